"""Prompts of one agent: accepted in order, queued, run one after the other, answered once.

A prompt is accepted by ``prompt/submitted``; from then on a crash cannot lose it. The queue is what the log says is
pending, so a reopened log has the same queue.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kimi_ray.agent.fold import FINAL_STATES, PromptRecord, content_hash
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.notices import Notices
from kimi_ray.agent.slots import AgentSlots, PromptQueued
from kimi_ray.agent.specs import PromptSpec
from kimi_ray.errors import AgentError


class Prompts:
    """The queue and the states; every change is an event.

    Args:
        journal: The agent's log.
        slots: ``prompt_queued`` is told.
        notices: Tells it.

    Attributes:
        joining: Prompts that were steered and join the running turn at its next step.
        active: The ids of the prompts of the running turn, its own first.
        held: No turn may begin now: every prompt that comes waits.
    """

    def __init__(self, journal: Journal, slots: AgentSlots | None = None, notices: Notices | None = None) -> None:
        self._journal = journal
        self._slots = slots if slots is not None else AgentSlots()
        self._notices = notices if notices is not None else Notices(journal)
        self._queue: deque[str] = deque(
            record.prompt_id
            for record in journal.fold.prompts.values()
            if record.state == "pending" and not record.of_rollout
        )
        self.joining: list[PromptRecord] = []
        self.active: list[str] = []
        self.held = False

    def __len__(self) -> int:
        return len(self._queue)

    def get(self, prompt_id: str) -> PromptRecord | None:
        """The prompt as the log tells it."""
        return self._journal.fold.prompts.get(prompt_id)

    def knows(self, prompt_id: str) -> bool:
        """Whether a prompt of that id was ever accepted."""
        fold = self._journal.fold
        return prompt_id in fold.prompts or fold.ended.get(prompt_id) is not None

    def accept(self, spec: PromptSpec) -> bool:
        """Accept a prompt, in the log; False when this very prompt was accepted before (a call sent twice).

        Raises:
            AgentError: ``prompt.id_conflict``, ``prompt.empty``.
        """
        content = self.content_of(spec)
        fold = self._journal.fold
        known = fold.prompts.get(spec.prompt_id) or fold.ended.get(spec.prompt_id)
        if known is not None:
            before = known.content if isinstance(known, PromptRecord) else None
            if content_hash(content) != known.content_hash if before is None else content != before:
                raise AgentError(
                    f"the prompt id {spec.prompt_id} is taken",
                    code="prompt.id_conflict",
                    hint="leave the id out, or use another",
                )
            return False
        data: dict[str, Any] = {"prompt_id": spec.prompt_id, "content": content}
        if spec.on_interrupt != "fail":
            data["on_interrupt"] = spec.on_interrupt
        if spec.sampling is not None:
            data["sampling"] = spec.sampling.said()
        if spec.limits is not None:
            data["limits"] = spec.limits.said()
        if spec.source is not None:
            data["source"] = spec.source
        if spec.output_schema is not None:
            data["output_schema"] = spec.output_schema
        self._journal.append("prompt/submitted", data)
        if spec.steer_if_active and self._has_turn:
            self._steer([spec.prompt_id])
            return True
        self._queue.append(spec.prompt_id)
        if self.active or self.held or len(self._queue) > 1 or self._journal.log.order.open_turn is not None:
            self._journal.append("prompt/queued", {"prompt_id": spec.prompt_id, "queue_length": len(self._queue)})
            if self._slots.prompt_queued:
                told = PromptQueued(spec.prompt_id, self._blocks_of(spec), len(self._queue))
                self._notices.tell(self._slots.prompt_queued, told)
        return True

    def content_of(self, spec: PromptSpec) -> list[dict[str, Any]]:
        """A prompt's content blocks as they are stored.

        Raises:
            AgentError: ``prompt.empty``.
        """
        blocks = self._blocks_of(spec)
        if not any(block.get("text", "").strip() or block.get("type") != "text" for block in blocks):
            raise AgentError("the prompt is empty", code="prompt.empty", hint="give it some text")
        return [self._journal.block(block) for block in blocks]

    @staticmethod
    def _blocks_of(spec: PromptSpec) -> list[dict[str, Any]]:
        return list(spec.content) if spec.content is not None else [{"type": "text", "text": spec.text}]

    @property
    def _has_turn(self) -> bool:
        """Whether a turn of a prompt runs that others could join: not while that prompt is still at its gate."""
        return bool(self.active) and self._journal.log.order.open_turn is not None

    def steer(self, prompt_ids: list[str]) -> None:
        """Move queued prompts into the running turn; all or none, in the order of the queue.

        Raises:
            AgentError: ``prompt.not_found``: no turn runs, an id stands twice, or is not one of a waiting prompt.
        """
        wanted = set(prompt_ids)
        if not self._has_turn or not prompt_ids or len(wanted) != len(prompt_ids):
            raise AgentError("there is no running turn to join with these prompts", code="prompt.not_found")
        missing = sorted(wanted.difference(self._queue))
        if missing:
            raise AgentError(f"the prompt {missing[0]} is not waiting", code="prompt.not_found")
        ordered = [prompt_id for prompt_id in self._queue if prompt_id in wanted]
        self._queue = deque(prompt_id for prompt_id in self._queue if prompt_id not in wanted)
        self._steer(ordered)

    def _steer(self, ordered: list[str]) -> None:
        turn = self._journal.log.order.open_turn
        self._journal.append(
            "prompt/steered", {"prompt_ids": ordered, "active_prompt_id": self.active[0], "turn": turn}
        )
        self.joining.extend(self._journal.fold.prompts[prompt_id] for prompt_id in ordered)

    def steered_into(self, prompt_id: str) -> list[str]:
        """The open prompts that joined the turn of this one."""
        return [
            record.prompt_id
            for record in self._journal.fold.prompts.values()
            if record.state == "steered" and record.steered_into == prompt_id
        ]

    def waits_since(self, seq: int) -> bool:
        """Whether a prompt waits for its turn that was accepted before this seq."""
        return bool(self._queue) and self._journal.fold.prompts[self._queue[0]].seq < seq

    def start_next(self) -> PromptRecord | None:
        """Take the head of the queue; it becomes active."""
        if not self._queue:
            return None
        prompt_id = self._queue.popleft()
        self.active = [prompt_id]
        return self._journal.fold.prompts[prompt_id]

    def take_joining(self) -> list[PromptRecord]:
        """The prompts that join the turn now; they are active from here on."""
        joined, self.joining = self.joining, []
        self.active.extend(record.prompt_id for record in joined)
        return joined

    def settle(self, turn: int | None, state: str, error: dict[str, Any] | None) -> None:
        """Give every active prompt its final state. Prompts that were to join but did not, or were admitted to a step
        that did not begin, go back to their places."""
        unheard, self.joining = self.joining, []
        for prompt_id in self.active:
            record = self._journal.fold.prompts[prompt_id]
            if record.state == "steered" and not record.heard:
                unheard.append(record)
            else:
                self.finish(prompt_id, state, turn=turn, error=error)
        self.active = []
        self.put_back(unheard)

    def put_back(self, records: list[PromptRecord]) -> None:
        """Let prompts wait again, each where it stood: the queue is in the order in which prompts were accepted."""
        if not records:
            return
        prompts = self._journal.fold.prompts
        self._queue = deque(
            sorted(
                {*self._queue, *(record.prompt_id for record in records)}, key=lambda prompt_id: prompts[prompt_id].seq
            )
        )
        for record in records:
            self._journal.append("prompt/queued", {"prompt_id": record.prompt_id, "queue_length": len(self._queue)})

    def finish(
        self, prompt_id: str, state: str, *, turn: int | None = None, error: dict[str, Any] | None = None
    ) -> None:
        """Write ``prompt/completed``."""
        data: dict[str, Any] = {"prompt_id": prompt_id, "state": state}
        if turn is not None:
            data["turn"] = turn
        if error is not None:
            data["error"] = error
        self._journal.append("prompt/completed", data)

    def cancel_queued(self, prompt_id: str | None) -> list[str]:
        """Cancel one prompt that waits, for its turn or to join one, or all; returns those that were cancelled."""
        waiting = [record.prompt_id for record in self.joining] + list(self._queue)
        hit = [queued for queued in waiting if prompt_id is None or queued == prompt_id]
        taken = set(hit)
        self._queue = deque(queued for queued in self._queue if queued not in taken)
        self.joining[:] = [record for record in self.joining if record.prompt_id not in taken]
        for queued in hit:
            self.finish(queued, "cancelled")
        return hit

    def give_up(self, error: dict[str, Any]) -> list[str]:
        """Fail every prompt that has no final state yet; returns their ids."""
        given_up = [record for record in self._journal.fold.prompts.values() if record.state not in FINAL_STATES]
        self._queue.clear()
        for record in given_up:
            self.finish(record.prompt_id, "failed", turn=record.turn, error=error)
        return [record.prompt_id for record in given_up]

    def is_final(self, prompt_id: str) -> bool:
        """Whether the prompt reached a final state."""
        record = self.get(prompt_id)
        return record is not None and record.state in FINAL_STATES


def user_message(record: PromptRecord) -> dict[str, Any]:
    """What ``user/message`` says of a prompt."""
    return {"id": record.prompt_id, "role": "user", "content": record.content, "source": {"kind": "user"}}
