"""Homes with sessions to check, to salvage and to sweep: real events, two agents, blobs that they refer to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_ray.events import LogHeader, SessionEvent, WriterRef, make_event
from kimi_ray.store import Store, StoreOptions, Stream, open_store_for_writing
from kimi_ray.store.blobs import digest_of
from kimi_ray.store.seam import Batch

SESSION = "session_one"
BLOB = b"You are a careful agent. " * 40
DIGEST = digest_of(BLOB)
AT = 1_700_000_000_000


def header_of(agent: str = "main", session: str = SESSION, **more: Any) -> dict[str, Any]:
    facts = LogHeader(
        session_id=session, agent_id=agent, created_at=AT, cwd="/w", writer=WriterRef(name="t", version="0"), **more
    )
    return facts.to_data()


def turn_events(turns: int = 2, *, blob: str | None = DIGEST) -> list[SessionEvent]:
    """Turns with a tool call each."""
    out: list[SessionEvent] = []

    def add(kind: str, data: dict[str, Any], **how: Any) -> None:
        out.append(make_event(len(out), AT + len(out), kind, data, **how))

    for turn in range(turns):
        call = f"c{turn}"
        add("prompt/submitted", {"prompt_id": f"p{turn}", "content": [{"type": "text", "text": "do"}]})
        add("turn/start", {"turn": turn, "prompts": [f"p{turn}"]})
        add("prompt/started", {"prompt_id": f"p{turn}", "turn": turn})
        add("step/start", {"turn": turn, "step": 0})
        content = [{"type": "text", "text": f"do {turn}"}]
        user = {"id": f"p{turn}", "role": "user", "content": content, "source": {"kind": "user"}}
        add("user/message", user, surface="append")
        if turn == 0 and blob is not None:
            system = {"$blob": blob, "bytes": len(BLOB)}
            add("request/header", {"header": {"model": "m", "system": system}, "reason": "initial"})
        block = {"type": "tool-call", "id": call, "name": "Read", "arguments": "{}"}
        message = {"id": f"a{turn}", "role": "assistant", "content": [block]}
        add("assistant/message", {"turn": turn, "step": 0, "message": message}, surface="append")
        add("tool/call", {"turn": turn, "step": 0, "call_id": call, "name": "Read", "arguments": "{}"})
        answer = [{"type": "tool-result", "tool_call_id": call, "content": [], "is_error": False}]
        source = {"kind": "tool", "call_id": call}
        result = {"id": f"t{turn}", "role": "user", "content": answer, "source": source}
        add("tool/result", {"turn": turn, "step": 0, "message": result}, surface="append", sources=(len(out) - 1,))
        add("step/end", {"turn": turn, "step": 0})
        add("turn/end", {"turn": turn, "reason": {"kind": "completed"}, "steps": 1})
        add("prompt/completed", {"prompt_id": f"p{turn}", "state": "completed", "turn": turn})
    return out


def batches_of(events: list[SessionEvent], stream: Stream, epoch: int, nonce: str, size: int = 4) -> list[Batch]:
    """The events in batches of ``size``."""
    out: list[Batch] = []
    for start in range(0, len(events), size):
        rows = [event.line + b"\n" for event in events[start : start + size]]
        lengths = tuple(map(len, rows))
        out.append(Batch(stream, epoch, nonce, events[start].seq, b"".join(rows), lengths, (1,) * len(rows)))
    return out


async def write_log(
    store: Store, events: list[SessionEvent], header: dict[str, Any], *, size: int = 4, close: bool = True
) -> None:
    """A log with these events, durable; its session must be open."""
    stream = Stream(header["session_id"], header["agent_id"])
    grant = await store.open_writer(header, "w")
    for batch in batches_of(events, stream, grant.epoch, "w", size):
        (answer,) = await store.append([batch], sync=True)
        assert answer.error is None, answer
    if close:
        await store.close_writer(stream, grant.epoch, "w")


async def filled_home(path: Path, *, agents: tuple[str, ...] = ("main", "agent-1"), **options: Any) -> None:
    """A home with one closed session: a document, logs of these agents, one blob."""
    store = await open_store_for_writing(str(path), StoreOptions(claim_timeout_s=1, **options))
    claim = await store.open_session(SESSION, "n", workspace_id="wd_x_0123")
    await store.put_blobs({DIGEST: BLOB})
    for agent in agents:
        parent = None if agent == "main" else {"session_id": SESSION, "agent_id": "main"}
        await write_log(store, turn_events(), header_of(agent, parent=parent))
    value: dict[str, Any] = {
        "id": SESSION, "version": 1, "title": "Things", "cwd": "/w", "tags": {"k": "v"}, "custom": {},
        "archived": False, "created_at": AT, "updated_at": AT, "workspace_id": "wd_x_0123",
        "agents": {agent: {"type": "main" if agent == "main" else "sub", "parent_agent_id": None} for agent in agents},
        "agent_count": len(agents),
    }  # fmt: skip
    await store.write_document(SESSION, value, grant=claim.grant, nonce="n", revision=0)
    await store.close_session(SESSION, "n")
    await store.close()


def log_file(home: Path, agent: str = "main", session: str = SESSION) -> Path:
    return home / "sessions/wd_x_0123" / session / "agents" / agent / "wire.jsonl"


def blob_file(home: Path, digest: str = DIGEST) -> Path:
    return home / "blobs" / digest[7:9] / digest[7:]


def flip(path: Path, needle: bytes, *, at: int = 0) -> int:
    """Damage one byte behind ``needle``; returns its offset."""
    data = bytearray(path.read_bytes())
    offset = data.index(needle) + at
    data[offset] ^= 4
    path.write_bytes(data)
    return offset
