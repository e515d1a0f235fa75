"""Sessions of the harness in a home of ours: listed, read, forked, gone on with; imported once, whole or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.events import parse_event, parse_header
from kimi_ray.exchange.dsh import Reading, importer
from kimi_ray.exchange.dsh.importer import Imported, candidates, import_sessions
from kimi_ray.log import EventLog
from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.open import open_store
from kimi_ray.store.seam import Store, StoreOptions, Stream
from tests.unit.exchange.conftest import FIXTURES
from tests.unit.exchange.dsh_writer import Log, asks, batched, compressed, crashed, header, plain, put
from tests.unit.runtime_fixtures import running

BACKENDS = [("jsonl", "none"), ("jsonl", "zstd"), ("sqlite", "none")]


@asynccontextmanager
async def opened(home: Path, backend: str = "jsonl", compression: str = "none") -> AsyncGenerator[Store]:
    options = StoreOptions(backend=backend, compression=compression, durability="none")
    store = await open_store_for_writing(str(home), options)
    try:
        yield store
    finally:
        await store.close()


async def imported(store: Store, path: Path) -> dict[Any, Imported]:
    return {one.report["id"]: one async for one in import_sessions(store, str(path))}


async def run(home: Path, path: Path, **options: Any) -> dict[Any, Imported]:
    async with opened(home, **options) as store:
        return await imported(store, path)


async def stored_log(home: Path, session_id: str) -> EventLog:
    reader = open_store(home)
    stream = Stream(session_id, "main")
    view = await reader.inspect(stream)
    assert view.closers == ()
    events = []
    while len(events) < view.next_seq:
        page = await reader.read_from(stream, len(events))
        events += [parse_event(line, at=page.first_seq + at) for at, line in enumerate(page.lines)]
    return EventLog.restore(parse_header(view.header), events)


@pytest.mark.parametrize(("backend", "compression"), BACKENDS)
@pytest.mark.parametrize("name", ["jsonl-none-full", "jsonl-zstd-full", "sqlite-full"])
async def test_every_format_into_every_backend(
    tmp_path: Path, name: str, backend: str, compression: str, untouched: Callable[[Path], Any]
) -> None:
    before = untouched(FIXTURES / name)
    done = await run(tmp_path, FIXTURES / name, backend=backend, compression=compression)
    assert untouched(FIXTURES / name) == before
    assert {key: one.outcome for key, one in done.items()} == {"full": "imported", "child": "imported"}
    assert done["full"].to_data()["imported"] == {
        "session_id": "full",
        "agent_id": "main",
        "events": 81,
        "conversions": {"foreign:request/context": 1},
    }
    log = await stored_log(tmp_path, "full")
    assert log.next_seq == 81 and list(log.surface.seqs) == [75, 78]
    child = await stored_log(tmp_path, "child")
    head = child.header
    assert head.origin == "fork" and head.seed_length == 50 and head.parent is not None
    assert (head.parent.session_id, head.parent.agent_id) == ("full", "main")
    documents = {document.session_id: document.value for document in await open_store(tmp_path).list_documents()}
    assert documents["full"]["last_prompt"] == "use tools 工具 🚀" == documents["full"]["title"]
    assert documents["full"]["created_at"] == 1_700_000_000_000 and documents["full"]["cwd"] == "/work/full"
    assert documents["full"]["last_turn_reason"] == "completed" and documents["full"]["agent_count"] == 1
    assert documents["child"]["forked_from"] == "full" and documents["child"]["custom"]["dsh"]["events"] == 53
    for session_id in ("full", "child"):
        assert (await open_store(tmp_path).verify(Stream(session_id, "main"))).ok


async def test_a_crashed_session_comes_in_repaired(tmp_path: Path) -> None:
    done = await run(tmp_path, FIXTURES / "jsonl-zstd-crash-kill-after-flush")
    assert done["crash"].events == 61 and done["crash"].report["stored"] == 57
    log = await stored_log(tmp_path, "crash")
    assert log.order.open_turn is None and log.next_seq == 61
    unknown, not_started = (log.surface[len(log.surface) - 2], log.surface[len(log.surface) - 1])
    assert unknown.data["error"] == {"name": "ToolOutcomeUnknownError", "code": "tool.outcome_unknown"}
    assert unknown.sources == (56,) and not_started.data["error"]["code"] == "tool.not_started"


async def test_importing_again_changes_nothing(tmp_path: Path, untouched: Callable[[Path], Any]) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    put(root, header("a"), plain(header("a"), crashed()))
    assert (await run(home, root))["a"].outcome == "imported"
    before = dict(untouched(home / "sessions").items())
    again = (await run(home, root))["a"]
    assert again.outcome == "unchanged" and again.session_id == "a" and again.events > 0
    assert untouched(home / "sessions") == before
    # The same session by another way is the same session.
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(plain(header("a"), crashed(), pack=False))
    assert (await run(home, copy))["a"].outcome == "unchanged"


async def test_a_source_that_went_on_is_told_and_not_imported(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    path = put(root, header("a"), plain(header("a"), crashed()))
    await run(home, root)
    path.write_bytes(plain(header("a"), crashed()[:5]))
    done = (await run(home, root))["a"]
    assert done.outcome == "changed" and done.events == len(crashed()) + 4
    assert (await stored_log(home, "a")).next_seq == len(crashed()) + 4


async def test_refused_sessions_leave_nothing_and_hide_nobody(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    put(root, header("good"), plain(header("good"), crashed()))
    put(root, header("new", version=1), plain(header("new", version=1), crashed()))
    put(root, header("bad"), compressed(header("bad"), batched(crashed()))[:40])
    done = await run(home, root)
    assert {key: one.outcome for key, one in done.items()} == {"good": "imported", "new": "refused", "bad": "refused"}
    assert done["new"].to_data()["imported"] is None
    assert [document.session_id for document in await open_store(home).list_documents()] == ["good"]


async def test_ids_that_do_not_fit_into_a_path(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    ids = ["a/b", "..", "工", "x" * 200, "\ud800", "plain"]
    for session_id in ids:
        put(root, header(session_id), plain(header(session_id), crashed()), name=_segment(session_id))
    done = await run(home, root)
    assert set(done) == set(ids) and {one.outcome for one in done.values()} == {"imported"}
    assert done["plain"].session_id == "plain"
    for session_id in ids[:-1]:
        ours = str(done[session_id].session_id)
        assert ours == candidates(session_id)[0] and ours.startswith("dsh-")
        labels = (await stored_log(home, ours)).header.labels
        assert labels["dsh_id"] == session_id.replace("\ud800", "\ufffd")
    assert {one.outcome for one in (await run(home, root)).values()} == {"unchanged"}


def _segment(session_id: str) -> str:
    from kimi_ray.exchange.dsh.header import encode_segment

    return str(encode_segment(session_id))


async def test_an_id_that_another_session_has(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        await (await (await work.create_session("full", model=model, profile="bare")).main.submit("x")).result(10)
    home = tmp_path / "home"
    done = await run(home, FIXTURES / "jsonl-none-full")
    ours = candidates("full")[1]
    assert done["full"].session_id == ours and done["child"].session_id == "child"
    parent = (await stored_log(home, "child")).header.parent
    assert parent is not None and parent.session_id == ours
    assert {one.outcome for one in (await run(home, FIXTURES / "jsonl-none-full")).values()} == {"unchanged"}


@pytest.mark.parametrize(("backend", "compression"), BACKENDS)
async def test_ids_that_differ_only_in_case(tmp_path: Path, backend: str, compression: str) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    ids = ["FULL", "Full", "full"]
    for session_id in ids:
        put(root, header(session_id), plain(header(session_id), crashed()))
    put(root, header("z", parentSession="full"), plain(header("z", parentSession="full"), crashed()))
    done = await run(home, root, backend=backend, compression=compression)
    assert {one.outcome for one in done.values()} == {"imported"}
    assert [done[key].session_id for key in ids] == ["FULL", candidates("Full")[1], candidates("full")[1]]
    parent = (await stored_log(home, "z")).header.parent
    assert parent is not None and parent.session_id == candidates("full")[1]
    again = await run(home, root, backend=backend, compression=compression)
    assert {one.outcome for one in again.values()} == {"unchanged"}
    async with opened(home, backend, compression) as store:
        await store.remove(candidates("full")[1])
    again = await run(home, root, backend=backend, compression=compression)
    assert again["full"].outcome == "removed"


async def test_a_removed_session_does_not_come_back(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    put(root, header("a"), plain(header("a"), crashed()))
    await run(home, root)
    async with opened(home) as store:
        await store.remove("a")
    assert (await run(home, root))["a"].outcome == "removed"


async def test_lineage_of_subagents(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    child = header("kid", parentSession="mum", origin="subagent", delegationDepth=2, agentPreset="explorer")
    put(root, child, plain(child, crashed()))
    await run(home, root)
    head = (await stored_log(home, "kid")).header
    assert (head.origin, head.delegation_depth, head.profile) == ("subagent", 2, "explorer")
    assert head.parent is not None and head.parent.session_id == "mum"
    assert head.to_data()["imported"] == {"format": "dsh", "header": child}


async def test_an_empty_session_is_there(tmp_path: Path) -> None:
    done = await run(tmp_path, FIXTURES / "jsonl-none-header-only")
    assert done["crash"].outcome == "imported" and done["crash"].events == 0
    log = await stored_log(tmp_path, "crash")
    assert log.next_seq == 1 and log.last is not None and log.last.type == "log/end-seed"
    assert (await run(tmp_path, FIXTURES / "jsonl-none-header-only"))["crash"].outcome == "unchanged"


def long_session() -> list[Any]:
    log = Log()
    log.start()
    for _ in range(3):
        log.start_step()
        seqs = log.chunks(*(f"word {n} " for n in range(200)))
        log.assistant({"type": "text", "text": "x" * 600_000}, *asks("c"), sources=seqs)
        log.result("c", log.call("c"), "y" * 600_000)
        log.end_step()
    log.end()
    log.add("session/title", {"title": "T" * 2000})
    return log.events


@pytest.mark.parametrize(("backend", "compression"), BACKENDS)
@pytest.mark.parametrize("stop_at", [1, "document"])
async def test_an_import_that_is_cut_short_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: Any, backend: str, compression: str
) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    events = long_session()
    put(root, header("a"), compressed(header("a"), batched(events)))
    async with opened(home, backend, compression) as store:
        calls = 0
        append, write_document = store.append, store.write_document

        async def failing_append(batches: Any, *, sync: bool) -> Any:
            nonlocal calls
            if calls == stop_at:
                raise StoreError("stopped", code="store.io")
            calls += 1
            return await append(batches, sync=sync)

        async def failing_document(*args: Any, **kwargs: Any) -> int:
            if stop_at == "document":
                raise StoreError("stopped", code="store.io")
            return await write_document(*args, **kwargs)

        monkeypatch.setattr(store, "append", failing_append)
        monkeypatch.setattr(store, "write_document", failing_document)
        done = (await imported(store, root))["a"]
        assert done.outcome == "failed" and done.error is not None and done.error.code == "store.io"
        assert "failure" in done.to_data()
        assert await store.list_documents() == []
    assert (await run(home, root, backend=backend, compression=compression))["a"].outcome == "imported"
    log = await stored_log(home, "a")
    assert log.next_seq == len(events)
    (document,) = await open_store(home).list_documents()
    assert document.value["title"] == "T" * 1000 and document.value["title_kind"] == "custom"
    assert (await open_store(home).verify(Stream("a", "main"))).ok


async def test_a_source_that_changed_behind_an_import_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    path = put(root, header("a"), plain(header("a"), crashed()))
    async with opened(home) as store:

        async def failing(*_args: Any, **_kwargs: Any) -> int:
            raise StoreError("stopped", code="store.io")

        monkeypatch.setattr(store, "write_document", failing)
        assert (await imported(store, root))["a"].outcome == "failed"
    other = crashed()
    other[3]["time"] += 1
    path.write_bytes(plain(header("a"), other))
    done = (await run(home, root))["a"]
    assert done.outcome == "failed" and done.error is not None and done.error.code == "store.conflict"
    assert "cut short" in str(done.error.hint)
    assert await open_store(home).list_documents() == []
    path.write_bytes(plain(header("a"), crashed()))
    assert (await run(home, root))["a"].outcome == "imported"


def test_pieces_hold_all_events_in_order() -> None:
    reading = Reading("a", "log", "none", header=header("a"), stored=long_session(), closers=[])
    pieces = importer._convert(reading).pieces
    ends = [piece.first_seq + sum(piece.row_events) for piece in pieces]
    assert len(pieces) > 2 and [0, *ends[:-1]] == [piece.first_seq for piece in pieces]
    assert ends[-1] == len(long_session()) and max(sum(piece.row_bytes) for piece in pieces) < 3 << 20
    assert all(sum(piece.row_bytes) == len(piece.payload) for piece in pieces)


@pytest.mark.parametrize("name", ["jsonl-none-full", "sqlite-crash-kill-after-flush", "jsonl-none-header-only"])
async def test_an_imported_session_goes_on(tmp_path: Path, name: str) -> None:
    done = await run(tmp_path / "home", FIXTURES / name)
    session_id = next(key for key in done if key in ("full", "crash"))
    before = await stored_log(tmp_path / "home", session_id)
    for number in range(2):
        async with running(tmp_path) as (runtime, stage, model):
            (listed,) = [one for one in await runtime.sessions.list_recent() if one.id == session_id]
            assert listed.error is None and listed.cwd in ("/work/full", "/work/crash")
            session = await runtime.workspace(tmp_path / "work").resume(session_id, model=model)
            result = await (await session.main.submit(f"and now {number}")).result(20)
            assert result.raise_for_state().text == f"did and now {number}"
            assert result.turn == before.order.next_turn + number
            asked = stage.requests[0].messages
            assert [message["id"] for message in asked][: len(before.messages())] == [
                message["id"] for message in before.messages()
            ]
    after = await stored_log(tmp_path / "home", session_id)
    assert after.order.next_turn == before.order.next_turn + 2
    documents = {one.session_id: one.value for one in await open_store(tmp_path / "home").list_documents()}
    assert (
        documents[session_id]["last_prompt"] == "and now 1"
        and documents[session_id]["custom"]["dsh"]["id"] == session_id
    )
    again = await run(tmp_path / "home", FIXTURES / name)
    assert again[session_id].outcome == "unchanged"


async def test_it_goes_on_as_it_was_run(tmp_path: Path) -> None:
    root, cwd = tmp_path / "root", tmp_path / "work"
    cwd.mkdir()
    log = Log()
    log.start()
    log.start_step()
    config = {"provider": "p", "model": "some-model", "temperature": 0.5}
    tools = [{"name": name, "description": "", "parameters": {}} for name in ("bash", "read", "exotic")]
    log.add("request/header", {"header": {"config": config, "system": "be brief", "tools": tools}, "reason": "initial"})
    log.end_step()
    log.end()
    head = header("a", str(cwd))
    put(root, head, plain(head, log.events))
    await run(tmp_path / "home", root)
    async with running(tmp_path) as (runtime, stage, model):
        bind = await runtime.binding("a")
        assert bind is not None and bind["model"] == "some-model" and bind["workdir"]["path"] == str(cwd)
        session = await runtime.workspace(cwd).resume("a", model=model)
        await (await session.main.submit("go")).result(20)
        (request,) = stage.requests
        assert request.system == "be brief" and request.sampling.temperature == 0.5
        assert sorted(tool.name for tool in request.tools) == ["Bash", "Read"]


async def test_a_fork_of_an_imported_session(tmp_path: Path) -> None:
    await run(tmp_path, FIXTURES / "jsonl-none-full")
    source = await stored_log(tmp_path, "full")
    async with opened(tmp_path) as store:
        head = source.header.to_data() | {"session_id": "branch", "origin": "fork", "seed_length": 50}
        grant = await store.fork(Stream("full", "main"), 50, head, "nonce")
        await store.close_writer(Stream("branch", "main"), grant.epoch, "nonce")
    branch = await stored_log(tmp_path, "branch")
    assert branch.next_seq == 50 and branch.order.next_turn == 2
    assert [e.line for e in branch.surface] == [e.line for e in source_prefix(tmp_path, 50) if e.surface is not None]


def source_prefix(home: Path, end: int) -> list[Any]:
    async def read() -> Any:
        return (await open_store(home).read_from(Stream("full", "main"), 0, end)).lines

    import threading

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(asyncio.run(read())))
    thread.start()
    thread.join(10)
    return [parse_event(line) for line in found]


async def test_conversions_are_counted_in_the_document(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    log = Log()
    log.add("x/new", {"half": "\ud83d", "zero": -0.0}, ignorable=True)
    log.add("session/title", {"title": "a \ud83d title"})
    put(root, header("a"), plain(header("a"), log.events))
    done = (await run(home, root))["a"]
    assert done.conversions == {
        "foreign:session/title": 1,
        "foreign:x/new": 1,
        "lone_surrogate": 2,
        "negative_zero": 1,
        "unknown_ignorable": 1,
    }
    (document,) = await open_store(home).list_documents()
    assert document.value["custom"]["dsh"]["conversions"] == done.conversions
    assert document.value["title"] == "a \ufffd title"
    assert json.dumps(document.value)
