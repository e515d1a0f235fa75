"""Notices: what handlers are told and have no say in. Told one after the other, by a task of the agent's own.

Whoever tells goes on at once. A handler that fails is a ``note/added`` in the agent's log, and harms nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, TypeVar

from kimi_ray.agent.journal import Journal
from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import KimiRayError, as_error
from kimi_ray.scopes import HookSlot

E = TypeVar("E")

NOTICE_S = 660.0
"""Longest time that the handlers of one notice may take: more than any hook is allowed."""
MAX_WAITING = 1000
"""Notices that may wait to be told; one more is dropped, and the log says so."""
_STOP_S = 2.0

_logger = logging.getLogger(__name__)


class Notices:
    """Tells the notices of one agent, in order.

    Args:
        journal: Where failures are kept.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: deque[tuple[HookSlot[Any], Any]] = deque()
        self._teller: asyncio.Task[None] | None = None
        self._dropped = False
        self._closed = False

    def tell(self, slot: HookSlot[E], event: E) -> None:
        """Tell the slot's handlers, after all that was told before; nothing behind the agent's end. Returns at once."""
        if self._closed:
            return
        if len(self._waiting) >= MAX_WAITING:
            if not self._dropped:
                self._note(f"{MAX_WAITING} notices wait for slow handlers: {slot.name} and others are not told")
            self._dropped = True
            return
        self._waiting.append((slot, event))
        if self._teller is None or self._teller.done():
            self._teller = asyncio.get_running_loop().create_task(self._tell_all(), name="notices")

    async def settled(self) -> None:
        """Return when all that was told until now has been heard."""
        while self._teller is not None and not self._teller.done():
            await asyncio.wait([self._teller])

    async def close(self, within_s: float) -> None:
        """Let what waits be heard for so many seconds, then give it up."""
        teller = self._teller
        if teller is not None:
            await asyncio.wait([teller], timeout=within_s)
        self._closed = True
        if teller is not None and not teller.done():
            self._note(f"the handlers of notices took longer than {within_s:g} s at the agent's end and were stopped")
            await self.end()

    def stop(self) -> None:
        """Tell nothing more, not even what is being told."""
        self._closed = True
        self._waiting.clear()
        if self._teller is not None:
            self._teller.cancel()

    async def end(self) -> None:
        """``stop``, and wait until the handler that was told something has ended."""
        self.stop()
        if self._teller is not None:
            await asyncio.wait([self._teller], timeout=_STOP_S)

    async def _tell_all(self) -> None:
        while self._waiting:
            slot, event = self._waiting.popleft()
            try:
                async with asyncio.timeout(NOTICE_S):
                    await slot.run(event)
            except BaseException as error:
                if ends_this_task(error) or isinstance(error, KeyboardInterrupt):
                    raise
                found = as_error(error)
                self._note(f"a handler of {slot.name} failed: {found.message} ({found.code})")
        self._dropped = False

    def _note(self, text: str) -> None:
        try:
            self._journal.append("note/added", {"text": text, "by": "kimi-ray"})
        except KimiRayError as error:
            _logger.warning("%s; and the log could not be told: %s", text, error)
