"""Making sessions, stopped before each changing file call or with one that fails, on disks that keep and that lose.

After every cut: a reader sees each new session whole or not at all, and of a publication all sessions or none; the next
process finds the same, nothing is left of the others, and their ids are free. What was told to be done is there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.errors import KimiRayError, error_from_data
from kimi_ray.store import JsonlStore, StoreOptions, open_store
from kimi_ray.store.seam import AppendResult, LogCopy, SessionCopy, Stream
from tests.conformance.crash_life import HOME
from tests.conformance.simulated_fs import Disk, SimulatedFs
from tests.conformance.simulated_loop import InlineSync, SimulatedLoop
from tests.conformance.store_contract import MAIN, all_lines, header, line, notes, ok

W = "wd_x_0123"
CUT = 6
MANY = 10**9


@dataclass
class Asked:
    """What a life asked for. ``ids`` appear together if ``together``; ``done`` were told to be there."""

    ids: tuple[str, ...]
    together: bool = False
    done: set[str] = field(default_factory=set[str])
    undone: set[str] = field(default_factory=set[str])
    """Told to be gone."""


async def opened(disk: Disk, compression: str, left: int = MANY) -> tuple[JsonlStore, SimulatedFs]:
    """A store process that dies before its changing call number ``left``."""
    fs = SimulatedFs(disk, left)
    extra = {"boot_id": disk.boot_id, "sync_interval_ms": 60_000}
    options = StoreOptions(compression=compression, claim_timeout_s=0.0, extra=extra)
    return await JsonlStore.open(HOME, options, fs=fs, strategy=InlineSync()), fs


async def create(store: Any, session_id: str) -> None:
    """A session with two logs and a document."""
    claim = await store.open_session(session_id, "n", workspace_id=W, create=True)
    for agent in ("main", "agent-1"):
        stream = Stream(session_id, agent)
        grant = await store.open_writer(header(stream), f"w-{agent}", claim="n")
        taken(await store.append([notes(0, 4, stream=stream, epoch=grant.epoch, nonce=f"w-{agent}")], sync=True))
    await store.write_document(session_id, {"title": session_id}, grant=claim.grant, nonce="n", revision=0)


def copied(session_id: str) -> SessionCopy:
    """Two copies of the source, one cut in a batch."""
    logs = tuple(
        LogCopy(MAIN, cut, header(Stream(session_id, agent)), (line(cut, "log/forked"), line(cut + 1, "log/end-seed")))
        for agent, cut in (("main", CUT), ("agent-1", 3))
    )
    return SessionCopy(session_id, W, {"title": session_id}, logs)


def lines_of(session_id: str, agent: str, *, together: bool) -> list[bytes]:
    """What a log of a session must hold."""
    if not together:
        return [line(seq, text=f"n{seq}") for seq in range(4)]
    cut = CUT if agent == "main" else 3
    return [*(line(seq, text=f"n{seq}") for seq in range(cut)), line(cut, "log/forked"), line(cut + 1, "log/end-seed")]


def taken(results: list[AppendResult]) -> None:
    """Raise what was refused."""
    for result in results:
        if result.error is not None:
            raise error_from_data(result.error)


async def together(*work: Awaitable[Any]) -> None:
    """Run to the end of all; the first failure is raised then."""
    for answer in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer


async def creates(store: Any, asked: Asked) -> None:
    async def one(session_id: str) -> None:
        await create(store, session_id)
        asked.done.add(session_id)

    await together(*map(one, asked.ids))


async def creates_and_gives_up(store: Any, asked: Asked) -> None:
    (session_id,) = asked.ids
    await store.open_session(session_id, "n", workspace_id=W, create=True)
    await store.open_writer(header(Stream(session_id, "main")), "w")
    taken(await store.append([notes(0, 4, stream=Stream(session_id, "main"))], sync=True))
    await store.close_session(session_id, "n")
    asked.undone.add(session_id)


async def publishes(store: Any, asked: Asked) -> None:
    await store.begin_publication("g", dict.fromkeys(asked.ids, W))
    await together(*(store.copy_session("g", copied(session_id)) for session_id in asked.ids))
    await store.publish("g")
    asked.done.update(asked.ids)


async def discards(store: Any, asked: Asked) -> None:
    await store.begin_publication("g", dict.fromkeys(asked.ids, W))
    for session_id in asked.ids:
        await store.copy_session("g", copied(session_id))
    await store.discard_publication("g")
    asked.undone.update(asked.ids)


Part = Callable[[Any, Asked], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Making:
    """A way to make sessions."""

    name: str
    part: Part
    ids: tuple[str, ...]
    together: bool = False


MAKINGS = (
    Making("create", creates, ("f0",)),
    Making("create 4", creates, ("f0", "f1", "f2", "f3")),
    Making("give up", creates_and_gives_up, ("f0",)),
    Making("publish", publishes, ("f0",), together=True),
    Making("publish 4", publishes, ("f0", "f1", "f2", "f3"), together=True),
    Making("discard", discards, ("f0", "f1"), together=True),
)


class Makings:
    """One making under crashes."""

    def __init__(self, loop: SimulatedLoop, making: Making, compression: str) -> None:
        self._loop = loop
        self._making = making
        self._compression = compression
        self._disk = Disk()
        loop.run(self._source())

    async def _source(self) -> None:
        store, fs = await opened(self._disk, self._compression)
        claim = await store.open_session("s1", "n", workspace_id=W, create=True)
        await store.open_writer(header(), "w")
        ok(await store.append([notes(0, 4)], sync=True))
        ok(await store.append([notes(4, 9)], sync=True))
        await store.write_document("s1", {}, grant=claim.grant, nonce="n", revision=0)
        await store.close_writer(MAIN, 1, "w")
        await store.close_session("s1", "n")
        await store.close()
        fs.kill()

    def calls(self) -> int:
        """How many changing calls the making is."""
        return self._cut(MANY)[2]

    def _cut(self, left: int) -> tuple[Disk, Asked, int]:
        return self._loop.run(self._run(left))

    async def _run(self, left: int) -> tuple[Disk, Asked, int]:
        disk, asked = self._disk.clone(), Asked(self._making.ids, self._making.together)
        store, fs = await opened(disk, self._compression)
        made, fs.left = fs.made, left
        with contextlib.suppress(KimiRayError):
            await self._making.part(store, asked)
        made = fs.made - made
        fs.kill()
        return disk, asked, made

    def try_cut(self, left: int, seed: int | None, recovery: int = MANY, again: int | None = None) -> bool:
        """Die at a call, crash, perhaps die and crash again in the next process, and look; whether that died."""
        disk, asked, _ = self._cut(left)
        disk.crash(seed)
        died = self._loop.run(self._reopen(disk, recovery)) if recovery < MANY else False
        if recovery < MANY:
            disk.crash(again)
        self._loop.run(self._check(disk, asked, lost=seed is not None or again is not None))
        return died

    async def _reopen(self, disk: Disk, left: int) -> bool:
        fs: SimulatedFs | None = None
        try:
            store, fs = await opened(disk, self._compression, left)
        except KimiRayError:
            return True
        await store.close()
        died = fs.dead
        fs.kill()
        return died

    def try_failure(self, call: int, seed: int | None, *, full: bool = False) -> None:
        """A call fails (or the disk is full from there on, until space is made); the maker takes it back, then dies."""
        disk, asked = self._disk.clone(), Asked(self._making.ids, self._making.together)
        self._loop.run(self._run_failing(disk, asked, call, full=full))
        disk.crash(seed)
        self._loop.run(self._check(disk, asked, lost=seed is not None))

    async def _run_failing(self, disk: Disk, asked: Asked, call: int, *, full: bool) -> None:
        store, fs = await opened(disk, self._compression)
        if full:
            disk.capacity = disk.used + call
        else:
            fs.fails_at = fs.made + call
        try:
            await self._making.part(store, asked)
        except KimiRayError:
            for session_id in asked.ids:
                if session_id not in asked.done | asked.undone:
                    await self._take_back(store, asked, session_id)
        for session_id in asked.undone:
            assert self.left_of(disk, session_id, reserved=True) == [], "what was taken back left something"
        fs.kill()
        disk.capacity = None

    async def _take_back(self, store: Any, asked: Asked, session_id: str) -> None:
        if asked.together:
            await store.discard_publication("g")
        else:
            await store.close_session(session_id, "n")
        if await store.read_document(session_id) is None:
            asked.undone.add(session_id)

    @staticmethod
    def left_of(disk: Disk, session_id: str, *, reserved: bool) -> list[str]:
        """Paths that a session which is not there left."""
        return [
            path
            for path in disk.paths()
            if f"/{session_id}" in path
            and (reserved or "/reserved/" not in path)
            and "/unpublished/published/" not in path
            and not ("/owners/" in path and ".tmp-" in path)  # these go with the first claim
        ]

    # -- oracles -------------------------------------------------------------------------------------------------------

    async def _check(self, disk: Disk, asked: Asked, *, lost: bool) -> None:
        shown = await self._look(disk, asked)
        store, fs = await opened(disk, self._compression)
        found = {document.session_id for document in await store.list_documents()}
        assert shown <= found, "what a reader saw is gone"
        assert found == {"s1"} | shown
        assert found == {row.stream.session_id for row in await store.list_logs()}
        markers = [path for path in disk.paths() if "/unpublished/new/" in path or "/unpublished/groups/" in path]
        assert markers == [], markers
        for session_id in asked.ids:
            if session_id in found:
                await self._goes_on(store, session_id, asked)
            else:
                left = self.left_of(disk, session_id, reserved=not lost)
                assert left == [], left
                await create(store, session_id)
                assert await store.read_document(session_id) is not None
        assert (await store.verify(MAIN)).ok
        await store.close()
        fs.kill()

    async def _look(self, disk: Disk, asked: Asked) -> set[str]:
        before = disk.fingerprint()
        reader = open_store(HOME, fs=SimulatedFs(disk))
        documents = {document.session_id for document in await reader.list_documents()} - {"s1"}
        logs = {row.stream.session_id for row in await reader.list()} - {"s1"}
        assert documents == logs, "a session is seen by half"
        assert asked.done <= documents, "a session that was told to be there is gone"
        assert documents.isdisjoint(asked.undone), "a session that was told to be gone is there"
        assert not asked.together or documents in (set(), set(asked.ids)), "some of a publication"
        for session_id in asked.ids:
            for agent in ("main", "agent-1"):
                stream = Stream(session_id, agent)
                if session_id in documents:
                    lines = await all_lines(reader, stream)
                    assert lines == lines_of(session_id, agent, together=asked.together), stream
                    assert (await reader.verify(stream)).ok
                else:
                    try:
                        await reader.read_from(stream, 0)
                    except KimiRayError as error:
                        assert error.code == "store.not_found", error
                    else:
                        raise AssertionError(f"{stream} can be read")
        assert disk.fingerprint() == before, "reading changed the disk"
        return documents

    async def _goes_on(self, store: Any, session_id: str, asked: Asked) -> None:
        claim = await store.open_session(session_id, "next")
        assert claim.revision == 1
        await store.write_document(session_id, {"v": 2}, grant=claim.grant, nonce="next", revision=1)
        stream = Stream(session_id, "main")
        grant = await store.open_writer(stream, "next")
        seq = len(lines_of(session_id, "main", together=asked.together))
        assert grant.next_seq == seq
        more = notes(seq, seq + 3, stream=stream, epoch=grant.epoch, nonce="next")
        ok(await store.append([more], sync=True))
        assert (await store.verify(stream)).ok
