"""Salvage: a new session of everything that verifies in a damaged one. The source is only read.

``rebuild`` says what becomes of the events of one log; here they are read from any backend and written to the new
session: first all logs, then the document. A session whose document is missing is one that a salvage did not finish:
the next one for the same source removes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import Field

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.events import LogHeader, ParentRef, SessionEvent, WriterRef, parse_header
from kimi_ray.ids import new_session_id, new_ulid
from kimi_ray.ids import workspace_id as workspace_id_of
from kimi_ray.log import epoch_ms
from kimi_ray.settings import Settings
from kimi_ray.store.checkup import UNREADABLE, blob_references
from kimi_ray.store.chunk_rows import pack_rows
from kimi_ray.store.layout import NO_WORKSPACE, not_found
from kimi_ray.store.rebuild import Rebuild
from kimi_ray.store.seam import Batch, Document, Store, Stream, WriterGrant
from kimi_ray.version import __version__

LABEL = "salvaged_from"
_PAGE_EVENTS = 1_000
_BATCH_BYTES = 2 << 20
_LATE_BYTES = 64 << 20
_LISTED = 1_000
_LOGS_AT_ONCE = 8

JsonObject = dict[str, Any]


class SalvagedLog(Settings):
    """What became of one log."""

    agent_id: str
    header: str = "kept"
    """``kept``, or ``rebuilt`` when it did not verify."""
    events: int = 0
    """Events of the new log; 0: nothing survived, and there is no new log."""
    survived: int = 0
    """Events of the source among them."""
    lost: tuple[dict[str, object], ...] = ()
    """Each {after_seq, count?, file?, offset?}: so many events behind that seq of the source are gone."""
    repairs: int = 0
    repaired: tuple[dict[str, object], ...] = ()
    """Each {seq, new_seq?, change}; at most a thousand."""
    duplicates: int = 0
    """Rows that were there twice, equal to the byte; kept once."""
    missing_blobs: tuple[dict[str, object], ...] = ()
    """Each {digest, seq, code}: the event is kept, its content is not there."""
    problems: tuple[dict[str, object], ...] = Field(default=())
    """Every damage that was met."""


class SalvageReport(Settings):
    """What ``salvage_session`` did."""

    source: str
    session_id: str
    """The new session."""
    workspace_id: str
    document: str = "kept"
    """``kept``, or ``rebuilt`` when the source has none that can be read."""
    logs: tuple[SalvagedLog, ...] = ()
    removed: tuple[str, ...] = ()
    """Sessions that earlier salvages of this source had not finished."""

    def to_data(self) -> dict[str, object]:
        """The report as plain JSON."""
        return self.model_dump(mode="json")


async def salvage_session(store: Store, session_id: str, *, agents: Iterable[str] | None = None) -> SalvageReport:
    """Make a new session of all events that verify in ``session_id``.

    Args:
        store: Where both are.
        session_id: The damaged session. It may even be live: what is written by now is taken.
        agents: Only the logs of these.

    Raises:
        StoreError: ``store.not_found``, ``store.nothing_survives``; ``log.version_unsupported`` for a log of another
            version; what writing gives. Nothing is left of the new session then.
    """
    streams = [row.stream for row in await store.list_logs(session_id=session_id)]
    if agents is not None:
        wanted = set(agents)
        streams = [stream for stream in streams if stream.agent_id in wanted]
    if not streams:
        raise not_found(session_id)
    removed = await _remove_unfinished(store, session_id)
    document, readable = await _document(store, session_id)
    work = _Salvage(store, session_id, new_session_id(), new_ulid())
    workspace_id = await work.begin(document, streams)
    try:
        logs = await work.write_logs(sorted(streams))
        if not any(log.events for log in logs):
            raise StoreError(
                f"nothing in session {session_id} verifies",
                code="store.nothing_survives",
                hint="the files are as they were; look for a backup",
                details={"session_id": session_id, "problems": [problem for log in logs for problem in log.problems]},
            )
        await work.write_document(document if readable else None, workspace_id, logs)
    except BaseException:
        await work.undo()
        raise
    await store.close_session(work.target, work.nonce)
    return SalvageReport(
        source=session_id,
        session_id=work.target,
        workspace_id=workspace_id,
        document="kept" if readable else "rebuilt",
        logs=tuple(logs),
        removed=tuple(removed),
    )


class _Salvage:
    """One new session in the making."""

    def __init__(self, store: Store, source: str, target: str, nonce: str) -> None:
        self._store = store
        self._source = source
        self._claim = 0
        self._cwd: str | None = None
        self._blobs: dict[str, str | None] = {}
        self.target = target
        self.nonce = nonce

    async def begin(self, document: Document | None, streams: list[Stream]) -> str:
        """Claim the new session, beside the source; returns its workspace."""
        cwd = None if document is None else document.value.get("cwd")
        if not isinstance(cwd, str):
            headers = [row.header for row in await self._store.list_logs(session_id=self._source) if row.header]
            cwd = next((header["cwd"] for header in headers if isinstance(header.get("cwd"), str)), None)
        self._cwd = cwd
        if document is not None:
            workspace_id = document.workspace_id
        else:
            workspace_id = NO_WORKSPACE if cwd is None else workspace_id_of(cwd)
        self._claim = (await self._store.open_session(self.target, self.nonce, workspace_id=workspace_id)).grant
        return workspace_id

    async def undo(self) -> None:
        """Leave nothing of the new session; what cannot be removed now the next salvage removes."""
        try:
            await self._store.remove(self.target)
        except KimiRayError:
            pass

    async def write_logs(self, streams: list[Stream]) -> list[SalvagedLog]:
        """All logs of the new session."""
        gate = asyncio.Semaphore(_LOGS_AT_ONCE)

        async def one(stream: Stream) -> SalvagedLog:
            async with gate:
                return await self._write_log(stream)

        tasks = [asyncio.create_task(one(stream)) for stream in streams]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _write_log(self, stream: Stream) -> SalvagedLog:
        reading = _Reading(self._store, stream)
        await reading.look()
        header, kept = self._header(stream, reading)
        rebuild = Rebuild(stream, header.created_at)
        out = _Output(self._store, Stream(self.target, stream.agent_id), header.to_data(), self.nonce)
        missing: dict[str, JsonObject] = {}
        async for damage, seq, line in reading.rows():
            rebuild.damaged(damage)
            if line is not None:
                for digest in blob_references(line):
                    await self._look_for(digest, seq, missing)
                await out.put(rebuild.take(seq, line))
        last = rebuild.finish()
        if rebuild.counts.survived:
            await out.put(last)
            await out.close()
        counts = rebuild.counts
        return SalvagedLog(
            agent_id=stream.agent_id,
            header="kept" if kept else "rebuilt",
            events=rebuild.next_seq if counts.survived else 0,
            survived=counts.survived,
            lost=tuple(counts.lost),
            repairs=counts.repairs,
            repaired=tuple(counts.repaired),
            duplicates=reading.duplicates,
            missing_blobs=tuple(missing.values()),
            problems=tuple(reading.problems),
        )

    def _header(self, stream: Stream, reading: _Reading) -> tuple[LogHeader, bool]:
        parent = ParentRef(session_id=stream.session_id, agent_id=stream.agent_id)
        writer = WriterRef(name="kimi-ray", version=__version__)
        try:
            old = None if reading.header is None else parse_header(reading.header)
        except KimiRayError as error:
            old = None
            reading.problem(error.to_data())
        if old is None:
            main = stream.agent_id == "main"
            old = LogHeader(
                session_id=self.target,
                agent_id=stream.agent_id,
                created_at=epoch_ms(),
                cwd=self._cwd,
                delegation_depth=0 if main else 1,
                writer=writer,
            )
            kept = False
        else:
            kept = True
        changes: JsonObject = {
            "session_id": self.target,
            "parent": parent,
            "origin": "fork",
            "labels": {**old.labels, LABEL: str(stream)},
            "writer": writer,
        }
        return old.model_copy(update=changes), kept

    async def _look_for(self, digest: str, seq: int, missing: dict[str, JsonObject]) -> None:
        if digest not in self._blobs:
            try:
                await self._store.read_blob(digest)
                self._blobs[digest] = None
            except StoreError as error:
                if error.code not in ("store.blob_missing", "store.corrupt"):
                    raise
                self._blobs[digest] = error.code
        code = self._blobs[digest]
        if code is not None:
            missing.setdefault(digest, {"digest": digest, "seq": seq, "code": code})

    async def write_document(self, document: Document | None, workspace_id: str, logs: list[SalvagedLog]) -> None:
        """The document of the new session, last of all: with it the session is whole."""
        now = epoch_ms()
        there = [log.agent_id for log in logs if log.events]
        value: JsonObject = {} if document is None else dict(document.value)
        registered = value.get("agents")
        agents = cast("JsonObject", registered) if isinstance(registered, dict) else {}
        known = {agent_id: entry for agent_id, entry in agents.items() if agent_id in there}
        if document is None:
            value = {"version": 1, "created_at": now, "archived": False, "custom": {}, "tags": {}}
            if self._cwd is not None:
                value["cwd"] = self._cwd
            known = {agent_id: _entry(agent_id) for agent_id in there}
        value |= {
            "id": self.target,
            "workspace_id": workspace_id,
            "updated_at": now,
            "agents": known,
            "agent_count": len(there),
            "forked_from": self._source,
        }
        await self._store.write_document(self.target, value, grant=self._claim, nonce=self.nonce, revision=0)


class _Reading:
    """The surviving rows of a log with rising seqs, each once, wherever in the file they stand.

    A first pass finds the rows that stand behind ones with higher seqs (an old batch that was written again); a second
    one gives all rows, those in the places where they belong.
    """

    def __init__(self, store: Store, stream: Stream) -> None:
        self._store = store
        self._stream = stream
        self._late: dict[int, list[bytes]] = {}
        self._late_bytes = 0
        self.header: JsonObject | None = None
        self.duplicates = 0
        self.problems: list[JsonObject] = []

    def problem(self, one: JsonObject) -> None:
        """Note a problem, up to a thousand."""
        if len(self.problems) < _LISTED:
            self.problems.append(one)

    async def look(self) -> None:
        """The first pass.

        Raises:
            LogError: ``log.version_unsupported``.
        """
        top = -1
        cursor: int | None = 0
        while cursor is not None:
            page = await self._store.read_surviving(self._stream, cursor, _PAGE_EVENTS)
            self.header = self.header or page.header
            for one in page.damage:
                if one.get("code") == "log.version_unsupported":
                    raise KimiRayError.from_data(one)
                self.problem(one)
            for seq, line in page.events:
                if seq > top:
                    top = seq
                else:
                    self._set_aside(seq, line)
            cursor = page.cursor

    def _set_aside(self, seq: int, line: bytes) -> None:
        lines = self._late.setdefault(seq, [])
        if line in lines:
            self.duplicates += 1
        elif self._late_bytes + len(line) > _LATE_BYTES:
            self._other(seq)
        else:
            lines.append(line)
            self._late_bytes += len(line)

    async def rows(self) -> AsyncIterator[tuple[tuple[JsonObject, ...], int, bytes | None]]:
        """The second pass: ``(damage before it, seq, line)``; a last one without a line may tell of more damage."""
        top = -1
        late = deque(sorted(self._late))
        cursor: int | None = 0
        while cursor is not None:
            page = await self._store.read_surviving(self._stream, cursor, _PAGE_EVENTS)
            damage = page.damage
            for seq, line in page.events:
                if seq <= top:
                    continue
                while late and late[0] < seq:
                    own = late.popleft()
                    lines = self._late[own]
                    if own > top and lines:
                        yield damage, own, lines[0]
                        damage, top = (), own
                        lines = lines[1:]
                    for _ in lines:
                        self._other(own)
                if late and late[0] == seq:
                    for other in self._late[late.popleft()]:
                        if other == line:
                            self.duplicates += 1
                        else:
                            self._other(seq)
                yield damage, seq, line
                damage, top = (), seq
            if damage:
                yield damage, -1, None
            cursor = page.cursor

    def _other(self, seq: int) -> None:
        """A second event with the same seq: the first is kept."""
        self.problem(
            {
                "code": "store.conflict",
                "message": f"{self._stream} holds a second, different event at seq {seq}; the first is kept",
                "details": {"stream": list(self._stream), "seq": seq},
            }
        )


@dataclass(slots=True)
class _Output:
    """A new log, written in batches; nothing is made before the first event."""

    store: Store
    stream: Stream
    header: JsonObject
    nonce: str
    grant: WriterGrant | None = None
    pending: list[SessionEvent] = field(default_factory=list[SessionEvent])
    pending_bytes: int = 0

    async def put(self, events: list[SessionEvent]) -> None:
        """Add events; written when there are enough."""
        self.pending.extend(events)
        self.pending_bytes += sum(len(event.line) for event in events)
        if self.pending_bytes >= _BATCH_BYTES or len(self.pending) >= _PAGE_EVENTS:
            await self._write(sync=False)

    async def close(self) -> None:
        """Make all of it durable and give the grant back."""
        await self._write(sync=True)
        assert self.grant is not None
        await self.store.close_writer(self.stream, self.grant.epoch, self.nonce)

    async def _write(self, *, sync: bool) -> None:
        if self.grant is None:
            self.grant = await self.store.open_writer(self.header, self.nonce)
        if not self.pending:
            return
        rows = pack_rows(self.pending)
        batch = Batch(
            self.stream,
            self.grant.epoch,
            self.nonce,
            self.pending[0].seq,
            b"".join([row for row, _ in rows]),
            tuple([len(row) for row, _ in rows]),
            tuple([count for _, count in rows]),
        )
        (answer,) = await self.store.append([batch], sync=sync)
        if answer.error is not None:
            raise KimiRayError.from_data(answer.error)
        self.pending, self.pending_bytes = [], 0


async def _document(store: Store, session_id: str) -> tuple[Document | None, bool]:
    """The source's document, and whether it can be read; a damaged one still says its workspace."""
    try:
        document = await store.read_document(session_id)
    except StoreError as error:
        if error.code not in UNREADABLE:
            raise
        found = [one for one in await store.list_documents() if one.session_id == session_id]
        return (Document(session_id, found[0].workspace_id, -1, {}) if found else None), False
    return document, document is not None


async def _remove_unfinished(store: Store, session_id: str) -> list[str]:
    """Remove what salvages of this session left that did not come to their end."""
    prefix = f"{session_id}/"
    found: set[str] = set()
    for row in await store.list_logs():
        labels = (row.header or {}).get("labels")
        if isinstance(labels, dict) and str(cast("JsonObject", labels).get(LABEL, "")).startswith(prefix):
            found.add(row.stream.session_id)
    removed: list[str] = []
    for target in sorted(found):
        try:
            if await store.read_document(target) is None:
                await store.remove(target)
                removed.append(target)
        except StoreError as error:
            # another salvage is just making it, or its finished document was damaged since
            if error.code not in ("session.in_use", "store.corrupt", "store.deleted"):
                raise
    return removed


def _entry(agent_id: str) -> JsonObject:
    if agent_id == "main":
        return {"type": "main", "parent_agent_id": None}
    return {"type": "sub", "parent_agent_id": "main"}
