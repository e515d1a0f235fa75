"""Homes to test with: logs made event by event, stored by a real store of any backend, without a runtime."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kimi_ray.events import LogHeader, SessionEvent, WriterRef, make_event
from kimi_ray.log import EventLog, tool_message
from kimi_ray.runs.rows import AttemptRow, ResultRow
from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.chunk_rows import pack_rows
from kimi_ray.store.seam import Batch, StoreOptions

BACKENDS = [("jsonl", "none"), ("jsonl", "zstd"), ("sqlite", "none")]
USAGE = {"input": 10, "cached": 4, "cache_write": 1, "output": 7, "reasoning": 2}


class Scribe:
    """A log that is written turn by turn. Its clock moves 10 ms an event, from 1,000,000."""

    def __init__(self, session_id: str = "session_one", agent_id: str = "main", **header: Any) -> None:
        self.header = LogHeader(
            session_id=session_id,
            agent_id=agent_id,
            created_at=1,
            writer=WriterRef(name="k", version="t"),
            **header,
        )
        self._now = 1_000_000
        self._unsaid: dict[str, Any] | None = None
        self.log = EventLog(self.header, clock=self._tick)
        self.events: list[SessionEvent] = []
        self.log.observe(self.events.append)
        self.blobs: dict[str, bytes] = {}

    def _tick(self) -> int:
        self._now += 10
        return self._now

    @property
    def where(self) -> dict[str, Any]:
        return {"turn": self.log.order.open_turn, "step": self.log.order.open_step}

    def add(self, type: str, **data: Any) -> SessionEvent:
        return self.log.append(type, data)

    def bind(self, model: str = "small") -> None:
        self.add("profile/bind", profile={"name": "bare"}, model=model)
        self._unsaid = {"provider": "openai", "model": f"{model}-wire"}

    def user(self, text: Any, *, kind: str = "user", **options: Any) -> SessionEvent:
        content = text if isinstance(text, list | dict) else [{"type": "text", "text": text}]
        data = {"id": f"m{self.log.next_seq}", "role": "user", "content": content, "source": {"kind": kind}}
        return self.log.append("user/message", data, surface=options.pop("surface", "append"), **options)

    def turn(self) -> None:
        self.add("turn/start", turn=self.log.order.next_turn, prompts=[])

    def step(self) -> None:
        self.add("step/start", turn=self.log.order.open_turn, step=self.log.order.next_step)
        if self._unsaid is not None:
            self.add("request/header", header=self._unsaid, reason="initial")
            self._unsaid = None

    def raw(self, type: str, data: dict[str, Any]) -> None:
        """An event as it stands, whatever its order and its payload."""
        self.events.append(make_event(self.log.next_seq, self._tick(), type, data))
        self.log._next_seq += 1  # what no log would take stands in it all the same

    def adopt(self, event: SessionEvent) -> None:
        """An event of another log."""
        self.log.adopt(event)
        self.events.append(event)

    def response(self, attempt: int = 1, **data: Any) -> SessionEvent:
        timing = data.pop("timing", {"total_ms": 30, "ttft_ms": 5, "limiter_ms": 2, "connect_ms": 1})
        return self.add("llm/response", **self.where, attempt=attempt, timing=timing, **data)

    def answer(self, text: str | list[Any], *calls: tuple[str, str, str], **data: Any) -> SessionEvent:
        content: list[Any] = list(text) if isinstance(text, list) else [{"type": "text", "text": text}] if text else []
        content += [{"type": "tool-call", "id": one, "name": name, "arguments": given} for one, name, given in calls]
        source = {"kind": "model", "provider": "openai", "model": "small-wire"}
        message = {"id": f"m{self.log.next_seq}", "role": "assistant", "content": content, "source": source}
        return self.log.append("assistant/message", {**self.where, "message": message, **data}, surface="append")

    def call(self, call_id: str, name: str, arguments: Any) -> SessionEvent:
        return self.add("tool/call", **self.where, call_id=call_id, name=name, arguments=arguments)

    def result(self, call_id: str, text: Any, *, error: str | None = None, **data: Any) -> SessionEvent:
        content = text if isinstance(text, list) else [{"type": "text", "text": text}]
        message = tool_message(f"m{self.log.next_seq}", call_id, content, is_error=error is not None)
        body = {**self.where, "message": message, **data} | ({"error": {"code": error}} if error else {})
        return self.log.append("tool/result", body, surface="append")

    def step_end(self, **data: Any) -> None:
        self.add("step/end", **self.where, **data)

    def end(self, kind: str = "completed", **reason: Any) -> None:
        if self.log.order.open_step is not None:
            self.step_end(model_ms=30, tools_ms=4, store_ms=1)
        self.add("turn/end", turn=self.log.order.open_turn, reason={"kind": kind, **reason})

    def plain_turn(self, text: str = "hello") -> None:
        self.turn()
        self.step()
        self.user(text)
        self.response(finish_reason="stop", usage=USAGE)
        self.answer(f"did {text}", attempt=1)
        self.end()

    def blob(self, text: str) -> dict[str, Any]:
        raw = text.encode()
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        self.blobs[digest] = raw
        return {"$blob": digest, "bytes": len(raw)}


async def store_logs(
    home: Path, scribes: Iterable[Scribe], backend: tuple[str, str] = BACKENDS[0], *, packed: bool = False
) -> None:
    """Put logs into a home, each session with a document; ``packed``: runs of chunks as a live writer stores them."""
    store = await open_store_for_writing(
        str(home), StoreOptions(backend=backend[0], compression=backend[1], durability="none")
    )
    opened: set[str] = set()
    for scribe in scribes:
        session_id, agent_id = scribe.header.session_id, scribe.header.agent_id
        if session_id not in opened:
            claim = await store.open_session(session_id, "claim", workspace_id="wd_x")
            await store.write_document(session_id, {"title": "T"}, grant=claim.grant, nonce="claim", revision=0)
            opened.add(session_id)
        if scribe.blobs:
            await store.put_blobs(scribe.blobs)
        nonce = f"nonce-{agent_id}"
        grant = await store.open_writer(scribe.header.to_data(), nonce)
        for start in range(0, len(scribe.events), 1000):
            events = scribe.events[start : start + 1000]
            rows = pack_rows(events) if packed else [(event.line + b"\n", 1) for event in events]
            lines, counts = [row for row, _ in rows], tuple(count for _, count in rows)
            sizes = tuple(map(len, lines))
            batch = Batch(scribe_stream(scribe), grant.epoch, nonce, start, b"".join(lines), sizes, counts)
            (answer,) = await store.append([batch], sync=True)
            assert answer.error is None, answer.error
        await store.close_writer(scribe_stream(scribe), grant.epoch, nonce)
    await store.close()


def scribe_stream(scribe: Scribe) -> Any:
    from kimi_ray.store.seam import Stream

    return Stream(scribe.header.session_id, scribe.header.agent_id)


def run_directory(
    path: Path,
    home: Path | None,
    rows: Iterable[ResultRow] = (),
    attempts: Iterable[AttemptRow] = (),
    run: str = "run_a",
) -> Path:
    """A run directory as a swarm leaves it."""
    path.mkdir(parents=True)
    manifest = {"v": 1, "run_id": run, "config": {} if home is None else {"home": str(home)}}
    (path / "run.json").write_text(json.dumps(manifest))
    (path / "results.jsonl").write_bytes(b"".join(row.to_line() for row in rows))
    (path / "attempts.jsonl").write_bytes(b"".join(row.to_line() for row in attempts))
    return path


def row_of(item: str, index: int = 0, run: str = "run_a", **facts: Any) -> ResultRow:
    given: dict[str, Any] = {
        "run_id": run, "item_id": item, "index": index, "repeat": 0, "attempt": 1, "status": "completed",
        "stop": "completed", "item": {"name": item}, "text": f"did {item}",
    }  # fmt: skip
    return ResultRow.model_validate(given | facts)


def eventful() -> Scribe:
    """Two turns: a retry, a tool that works, one that fails, one that is not started; then a cancel in mid-answer."""
    log = Scribe()
    log.bind()
    log.turn()
    log.step()
    log.user("first, ünïcödé 🦆")
    failure = {
        "code": "provider.overloaded",
        "message": "busy",
        "retryable": True,
        "kind": "ProviderError",
        "details": {},
    }
    log.response(1, error=failure, http_status=503)
    log.add("llm/retry", **log.where, attempt=1, delay_ms=250, max_attempts=3, error=failure)
    log.response(2, finish_reason="tool_calls", usage=USAGE, served_model="served", response_id="r2")
    calls = [("c1", "Read", '{"path":"a"}'), ("c2", "Bash", "not json"), ("c3", "Read", "{}")]
    log.answer([{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "look"}], *calls, attempt=2)
    log.call("c1", "Read", '{"path":"a"}')
    log.result("c1", "the file", queued_ms=1, run_ms=7)
    log.call("c2", "Bash", "not json")
    log.result("c2", "no", error="tool.bad_arguments", run_ms=2, exit_code=3)
    log.result("c3", "This tool call was not started", error="tool.not_started")
    log.step_end(model_ms=900, tools_ms=9, store_ms=2)
    log.step()
    log.response(1, finish_reason="stop", usage={"input": 1, "output": 2, "estimated": True})
    log.answer("done", attempt=1)
    log.end()
    log.turn()
    log.step()
    log.user("second")
    log.response(1, usage={"input": 5, "output": 1})
    log.answer("so fa", attempt=1, interrupted=True)
    log.end("cancelled", cause="user")
    return log


def pylist(table: Any, *names: str) -> list[Any]:
    rows = table.select(names).to_pylist()
    return [row[names[0]] for row in rows] if len(names) == 1 else [tuple(row[name] for name in names) for row in rows]
