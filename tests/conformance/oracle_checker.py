"""An independent checker of a home: it reads the bytes on disk as the design describes them, without kimi_ray.

Two parts. A ``Journal`` is written by the harness in each process that writes logs: what it was granted, what it is
about to enqueue, what a flush acknowledged. Each record is one ``write`` to an append-only file, so a killed process
leaves all it did. ``check_home`` then reads the home with parsers of its own (plain batches, Zstandard frames,
SQLite) and compares:

* every log is what its writers appended, byte for byte, each event under the grant that wrote it;
* everything acknowledged is there and nobody wrote over it; seqs have no gap;
* epochs rise, each has one nonce, and no old writer's event follows a newer grant;
* no leftovers of a repair or of a killed write; documents, owners and blobs are well-formed.

It stands alone on purpose: a mistake shared by the store's writer and its reader would be seen by neither.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

Stream = tuple[str, str]


# -- what the writers say ------------------------------------------------------------------------------------------


def mark(line: bytes) -> str:
    """What a journal keeps of a line: enough to know it again."""
    return hashlib.blake2b(line, digest_size=12).hexdigest()


class Journal:
    """One process's record, one ``write`` a call.

    Args:
        path: A file of this process alone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def granted(self, stream: Stream, epoch: int, nonce: str, next_seq: int) -> None:
        """A grant was received."""
        self._put("grant", stream, epoch, nonce, next_seq)

    def appended(self, stream: Stream, epoch: int, events: Iterable[tuple[int, bytes]]) -> None:
        """These events are about to be enqueued: ``(seq, line)``."""
        self._put("append", stream, epoch, [(seq, mark(line)) for seq, line in events])

    def flushed(self, stream: Stream, epoch: int, next_seq: int) -> None:
        """A flush came back: everything below ``next_seq`` is durable."""
        self._put("flush", stream, epoch, next_seq)

    def told(self, stream: Stream, next_seq: int) -> None:
        """Somebody who does not write the log was told that everything below ``next_seq`` is durable."""
        self._put("told", stream, next_seq)

    def did(self, stream: Stream, call: str) -> None:
        """A tool call had an effect in the world; its ``tool/call`` must be in the log, and the effect only once."""
        self._put("did", stream, call)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def _put(self, what: str, stream: Stream, *rest: Any) -> None:
        data = json.dumps([what, *stream, *rest]).encode() + b"\n"
        if os.write(self._fd, data) != len(data):
            raise OSError("the journal took only a part of a record")


@dataclass
class Claims:
    """What all journals say of one stream."""

    grants: dict[int, set[tuple[str, int]]] = field(default_factory=dict)
    lines: dict[int, dict[int, str]] = field(default_factory=dict)
    """By epoch, the mark of each seq."""
    flushed: dict[int, int] = field(default_factory=dict)
    """By epoch, the highest acknowledged next seq."""
    told: int = 0
    effects: list[str] = field(default_factory=list)


def read_journals(paths: Iterable[str | os.PathLike[str]]) -> dict[Stream, Claims]:
    """All journals as one. A last record without its newline was cut by a kill, before what it tells of began."""
    claims: dict[Stream, Claims] = {}
    for path in paths:
        for record in Path(path).read_bytes().split(b"\n")[:-1]:
            what, session, agent, *rest = json.loads(record)
            said = claims.setdefault((session, agent), Claims())
            if what == "grant":
                epoch, nonce, next_seq = rest
                said.grants.setdefault(epoch, set()).add((nonce, next_seq))
            elif what == "append":
                epoch, events = rest
                said.lines.setdefault(epoch, {}).update(dict(map(tuple, events)))
            elif what == "flush":
                epoch, next_seq = rest
                said.flushed[epoch] = max(said.flushed.get(epoch, 0), next_seq)
            elif what == "told":
                said.told = max(said.told, rest[0])
            else:
                said.effects.append(rest[0])
    return claims


# -- what is on disk -----------------------------------------------------------------------------------------------


class Grant(NamedTuple):
    """An epoch row."""

    epoch: int
    nonce: str
    seq: int


@dataclass
class StoredLog:
    """One log as its bytes say. ``problems`` are broken promises of the format; ``torn`` are bytes after its end."""

    where: str
    header: dict[str, Any] = field(default_factory=dict)
    lines: list[bytes] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    closed: list[tuple[int, int]] = field(default_factory=list)
    batches: int = 0
    torn: int = 0
    problems: list[str] = field(default_factory=list)

    def take_row(self, row: bytes) -> None:
        """One verified row, without its newline."""
        value = json.loads(row)
        at = len(self.lines)
        if row.startswith(b'{"epoch":'):
            if value["seq"] != at:
                self.problems.append(f"epoch row {value['epoch']} says seq {value['seq']} at {at}")
            self.grants.append(Grant(value["epoch"], value["writer"], at))
        elif row.startswith(b'{"closed":'):
            if value["seq"] != at or not self.grants or self.grants[-1].epoch != value["closed"]:
                self.problems.append(f"closed row {value} at seq {at} after {self.grants[-1:]}")
            self.closed.append((value["closed"], at))
        else:
            for line in expanded(row, value):
                seq = json.loads(line)["seq"]
                if seq != len(self.lines):
                    self.problems.append(f"event {seq} stands where {len(self.lines)} belongs")
                self.lines.append(line)

    def epoch_at(self, seq: int) -> int:
        """Under which grant an event was written."""
        return max((grant.epoch for grant in self.grants if grant.seq <= seq), default=0)


_PACKED = {
    "text-chunks": ("text-delta", "text", "texts"),
    "reasoning-chunks": ("reasoning-delta", "text", "texts"),
    "tool-call-chunks": ("tool-call-delta", "arguments", "args"),
}


def expanded(row: bytes, value: dict[str, Any]) -> list[bytes]:
    """The lines of a row: itself, or the members of a packed run of chunks."""
    kind = _PACKED.get(value.get("type", ""))
    if kind is None or "seq0" not in value:
        return [row]
    delta, one, many = kind
    data, lines, time = value["data"], [], value["time0"]
    for member, text in enumerate(data[many]):
        time += data["dt"][member - 1] if member else 0
        call = {key: data[key] for key in ("id", "name") if key in data}
        chunk = {"type": delta, "index": data["index"], **call, one: text}
        place = {key: data[key] for key in ("turn", "step", "attempt")}
        event = {"seq": value["seq0"] + member, "time": time, "type": "assistant/chunk"}
        event["data"] = place | {"chunk": chunk}
        lines.append(json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode())
    return lines


_BATCH = re.compile(
    rb'\{"batch":(\d+),"seq":(\d+),"bytes":(\d+),"crc":\[((?:"[0-9a-f]{8}",?)*)\],"self":"([0-9a-f]{8})"\}'
)


def read_plain(path: Path) -> StoredLog:
    """A ``wire.jsonl``: a header line and batches, each led by a row of checksums, up to the first not whole."""
    log = StoredLog(str(path))
    data = path.read_bytes()
    end = data.find(b"\n") + 1
    header = data[:end]
    at = good = end
    while at < len(data):
        batch = _plain_batch(data, at, header if log.batches == 0 else b"")
        if batch is None:
            break
        number, seq, rows, at = batch
        if (number, seq) != (log.batches, len(log.lines)):
            log.problems.append(f"batch {number} with seq {seq} stands where {log.batches}, {len(log.lines)} belong")
        for row in rows:
            log.take_row(row[:-1])
        log.batches += 1
        good = at
    if log.batches:
        log.header = json.loads(header)
    log.torn = len(data) - good
    for found in re.finditer(rb'(?:^|\n)(?=\{"batch":)', data[good:]):
        later = _plain_batch(data, good + found.end(), b"")
        if later is not None and good + found.end() != good:
            log.problems.append(f"a whole batch {later[0]} stands after damage at byte {good}")
            break
    return log


def _plain_batch(data: bytes, at: int, header: bytes) -> tuple[int, int, list[bytes], int] | None:
    """``(number, seq, rows, end)`` of the batch at ``at``, or None when it is not whole."""
    end = data.find(b"\n", at) + 1
    row = data[at:end]
    match = _BATCH.fullmatch(row[:-1])
    if match is None or crc32(row[:-11] + b'00000000"}\n') != int(match[5], 16):
        return None
    number, seq, size = (int(match[n]) for n in (1, 2, 3))
    payload = data[end : end + size]
    rows = [row + b"\n" for row in payload.split(b"\n")[:-1]]
    covered = ([header] if header else []) + rows
    told = re.findall(rb"[0-9a-f]{8}", match[4])
    if len(payload) != size or not payload.endswith(b"\n") or [b"%08x" % crc32(one) for one in covered] != told:
        return None
    return number, seq, rows, end + size


def read_zstd(path: Path) -> StoredLog:
    """A ``wire.jsonl.zst``: one standard frame for the header, one a batch, up to the first that is not whole."""
    import zstandard

    log = StoredLog(str(path))
    data = path.read_bytes()
    at = 0
    while at < len(data):
        reader = zstandard.ZstdDecompressor().decompressobj()
        try:
            parameters = zstandard.get_frame_parameters(data[at:])
            content = reader.decompress(data[at:])
        except zstandard.ZstdError:
            break
        if not reader.eof or not content.endswith(b"\n"):
            break
        if not parameters.has_checksum or parameters.content_size != len(content):
            log.problems.append(f"the frame at byte {at} has no checksum or not its size")
        at = len(data) - len(reader.unused_data)
        rows = content.split(b"\n")[:-1]
        if not log.header:
            log.header = json.loads(rows[0])
            rows = rows[1:]
        else:
            log.batches += 1
        for row in rows:
            log.take_row(row)
    log.torn = len(data) - at
    return log


def read_sqlite(path: Path) -> dict[Stream, StoredLog]:
    """All published logs of a database, each row against its checksum."""
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        database.execute("BEGIN")
        streams = database.execute(
            "SELECT s.id, s.session_id, s.agent_id, s.header, h.next_seq FROM streams s JOIN heads h ON h.stream = s.id"
            " WHERE h.published = 1 AND s.session_id NOT IN (SELECT session_id FROM sessions WHERE removed = 1)"
        ).fetchall()
        return {
            (session, agent): _sqlite_log(database, StoredLog(f"{path}#{number}", json.loads(header)), number, end)
            for number, session, agent, header, end in streams
        }
    finally:
        database.close()


_SEQ_BITS = 40


def _sqlite_log(database: sqlite3.Connection, log: StoredLog, number: int, end: int) -> StoredLog:
    grants = database.execute(
        "SELECT epoch, seq, nonce, closed_seq FROM grants WHERE stream = ? ORDER BY epoch", (number,)
    ).fetchall()
    log.grants = [Grant(epoch, nonce, seq) for epoch, seq, nonce, _ in grants]
    log.closed = [(epoch, closed) for epoch, _, _, closed in grants if closed >= 0]
    span = (number << _SEQ_BITS, (number + 1) << _SEQ_BITS)
    rows = database.execute("SELECT id, events, crc, data FROM rows WHERE id >= ? AND id < ? ORDER BY id", span)
    for key, events, crc, data in rows:
        seq, before = key - span[0], len(log.lines)
        log.batches += 1
        if crc32(struct.pack("<qqq", number, seq, events), crc32(data)) != crc:
            log.problems.append(f"row {key} (seq {seq}) does not have its checksum")
        if seq != before:
            log.problems.append(f"row {key} says seq {seq} at {before}")
        log.take_row(data.removesuffix(b"\n"))
        if len(log.lines) - before != events:
            log.problems.append(f"row {key} has {len(log.lines) - before} events and says {events}")
    if len(log.lines) != end:
        log.problems.append(f"its head says {end} events, its rows have {len(log.lines)}")
    return log


def _sqlite_documents(path: Path) -> list[tuple[str, int, bytes | None]]:
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return database.execute("SELECT session_id, revision, document FROM sessions WHERE removed = 0").fetchall()
    finally:
        database.close()


def databases_of(home: Path) -> list[Path]:
    """The databases of a home. Never in the process that has one open: closing a file drops the locks on it."""
    return sorted(home.glob("shards/*.db"))


def streams_of(home: Path) -> Iterator[tuple[Stream, StoredLog]]:
    """Every log of a home."""
    for name, read in (("wire.jsonl", read_plain), ("wire.jsonl.zst", read_zstd)):
        for path in sorted(home.glob(f"sessions/*/*/agents/*/{name}")):
            yield (path.parts[-4], path.parts[-2]), read(path)
    for path in databases_of(home):
        yield from read_sqlite(path).items()


# -- the comparison ------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What was found. ``violations`` is empty when every oracle holds."""

    violations: list[str] = field(default_factory=list)
    logs: dict[Stream, StoredLog] = field(default_factory=dict)
    events: int = 0
    acknowledged: int = 0
    grants: int = 0
    torn: int = 0
    documents: int = 0
    blobs: int = 0

    def summary(self) -> str:
        """One line of counts."""
        return (
            f"{len(self.logs)} logs, {self.events} events, {self.acknowledged} acknowledged, {self.grants} grants, "
            f"{self.torn} torn tails, {self.documents} documents, {self.blobs} blobs, "
            f"{len(self.violations)} violations"
        )


def check_home(
    home: str | os.PathLike[str], journals: Iterable[str | os.PathLike[str]] = (), *, running: bool = False
) -> Report:
    """Compare a home with what its writers say.

    Args:
        home: The directory.
        journals: The files of all ``Journal``s.
        running: A store works on it now: unfinished files and torn tails are its own.
    """
    home, journals = Path(home), list(journals)
    # What the journals acknowledge was on disk before they were read ...
    claims = read_journals(journals)
    report = Report()
    for stream, log in streams_of(home):
        if stream in report.logs:
            report.violations.append(f"{stream} is stored twice: {log.where}")
        report.logs[stream] = log
        report.violations += [f"{stream}: {problem} ({log.where})" for problem in _log_problems(log)]
        report.events += len(log.lines)
        report.grants += len(log.grants)
        report.torn += bool(log.torn)
    # ... and what is on disk was in the journals before it was written.
    if running:
        for stream, said in read_journals(journals).items():
            known = claims.setdefault(stream, Claims())
            known.grants, known.lines = said.grants, said.lines
    removed = {entry.name for entry in home.glob("tombstones/*")}
    for stream, said in claims.items():
        log = report.logs.get(stream)
        if stream[0] in removed:
            if log is not None and not running:
                report.violations.append(f"{stream} was removed and is still there")
            continue
        report.acknowledged += max(said.told, *said.flushed.values(), 0)
        report.violations += [f"{stream}: {problem}" for problem in _claim_problems(log, said)]
    _check_files(home, report, running=running)
    return report


def _log_problems(log: StoredLog) -> Iterator[str]:
    yield from log.problems
    if log.lines and not log.grants:
        yield "events without any grant"
    if log.grants and log.grants[0].seq > 0 and not (log.header.get("parent") or log.header.get("seed_length")):
        yield f"its first {log.grants[0].seq} events have no grant"
    epochs = [grant.epoch for grant in log.grants]
    if any(later <= earlier for earlier, later in itertools.pairwise(epochs)):
        yield f"epochs do not rise: {epochs}"
    nonces = [grant.nonce for grant in log.grants]
    if len(set(nonces)) != len(nonces):
        yield f"one nonce has two epochs: {nonces}"


def _claim_problems(log: StoredLog | None, said: Claims) -> Iterator[str]:
    acknowledged = max(said.told, *said.flushed.values(), 0)
    if log is None:
        if acknowledged:
            yield f"{acknowledged} acknowledged events and no log"
        return
    stored = {grant.epoch: grant for grant in log.grants}
    for epoch, grants in said.grants.items():
        nonces = {nonce for nonce, _ in grants}
        if len(nonces) > 1:
            yield f"epoch {epoch} was granted to {sorted(nonces)}"
        row = stored.get(epoch)
        if row is not None and ({row.nonce} != nonces or row.seq != min(seq for _, seq in grants)):
            yield f"epoch {epoch} is stored as {row} and was granted as {sorted(grants)}"
    if acknowledged > len(log.lines):
        yield f"{acknowledged} events were acknowledged, {len(log.lines)} are readable"
    for epoch, next_seq in said.flushed.items():
        over = [grant for grant in log.grants if grant.epoch > epoch and grant.seq < next_seq]
        if over:
            yield f"epoch {epoch} had {next_seq} events acknowledged and {over} began below"
    if said.lines:
        yield from _foreign_lines(log, said)
    calls = [
        value["data"].get("call_id")
        for value in (json.loads(line) for line in log.lines if b'"tool/call"' in line)
        if value["type"] == "tool/call"
    ]
    for call in said.effects:
        if call not in calls:
            yield f"the effect of call {call} is in the world and not in the log"
    for call in {call for call in said.effects if said.effects.count(call) > 1}:
        yield f"call {call} had its effect {said.effects.count(call)} times"


def _foreign_lines(log: StoredLog, said: Claims) -> Iterator[str]:
    bounds = [*log.grants, Grant(0, "", len(log.lines))]
    for grant, following in itertools.pairwise(bounds):
        appended = said.lines.get(grant.epoch, {})
        for seq in range(grant.seq, min(following.seq, len(log.lines))):
            if appended.get(seq) != mark(log.lines[seq]):
                why = "was never appended" if seq not in appended else "is not what was appended"
                yield f"event {seq} under epoch {grant.epoch} {why}: {log.lines[seq][:120]!r}"
                break


_BLOB = re.compile(rb'"\$blob":"sha256:([0-9a-f]{64})"')


def _check_files(home: Path, report: Report, *, running: bool) -> None:
    bad = report.violations.append
    facts = _object(home / "store.json", bad)
    if facts is not None and not {"format", "uuid", "backend", "compression", "shards"} <= facts.keys():
        bad(f"store.json lacks keys: {sorted(facts)}")
    for path in home.glob("sessions/*/*/state.json"):
        document = _object(path, bad)
        if document is not None:
            report.documents += 1
            revision = document.get("revision")
            if type(revision) is not int or revision < 1:
                bad(f"{path} has revision {revision!r}")
    for path in databases_of(home):
        for session, revision, document in _sqlite_documents(path):
            if document is not None:
                report.documents += 1
                if revision < 1 or not isinstance(json.loads(document), dict):
                    bad(f"the document of {session} in {path} has revision {revision} or is no object")
    for path in home.glob("owners/*"):
        if ".tmp-" in path.name:
            continue
        owner = _object(path, bad)
        if owner is not None and not (type(owner.get("grant")) is int and {"writer", "nonce"} <= owner.keys()):
            bad(f"{path} is no owner: {owner}")
    wanted = {digest for log in report.logs.values() for line in log.lines for digest in _BLOB.findall(line)}
    for path in home.glob("blobs/*/*"):
        if ".tmp-" in path.name:
            continue
        report.blobs += 1
        wanted.discard(path.name.encode())
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
            bad(f"{path} does not have the content of its name")
    report.violations += [f"blob {digest.decode()} is referred to and missing" for digest in sorted(wanted)]
    if not running:
        # Those below blobs/ are the sweep's: another process may be writing one of them.
        report.violations += [
            f"left over: {path}"
            for path in home.rglob("*")
            if (".tmp-" in path.name and path.parent.parent != home / "blobs") or path.name == "wire.redo"
        ]


def _object(path: Path, bad: Any) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        bad(f"{path} is not JSON: {error}")
        return None
    if not isinstance(value, dict):
        bad(f"{path} is no object")
        return None
    return value
