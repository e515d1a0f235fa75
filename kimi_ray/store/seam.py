"""The store seam: what every backend promises, and the plain data that crosses it.

A store keeps *streams* of opaque rows (an event's canonical bytes) and session *documents*. It never parses an event
on the way in. ``tests/conformance/store_contract.py`` holds the promises below against any backend.

A grant is the right to write one stream: an ``epoch`` (rising, durable before the grant returns) and the ``nonce`` of
the writer that asked. A later grant fences all earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from pydantic import Field

from kimi_ray.settings import Durability, Settings


class Stream(NamedTuple):
    """The address of a log."""

    session_id: str
    agent_id: str

    def __str__(self) -> str:
        return f"{self.session_id}/{self.agent_id}"


@dataclass(frozen=True, slots=True)
class WriterGrant:
    """The right to append to one stream. ``next_seq`` is the seq of the next event.

    ``header`` is the log's when the store has it at hand, which spares the new writer a look at the whole log.
    """

    epoch: int
    next_seq: int
    header: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """A session's claim. ``revision`` is the document's, 0 when there is none yet."""

    grant: int
    revision: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one stream, cut by its write controller, to be appended as one unit.

    ``payload`` is the rows one after the other, each with its final ``\\n``; ``row_bytes`` their lengths;
    ``row_events`` how many events each row holds (1, or more for a packed chunk row).
    """

    stream: Stream
    epoch: int
    nonce: str
    first_seq: int
    payload: bytes | memoryview
    row_bytes: tuple[int, ...]
    row_events: tuple[int, ...]
    closing: bool = False
    """It ends a turn or a log: on a full disk it may use the reserve."""

    @property
    def next_seq(self) -> int:
        """The seq after the last event of the batch."""
        return self.first_seq + sum(self.row_events)


@dataclass(frozen=True, slots=True)
class AppendResult:
    """The answer for one stream of an ``append``.

    ``written`` and ``durable`` are next seqs (everything below is written, resp. durable). ``error`` is the
    ``KimiRayError.to_data()`` of a batch that was refused (``store.conflict``, ``store.gap``, ``store.fenced`` ...).
    """

    stream: Stream
    written: int
    durable: int
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class LogView:
    """A log as ``load`` or ``inspect`` sees it; events follow in pages from ``read_from``.

    ``closers`` are the events that logical repair appended (``load``) or would append (``inspect``), as JSON.
    ``cut`` is the seq after the last stored event before repair; ``torn_bytes`` what physical repair sets aside.
    """

    header: dict[str, Any]
    next_seq: int
    epoch: int
    closers: tuple[dict[str, Any], ...]
    cut: int
    torn_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Page:
    """A run of stored events: canonical lines without ``\\n``, seqs ``first_seq`` .. ``first_seq + len(lines) - 1``."""

    first_seq: int
    lines: tuple[bytes, ...]
    next_seq: int
    """The seq after the last event stored in the log (not of this page)."""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ListedLog:
    """A row of ``list()``: the header, or the error that this one log gives."""

    stream: Stream
    header: dict[str, Any] | None
    path: str | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class LogSnapshot:
    """A row of ``snapshots()``: a log with its ``revision``, or the error that this one log gives.

    ``revision`` is opaque and compared for equality only. It changes with every append and repair, and two stores never
    share one.
    """

    stream: Stream
    revision: str
    header: dict[str, Any] | None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """A session document (``state.json``) and its revision. ``value`` is JSON."""

    session_id: str
    workspace_id: str
    revision: int
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LogCopy:
    """A log to be made: the first ``cut`` events of ``source`` under ``header``, then ``tail``, then nothing granted.

    ``tail`` are canonical event lines without ``\\n``, with the seqs from ``cut`` on.
    """

    source: Stream
    cut: int
    header: dict[str, Any]
    tail: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionCopy:
    """A session to be made of copied logs; ``document`` is its first (revision 1)."""

    session_id: str
    workspace_id: str
    document: dict[str, Any]
    logs: tuple[LogCopy, ...]


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What ``<home>/store.json`` fixed at creation. ``home_id`` is its uuid: it names the runtime."""

    home_id: str
    backend: str
    compression: str
    shards: int
    format: int = 1


@dataclass(slots=True)
class StoreOptions:
    """How a store process runs."""

    backend: str = "jsonl"
    compression: str = "none"
    shards: int = 1
    durability: Durability = "disk"
    network_home: bool = False
    claim_timeout_s: float = 15.0
    """How long a claim waits for an owner that is dying (a detached actor outlives its driver by 1 to 4 s)."""
    expected_home_id: str | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


class VerifyReport(Settings):
    """What ``verify`` found in one log."""

    session_id: str
    agent_id: str
    ok: bool
    events: int = 0
    batches: int = 0
    """Batches (plain), frames (Zstandard) or rows (SQLite)."""
    bytes: int = 0
    """Bytes that verify."""
    epoch: int = 0
    closed: bool = False
    """Whether the newest grant was given back."""
    torn_bytes: int = 0
    """Bytes after them that a crash cut short; the next writer sets them aside."""
    problems: tuple[dict[str, object], ...] = Field(default=())
    """Each with ``code``, ``message``, and ``details`` {file, offset or rowid, seq}."""

    def to_data(self) -> dict[str, object]:
        """The report as plain JSON."""
        return self.model_dump(mode="json")


@dataclass(frozen=True, slots=True)
class SurvivingPage:
    """Some events of a damaged log: canonical lines without ``\\n``, each with the seq that the store knows it by.

    ``header`` is the log's when it verifies, else None. ``cursor`` asks for the next page; None: this was the last.
    ``damage`` are the places passed over since the page before, as ``KimiRayError.to_data()``.
    """

    header: dict[str, Any] | None
    events: tuple[tuple[int, bytes], ...]
    cursor: int | None
    damage: tuple[dict[str, Any], ...] = ()


class SweepReport(Settings):
    """What ``sweep_blobs`` did."""

    logs: int = 0
    """Logs whose references were marked."""
    kept: int = 0
    """Blobs that a log refers to."""
    young: int = 0
    """Blobs that nobody refers to, touched within the grace."""
    deleted: int = 0
    """Blobs deleted, or with ``dry_run`` those that would be."""
    deleted_bytes: int = 0
    held_back: int = 0
    """Blobs that would have gone if everything could have been read; see ``problems``."""
    dry_run: bool = False
    problems: tuple[dict[str, object], ...] = Field(default=())
    """What could not be read, or not whole, as ``KimiRayError.to_data()``."""

    def to_data(self) -> dict[str, object]:
        """The report as plain JSON."""
        return self.model_dump(mode="json")


class Store(Protocol):
    """A durable store, inside the one process that owns the sessions it writes. Async; no Ray.

    Every method may raise ``StoreError``; the codes are named with each method. Methods that only read never write a
    byte and may be called beside a live writer.
    """

    @property
    def identity(self) -> StoreIdentity:
        """``store.json``."""
        ...

    async def open_session(
        self, session_id: str, nonce: str, *, workspace_id: str | None = None, create: bool = False
    ) -> SessionGrant:
        """Claim a session for this process; idempotent by nonce. ``workspace_id`` places a new session.

        With ``create`` the session must not be there, and is unpublished until its first document is written: nobody
        else sees it, and if its process dies before, the next one to open the home deletes what there is of it.

        Raises:
            StoreError: ``session.in_use`` {host, pid} after ``claim_timeout_s``; ``store.not_found`` for an unknown
                session without ``workspace_id``; with ``create`` ``store.exists``, ``store.deleted``.
        """
        ...

    async def close_session(self, session_id: str, nonce: str) -> None:
        """Give the claim back (the owner file is removed). Idempotent."""
        ...

    async def open_writer(
        self, target: dict[str, Any] | Stream, nonce: str, *, claim: str | None = None
    ) -> WriterGrant:
        """A new grant on an existing stream, or a new log when ``target`` is a header.

        The grant is durable before it returns, as an epoch row in the log; a new log becomes visible with its first
        batch only. Idempotent by nonce. Physical repair of a torn tail happens here.

        Args:
            target: The stream, or the header of a new log.
            nonce: Names the writer to be.
            claim: The nonce of ``open_session`` that the caller acts for; None does not look.

        Raises:
            StoreError: ``store.not_found``, ``store.exists``, ``store.corrupt``, ``session.in_use``,
                ``store.deleted``; ``session.fenced`` when another claim of the session is in force.
        """
        ...

    async def append(self, batches: list[Batch], *, sync: bool) -> list[AppendResult]:
        """Append batches of several streams; one answer per batch, in order. One bad batch does not fail the others.

        ``sync=True``: answers only when durable. Per-event idempotence: an overlap with what is stored is compared
        byte for byte; equal events are skipped and the rest appended.
        """
        ...

    async def close_writer(self, stream: Stream, epoch: int, nonce: str) -> None:
        """End the grant with a closed row, durable. Idempotent; a fenced grant is left alone."""
        ...

    async def load(self, stream: Stream, *, is_live: bool | None = None) -> LogView:
        """A cold log, repaired. ``is_live`` is the caller's knowledge about an unknown log; only False makes it cold.

        Raises:
            StoreError: ``log.turn_open`` for a live log, ``store.not_found``, ``store.corrupt``.
        """
        ...

    async def inspect(self, stream: Stream) -> LogView:
        """The view that ``load`` would give, without writing a byte."""
        ...

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """A page of the suffix from ``seq``; empty past the end. Fast at the tail of a large log."""
        ...

    async def list_logs(self, *, session_id: str | None = None) -> list[ListedLog]:
        """Headers of all logs (or of one session's). A broken log is reported in its row."""
        ...

    async def snapshots(self, *, session_id: str | None = None) -> list[LogSnapshot]:
        """Headers of all logs (or of one session's) with their revisions. A broken log is reported in its row."""
        ...

    async def revision(self, stream: Stream) -> str:
        """The revision of one log, cheap: as in its ``LogSnapshot``.

        Raises:
            StoreError: ``store.not_found``, ``store.deleted``.
        """
        ...

    async def fork(self, source: Stream, cut: int, header: dict[str, Any], nonce: str) -> WriterGrant:
        """A new log with the first ``cut`` events of ``source`` under ``header``, granted to ``nonce``.

        Idempotent by nonce; visible whole and durable, or not at all. The copy's newest epoch is above every copied
        one. A live source is read as far as it is written: flush it first.

        Raises:
            StoreError: ``store.gap`` {expected} when the source is shorter, ``store.exists``, ``store.not_found``,
                ``store.corrupt``, ``session.in_use``.
        """
        ...

    async def begin_publication(self, group: str, sessions: dict[str, str]) -> None:
        """Reserve ids for sessions that are to appear together, or not at all; durable. Idempotent by ``group``.

        Until ``publish`` nobody sees them; if this process dies before, the next one to open the home deletes them.

        Args:
            group: Names the publication; fit for a file name.
            sessions: Session id to workspace id.

        Raises:
            StoreError: ``store.exists``, ``store.deleted`` or ``session.in_use`` for an id that is taken,
                ``store.invalid_id``. Nothing is reserved then.
        """
        ...

    async def copy_session(self, group: str, copy: SessionCopy) -> None:
        """Make one session of a begun publication: its logs, then its document; durable. Idempotent.

        Live sources are read as far as they are written: flush them first. No grant is left on the copies.

        Raises:
            StoreError: ``store.gap`` {expected} when a source is shorter than its cut, ``store.not_found`` (a source,
                or the publication), ``store.corrupt``.
        """
        ...

    async def publish(self, group: str) -> None:
        """Show all sessions of a publication, by one flip; durable. Idempotent: a published one may be told again.

        Raises:
            StoreError: ``store.not_found`` when the publication was discarded, or never begun.
        """
        ...

    async def discard_publication(self, group: str) -> None:
        """Delete what there is of a publication that was not published. Idempotent; a published one is left alone."""
        ...

    async def verify(self, stream: Stream) -> VerifyReport:
        """Check everything about a log and report all that is wrong, instead of stopping at the first.

        Raises:
            StoreError: ``store.not_found``; damage is in the report.
        """
        ...

    async def read_surviving(self, stream: Stream, cursor: int = 0, limit: int = 1000) -> SurvivingPage:
        """Every event that verifies, whatever is broken around it, in pages; what ``salvage`` reads.

        Args:
            stream: The log, however damaged.
            cursor: Where to go on: the ``cursor`` of the page before.
            limit: At most about so many events (a packed row is not split).

        Raises:
            StoreError: ``store.not_found``.
        """
        ...

    async def sweep_blobs(self, *, grace_s: float = 86_400.0, dry_run: bool = False) -> SweepReport:
        """Delete blobs that no log refers to and that nobody touched for ``grace_s`` seconds (mark and sweep).

        Damaged bytes count as far as they name blobs, and are reported. Where something cannot be read at all nothing
        is deleted (``held_back``). A grace below ``sweep.MIN_GRACE_S`` is for homes in which nobody writes; ``dry_run``
        deletes nothing.
        """
        ...

    async def locate(self, stream: Stream) -> str | None:
        """The path of the log on the storage node, a hint; None when the backend has no file per log."""
        ...

    async def read_raw(self, stream: Stream) -> bytes:
        """The stored artifact, byte for byte.

        Raises:
            StoreError: ``store.no_raw_artifact``, ``store.not_found``.
        """
        ...

    async def read_document(self, session_id: str) -> Document | None:
        """The session's document, or None."""
        ...

    async def list_documents(self) -> list[Document]:
        """All session documents; unreadable ones come with ``value={"error": ...}``."""
        ...

    async def write_document(
        self, session_id: str, value: dict[str, Any], *, grant: int, nonce: str, revision: int
    ) -> int:
        """Replace the document if its revision is still ``revision``; returns the new one, durable.

        Raises:
            StoreError: ``store.conflict`` {revision}, ``store.fenced`` when the claim is another's.
        """
        ...

    async def remove(self, session_id: str) -> None:
        """Delete a session: tombstone first, then its files. A zombie cannot bring it back."""
        ...

    async def has_blob(self, digest: str) -> bool:
        """Whether ``sha256:<hex>`` is stored durably."""
        ...

    async def put_blobs(self, blobs: dict[str, bytes]) -> None:
        """Store content by digest, durable when it returns. Existing ones are left alone."""
        ...

    async def read_blob(self, digest: str) -> bytes:
        """The content of a blob, verified against its digest.

        Raises:
            StoreError: ``store.blob_missing``, ``store.corrupt``.
        """
        ...

    async def stats(self) -> dict[str, Any]:
        """Counters for ``status`` and ``bench``: commits, syncs, events, bytes, queue bytes."""
        ...

    async def close(self) -> None:
        """Finish what was accepted, sync, release locks. Idempotent."""
        ...
