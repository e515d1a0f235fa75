"""The SQLite format of the harness, schema 17. The file itself is never opened: a copy of it is.

Opening a database can write to it, or to the files beside it (a write-ahead log is recovered by whoever opens first),
so the database and its log are copied into a private directory and read there.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from kimi_ray.exchange.dsh.chunk_rows import CHUNK_TAGS, MAX_DATABASE_BYTES, MAX_DATABASE_MEMBERS, expand_row
from kimi_ray.exchange.dsh.errors import Refusal, corrupt, unsupported
from kimi_ray.exchange.dsh.header import FORMAT_VERSION, version_refusal
from kimi_ray.exchange.dsh.js_json import MAX_SAFE_INTEGER, Parsed, is_safe_integer, parse_text
from kimi_ray.exchange.dsh.model import Event, JsonObject, Stored

SCHEMA_VERSION: Final = 17
APPLICATION_ID: Final = 0x44534850
MAGIC: Final = b"SQLite format 3\x00"

_TABLES: Final = frozenset({"persistence_state", "sessions", "events"})
_COLUMNS: Final = (
    ("version", "version"),
    ("id", "id"),
    ("created_at", "createdAt"),
    ("cwd", "cwd"),
    ("parent_session", "parentSession"),
    ("seed_length", "seedLength"),
    ("origin", "origin"),
    ("delegation_depth", "delegationDepth"),
    ("agent_preset", "agentPreset"),
)
_PACKED: Final = 0
_STABLE_COPIES: Final = 20
_BESIDE: Final = ("-wal", "-journal")
"""Files that belong to a database and hold what is not in it yet, or not any more."""


@contextmanager
def opened_copy(path: str) -> Generator[sqlite3.Connection]:
    """A connection to a private copy of a database.

    Raises:
        Refusal: it is not a session database of this schema, or it is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="kimi-ray-dsh-") as directory:
        copy = os.path.join(directory, "copy.sqlite")
        _copy(path, copy)
        connection = sqlite3.connect(copy, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.row_factory = sqlite3.Row
            connection.text_factory = _as_text
            _check(connection, path)
            yield connection
        except sqlite3.DatabaseError as error:
            raise corrupt(f'session database at "{path}" cannot be read: {error}') from error
        finally:
            connection.close()


def _copy(path: str, copy: str) -> None:
    """A database and what is beside it, as they were at one moment; the shared index is made anew from the log."""
    for _ in range(_STABLE_COPIES):
        before = _state(path)
        shutil.copyfile(path, copy)
        for beside in _BESIDE:
            if os.path.exists(path + beside):
                shutil.copyfile(path + beside, copy + beside)
        if _state(path) == before:
            return
    raise corrupt(f'session database at "{path}" is being written to: it changed {_STABLE_COPIES} times while copied')


def _state(path: str) -> list[tuple[int, int] | None]:
    return [_stamp(path + beside) for beside in ("", *_BESIDE)]


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def _as_text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _check(connection: sqlite3.Connection, path: str) -> None:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    application: int = connection.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION_ID:
        raise unsupported(
            f'session database at "{path}" has application id {application}, expected {APPLICATION_ID}: it is not '
            "one of the harness"
        )
    if version != SCHEMA_VERSION:
        raise unsupported(
            f'session database at "{path}" has schema version {version}, incompatible with this build '
            f"({SCHEMA_VERSION})"
        )
    names = {row["name"] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if not names >= _TABLES:
        raise corrupt(f'session database at "{path}" does not contain the required schema objects')


def session_ids(connection: sqlite3.Connection) -> list[str]:
    """All sessions, in the order in which they were stored."""
    return [str(row["id"]) for row in connection.execute("SELECT id FROM sessions ORDER BY rowid")]


def header_row(connection: sqlite3.Connection, session_id: str) -> JsonObject:
    """The header of a session as a listing shows it."""
    row = connection.execute("SELECT * FROM sessions WHERE id = ?", (session_id,)).fetchone()
    return {key: row[column] for column, key in _COLUMNS if row[column] is not None}


def check_row(connection: sqlite3.Connection, session_id: str, header: JsonObject) -> None:
    """What the original demands of the row of a session.

    Raises:
        Refusal: ``unsupported`` for another version, else ``corrupt``.
    """
    row = connection.execute("SELECT incarnation, revision FROM sessions WHERE id = ?", (session_id,)).fetchone()
    numbers = [header.get(key, 0) for key in ("version", "createdAt", "seedLength", "delegationDepth")]
    if not session_id or not all(is_safe_integer(number) for number in (*numbers, row["revision"])):
        raise corrupt("the stored session metadata is not what the harness writes")
    if min(*numbers[1:], row["revision"]) < 0 or "createdAt" not in header or "version" not in header:
        raise corrupt("the stored session metadata holds a negative number")
    if "cwd" in header and not str(header["cwd"]).startswith("/"):
        raise corrupt("stored session cwd must be absolute")
    if header.get("origin", "subagent") != "subagent":
        raise corrupt("stored session origin must be subagent or null")
    if header["version"] != FORMAT_VERSION:
        raise version_refusal(session_id, header["version"])


def read_session(connection: sqlite3.Connection, session_id: str, header: JsonObject) -> Stored:
    """The events of a session. The last row that holds a ``turn/end`` divides damage from a removable tail.

    Raises:
        Refusal: ``corrupt``.
    """
    check_row(connection, session_id, header)
    rows: list[Any] = connection.execute(
        "SELECT rowid AS place, * FROM events WHERE session_id = ? ORDER BY seq", (session_id,)
    ).fetchall()
    decoded = [_decode_or_none(row) for row in rows]
    committed = max((at for at, found in enumerate(decoded) if found is not None and _ends_turn(found[0])), default=-1)
    stored = Stored(header, [])
    for at, (row, found) in enumerate(zip(rows, decoded, strict=True)):
        expected = len(stored.events)
        if found is None or any(event["seq"] != expected + place for place, event in enumerate(found[0])):
            if at <= committed:
                raise corrupt(
                    f"corrupt session log: invalid committed physical row at seq {row['seq']}",
                    seq=row["seq"],
                    rowid=row["place"],
                )
            stored.set_aside = {"rows": len(rows) - at}
            break
        stored.events.extend(found[0])
        stored.notes.update(found[1].notes)
    return stored


def _ends_turn(events: list[Event]) -> bool:
    return any(event["type"] == "turn/end" for event in events)


def _decode_or_none(row: Any) -> tuple[list[Event], Parsed] | None:
    _check_columns(row)
    try:
        return _decode(row)
    except ValueError:
        return None


def _check_columns(row: Any) -> None:
    """What is refused even in a tail, before a row is interpreted."""
    right = (
        is_safe_integer(row["seq"])
        and row["seq"] >= 0
        and is_safe_integer(row["time"])
        and type(row["type"]) is str
        and bool(row["type"])
        and isinstance(row["data"], str | bytes)
        and isinstance(row["source_event_seqs"], bytes | None)
    )
    if not right:
        raise corrupt(
            f"the stored event at seq {row['seq']} is not a row of the harness", seq=row["seq"], rowid=row["place"]
        )


def _decode(row: Any) -> tuple[list[Event], Parsed]:
    tag: str = row["type"]
    if row["ignorable"] == _PACKED:
        if tag not in CHUNK_TAGS or row["source_event_seqs"] is not None or row["surface_op"] is not None:
            raise ValueError(f"malformed {tag} storage row")
        text = _text(row["data"], most=MAX_DATABASE_BYTES)
        if len(text.encode(errors="surrogatepass")) > MAX_DATABASE_BYTES:
            raise ValueError(f"malformed {tag} storage row: more than {MAX_DATABASE_BYTES} bytes")
        parsed = parse_text(text)
        return expand_row(tag, row["seq"], row["time"], parsed.value, least=3, most=MAX_DATABASE_MEMBERS), parsed
    parsed = parse_text(_text(row["data"]))
    event: Event = {"type": tag, "seq": row["seq"], "time": row["time"], "data": parsed.value}
    if row["source_event_seqs"] is not None:
        event["sourceEventSeqs"] = decode_seqs(row["source_event_seqs"])
    if row["surface_op"] is not None:
        event["surfaceOp"] = parse_text(row["surface_op"]).value
    if row["ignorable"] == 1:
        event["ignorable"] = True
    return [event], parsed


def _text(data: str | bytes, *, most: int | None = None) -> str:
    if isinstance(data, str):
        return data
    import zstandard

    reader = zstandard.ZstdDecompressor().decompressobj()
    try:
        raw = reader.decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"a compressed column cannot be read: {error}") from None
    if not reader.eof or (most is not None and len(raw) > most):
        raise ValueError("a compressed column is cut short or too large")
    return raw.decode()


def decode_seqs(data: bytes) -> list[int]:
    """Source seqs: an unsigned varint, then ZigZag varints of the differences, each in its shortest form.

    Raises:
        ValueError: it is not such a list.
    """
    seqs: list[int] = []
    place, previous = 0, 0
    while place < len(data):
        number, place = _varint(data, place)
        if not seqs:
            value = number
        else:
            value = previous + (number >> 1 if number & 1 == 0 else -((number + 1) >> 1))
        if not 0 <= value <= MAX_SAFE_INTEGER:
            raise ValueError("malformed source_event_seqs storage value: a seq is out of range")
        seqs.append(value)
        previous = value
    return seqs


def _varint(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while place < len(data):
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        if byte < 128:
            if shift and byte == 0:
                raise ValueError("malformed source_event_seqs storage value: non-canonical varint")
            return number, place
        shift += 7
        if shift > 56:
            break
    raise ValueError("malformed source_event_seqs storage value: truncated or too long")


def as_refusal(error: Exception, path: str) -> Refusal:
    """What a database error means for the session that was read."""
    return corrupt(f'session database at "{path}" cannot be read: {error}')
