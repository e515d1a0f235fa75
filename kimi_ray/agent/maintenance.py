"""Standing still: what is done to an agent while no turn of it runs.

A hold keeps turns from beginning; ``maintain`` is a hold with work of its own (a compaction, an undo). Prompts that
come meanwhile are accepted, wait, and run afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kimi_ray.agent.prompts import Prompts
from kimi_ray.errors import AgentError
from kimi_ray.store.seam import Stream

T = TypeVar("T")


class StandsStill:
    """What a ``LiveAgent`` has of it."""

    stream: Stream
    prompts: Prompts
    _holders: set[str]
    _maintenance: asyncio.Task[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether a turn runs, a prompt waits, or maintenance is at work."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether it takes nothing any more."""
        raise NotImplementedError

    def _wake_if_open(self) -> None:
        raise NotImplementedError

    def hold(self, holder: str) -> None:
        """Start no turn until ``release``; prompts are accepted and wait. Only for an agent that is not busy."""
        self._holders.add(holder)
        self.prompts.held = True

    def release(self, holder: str) -> None:
        """End a hold; what waits starts when it was the last one. Idempotent."""
        self._holders.discard(holder)
        self.prompts.held = bool(self._holders)
        self._wake_if_open()

    async def maintain(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do something to the agent while it stands still. Cancelling this await ends the work.

        Args:
            name: What it is, in a word.
            work: What is done; it is cancelled when the agent is cancelled or closed.

        Raises:
            AgentError: ``agent.busy`` {reason}, retryable: a turn runs or a prompt waits, or somebody else holds it
                still; ``agent.closed``; ``agent.cancelled`` when the agent was cancelled meanwhile.
        """
        if self.closed:
            raise AgentError(f"the agent {self.stream} is closed", code="agent.closed")
        if self.busy or self._holders:
            raise self._busy_with(name)
        self.hold(name)
        task = self._maintenance = asyncio.get_running_loop().create_task(work(), name=f"{name} of {self.stream}")
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        finally:
            self._maintenance = None
            self.release(name)
        if task.cancelled():
            raise AgentError(f"{name} of {self.stream} was cancelled", code="agent.cancelled")
        return task.result()

    def stop_maintenance(self) -> bool:
        """Cancel the work that is under way; returns whether there is some."""
        return self._maintenance is not None and self._maintenance.cancel()

    def _busy_with(self, name: str) -> AgentError:
        reason = "maintenance" if self._maintenance is not None else "held" if self._holders else "turn"
        words = {
            "maintenance": "is being compacted or undone by another call",
            "held": "is held still for somebody else",
        }
        hints = {"maintenance": "wait until that has ended, or cancel it", "held": "try again when that has ended"}
        return AgentError(
            f"{name}: {self.stream} {words.get(reason, 'has a turn running or a prompt waiting')}",
            code="agent.busy",
            hint=hints.get(reason, "wait for its prompts, or cancel them"),
            details={"reason": reason},
            retryable=True,
        )
