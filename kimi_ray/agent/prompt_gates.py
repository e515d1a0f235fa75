"""Gates of prompts: before a prompt's turn begins, and before a steered prompt joins, others may block it.

A blocked prompt is in the log and on the surface, behind the words of whoever blocked it, and begins no turn. Steered
prompts pass the gate too: what must not be said must not be said in the middle of a turn either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kimi_ray.agent.fold import PromptRecord
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.prompts import Prompts, user_message
from kimi_ray.agent.slots import AgentSlots, PromptGate
from kimi_ray.agent.turn_signal import TurnSignal, TurnStopped
from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import AgentError, KimiRayError, LogError, as_error
from kimi_ray.events import freeze, thaw
from kimi_ray.ids import new_message_id


class PromptGates:
    """Runs the slot ``prompt`` of one agent.

    Args:
        journal: The agent's log.
        prompts: Its queue.
        slots: Whom to ask.
        settle: Told the ids of steered prompts that reached a final state here.
    """

    def __init__(
        self, journal: Journal, prompts: Prompts, slots: AgentSlots, settle: Callable[[list[str]], None]
    ) -> None:
        self._journal = journal
        self._prompts = prompts
        self._slot = slots.prompt
        self._settle = settle

    @property
    def waiting(self) -> bool:
        """Whether prompts are to join the turn."""
        return bool(self._prompts.joining)

    async def admit(self, record: PromptRecord, signal: TurnSignal) -> list[dict[str, Any]] | None:
        """The user messages with which a prompt's turn begins, its own the last; None: it does not run, and has its
        final state.

        Raises:
            TurnStopped: the signal; nothing was written.
        """
        gate = await self._ask(record, signal, steered=False)
        return self._judge(record, gate)

    async def join(self, signal: TurnSignal) -> list[dict[str, Any]]:
        """The user messages of the prompts that join the turn now; those that were stopped at the gate have ended.

        Raises:
            TurnStopped: the signal; none has joined.
        """
        prompts = self._prompts
        if not self._slot:
            return [message for record in prompts.take_joining() for message in self.say(record)]
        admitted: dict[str, list[dict[str, Any]]] = {}
        while unasked := [record for record in prompts.joining if record.prompt_id not in admitted]:
            record = unasked[0]
            gate = await self._ask(record, signal, steered=True)
            if record not in prompts.joining:
                continue  # cancelled meanwhile
            messages = self._judge(record, gate)
            if messages is None:
                prompts.joining.remove(record)
                self._settle([record.prompt_id])
            else:
                admitted[record.prompt_id] = messages
        return [message for record in prompts.take_joining() for message in admitted[record.prompt_id]]

    async def _ask(self, record: PromptRecord, signal: TurnSignal, *, steered: bool) -> PromptGate | KimiRayError:
        try:
            [whole] = await self._journal.resolve([{"content": record.content}])
            gate = PromptGate(record.prompt_id, thaw(whole["content"]), steered)
            with signal.interruptible():
                await self._slot.run(gate)
            gate.before = [self._message(message, blocked=gate.reason is not None) for message in gate.before]
        except TurnStopped:
            raise
        except BaseException as error:
            if ends_this_task(error) or isinstance(error, KeyboardInterrupt):
                raise
            return as_error(error)
        return gate

    def _judge(self, record: PromptRecord, gate: PromptGate | KimiRayError) -> list[dict[str, Any]] | None:
        prompt_id = record.prompt_id
        if isinstance(gate, KimiRayError):
            self._prompts.finish(prompt_id, "failed", error=gate.to_data())
            return None
        messages = self.say(record)
        if messages:
            messages[:0] = gate.before
        if gate.reason is None:
            return messages
        if not gate.before and messages:
            words = {"content": [{"type": "text", "text": gate.reason}], "source": {"kind": "gate"}}
            messages.insert(0, self._message(words, blocked=True))
        try:
            for message in messages:
                self._journal.append("user/message", message, surface="append")
        except LogError as error:
            self._prompts.finish(prompt_id, "failed", error=error.to_data())
            return None
        error = AgentError(f"the prompt was blocked: {gate.reason}", code="prompt.blocked")
        self._prompts.finish(prompt_id, "blocked", error=error.to_data())
        return None

    def _message(self, message: dict[str, Any], *, blocked: bool) -> dict[str, Any]:
        source = dict(message["source"])
        if blocked:
            source["blocked"] = True
        content = [self._journal.block(freeze(block)) for block in message["content"]]
        return {"id": new_message_id(), "role": "user", "content": content, "source": source}

    def say(self, record: PromptRecord) -> list[dict[str, Any]]:
        """The user message of a prompt that goes to the model now: none if an earlier life has said it.

        That was lost between the messages of a blocked prompt and its end.
        """
        return [] if record.heard else [user_message(record)]
