"""Making sessions that nobody sees before they are whole: the same for every backend.

What a marker names is deleted by whoever ends it: its own process when the session comes to nothing, else the next one
that opens the home or needs the id. Deleting is durable before the marker goes, and the marker is locked meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.claims import Claims
from kimi_ray.store.fs import io_errors
from kimi_ray.store.layout import check_id
from kimi_ray.store.owners import Owners
from kimi_ray.store.refusals import is_being_made, no_publication
from kimi_ray.store.seam import SessionCopy
from kimi_ray.store.sessions_held import SessionsHeld
from kimi_ray.store.unpublished import Marker, Unpublished


class Maker(Protocol):
    """What a backend does for sessions that are being made; nobody else touches them meanwhile."""

    def check_new(self, session_id: str, workspace_id: str) -> None:
        """Refuse an id that is taken, and remember the place of one that is not. Blocking.

        Raises:
            StoreError: ``store.exists``, ``store.deleted``, ``store.invalid_id``.
        """
        ...

    def forget(self, session_id: str) -> None:
        """Forget the place of a session that will not be made; one that is there stays known. Blocking."""
        ...

    def has_document(self, session_id: str) -> bool:
        """Whether a session that is not removed has a document. Blocking."""
        ...

    async def make(self, copy: SessionCopy) -> None:
        """Make a session of which there is nothing; durable, its document last."""
        ...

    async def unmake(self, sessions: dict[str, str], *, shown: bool = False) -> None:
        """Delete all that is stored of sessions (with their workspace ids; empty: unknown), without a tombstone;
        durable. May be repeated; a session that was removed stays removed. With ``shown`` no marker hides them: they
        are never seen without their logs."""
        ...

    async def settle(self, session_id: str) -> None:
        """Make the document durable that was found."""
        ...


_LOCK_TIMEOUT_S = 30.0
_POLL_S = 0.005

Run = Callable[..., Awaitable[Any]]
"""Runs blocking work in a thread of the store."""


class Publications:
    """What one store process makes, and what dead ones left. Lives on one event loop."""

    def __init__(
        self,
        unpublished: Unpublished,
        owners: Owners,
        maker: Maker,
        home: str,
        run: Run,
        forget_streams: Callable[[str], None],
    ) -> None:
        """
        Args:
            unpublished: The markers.
            owners: Who lives.
            maker: What makes and deletes.
            home: Named by a file call that fails.
            run: As ``Run``.
            forget_streams: Makes what still arrives for the logs of a session fail.
        """
        self._unpublished = unpublished
        self._owners = owners
        self._maker = maker
        self._home = home
        self._run = run
        self._forget_streams = forget_streams
        self._copying: dict[str, asyncio.Future[None]] = {}

    # -- one session, shown by its first document ---------------------------------------------------------------------

    def makes(self, session_id: str, nonce: str | None = None) -> bool:
        """Whether this process (for ``nonce``) makes the session, and it has no document yet."""
        maker = self._unpublished.mine.get(session_id)
        return maker is not None and nonce in (None, maker)

    async def make_way(self, session_id: str, nonce: str, claims: Claims) -> bool:
        """Prepare for a new session that ``nonce`` will make: an unfinished one of an earlier nonce comes to nothing,
        as a later claim ends an earlier one.

        Returns:
            Whether it is still to be claimed as new; False when ``nonce`` has it already.
        """
        held = self._owners.held.get(session_id)
        if held is not None and held.nonce == nonce:
            return False
        if self.makes(session_id):
            await self.give_up(session_id, claims)
        return True

    @contextlib.asynccontextmanager
    async def claiming(self, session_id: str, new: str | None) -> AsyncGenerator[None]:
        """Around the claim of a session; of a ``new`` one that is not claimed after all nothing is remembered."""
        try:
            yield
        except BaseException:
            if new is not None and not self.makes(session_id):
                with contextlib.suppress(KimiRayError):  # what was raised is what is told
                    await self._run(self._maker.forget, session_id)
            raise

    def refuse_other(self, session_id: str, nonce: str) -> None:
        """Nobody but its maker opens a session that is not published.

        Raises:
            StoreError: ``session.in_use``.
        """
        if self._unpublished.mine.get(session_id, nonce) != nonce:
            raise is_being_made(session_id, session_id)

    async def shown(self, session_id: str) -> None:
        """The first document of a session is durable."""
        if self._unpublished.mine.pop(session_id, None) is not None:
            await self._run(self._unpublished.drop_new, session_id)

    async def removed(self, session_id: str) -> None:
        """A session is removed: a marker that its maker could not remove goes too."""
        await self._run(self._unpublished.drop_new, session_id)

    async def give_up(self, session_id: str, claims: Claims) -> None:
        """Delete what there is of a session that this process makes; its id is free then.

        Raises:
            StoreError: What a file call gives; it may be tried again.
        """
        marker = await self._run(self._unpublished.new, session_id)
        self._forget_streams(session_id)
        await self._maker.unmake({session_id: ""} if marker is None else marker.sessions, shown=True)
        self._forget_streams(session_id)  # an append in flight may have loaded one again
        await claims.give_up(session_id)
        await self._run(self._owners.forget, [session_id])  # a claim that failed may have left its file
        if marker is not None:
            await self._run(self._unpublished.drop, marker)
        self._unpublished.mine.pop(session_id, None)

    # -- sessions that appear together --------------------------------------------------------------------------------

    async def begin(self, group: str, sessions: dict[str, str]) -> None:
        """See ``Store.begin_publication``."""
        check_id(group, "group")
        for session_id in sessions:
            check_id(session_id, "session id")
        for marker in await self._run(self._unpublished.groups):
            if marker.name == group or not sessions.keys().isdisjoint(marker.sessions):
                await self._if_dead(marker)
        for marker in await self._run(self._unpublished.all_new):
            if marker.name in sessions:
                await self._if_dead(marker)
        await self._run(self._reserve, group, sessions)

    def _reserve(self, group: str, sessions: dict[str, str]) -> None:
        with self._owners.deciding():
            known = self._unpublished.group(group) or self._unpublished.record(group)
            if known is not None:
                if known.sessions == sessions:
                    return
                raise StoreError(
                    f"the publication {group} names other sessions",
                    code="store.exists",
                    hint="choose another name for it",
                    details={"group": group},
                )
            groups = self._unpublished.groups()
            taken = self._unpublished.taken(groups)
            for session_id, workspace_id in sessions.items():
                refusal = self._owners.refusal(session_id, groups)
                if refusal is not None:
                    raise refusal
                other = taken.setdefault(session_id.lower(), session_id)
                if other != session_id:
                    raise is_being_made(session_id, other)
                self._maker.check_new(session_id, workspace_id)
                self._maker.forget(session_id)
            with io_errors(self._home):
                self._unpublished.add_group(group, sessions, self._owners.writer)

    async def copy(self, group: str, copy: SessionCopy) -> None:
        """See ``Store.copy_session``."""
        check_id(copy.session_id, "session id")
        while copy.session_id in self._copying:
            await asyncio.wait([self._copying[copy.session_id]])
        done = self._copying[copy.session_id] = asyncio.get_running_loop().create_future()
        try:
            await self._copy(group, copy)
        finally:
            del self._copying[copy.session_id]
            done.set_result(None)

    async def _copy(self, group: str, copy: SessionCopy) -> None:
        marker = await self._pending(group)
        async with self._locked(marker, alone=False) as there:
            if marker is None or not there:
                if await self._published(group, copy.session_id):
                    return
                raise no_publication(group)
            if marker.sessions.get(copy.session_id) != copy.workspace_id:
                raise no_publication(group).with_details(session_id=copy.session_id)
            if await self._run(self._maker.has_document, copy.session_id):
                await self._maker.settle(copy.session_id)
                return
            await self._run(self._owners.register)
            mine = {copy.session_id: copy.workspace_id}
            await self._maker.unmake(mine)  # what an earlier try left
            try:
                await self._maker.make(copy)
            except BaseException:
                with contextlib.suppress(KimiRayError):  # what is left goes with the publication
                    await self._maker.unmake(mine)
                raise

    async def publish(self, group: str) -> None:
        """See ``Store.publish``."""
        marker = await self._pending(group)
        async with self._locked(marker, alone=True) as there:
            if marker is not None and there:
                for session_id in marker.sessions:
                    if not await self._run(self._maker.has_document, session_id):
                        raise no_publication(session_id).with_details(group=group)
                await self._run(self._unpublished.flip, marker)
                return
        if not await self._published(group, None):
            raise no_publication(group)

    async def discard(self, group: str) -> None:
        """See ``Store.discard_publication``."""
        marker = await self._run(self._unpublished.group, group)
        if marker is not None:
            await self._delete(marker)

    async def _pending(self, group: str) -> Marker | None:
        """The marker of a publication whose process lives; one of a dead process is rolled back."""
        marker = await self._run(self._unpublished.group, group)
        if marker is None or marker.writer == self._owners.writer:
            return marker
        return None if await self._if_dead(marker) else marker

    async def _published(self, group: str, session_id: str | None) -> bool:
        record = await self._run(self._unpublished.record, group)
        if record is None or (session_id is not None and session_id not in record.sessions):
            return False
        await self._run(self._unpublished.settle, group)
        return True

    # -- ending what a dead process began ----------------------------------------------------------------------------

    async def recover(self) -> None:
        """Roll back what dead processes left; what cannot be deleted now stays hidden until the next time.

        Raises:
            StoreError: What a file call gives that makes a publication durable.
        """
        if await self._run(self._unpublished.tidy):
            await self._run(self._clear)
        for marker in (*await self._run(self._unpublished.groups), *await self._run(self._unpublished.all_new)):
            with contextlib.suppress(StoreError):
                await self._if_dead(marker)

    def _clear(self) -> None:
        with self._owners.deciding(), io_errors(self._home):
            self._unpublished.clear()

    async def roll_back(self, session_id: str) -> None:
        """Roll back what a dead process left of a session, and of those that were to appear with it."""
        groups = await self._run(self._unpublished.groups)
        marker = await self._run(self._unpublished.maker_of, session_id, groups)
        if marker is not None:
            await self._if_dead(marker)

    async def _if_dead(self, marker: Marker) -> bool:
        """End what a marker stands for if its writer is dead; whether it was."""
        if marker.writer == self._owners.writer or await self._run(self._owners.lives, marker.writer):
            return False
        if not marker.grouped and await self._run(self._maker.has_document, marker.name):
            await self._maker.settle(marker.name)
            await self._run(self._unpublished.drop_new, marker.name)
        else:
            await self._delete(marker)
        return True

    async def _delete(self, marker: Marker) -> None:
        async with self._locked(marker, alone=True) as there:
            if there:
                await self._maker.unmake(marker.sessions)
                await self._run(self._owners.forget, marker.sessions)
                await self._run(self._unpublished.drop, marker)

    @contextlib.asynccontextmanager
    async def _locked(self, marker: Marker | None, *, alone: bool) -> AsyncGenerator[bool]:
        held: list[int] = []
        try:
            if marker is not None:
                await self._lock(marker, held, alone=alone)
            yield bool(held)
        finally:
            for lock in held:
                self._unpublished.unlock(lock)

    async def _lock(self, marker: Marker, held: list[int], *, alone: bool) -> None:
        """Put the lock into ``held``, where it is found also when this is cancelled."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LOCK_TIMEOUT_S
        while not await self._run(self._try_lock, marker, held, alone):
            if loop.time() >= deadline:
                raise StoreError(
                    f"{marker.path} is being worked on for too long",
                    code="store.busy",
                    hint="try again when the copies that are under way have ended",
                    details={"path": marker.path},
                    retryable=True,
                )
            await asyncio.sleep(_POLL_S)

    def _try_lock(self, marker: Marker, held: list[int], alone: bool) -> bool:
        """Take the lock into ``held`` if the marker is there; False while others hold it."""
        try:
            lock = self._unpublished.lock(marker, alone=alone)
        except BlockingIOError:
            return False
        if lock is not None:
            held.append(lock)
        return True


class Publishing:
    """The part of a store that makes sessions, the same for every backend."""

    _publications: Publications
    _sessions: SessionsHeld
    _claims: Claims

    def _check_open(self) -> None:
        raise NotImplementedError

    async def begin_publication(self, group: str, sessions: dict[str, str]) -> None:
        """See ``Store.begin_publication``."""
        self._check_open()
        await self._publications.begin(group, sessions)

    async def copy_session(self, group: str, copy: SessionCopy) -> None:
        """See ``Store.copy_session``."""
        self._check_open()
        await self._publications.copy(group, copy)

    async def publish(self, group: str) -> None:
        """See ``Store.publish``."""
        self._check_open()
        await self._publications.publish(group)

    async def discard_publication(self, group: str) -> None:
        """See ``Store.discard_publication``."""
        self._check_open()
        await self._publications.discard(group)

    async def _make_way(self, session_id: str, nonce: str, workspace_id: str, *, create: bool) -> str | None:
        """What to claim a session with: the workspace id of a new one, None for one that is there."""
        if not create:
            self._publications.refuse_other(session_id, nonce)
            return None
        async with self._sessions.alone(session_id):
            new = await self._publications.make_way(session_id, nonce, self._claims)
        return workspace_id if new else None

    async def _came_to_nothing(self, session_id: str, nonce: str | None = None) -> bool:
        """Whether the session (that ``nonce`` makes) was not published, and is gone now."""
        async with self._sessions.alone(session_id):
            if not self._publications.makes(session_id, nonce):
                return False
            await self._publications.give_up(session_id, self._claims)
            return True
