"""A load on a store actor: real senders and controllers that write many logs, and a journal of what they did.

What the journal says can be compared with the bytes of the home (``tests.conformance.oracle_checker``). Writers are
reopened under new grants at random, and the old ones go on as zombies until the store tells them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from kimi_ray.errors import KimiRayError, error_from_data
from kimi_ray.events import SessionEvent, make_event
from kimi_ray.hosts.ports import Peer, is_lost
from kimi_ray.store.blobs import digest_of
from kimi_ray.store.seam import AppendResult, Batch, Stream, WriterGrant
from kimi_ray.store.sender import Sender
from kimi_ray.store.wire import pack_call
from kimi_ray.store.write_controller import WriteController
from kimi_ray.store.writer_settings import WriterSettings
from tests.conformance.oracle_checker import Journal

WORKSPACE = "wd_load_000000000000"
SETTINGS = WriterSettings(
    write_window_ms=20, sync_interval_ms=100, store_timeout_s=90, close_timeout_s=90, call_timeout_s=20,
    backoff_initial_ms=20, backoff_max_ms=500,
)  # fmt: skip
_AWAY = frozenset({"store.unavailable", "store.busy", "store.io_failed", "store.disk_full", "store.poisoned"})


class LoadedStream:
    """One log under load."""

    def __init__(self, load: StoreLoad, stream: Stream, dice: random.Random) -> None:
        self.load = load
        self.stream = stream
        self.dice = dice
        self.writer: WriteController | None = None
        self.zombies: list[WriteController] = []
        self.flushes = 0
        self.events = 0
        self.fenced = 0

    async def open(self) -> None:
        """Take a grant, the first or the next; a writer that is there becomes a zombie."""
        load = self.load
        nonce = f"{self.stream.session_id}-{self.stream.agent_id}-{load.prefix}-{self.dice.getrandbits(48):012x}"
        target = load.header(self.stream) if self.writer is None else self.stream
        grant: WriterGrant = (await load.ask("open_writers", [(target, nonce, None)]))[0]
        if isinstance(grant, dict):
            raise error_from_data(grant)
        load.journal.granted(self.stream, grant.epoch, nonce, grant.next_seq)
        if self.writer is not None:
            self.zombies.append(self.writer)
        self.writer = WriteController(
            self.stream, epoch=grant.epoch, nonce=nonce, first_seq=grant.next_seq, sender=load.sender
        )

    def append(self, writer: WriteController, count: int) -> None:
        """Some events: notes, and runs of chunks that are packed on their way."""
        first, events = writer.next_seq, []
        kind = self.dice.choice(("note", "note", "chunks"))
        for seq in range(first, first + count):
            text = f"{writer.nonce} {seq} " + self.dice.choice(("", "ü\n\x7f", "x" * 300))
            data: dict[str, Any] = {"text": text}
            if kind == "chunks":
                data = {"turn": 0, "step": 0, "attempt": 1, "chunk": {"type": "text-delta", "index": 0, "text": text}}
            name = "assistant/chunk" if kind == "chunks" else "note/added"
            events.append(make_event(seq, 1_700_000_000_000 + self.dice.randrange(10_000), name, data))
        self._enqueue(writer, events)
        if self.dice.random() < 0.02:
            self.append_with_blob(writer)

    def append_with_blob(self, writer: WriteController) -> None:
        """An event that refers to a blob, which is durable before it."""
        content = self.dice.randbytes(2000)
        digest = digest_of(content)
        writer.attach_blob(digest, content)
        self._enqueue(
            writer, [make_event(writer.next_seq, 1, "note/added", {"text": {"$blob": digest, "bytes": 2000}})]
        )

    def _enqueue(self, writer: WriteController, events: list[SessionEvent]) -> None:
        self.load.journal.appended(self.stream, writer.epoch, [(event.seq, event.line) for event in events])
        for event in events:
            writer.enqueue(event)
        self.events += len(events)

    async def flush(self, writer: WriteController) -> None:
        """Have everything so far acknowledged, and note that it was."""
        target = writer.next_seq
        await writer.flush()
        self.load.journal.flushed(self.stream, writer.epoch, target)
        self.flushes += 1

    async def run(self, ends: asyncio.Event) -> None:
        """Append, flush, wait, reopen, at random, until ``ends``."""
        while not ends.is_set():
            writer = self.writer
            assert writer is not None
            self.append(writer, self.dice.randint(1, 12))
            await self._tolerant(writer.wait_for_room())
            if self.dice.random() < 0.5:
                await self._tolerant(self.flush(writer))
            if self.dice.random() < self.load.reopen_chance:
                await self._tolerant(self.open())
            for zombie in self.zombies:
                self.append(zombie, 1) if zombie.error is None else None
            self.zombies = [zombie for zombie in self.zombies if not self._gone(zombie)]
            await asyncio.sleep(self.dice.random() * self.load.pause_s)

    async def _tolerant(self, work: Awaitable[None]) -> None:
        try:
            await work
        except KimiRayError as error:
            if error.code not in self.load.tolerated:
                raise

    def _gone(self, zombie: WriteController) -> bool:
        if zombie.state != "fenced":
            return False
        self.fenced += 1
        return True

    async def finish(self) -> None:
        """Everything durable, every zombie told, the grant closed."""
        writer = self.writer
        assert writer is not None
        await self.flush(writer)
        await writer.close()
        for zombie in self.zombies:
            try:
                if zombie.error is None:
                    self.append(zombie, 1)
                await zombie.close()
            except KimiRayError as error:
                if error.code not in ("store.fenced", "store.conflict"):
                    raise
            self.fenced += zombie.state == "fenced"
        answers = await self.load.ask("close_writers", [(self.stream, writer.epoch, writer.nonce)])
        assert answers == [None], answers


class StoreLoad:
    """Many logs on one store.

    Args:
        peer: The store's actor.
        journal: Where to note what is done.
        dice: All randomness.
        prefix: Names the sessions.
        sessions: How many sessions, each with ``agents`` logs.
        reopen_chance: That a log gets a new grant after a piece of work.
        pause_s: Longest pause of a log between two pieces of work.
        tolerated: Codes of a flush that are not the end: the disk was made to fail.
    """

    def __init__(
        self,
        peer: Peer,
        journal: Journal,
        dice: random.Random,
        *,
        prefix: str = "load",
        sessions: int = 6,
        agents: int = 5,
        reopen_chance: float = 0.01,
        pause_s: float = 0.02,
        tolerated: frozenset[str] = frozenset(),
        settings: WriterSettings = SETTINGS,
    ) -> None:
        self.peer = peer
        self.journal = journal
        self.prefix = prefix
        self.reopen_chance = reopen_chance
        self.pause_s = pause_s
        self.tolerated = tolerated
        self.sender = Sender(self._append, self._put_blobs, settings=settings)
        self._timeout_s = settings.call_timeout_s
        self._within_s = settings.store_timeout_s
        self.streams = [
            LoadedStream(self, Stream(f"session_{prefix}{s}", f"agent-{a}"), random.Random(dice.getrandbits(64)))
            for s in range(sessions)
            for a in range(agents)
        ]
        self._ends = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Claim the sessions, open the logs, begin."""
        for session_id in dict.fromkeys(log.stream.session_id for log in self.streams):
            await self.ask("open_session", session_id, f"claim-{session_id}", WORKSPACE)
        for log in self.streams:
            await log.open()
        self._tasks = [asyncio.create_task(log.run(self._ends)) for log in self.streams]

    async def stop(self) -> None:
        """Let all come to their end, durable and closed.

        Raises:
            KimiRayError: What a log met on its way.
        """
        self._ends.set()
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*(log.finish() for log in self.streams))
        await self.sender.close()

    def cancel(self) -> None:
        """Leave everything as it is."""
        for task in self._tasks:
            task.cancel()

    @property
    def flushes(self) -> int:
        """How many flushes came back."""
        return sum(log.flushes for log in self.streams)

    @property
    def events(self) -> int:
        """How many events were enqueued, by zombies too."""
        return sum(log.events for log in self.streams)

    async def flushed_after(self, count: int, within_s: float = 120.0) -> None:
        """Wait until more than ``count`` flushes came back; a log that failed is raised."""
        async with asyncio.timeout(within_s):
            while self.flushes <= count:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)

    async def ask(self, method: str, *args: Any) -> Any:
        """A call to the store, again while it is away (what is asked here is idempotent)."""
        return await ask_until(lambda: self.peer.call(method, *args, timeout_s=20), self._within_s)

    def header(self, stream: Stream) -> dict[str, Any]:
        """The header of a new log."""
        return {
            "type": "log", "version": 1, "enc": 1, "session_id": stream.session_id, "agent_id": stream.agent_id,
            "created_at": 0, "origin": "main", "delegation_depth": 0, "labels": {},
            "writer": {"name": "load", "version": "0"},
        }  # fmt: skip

    async def _append(self, batches: list[Batch], sync: bool) -> list[AppendResult]:
        call = pack_call(batches, sync=sync)
        return await self.peer.call("append", call, timeout_s=self._timeout_s, group="store")

    async def _put_blobs(self, blobs: dict[str, bytes]) -> None:
        await self.peer.call("put_blobs", dict(blobs), timeout_s=self._timeout_s, group="store")


async def ask_until(call: Callable[[], Awaitable[Any]], within_s: float) -> Any:
    """The call's answer, asked for again while its callee is away."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await call()
            except KimiRayError as error:
                if not (is_lost(error.code) or error.code in _AWAY):
                    raise
            await asyncio.sleep(0.1)
