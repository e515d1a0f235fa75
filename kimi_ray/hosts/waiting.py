"""Waiting for many prompts of one host with few calls.

All results that somebody waits for on a host are served by a handful of long polls, whoever waits and for however
many. A poll that returns takes over what no other poll covers; it lingers a little when it brings few results out of
many outstanding, so that a busy host is asked once for ten results and not ten times for one. A poll names its prompts
once: the host keeps them for its next call (``outcome_watches``), and is told all of them again after an answer that
brought nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.boundary import unexpected
from kimi_ray.hosts.ports import Peer
from kimi_ray.hosts.specs import Outcome
from kimi_ray.ids import new_ulid
from kimi_ray.store.seam import Stream

PromptKey = tuple[Stream, str]
"""A prompt by its agent and id."""

POLL_S = 20.0
BUSY_POLL_S = 1.0
MAX_POLLS = 4
_ANSWER_MARGIN_S = 10.0
_WORTHWHILE = 10
_LINGER_MIN_S = 0.004
_LINGER_MAX_S = 0.1
_BUSY_CODES = ("infra.pending_limit", "infra.object_store_full")


class OutcomeWaiter:
    """The prompts that are outstanding on one host.

    Args:
        peer: The agent host.
        on_outcomes: Called with the outcomes of each answer, on the loop.
        on_lost: Called with the error and the prompts that a failed poll covered; they are no longer waited for.
        on_call: Called before each poll, for whoever counts.
    """

    def __init__(
        self,
        peer: Peer,
        on_outcomes: Callable[[list[Outcome]], None],
        on_lost: Callable[[KimiRayError, list[PromptKey]], None],
        *,
        on_call: Callable[[], None] | None = None,
    ) -> None:
        self._peer = peer
        self._on_outcomes = on_outcomes
        self._on_lost = on_lost
        self._on_call = on_call
        self._cover: dict[PromptKey, int] = {}
        self._covered: dict[int, int] = {}
        """How many prompts each poll covers."""
        self._uncovered: dict[PromptKey, None] = {}
        self._polls: dict[int, asyncio.Task[None]] = {}
        self._next_poll = 0
        self._kick: asyncio.Handle | None = None
        self._linger_s = 0.0
        self._closed = False

    @property
    def outstanding(self) -> int:
        """How many prompts are waited for."""
        return len(self._cover) + len(self._uncovered)

    def add(self, keys: Iterable[PromptKey]) -> None:
        """Wait for these prompts too."""
        for key in keys:
            if key not in self._cover:
                self._uncovered[key] = None
        if self._uncovered and self._kick is None and not self._closed:
            # All that is added in one turn of the loop shares a poll.
            self._kick = asyncio.get_running_loop().call_soon(self._start_poll)

    def discard(self, key: PromptKey) -> None:
        """Wait for this prompt no longer."""
        self._uncovered.pop(key, None)
        self._forget(key)

    async def close(self) -> None:
        """End the polls. Idempotent."""
        self._closed = True
        tasks = list(self._polls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_poll(self) -> None:
        self._kick = None
        if self._closed or not self._uncovered or len(self._polls) >= MAX_POLLS:
            return
        number = self._next_poll
        self._next_poll += 1
        task = asyncio.get_running_loop().create_task(self._poll(number), name=f"wait {self._peer.name}")
        self._polls[number], self._covered[number] = task, 0
        task.add_done_callback(lambda _: self._ended(number))

    def _ended(self, number: int) -> None:
        del self._polls[number], self._covered[number]
        if self._uncovered:
            self._start_poll()

    async def _poll(self, number: int) -> None:
        watch, answers, pause_s = new_ulid(), 0, _LINGER_MIN_S
        while True:
            fresh = self._take_on(number)
            if not self._covered[number]:
                return
            if not answers:
                fresh = self._covered_by(number)
            # The last free poll comes back soon: what is added while all are out must not wait for a slow prompt.
            wait_s = BUSY_POLL_S if len(self._polls) >= MAX_POLLS else POLL_S
            if self._on_call is not None:
                self._on_call()
            try:
                outcomes: list[Outcome] | None = await self._peer.call(
                    "wait_any", fresh, wait_s, watch, answers, timeout_s=wait_s + _ANSWER_MARGIN_S, group="wait"
                )
            except KimiRayError as error:
                if error.code in _BUSY_CODES:
                    answers = 0
                    await asyncio.sleep(pause_s)
                    pause_s = min(1.0, pause_s * 2)
                    continue
                self._lose(number, error)
                return
            except Exception as error:  # noqa: BLE001  told to those who wait: nobody else would ever answer them
                self._lose(number, unexpected(error, f"waiting at {self._peer.name}"))
                return
            pause_s = _LINGER_MIN_S
            known = [outcome for outcome in outcomes or () if self._forget((outcome.stream, outcome.prompt_id))]
            # Nothing came, or it is not the watch that it was: all are named again, so none can be waited for in vain.
            # And the host lets go of a watch with nothing left to wait for.
            answers = answers + 1 if outcomes and self._covered[number] else 0
            if known:
                self._on_outcomes(known)
                await self._linger(len(known))

    def _take_on(self, number: int) -> list[PromptKey]:
        """A poll covers what no other one does; returns what that is."""
        fresh = list(self._uncovered)
        self._uncovered.clear()
        for key in fresh:
            self._cover[key] = number
        self._covered[number] += len(fresh)
        return fresh

    def _covered_by(self, number: int) -> list[PromptKey]:
        return [key for key, poll in self._cover.items() if poll == number]

    def _lose(self, number: int, error: KimiRayError) -> None:
        lost = self._covered_by(number)
        for key in lost:
            self._forget(key)
        if lost:
            self._on_lost(error, lost)

    def _forget(self, key: PromptKey) -> bool:
        number = self._cover.pop(key, None)
        if number in self._covered:
            self._covered[number] -= 1
        return number is not None

    async def _linger(self, brought: int) -> None:
        wanted = min(_WORTHWHILE, max(1, (self.outstanding + brought) // 2))
        if brought < wanted:
            self._linger_s = min(_LINGER_MAX_S, max(_LINGER_MIN_S, self._linger_s * 2))
        else:
            self._linger_s = self._linger_s / 2 if self._linger_s > _LINGER_MIN_S else 0.0
        if self._linger_s:
            await asyncio.sleep(self._linger_s)
