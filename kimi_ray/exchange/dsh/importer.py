"""Writing sessions of the harness into a home, through the ``Store`` seam.

A session's document is written last, so a home shows it whole or not at all; a log that a crash left half is gone over
again by the next import, and what is there already is compared, not written twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from kimi_ray.errors import KimiRayError, StoreError, error_from_data
from kimi_ray.events import SessionEvent, make_event
from kimi_ray.exchange.dsh.convert import Conversion
from kimi_ray.exchange.dsh.lossless import within_rule
from kimi_ray.exchange.dsh.model import JsonObject, Reading
from kimi_ray.exchange.dsh.session_facts import FORMAT, SessionFacts, document, log_header, workspace_of
from kimi_ray.exchange.dsh.sources import read_source
from kimi_ray.ids import MAIN, is_path_safe_id, new_ulid
from kimi_ray.store.chunk_rows import pack_rows
from kimi_ray.store.seam import Batch, Document, Store, Stream

Outcome = Literal["imported", "unchanged", "changed", "removed", "refused", "failed"]
"""``unchanged``: it is there from an earlier import. ``changed``: that one was made of other events, and stays as it
is. ``removed``: it was removed from this home. ``refused``: it cannot be read. ``failed``: the home refused it."""

_BATCH_BYTES: Final = 1 << 20
_BATCH_EVENTS: Final = 4096


@dataclass(slots=True)
class Imported:
    """What became of one session. ``report`` is what ``Reading.to_data`` said, ``source`` its file; ``earlier`` is
    where a session of this id that is here already was imported from.
    """

    report: JsonObject
    source: str
    outcome: Outcome
    session_id: str | None = None
    events: int = 0
    conversions: JsonObject | None = None
    error: KimiRayError | None = None
    earlier: str | None = None

    def to_data(self) -> JsonObject:
        """The session in the document of ``--json``."""
        data = self.report | {"outcome": self.outcome, "imported": None}
        if self.session_id is not None:
            data["imported"] = {
                "session_id": self.session_id,
                "agent_id": MAIN,
                "events": self.events,
                "conversions": self.conversions or {},
            }
        if self.error is not None:
            data["failure"] = self.error.to_data()
        return data


async def import_sessions(store: Store, path: str) -> AsyncIterator[Imported]:
    """Import every session under a path; one that fails does not keep the others.

    Args:
        store: The home's store, open for writing.
        path: As for ``read_source``.

    Raises:
        ConfigError: ``import.not_found``, ``import.nothing_found``.
    """
    readings = read_source(path)
    while True:
        reading = await asyncio.to_thread(_next, readings)
        if reading is None:
            return
        if reading.error is not None or reading.id is None or reading.header is None:
            yield Imported(reading.to_data(), reading.source, "refused")
            continue
        report = reading.to_data()
        try:
            yield await _import(store, reading, report)
        except KimiRayError as error:
            gone = error.code == "store.deleted"
            failed = Imported(report, reading.source, "removed" if gone else "failed")
            failed.error = None if gone else error
            yield failed


def _next(readings: Iterator[Reading]) -> Reading | None:
    return next(readings, None)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a batch to be: as bytes, because the events of a long session are many times larger in memory."""

    first_seq: int
    payload: bytes
    row_bytes: tuple[int, ...]
    row_events: tuple[int, ...]

    @classmethod
    def of(cls, events: list[SessionEvent]) -> _Piece:
        rows = pack_rows(events)
        return cls(
            events[0].seq,
            b"".join(row for row, _ in rows),
            tuple(len(row) for row, _ in rows),
            tuple(count for _, count in rows),
        )


@dataclass(slots=True)
class _Converted:
    pieces: list[_Piece]
    events: int
    facts: SessionFacts
    counts: Counter[str]
    digest: str


def _convert(reading: Reading) -> _Converted:
    conversion, facts = Conversion(), SessionFacts()
    conversion.counts.update(reading.notes)
    pieces: list[_Piece] = []
    events: list[SessionEvent] = []
    size = number = 0
    for event in reading.events:
        made = conversion.convert(event)
        facts.follow(made)
        events.append(made)
        number += 1
        size += len(made.line)
        if size >= _BATCH_BYTES or len(events) >= _BATCH_EVENTS:
            pieces.append(_Piece.of(events))
            events, size = [], 0
    if events:
        pieces.append(_Piece.of(events))
    return _Converted(pieces, number, facts, conversion.counts, conversion.digest)


async def _import(store: Store, reading: Reading, report: JsonObject) -> Imported:
    dsh_id, header = str(reading.id), cast("JsonObject", reading.header)
    session_id, stored = await _choose(store, dsh_id, candidates(dsh_id))
    parent = header.get("parentSession")
    parent_id = None if parent is None else (await _choose(store, str(parent), candidates(str(parent))))[0]
    converted = await asyncio.to_thread(_convert, reading)
    reading.stored = reading.closers = None
    if stored is None:
        try:
            return await _make(store, reading, report, converted, session_id, parent_id)
        except StoreError as error:
            if error.code != "store.invalid_id" or session_id == candidates(dsh_id)[-1]:
                raise
        # Another session has this id in other letters: it is not free.
        session_id, stored = await _choose(store, dsh_id, candidates(dsh_id)[1:])
        if stored is None:
            return await _make(store, reading, report, converted, session_id, parent_id)
    earlier = stored.value["custom"][FORMAT]
    outcome = "unchanged" if earlier.get("digest") == converted.digest else "changed"
    events, conversions = earlier.get("events", 0), earlier.get("conversions")
    return Imported(report, reading.source, outcome, session_id, events, conversions, earlier=earlier.get("source"))


async def _make(
    store: Store, reading: Reading, report: JsonObject, converted: _Converted, session_id: str, parent_id: str | None
) -> Imported:
    dsh_id, header = str(reading.id), cast("JsonObject", reading.header)
    counts = converted.counts.copy()
    ours = log_header(session_id, header, converted.facts, parent_id, counts)
    origin: JsonObject = {
        "id": _plain(dsh_id),
        "digest": converted.digest,
        "events": converted.events,
        "source": _plain(reading.source),
        "conversions": dict(sorted(counts.items())),
    }
    forked_from = parent_id if ours["origin"] == "fork" else None
    value = document(session_id, ours, converted.facts, origin, forked_from)
    await _write(store, session_id, ours, converted.pieces, value)
    return Imported(report, reading.source, "imported", session_id, converted.events, origin["conversions"])


async def _write(store: Store, session_id: str, header: JsonObject, pieces: list[_Piece], value: JsonObject) -> None:
    claim = new_ulid()
    granted = await store.open_session(session_id, claim, workspace_id=workspace_of(header.get("cwd")))
    try:
        # A log without events is no log: an empty session begins with the mark that resuming it would put there.
        whole = pieces or [_Piece.of([make_event(0, header["created_at"], "log/end-seed", {})])]
        await _write_log(store, Stream(session_id, MAIN), header, whole, claim)
        await store.write_document(session_id, value, grant=granted.grant, nonce=claim, revision=granted.revision)
    finally:
        await store.close_session(session_id, claim)


async def _write_log(store: Store, stream: Stream, header: JsonObject, pieces: list[_Piece], claim: str) -> None:
    nonce = new_ulid()
    try:
        grant = await store.open_writer(header, nonce, claim=claim)
    except StoreError as error:
        if error.code != "store.exists":
            raise
        # An import that was cut short: the same events are compared, the missing ones follow.
        grant = await store.open_writer(stream, nonce, claim=claim)
    for at, piece in enumerate(pieces):
        batch = Batch(stream, grant.epoch, nonce, piece.first_seq, piece.payload, piece.row_bytes, piece.row_events)
        (result,) = await store.append([batch], sync=at == len(pieces) - 1)
        if result.error is not None:
            failure = error_from_data(result.error)
            if failure.code == "store.conflict":
                failure.hint = "an earlier import was cut short and the source has changed since: use another home"
            raise failure
    await store.close_writer(stream, grant.epoch, nonce)


async def _choose(store: Store, dsh_id: str, ids: list[str]) -> tuple[str, Document | None]:
    """Our id for a session of the harness, of those it may have, and its document when it was imported before.

    The one that it has already; else the first that is free, or that an import of it began.
    """
    free: list[str] = []
    for candidate in ids:
        stored = await store.read_document(candidate)
        if stored is not None:
            custom: Any = stored.value.get("custom") or {}
            if isinstance(custom, dict) and _is_ours(cast("JsonObject", custom).get(FORMAT), dsh_id):
                return candidate, stored
            continue
        logs = await store.list_logs(session_id=candidate)
        kept: list[Any] = [(log.header or {}).get("imported") or {} for log in logs]
        if all(_is_ours(imported.get("header"), dsh_id) for imported in kept):
            free.append(candidate)
    if free:
        return free[0], None
    raise StoreError(
        f"the session ids that {_plain(dsh_id)!r} could have here are taken by other sessions",
        code="import.id_taken",
        hint="import into another home",
        details={"id": _plain(dsh_id)},
    )


def candidates(dsh_id: str) -> list[str]:
    """The ids that a session of the harness may have in a home, the preferred one first."""
    made = f"dsh-{hashlib.sha256(dsh_id.encode(errors='surrogatepass')).hexdigest()[:32]}"
    return [dsh_id, made] if is_path_safe_id(dsh_id) else [made]


def _is_ours(kept: Any, dsh_id: str) -> bool:
    return isinstance(kept, dict) and cast("JsonObject", kept).get("id") == _plain(dsh_id)


def _plain(text: str) -> str:
    return str(within_rule(text, Counter()))
