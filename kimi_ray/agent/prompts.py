"""Prompts of one agent: accepted in order, queued, run one after the other, answered once.

A prompt is accepted by ``prompt/submitted``; from then on a crash cannot lose it. The queue is what the log says is
pending, so a reopened log has the same queue.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kimi_ray.agent.fold import FINAL_STATES, PromptRecord, content_hash
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.specs import PromptSpec
from kimi_ray.errors import AgentError


class Prompts:
    """The queue and the states; every change is an event."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._queue: deque[str] = deque(
            record.prompt_id
            for record in journal.fold.prompts.values()
            if record.state == "pending" and not record.of_rollout
        )
        self._joining: list[str] = []
        self.active: list[str] = []

    def __len__(self) -> int:
        return len(self._queue)

    def get(self, prompt_id: str) -> PromptRecord | None:
        """The prompt as the log tells it."""
        return self._journal.fold.prompts.get(prompt_id)

    def accept(self, spec: PromptSpec) -> bool:
        """Accept a prompt, in the log; False when this very prompt was accepted before (a call sent twice).

        Raises:
            AgentError: ``prompt.id_conflict``, ``prompt.empty``.
        """
        content = self.content_of(spec)
        known = self.get(spec.prompt_id)
        if known is not None:
            dropped = known.content is None
            if content_hash(content) != known.content_hash if dropped else content != known.content:
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
        if spec.steer_if_active and self.active:
            self.steer([spec.prompt_id], queued=False)
            return True
        self._queue.append(spec.prompt_id)
        if self.active or len(self._queue) > 1:
            self._journal.append("prompt/queued", {"prompt_id": spec.prompt_id, "queue_length": len(self._queue)})
        return True

    def content_of(self, spec: PromptSpec) -> list[dict[str, Any]]:
        """A prompt's content blocks as they are stored.

        Raises:
            AgentError: ``prompt.empty``.
        """
        blocks = list(spec.content) if spec.content is not None else [{"type": "text", "text": spec.text}]
        if not any(block.get("text", "").strip() or block.get("type") != "text" for block in blocks):
            raise AgentError("the prompt is empty", code="prompt.empty", hint="give it some text")
        return [self._journal.block(block) for block in blocks]

    def steer(self, prompt_ids: list[str], *, queued: bool = True) -> None:
        """Move queued prompts into the running turn; all or none, in the order of the queue.

        Raises:
            AgentError: ``prompt.not_found``.
        """
        waiting = set(prompt_ids)
        if not self.active or not prompt_ids or len(waiting) != len(prompt_ids):
            raise AgentError("there is no running turn to join with these prompts", code="prompt.not_found")
        if queued and not waiting <= set(self._queue):
            missing = sorted(waiting - set(self._queue))
            raise AgentError(f"the prompt {missing[0]} is not waiting", code="prompt.not_found")
        ordered = [prompt_id for prompt_id in self._queue if prompt_id in waiting] if queued else prompt_ids
        self._queue = deque(prompt_id for prompt_id in self._queue if prompt_id not in waiting)
        turn = self._journal.log.order.open_turn
        self._journal.append(
            "prompt/steered", {"prompt_ids": ordered, "active_prompt_id": self.active[0], "turn": turn}
        )
        self._joining.extend(ordered)

    def start_next(self) -> PromptRecord | None:
        """Take the head of the queue; it becomes active."""
        if not self._queue:
            return None
        prompt_id = self._queue.popleft()
        self.active = [prompt_id]
        return self._journal.fold.prompts[prompt_id]

    def take_joining(self) -> list[PromptRecord]:
        """The prompts that join the turn at its next step."""
        joined, self._joining = self._joining, []
        self.active.extend(joined)
        return [self._journal.fold.prompts[prompt_id] for prompt_id in joined]

    def settle(self, turn: int | None, state: str, error: dict[str, Any] | None) -> None:
        """Give every active prompt its final state. Prompts that were to join but did not run go back to the queue."""
        for prompt_id in self.active:
            self.finish(prompt_id, state, turn=turn, error=error)
        self.active = []
        self._queue.extendleft(reversed(self._joining))
        self._joining = []

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
        """Cancel one queued prompt, or all; returns those that were cancelled."""
        hit = [queued for queued in self._queue if prompt_id is None or queued == prompt_id]
        taken = set(hit)
        self._queue = deque(queued for queued in self._queue if queued not in taken)
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
