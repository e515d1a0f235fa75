"""A store process on a simulated machine that writes down what it asked for and what it was promised.

``Ledger`` is that record: the oracles compare it with what a disk still holds. A promise made by a process that is
already dead does not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from kimi_ray.errors import KimiRayError
from kimi_ray.store import JsonlStore, StoreOptions
from kimi_ray.store.blobs import digest_of
from kimi_ray.store.seam import AppendResult, LogView, Stream
from tests.conformance.simulated_fs import Disk, SimulatedFs
from tests.conformance.simulated_loop import InlineSync
from tests.conformance.store_contract import MAIN, batch, header, line

HOME = "/home"
_PAGE = 50
WORKSPACE = "wd_x_0123"


class DiedError(Exception):
    """The process is dead."""


class RefusedError(Exception):
    """An append was refused."""


@dataclass
class LogFacts:
    """What one log must hold.

    Attributes:
        asked: Nonces that asked for a grant.
        epochs: The grants that were given, by nonce; ``stored`` are those whose row must be in the log.
        sent: What each writer asked to append, by nonce and seq.
        durable: The lines that were promised to be durable.
        loose: Batches written since, whose loss a power cut may bring in any combination.
        open_turn: The log may hold a turn that a crash left open, and the events that close it.
    """

    asked: set[str] = field(default_factory=set[str])
    epochs: dict[str, int] = field(default_factory=dict[str, int])
    stored: set[str] = field(default_factory=set[str])
    sent: dict[str, dict[int, bytes]] = field(default_factory=dict[str, dict[int, bytes]])
    durable: list[bytes] = field(default_factory=list[bytes])
    loose: int = 0
    open_turn: bool = False

    def line(self, nonce: str, seq: int) -> bytes:
        """The event that a writer has at a seq; it tells writers apart."""
        lines = self.sent.setdefault(nonce, {})
        return lines.setdefault(seq, line(seq, by=nonce, text=sha256(f"{nonce} {seq}".encode()).hexdigest()))

    def promise(self, lines: list[bytes]) -> None:
        """These lines, the first of the log, are durable."""
        assert lines[: len(self.durable)] == self.durable, "flushed events changed"
        self.durable = lines
        self.loose = 0

    def clone(self) -> LogFacts:
        """A copy."""
        sent = {nonce: dict(lines) for nonce, lines in self.sent.items()}
        return LogFacts(
            set(self.asked), dict(self.epochs), set(self.stored), sent, list(self.durable), self.loose, self.open_turn
        )


@dataclass
class Ledger:
    """What a machine's processes asked for and were promised."""

    compression: str = "none"
    home_id: str | None = None
    logs: dict[Stream, LogFacts] = field(default_factory=dict[Stream, LogFacts])
    claims: dict[str, int] = field(default_factory=dict[str, int])
    claimed: int = 0
    """The newest grant of a claim that was not given back."""
    tries: dict[int, list[dict[str, Any]]] = field(default_factory=dict[int, list[dict[str, Any]]])
    revision: int = 0
    blobs: dict[bytes, bool] = field(default_factory=dict[bytes, bool])
    removal: str = ""
    """``asked`` or ``done``."""
    seen: dict[Stream, list[bytes]] = field(default_factory=dict[Stream, list[bytes]])
    """What readers were shown since the last power cut."""
    torn: dict[Stream, bytes] = field(default_factory=dict[Stream, bytes])
    """The bytes of logs with a torn tail that nobody began to repair."""
    boots: int = 0
    """Power cuts when ``seen`` and ``torn`` were written."""

    def log(self, stream: Stream) -> LogFacts:
        """The facts of a stream."""
        return self.logs.setdefault(stream, LogFacts())

    def clone(self) -> Ledger:
        """A copy."""
        logs = {stream: facts.clone() for stream, facts in self.logs.items()}
        tries = {revision: list(values) for revision, values in self.tries.items()}
        return replace(self, logs=logs, claims=dict(self.claims), tries=tries, blobs=dict(self.blobs), seen={}, torn={})


class Life:
    """One process. Every method raises ``DiedError`` once it is dead."""

    def __init__(self, disk: Disk, ledger: Ledger, fs: SimulatedFs, store: JsonlStore) -> None:
        self.disk = disk
        self.ledger = ledger
        self.fs = fs
        self.store = store

    @classmethod
    async def start(cls, disk: Disk, ledger: Ledger, calls: int = 10**9, **options: Any) -> Life:
        """Open the store; the process dies before its changing call number ``calls``."""
        fs = SimulatedFs(disk, calls)
        extra = {"boot_id": disk.boot_id, "sync_interval_ms": 60_000}
        try:
            store = await JsonlStore.open(
                HOME,
                StoreOptions(compression=ledger.compression, claim_timeout_s=0.0, extra=extra, **options),
                fs=fs,
                strategy=InlineSync(),
            )
        except KimiRayError as error:
            if fs.dead:
                raise DiedError from error
            raise
        life = cls(disk, ledger, fs, store)
        life._alive()
        assert ledger.home_id in (None, store.identity.home_id), "the home is another one"
        ledger.home_id = store.identity.home_id
        return life

    def _alive(self) -> None:
        if self.fs.dead:
            raise DiedError

    async def _ask(self, work: Any) -> Any:
        try:
            answer = await work
        except KimiRayError as error:
            if self.fs.dead:
                raise DiedError from error
            raise
        self._alive()
        return answer

    async def claim(self, nonce: str) -> int:
        """Open the session."""
        ledger = self.ledger
        grant = (await self._ask(self.store.open_session("s1", nonce, workspace_id=WORKSPACE))).grant
        assert grant > ledger.claimed or grant == ledger.claims.get(nonce), "the grant of a claim does not rise"
        ledger.claims[nonce] = ledger.claimed = grant
        return grant

    async def unclaim(self, nonce: str) -> None:
        """Close the session."""
        self.ledger.claimed = 0  # its grant is forgotten
        await self._ask(self.store.close_session("s1", nonce))

    async def grant(self, nonce: str, stream: Stream = MAIN, *, new: bool = False) -> int:
        """Open a writer; returns the next seq."""
        facts = self.ledger.log(stream)
        facts.asked.add(nonce)
        facts.loose = max(facts.loose, 1)  # its epoch row, written after what was loose is synced
        found = await self._ask(self.store.open_writer(header(stream) if new else stream, nonce))
        newest = max((facts.epochs[other] for other in facts.stored if other != nonce), default=0)
        assert found.epoch > newest, "an epoch does not rise"
        facts.epochs[nonce] = found.epoch
        if not new:
            facts.stored.add(nonce)
            facts.promise(await all_lines(self.store, stream))
            assert found.next_seq == len(facts.durable)
        return found.next_seq

    async def append(self, nonce: str, first: int, end: int, stream: Stream = MAIN, *, sync: bool) -> AppendResult:
        """Append events ``first`` .. ``end - 1`` of this writer; the answer may be an error."""
        facts = self.ledger.log(stream)
        lines = [facts.line(nonce, seq) for seq in range(first, end)]
        facts.loose += 1
        send = batch(lines, first, epoch=facts.epochs[nonce], nonce=nonce, stream=stream)
        answer: AppendResult = (await self._ask(self.store.append([send], sync=sync)))[0]
        if answer.error is None:
            facts.stored.add(nonce)
            assert answer.durable >= end or not sync
            if answer.durable > len(facts.durable):
                facts.promise((await all_lines(self.store, stream))[: answer.durable])
        return answer

    async def must_append(self, nonce: str, first: int, end: int, stream: Stream = MAIN, *, sync: bool) -> None:
        """``append`` that is not refused."""
        answer = await self.append(nonce, first, end, stream, sync=sync)
        if answer.error is not None:
            raise RefusedError(answer.error)

    async def close_writer(self, nonce: str, stream: Stream = MAIN) -> None:
        """End a grant."""
        facts = self.ledger.log(stream)
        facts.loose = max(facts.loose, 1)
        await self._ask(self.store.close_writer(stream, facts.epochs[nonce], nonce))
        facts.loose = 0

    async def load(self, stream: Stream = MAIN) -> LogView:
        """Load a log whose writer is known to be dead."""
        facts = self.ledger.log(stream)
        facts.loose = max(facts.loose, 1)  # epoch row, closers, closed row: one after the other
        view: LogView = await self._ask(self.store.load(stream, is_live=False))
        facts.loose = 0
        return view

    async def fork(self, cut: int, nonce: str, target: Stream, source: Stream = MAIN) -> None:
        """Fork ``source``."""
        facts, parent = self.ledger.log(target), self.ledger.log(source)
        facts.asked |= parent.asked | {nonce}
        facts.sent.update({writer: dict(lines) for writer, lines in parent.sent.items()})
        facts.open_turn = parent.open_turn
        found = await self._ask(self.store.fork(source, cut, header(target), nonce))
        facts.epochs[nonce] = found.epoch
        facts.stored.add(nonce)
        facts.promise(await all_lines(self.store, target))
        assert facts.durable == (await all_lines(self.store, source))[:cut]

    async def write_document(self, nonce: str, value: dict[str, Any]) -> None:
        """Replace the document that has the last known revision."""
        ledger = self.ledger
        ledger.tries.setdefault(ledger.revision + 1, []).append(value)
        asked = self.store.write_document(
            "s1", value, grant=ledger.claims[nonce], nonce=nonce, revision=ledger.revision
        )
        ledger.revision = await self._ask(asked)

    async def remove(self) -> None:
        """Remove the session."""
        self.ledger.removal = self.ledger.removal or "asked"
        await self._ask(self.store.remove("s1"))
        self.ledger.removal = "done"

    async def put_blob(self, content: bytes) -> None:
        """Store a blob."""
        self.ledger.blobs.setdefault(content, False)
        await self._ask(self.store.put_blobs({digest_of(content): content}))
        self.ledger.blobs[content] = True


async def all_lines(store: Any, stream: Stream) -> list[bytes]:
    """All events, in small pages."""
    lines: list[bytes] = []
    while True:
        page = await store.read_from(stream, len(lines), _PAGE)
        if not page.lines:
            assert page.next_seq == len(lines), stream
            return lines
        lines.extend(page.lines)
