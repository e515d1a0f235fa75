"""A session's document while the session is live: one queue of changes, written under the session's grant.

The order of every change is memory, document on disk, index, notify. A caller's change is awaited until it is on disk;
what the log already has (agents, activity) is written every three seconds at most, and at the close.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from kimi_ray.errors import KimiRayError, SessionError, as_error
from kimi_ray.events import thaw
from kimi_ray.session.document_value import (
    Activity,
    AgentEntry,
    Value,
    with_activity,
    with_agents,
    with_logged_agents,
    with_patch,
)
from kimi_ray.session.in_flight import InFlight, with_in_flight

Write = Callable[[Value, int], Awaitable[int]]
"""Writes a value over a revision; gives the new revision when it is durable."""

Listener = Callable[[Value], None]

_logger = logging.getLogger(__name__)


class SessionDocument:
    """The one owner of a live session's document.

    Args:
        value: The document as it is (not yet written when ``revision`` is 0).
        revision: Its revision in the store.
        write: Compare-and-set through the store, under the session's grant.
        clock: Epoch milliseconds.
        changed: Whether ``value`` is not what the store has (it was put right at its load): it is then written soon.
        spacing_s: Least time between two writes that nobody awaits.
    """

    def __init__(
        self,
        value: Value,
        revision: int,
        write: Write,
        *,
        clock: Callable[[], int],
        changed: bool = False,
        spacing_s: float = 3.0,
    ) -> None:
        self._value = value
        self._revision = revision
        self._write = write
        self._clock = clock
        self._spacing_s = spacing_s
        self._heard_at = 0
        self._version = 0
        self._written = -1 if revision == 0 else 0
        self._unsure = 0
        """Writes since the last good one whose outcome is not known: each may have made a revision."""
        self._lock = asyncio.Lock()
        self._lazy: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._listeners: list[Listener] = []
        self.last_error: KimiRayError | None = None
        if changed:
            self._changed()

    @property
    def revision(self) -> int:
        """The revision on disk."""
        return self._revision

    def snapshot(self) -> Value:
        """A copy of the value in memory."""
        return thaw(self._value)

    def observe(self, listener: Listener) -> None:
        """Call ``listener`` with the value after each write."""
        self._listeners.append(listener)

    async def update(self, patch: dict[str, Any]) -> Value:
        """A caller's change; on disk when it returns.

        Raises:
            SessionError: ``session.bad_update``, ``session.bad_metadata``, ``session.closed``.
            StoreError: what the store refused; memory is then ahead of the disk and the next write carries it.
        """
        self._refuse_closed()
        if with_patch(self._value, patch, now=self._clock()):
            self._version += 1
        await self.flush()
        return self.snapshot()

    async def set_generated_title_if_uncustomized(self, title: str, *, force: bool = False) -> Value:
        """A title that a program made; one that the caller gave stays, unless ``force``. Raises as ``update``."""
        return await self.update({"title": title, "title_kind": "generated", "force": force})

    def register(self, entries: list[AgentEntry]) -> None:
        """Agents exist. Written soon; dropped after the close."""
        if not self._closing.is_set() and with_agents(self._value, entries):
            self._changed()

    def reconcile(self, entries: list[AgentEntry]) -> None:
        """All agents that have logs, as their headers tell: the logs win, labels of both are kept. Written soon."""
        if not self._closing.is_set() and with_logged_agents(self._value, entries):
            self._changed()

    async def set_in_flight(self, now: InFlight) -> None:
        """Remember what is under way; on disk when it returns. Raises as ``update``."""
        if with_in_flight(self._value, now):
            self._version += 1
        await self.flush()

    def note(self, activity: Activity) -> None:
        """The main agent did something. Written soon; dropped after the close, and when newer news is here already."""
        if self._closing.is_set() or activity.at < self._heard_at:
            return
        self._heard_at = activity.at
        if with_activity(self._value, activity):
            self._changed()

    async def flush(self) -> None:
        """On disk from here on. Calls that come while a write runs share the next one."""
        wanted = self._version
        while self._written < wanted:
            # A caller that gives up must not cut a write in two: its answer is the next revision.
            await asyncio.shield(asyncio.ensure_future(self._write_once(wanted)))

    async def close(self) -> None:
        """Write what is unwritten; later changes are dropped. Idempotent."""
        self._closing.set()
        lazy, self._lazy = self._lazy, None
        if lazy is not None:
            await lazy
        await self.flush()

    async def _write_once(self, wanted: int) -> None:
        async with self._lock:
            if self._written >= wanted:
                return
            version, value = self._version, self.snapshot()
            self._revision = await self._write_over(value)
            self._written = version
            self.last_error = None
            for listener in tuple(self._listeners):
                listener(value)

    async def _write_over(self, value: Value) -> int:
        while True:
            try:
                revision = await self._write(value, self._revision)
            except KimiRayError as error:
                if error.code != "store.conflict":
                    self._unsure += 1
                    raise
                stored = error.details.get("revision")
                if type(stored) is not int or not 0 < stored - self._revision <= self._unsure:
                    raise
                # A write of ours that failed did happen: nobody else writes under our grant.
                self._revision, self._unsure = stored, 0
            else:
                self._unsure = 0
                return revision

    def _changed(self) -> None:
        self._version += 1
        if self._lazy is None or self._lazy.done():
            self._lazy = asyncio.get_running_loop().create_task(self._write_lazily())

    async def _write_lazily(self) -> None:
        while self._written < self._version and not self._closing.is_set():
            try:
                async with asyncio.timeout(self._spacing_s):
                    await self._closing.wait()
            except TimeoutError:
                pass
            try:
                await self.flush()
            except Exception as error:
                # Nobody awaits this write; the value stays in memory, the next change or the close tries again.
                if not isinstance(error, KimiRayError):
                    _logger.error("a session's document was not written: %r", error, exc_info=error)
                self.last_error = as_error(error)
                return

    def _refuse_closed(self) -> None:
        if self._closing.is_set():
            raise SessionError(
                f"session {self._value['id']} is closed", code="session.closed", hint="resume it to change it"
            )
