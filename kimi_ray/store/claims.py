"""Who in this process needs which session's claim, and the waiting for an owner that may be dying."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kimi_ray.errors import StoreError
from kimi_ray.store.grouped import Grouped
from kimi_ray.store.owners import Owner, Owners, Wanted

_POLL_S = 0.05
SESSION: Final = "session"
"""The holder that ``open_session`` stands for."""


class Claims:
    """Claims sessions in groups, keeps each while something holds it, gives it back after the last.

    A holder is any hashable thing: an open stream, a load, or ``SESSION``.
    """

    def __init__(self, owners: Owners, timeout_s: float, roll_back: Callable[[str], Awaitable[None]]) -> None:
        """
        Args:
            owners: The files.
            timeout_s: How long to wait for a living owner.
            roll_back: Deletes what a dead process left of a session that it was making.
        """
        self._roll_back = roll_back
        self._owners = owners
        self._timeout = timeout_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="store-claims")
        self._grouped: Grouped[Wanted, Owner | StoreError] = Grouped(owners.try_claims, self._executor)
        self._holders: dict[str, set[object]] = {}
        self._releasing: dict[str, asyncio.Future[bool]] = {}

    async def claim(self, session_id: str, nonce: str | None, holder: object, *, new: str | None = None) -> Owner:
        """Hold a session for ``holder``.

        Args:
            session_id: The session.
            nonce: As in ``Wanted``.
            holder: Who needs it.
            new: As in ``Wanted``.

        Raises:
            StoreError: ``session.in_use`` {host, pid} after the time-out; with ``new`` also as ``Owners.try_claims``.
        """
        holders = self._holders.setdefault(session_id, set())
        joined = holder not in holders
        holders.add(holder)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        try:
            while True:
                releasing = self._releasing.get(session_id)
                if releasing is not None:
                    await asyncio.wait([releasing])
                    continue
                held = self._owners.held.get(session_id)
                if held is not None and nonce in (None, held.nonce):
                    return held
                answer = await self._grouped.submit(Wanted(session_id, nonce, new))
                if isinstance(answer, Owner):
                    return answer
                if answer.code != "session.in_use" or loop.time() >= deadline:
                    raise answer
                if answer.details.get("abandoned"):
                    await self._roll_back(session_id)
                await asyncio.sleep(_POLL_S)
        except BaseException:
            if joined:
                holders.discard(holder)
                if not holders:
                    # a claim in progress may still succeed; this runs after it
                    await asyncio.shield(self._release(session_id, None))
            raise

    def holds(self, session_id: str, holder: object) -> bool:
        """Whether ``holder`` holds the session."""
        return holder in self._holders.get(session_id, ())

    async def let_go(self, session_id: str, holder: object) -> None:
        """End one hold; the claim is given back after the last."""
        holders = self._holders.get(session_id)
        if holders is None:
            return
        holders.discard(holder)
        if not holders:
            await self._release(session_id, None)

    async def close_session(self, session_id: str, nonce: str) -> bool:
        """Give the claim of ``nonce`` back, whatever holds it; False when it is another's."""
        held = self._owners.held.get(session_id)
        if held is None or held.nonce != nonce:
            return False
        self._holders.pop(session_id, None)
        await self._release(session_id, nonce)
        return True

    @contextlib.asynccontextmanager
    async def holding(self, session_id: str) -> AsyncGenerator[Owner]:
        """Hold a session for the length of the block."""
        holder = object()
        owner = await self.claim(session_id, None, holder)
        try:
            yield owner
        finally:
            await self.let_go(session_id, holder)

    async def give_up(self, session_id: str) -> None:
        """Give the claim back, whoever has it."""
        held = self._owners.held.get(session_id)
        if held is not None:
            await self.close_session(session_id, held.nonce)

    async def _release(self, session_id: str, nonce: str | None) -> None:
        self._holders.pop(session_id, None)
        if session_id in self._releasing:
            return
        run = asyncio.get_running_loop().run_in_executor(self._executor, self._owners.release, session_id, nonce)
        self._releasing[session_id] = run
        try:
            await asyncio.shield(run)
        finally:
            del self._releasing[session_id]

    async def close(self) -> None:
        """Release the lock of this process."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._owners.close)
        self._executor.shutdown(wait=True)
