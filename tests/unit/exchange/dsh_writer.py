"""A writer of the harness's three formats, for tests: from events to the bytes that it would have left."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zstandard

Event = dict[str, Any]

SCHEMA = """
CREATE TABLE persistence_state (
  singleton INTEGER PRIMARY KEY CHECK (singleton = 1),
  store_id TEXT NOT NULL
) STRICT;
CREATE TABLE sessions (
  id TEXT PRIMARY KEY, version INTEGER NOT NULL, created_at INTEGER NOT NULL, cwd TEXT, parent_session TEXT,
  seed_length INTEGER, origin TEXT, incarnation TEXT NOT NULL, revision INTEGER NOT NULL, delegation_depth INTEGER,
  agent_preset TEXT
) STRICT;
CREATE TABLE events (
  session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
  seq INTEGER NOT NULL, type TEXT NOT NULL, time INTEGER NOT NULL, data ANY NOT NULL, source_event_seqs ANY,
  surface_op TEXT, ignorable INTEGER CHECK (ignorable IS NULL OR ignorable IN (0, 1)),
  PRIMARY KEY (session_id, seq)
) STRICT;
PRAGMA application_id = 1146308688;
PRAGMA user_version = 17;
"""
UUID = "0b0b6f62-5c3f-4a3e-9d49-3f1f8a2f8a11"


def header(session_id: str = "s1", cwd: str | None = "/work/crash", **more: Any) -> dict[str, Any]:
    """A header, without the tag that its line has."""
    made: dict[str, Any] = {"version": 0, "id": session_id, "createdAt": 1_700_000_000_000}
    if cwd is not None:
        made["cwd"] = cwd
    return {**made, "delegationDepth": 0, **more}


def header_line(head: dict[str, Any]) -> bytes:
    return text({"type": "session", **head}).encode(errors="surrogatepass") + b"\n"


def text(value: Any) -> str:
    """As JavaScript writes it: halves of surrogate pairs are escaped."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", body)


def line(event: Event) -> bytes:
    return text(event).encode(errors="surrogatepass") + b"\n"


def frame(data: bytes, *, checksum: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=checksum).compress(data)


def plain(head: dict[str, Any], events: Sequence[Event], *, pack: bool = True) -> bytes:
    return header_line(head) + b"".join(line(row) for row in (packed(events) if pack else events))


def compressed(head: dict[str, Any], batches: Sequence[Sequence[Event]]) -> bytes:
    return b"".join([frame(header_line(head)), *(frame(b"".join(map(line, packed(batch)))) for batch in batches)])


def put(root: Path, head: dict[str, Any], data: bytes, *, project: str | None = None, name: str | None = None) -> Path:
    """Put a log where the harness keeps it."""
    zstd = data[:4] == b"\x28\xb5\x2f\xfd"
    cwd = head.get("cwd")
    place = project or ("_no-cwd" if cwd is None else "--" + cwd.strip("/").replace("/", "-") + "--")
    path = root / place / (name or head["id"]) / ("session.jsonl.zstd" if zstd else "session.jsonl")
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


def packed(events: Sequence[Event]) -> list[Event]:
    """Runs of three or more like deltas as one row."""
    rows: list[Event] = []
    run: list[Event] = []
    for event in [*events, {}]:
        if run and not (event and _shape(event) == _shape(run[-1]) and event["seq"] == run[-1]["seq"] + 1):
            rows += [_row(run)] if len(run) >= 3 and _shape(run[0]) else run
            run = []
        if event:
            run.append(event)
    return rows


def _shape(event: Event) -> Any:
    chunk = event["data"].get("chunk") if event["type"] == "assistant/chunk" else None
    if not isinstance(chunk, dict) or not str(chunk.get("type", "")).endswith("-delta"):
        return None
    parts = [chunk["type"], event["data"]["turn"], event["data"]["step"], chunk["index"]]
    return (*parts, chunk.get("id"), chunk.get("name", False))


def _row(run: list[Event]) -> Event:
    first = run[0]
    chunk = first["data"]["chunk"]
    gaps = [after["time"] - before["time"] for before, after in itertools.pairwise(run)]
    data = {"turn": first["data"]["turn"], "step": first["data"]["step"], "index": chunk["index"], "dt": gaps}
    if chunk["type"] == "tool-call-delta":
        data |= {"id": chunk["id"]} | ({"name": chunk["name"]} if "name" in chunk else {})
        data["args"] = [event["data"]["chunk"]["argumentsDelta"] for event in run]
    else:
        data["texts"] = [event["data"]["chunk"]["text"] for event in run]
    tag = chunk["type"].removesuffix("-delta") + "-chunks"
    return {"type": tag, "seq0": first["seq"], "time0": first["time"], "data": data}


def varints(seqs: Sequence[int]) -> bytes:
    """Source seqs as the database keeps them."""
    out = bytearray()
    previous = 0
    for place, seq in enumerate(seqs):
        delta = seq - previous
        number = seq if place == 0 else delta * 2 if delta >= 0 else -delta * 2 - 1
        while number >= 128:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
        previous = seq
    return bytes(out)


def column(data: Any) -> str | bytes:
    """A data column: large ones compressed."""
    body = text(data)
    raw = body.encode()
    small = frame(raw, checksum=False) if len(raw) >= 4096 else raw
    return small if len(small) < len(raw) else body


class Database:
    """A sessions database under construction."""

    def __init__(self, path: Path, *, wal: bool = False) -> None:
        self.path = path
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.executescript(SCHEMA)
        self.connection.execute("INSERT INTO persistence_state VALUES (1, ?)", (UUID,))
        if wal:
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA wal_autocheckpoint = 0")

    def session(self, head: dict[str, Any], events: Sequence[Event]) -> None:
        """Add a session as one append would."""
        keys = ("id", "version", "createdAt", "cwd", "parentSession", "seedLength", "origin")
        more = (UUID, 1, head.get("delegationDepth"), head.get("agentPreset"))
        self.connection.execute(
            "INSERT INTO sessions VALUES (?,?,?,?,?,?,?,?,?,?,?)", (*(head.get(key) for key in keys), *more)
        )
        for row in packed(events):
            self.row(head["id"], row)

    def row(self, session_id: str, row: Event) -> None:
        is_packed = "seq0" in row
        sources = row.get("sourceEventSeqs")
        self.connection.execute(
            "INSERT INTO events VALUES (?,?,?,?,?,?,?,?)",
            (
                session_id,
                row["seq0"] if is_packed else row["seq"],
                row["type"],
                row["time0"] if is_packed else row["time"],
                column(row["data"]),
                None if sources is None else varints(sources),
                text(row["surfaceOp"]) if "surfaceOp" in row else None,
                0 if is_packed else 1 if row.get("ignorable") else None,
            ),
        )

    def close(self) -> None:
        self.connection.close()


class Log:
    """Builds a log that keeps the rules, event by event."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.turn = 0
        self.step = 0

    def add(self, kind: str, data: Any, **envelope: Any) -> int:
        seq = len(self.events)
        self.events.append({"type": kind, "seq": seq, "time": 1_700_000_000_100 + 3 * seq, "data": data, **envelope})
        return seq

    def start(self) -> None:
        self.turn += 1
        self.step = 0
        self.add("turn/start", {"turn": self.turn})

    def start_step(self) -> None:
        self.step += 1
        self.add("step/start", self.place())

    def end_step(self) -> None:
        self.add("step/end", self.place())

    def end(self, **reason: Any) -> None:
        self.add("turn/end", {"turn": self.turn, "reason": reason or {"kind": "completed"}})

    def place(self) -> dict[str, int]:
        return {"turn": self.turn, "step": self.step}

    def user(self, words: str) -> int:
        message = {"id": f"u{len(self.events)}", "role": "user", "content": [{"type": "text", "text": words}]}
        return self.add("user/message", {**message, "source": {"kind": "user"}}, surfaceOp="append")

    def chunks(self, *words: str, kind: str = "text-delta", **more: Any) -> list[int]:
        key = "argumentsDelta" if kind == "tool-call-delta" else "text"
        chunk = {"type": kind, "index": 0, **more}
        return [self.add("assistant/chunk", {**self.place(), "chunk": {**chunk, key: word}}) for word in words]

    def assistant(self, *blocks: dict[str, Any], sources: list[int] | None = None) -> int:
        message = {
            "role": "assistant",
            "content": list(blocks),
            "source": {"kind": "model", "provider": "p", "model": "m"},
            "id": f"a{len(self.events)}",
        }
        cited = {} if sources is None else {"sourceEventSeqs": sources}
        return self.add("assistant/message", {**self.place(), "message": message}, **cited, surfaceOp="append")

    def call(self, call_id: str, name: str = "bash") -> int:
        return self.add("tool/call", {**self.place(), "callId": call_id, "name": name, "arguments": "{}"})

    def result(self, call_id: str, cited: int, words: str = "ok", **envelope: Any) -> int:
        message = {
            "source": {"kind": "tool", "callId": call_id},
            "content": [
                {
                    "type": "tool-result",
                    "toolCallId": call_id,
                    "content": [{"type": "text", "text": words}],
                    "isError": False,
                }
            ],
            "role": "user",
            "id": f"r{call_id}",
        }
        surface = envelope or {"surfaceOp": "append"}
        return self.add("tool/result", {**self.place(), "message": message}, sourceEventSeqs=[cited], **surface)


def asks(*call_ids: str) -> list[dict[str, Any]]:
    """Blocks that ask for tools."""
    return [{"type": "tool-call", "id": call_id, "name": "bash", "arguments": "{}"} for call_id in call_ids]


def crashed() -> list[Event]:
    """One turn that ended, one that a crash left open: a call answered, one started, one not; then todos."""
    log = Log()
    log.start()
    log.start_step()
    log.user("question 1")
    seqs = log.chunks(*(f" token{n}" for n in range(12)))
    log.assistant({"type": "text", "text": "answer"}, sources=seqs)
    log.end_step()
    log.end()
    log.start()
    log.start_step()
    log.user("run tools 工具 🚀")
    log.assistant(*asks("call-1", "call-2", "call-3"), sources=[])
    log.result("call-1", log.call("call-1"))
    log.call("call-2")
    for number in range(7):
        log.add("todo/write", {"todos": [{"content": f"kept {number}", "status": "pending"}]})
    return log.events


def batched(events: Sequence[Event]) -> list[list[Event]]:
    """The events in batches as a writer would have cut them: after each turn, and the last ones apart."""
    batches: list[list[Event]] = [[]]
    for event in events:
        batches[-1].append(event)
        if event["type"] == "turn/end":
            batches.append([])
    tail = batches.pop()
    return [*batches, *([tail[:-7], tail[-7:]] if len(tail) > 7 else [tail])]
