"""Who waits for which prompts of a host.

A watch is one long poll after another about the same prompts. The first call names them; each later one only what came
to them, since a driver waits for thousands of prompts here and asks again after each answer. An answer that was lost
on its way is no matter: the caller then counts other answers than the watch does, and names all of its prompts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kimi_ray.agent.specs import Outcome
from kimi_ray.errors import AgentError
from kimi_ray.store.seam import Stream

GATHER_S = 0.005
"""How long an answer about several prompts gathers more once the first has ended: one call then tells of many."""

FORGOTTEN_AFTER_S = 60.0
"""A watch that nobody asks about for so long is given up: its caller has gone."""


class Watch:
    """The prompts that one caller waits for, and those of them that have ended since its last answer."""

    __slots__ = ("_ended", "_expiry", "_ready", "_timer", "_watches", "answers", "forgotten", "prompts")

    def __init__(self, watches: OutcomeWatches) -> None:
        self.prompts: dict[Stream, set[str]] = {}
        self.answers = 0
        """How many answers were given."""
        self.forgotten: dict[Stream, dict[str, AgentError]] = {}
        """Prompts that ended long ago, with what to say if their ends cannot be read."""
        self._watches = watches
        self._ended: list[Outcome] = []
        self._ready = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def has_news(self) -> bool:
        """Whether something has ended since the last answer."""
        return bool(self._ended)

    def add(self, stream: Stream, prompt_id: str) -> None:
        """Wait for this prompt too; its end is told from now on."""
        found = self.prompts.get(stream)
        if found is None:
            found = self.prompts[stream] = set()
            self._watches.watch(stream, self)
        found.add(prompt_id)

    def tell(self, outcome: Outcome) -> None:
        """A prompt has ended; one that is not waited for is passed over."""
        found = self.prompts.get(outcome.stream)
        if found is None or outcome.prompt_id not in found:
            return
        found.remove(outcome.prompt_id)
        if not found:
            del self.prompts[outcome.stream]
            self._watches.unwatch(outcome.stream, self)
        self.tell_now(outcome)
        if not self.prompts:
            self._ready.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._ready.set)

    def tell_now(self, outcome: Outcome) -> None:
        """A prompt that was asked for has ended before."""
        self._ended.append(outcome)

    async def answer(self, timeout_s: float) -> list[Outcome]:
        """What has ended since the last answer; waits for the first one, at most ``timeout_s``."""
        if not self._ended:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
            except TimeoutError:
                pass
        self._ready.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ended, self._ended = self._ended, []
        self.answers += 1
        return ended

    def rest(self, forgotten: asyncio.TimerHandle | None) -> None:
        """Nobody asks just now, and if that stays so ``forgotten`` happens; or somebody asks again (None)."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = forgotten

    def end(self) -> None:
        """Wait for nothing any more."""
        for stream in self.prompts:
            self._watches.unwatch(stream, self)
        self.prompts = {}
        self.rest(None)
        if self._timer is not None:
            self._timer.cancel()


class OutcomeWatches:
    """All watches of a host."""

    def __init__(self) -> None:
        self._by_stream: dict[Stream, set[Watch]] = {}
        self._named: dict[str, Watch] = {}

    def take_up(self, name: str | None, answers: int) -> Watch | None:
        """The watch of this name, for its next question.

        Args:
            name: Its caller's; None is a watch for a single question.
            answers: How many answers the caller has had; with 0 the watch is made anew.

        Returns:
            None where a watch with as many answers is not known: all its prompts must be named again.
        """
        if name is None:
            return Watch(self)
        watch = self._named.pop(name, None)
        if watch is not None and (answers == 0 or watch.answers != answers):
            watch.end()
            watch = None
        if watch is None:
            return Watch(self) if answers == 0 else None
        watch.rest(None)
        return watch

    def put_down(self, name: str | None, watch: Watch) -> None:
        """A question was answered: the watch waits for the next one, or ends if it has no name, or nothing to tell."""
        if name is None or not (watch.prompts or watch.forgotten or watch.has_news):
            watch.end()
            return
        self._named[name] = watch
        watch.rest(asyncio.get_running_loop().call_later(FORGOTTEN_AFTER_S, self._forget, name, watch))

    def tell(self, outcome: Outcome) -> None:
        """A prompt has ended."""
        for watch in tuple(self._by_stream.get(outcome.stream, ())):
            watch.tell(outcome)

    def waited_for(self, stream: Stream) -> Iterable[str]:
        """The prompts of an agent that somebody waits for."""
        return {prompt_id for watch in self._by_stream.get(stream, ()) for prompt_id in watch.prompts[stream]}

    def watch(self, stream: Stream, watch: Watch) -> None:
        """A watch wants to hear of an agent's prompts."""
        self._by_stream.setdefault(stream, set()).add(watch)

    def unwatch(self, stream: Stream, watch: Watch) -> None:
        """A watch does not want to hear of them any more."""
        watches = self._by_stream[stream]
        watches.discard(watch)
        if not watches:
            del self._by_stream[stream]

    def _forget(self, name: str, watch: Watch) -> None:
        if self._named.get(name) is watch:
            del self._named[name]
            watch.end()
