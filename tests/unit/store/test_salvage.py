"""Salvage through a store: any damage, every backend; the source stays as it is; a death leaves no half."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.events import SessionEvent, parse_event, parse_header
from kimi_ray.log import EventLog, complete_tools
from kimi_ray.store import Store, StoreOptions, Stream, open_store, open_store_for_writing
from kimi_ray.store.identity import check_backend
from kimi_ray.store.salvage import salvage_session
from tests.conformance.store_contract import all_lines, fingerprint
from tests.unit.store.random_logs import random_log
from tests.unit.store.rescue_homes import (
    DIGEST,
    SESSION,
    blob_file,
    filled_home,
    flip,
    header_of,
    log_file,
    turn_events,
    write_log,
)
from tests.unit.store.test_faults import DyingFs
from tests.unit.store.test_rebuild import check_pairs, go_on, what


def there(backend: str, compression: str) -> bool:
    try:
        check_backend(StoreOptions(backend=backend, compression=compression))
    except StoreError:
        return False
    return True


BACKENDS = [one for one in (("jsonl", "none"), ("jsonl", "zstd"), ("sqlite", "none")) if there(*one)]


async def opened(home: Path, **options: Any) -> Store:
    return await open_store_for_writing(str(home), StoreOptions(claim_timeout_s=0.5, **options))


async def salvaged(home: Path, **options: Any) -> Any:
    store = await opened(home, **options)
    try:
        return await salvage_session(store, SESSION)
    finally:
        await store.close()


@pytest.mark.parametrize(("backend", "compression"), BACKENDS)
async def test_an_undamaged_session_is_copied_event_by_event(tmp_path: Path, backend: str, compression: str) -> None:
    options = {"backend": backend, "compression": compression}
    await filled_home(tmp_path, **options)
    before = fingerprint(tmp_path / "sessions")
    report = await salvaged(tmp_path, **options)
    after = fingerprint(tmp_path / "sessions")
    assert {name: facts for name, facts in after.items() if name in before} == before, "the source is only read"
    reading = open_store(tmp_path)
    for log in report.logs:
        assert (log.header, log.lost, log.repairs, log.missing_blobs) == ("kept", (), 0, ())
        stream = Stream(report.session_id, log.agent_id)
        assert await all_lines(reading, stream) == [event.line for event in turn_events()]
        assert (await reading.verify(stream)).ok
        header = parse_header((await reading.inspect(stream)).header)
        assert header.parent is not None
        assert (header.origin, header.parent.session_id, header.parent.agent_id) == ("fork", SESSION, log.agent_id)
        assert header.labels["salvaged_from"] == f"{SESSION}/{log.agent_id}"
        assert header.cwd == "/w"
    document = await reading.read_document(report.session_id)
    assert document is not None
    kept = {key: document.value[key] for key in ("title", "tags", "cwd", "id", "forked_from", "agent_count")}
    assert kept == {
        "title": "Things", "tags": {"k": "v"}, "cwd": "/w", "id": report.session_id, "forked_from": SESSION,
        "agent_count": 2,
    }  # fmt: skip
    assert document.workspace_id == "wd_x_0123"


async def surviving(home: Path, stream: Stream) -> list[tuple[int, bytes]]:
    store = open_store(home)
    found: list[tuple[int, bytes]] = []
    cursor: int | None = 0
    while cursor is not None:
        page = await store.read_surviving(stream, cursor)
        found.extend(page.events)
        cursor = page.cursor
    return found


def damage(path: Path, dice: Random) -> None:
    """One to three kinds of harm to a file, its first line mostly spared."""
    data = bytearray(path.read_bytes())
    start = dice.choice((0, data.find(b"\n") + 1, data.find(b"\n") + 1))
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(start, len(data))
        size = dice.choice((1, 30, 200, 900))
        kind = dice.choice(("flip", "zero", "remove", "garbage", "again", "cut"))
        if kind == "flip":
            data[at] ^= 1 << dice.randrange(8)
        elif kind == "zero":
            data[at : at + size] = bytes(len(data[at : at + size]))
        elif kind == "remove":
            del data[at : at + size]
        elif kind == "garbage":
            data[at:at] = dice.randbytes(size)
        elif kind == "again":
            data += data[at : at + size * 4]
        else:
            del data[at:]
        if len(data) <= start:
            break
    path.write_bytes(data)


async def salvage_damaged(home: Path, events: list[SessionEvent], dice: Random, compression: str) -> None:
    options = {"compression": compression, "durability": "none"}
    store = await opened(home, **options)
    await store.open_session(SESSION, "n", workspace_id="wd_x_0123")
    await write_log(store, events, header_of(), size=dice.randint(1, 7))
    await store.close()
    (path,) = (home / "sessions/wd_x_0123" / SESSION / "agents/main").glob("wire.jsonl*")
    damage(path, dice)
    source = fingerprint(path.parent)
    found = await surviving(home, Stream(SESSION, "main"))
    try:
        report = await salvaged(home, **options)
    except StoreError as error:
        assert error.code == "store.nothing_survives"
        assert found == []
        assert len(list((home / "sessions/wd_x_0123").iterdir())) == 1
        return
    assert fingerprint(path.parent) == source
    reading = open_store(home)
    new = Stream(report.session_id, "main")
    assert (await reading.verify(new)).ok
    lines = await all_lines(reading, new)
    log = EventLog.restore(
        parse_header((await reading.inspect(new)).header), [parse_event(line, at=at) for at, line in enumerate(lines)]
    )
    check_pairs(complete_tools(log.messages()))
    (facts,) = report.logs
    left_out = {entry["seq"] for entry in facts.repaired if str(entry["change"]).startswith("left out")}
    first: dict[int, bytes] = {}
    for seq, line in sorted(found, key=lambda one: one[0]):
        first.setdefault(seq, line)
    wanted = [what(line) for seq, line in sorted(first.items()) if seq not in left_out]
    added = iter([what(line) for line in lines])
    assert all(any(one == other for other in added) for one in wanted), "every row that verifies, in order"
    assert {line for _, line in found} <= {event.line for event in events}, "and nothing that was never written"
    if len(first) == len(events):
        assert [line for line in lines if b"log/salvaged" not in line] == [event.line for event in events]
    go_on(log)
    again = await opened(home, **options)
    view = await again.load(new, is_live=False)
    assert view.cut == len(lines)
    await again.close()


@pytest.mark.parametrize("compression", [compression for backend, compression in BACKENDS if backend == "jsonl"])
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_whatever_happens_to_the_file_the_rest_is_saved(
    tmp_path_factory: pytest.TempPathFactory, compression: str, seed: int
) -> None:
    dice = Random(seed)
    home = tmp_path_factory.mktemp("home")
    asyncio.run(salvage_damaged(home, random_log(dice, turns=2), dice, compression))


async def test_an_old_batch_that_was_written_again_counts_once(tmp_path: Path) -> None:
    await filled_home(tmp_path, agents=("main",))
    path = log_file(tmp_path)
    data = path.read_bytes()
    starts = [at for at in range(len(data)) if data.startswith(b'{"batch":', at)]
    path.write_bytes(data + data[starts[1] : starts[2]])
    report = await salvaged(tmp_path)
    lines = await all_lines(open_store(tmp_path), Stream(report.session_id, "main"))
    assert lines == [event.line for event in turn_events()]
    assert report.logs[0].duplicates == 4


async def test_a_row_that_is_only_in_an_old_copy_comes_back_to_its_place(tmp_path: Path) -> None:
    await filled_home(tmp_path, agents=("main",))
    path = log_file(tmp_path)
    data = path.read_bytes()
    starts = [at for at in range(len(data)) if data.startswith(b'{"batch":', at)]
    path.write_bytes(data[: starts[1]] + data[starts[2] :] + data[starts[1] : starts[2]])
    report = await salvaged(tmp_path)
    lines = await all_lines(open_store(tmp_path), Stream(report.session_id, "main"))
    assert lines == [event.line for event in turn_events()]


@pytest.mark.skipif(("sqlite", "none") not in BACKENDS, reason="this build has no SQLite backend")
async def test_damaged_rows_of_a_database(tmp_path: Path) -> None:
    await filled_home(tmp_path, backend="sqlite")
    hit = 0
    for path in (tmp_path / "shards").iterdir():
        data = bytearray(path.read_bytes())
        for needle in (b'"do 1"', b'"tool-result"'):
            at = data.find(needle)
            if at >= 0:
                data[at + 2] ^= 4
                hit += 1
        path.write_bytes(data)
    assert hit
    broken = [report for agent in ("main", "agent-1") if not (report := await _verify(tmp_path, agent)).ok]
    assert broken
    report = await salvaged(tmp_path, backend="sqlite")
    lost = [entry for log in report.logs for entry in log.lost]
    assert len(lost) == hit
    assert all("rowid" in entry and entry["count"] == 1 for entry in lost)
    for log in report.logs:
        assert (await _verify(tmp_path, log.agent_id, report.session_id)).ok
        lines = await all_lines(open_store(tmp_path), Stream(report.session_id, log.agent_id))
        restored = EventLog.restore(
            parse_header((await open_store(tmp_path).inspect(Stream(report.session_id, log.agent_id))).header),
            [parse_event(line, at=at) for at, line in enumerate(lines)],
        )
        check_pairs(complete_tools(restored.messages()))


async def _verify(home: Path, agent: str, session_id: str = SESSION) -> Any:
    return await open_store(home).verify(Stream(session_id, agent))


async def test_a_live_session_is_salvaged_as_far_as_it_is_written(tmp_path: Path) -> None:
    live = await opened(tmp_path)
    await live.open_session(SESSION, "n", workspace_id="wd_x_0123")
    events = turn_events()[:9]
    await write_log(live, events, header_of(), close=False)
    report = await salvaged(tmp_path)
    assert await all_lines(open_store(tmp_path), Stream(report.session_id, "main")) == [event.line for event in events]
    after = await opened(tmp_path)
    view = await after.load(Stream(report.session_id, "main"))
    assert [closer["type"] for closer in view.closers][-1:] == ["turn/end"]
    await after.close()
    await live.close()


async def test_missing_blobs_are_told_and_a_damaged_document_and_header_are_made_anew(tmp_path: Path) -> None:
    await filled_home(tmp_path)
    blob_file(tmp_path).unlink()
    log_file(tmp_path).parents[2].joinpath("state.json").write_bytes(b"{")
    flip(log_file(tmp_path, "agent-1"), b'"session_id"')
    report = await salvaged(tmp_path)
    assert report.document == "rebuilt"
    assert report.workspace_id == "wd_x_0123"
    logs = {log.agent_id: log for log in report.logs}
    assert (logs["main"].header, logs["agent-1"].header) == ("kept", "rebuilt")
    seq = next(event.seq for event in turn_events() if event.type == "request/header")
    assert logs["main"].missing_blobs == ({"digest": DIGEST, "seq": seq, "code": "store.blob_missing"},)
    document = await open_store(tmp_path).read_document(report.session_id)
    assert document is not None
    assert set(document.value["agents"]) == {"main", "agent-1"}
    assert document.value["cwd"] == "/w"


async def test_nothing_survives(tmp_path: Path) -> None:
    await filled_home(tmp_path, agents=("main",))
    log_file(tmp_path).write_bytes(b"x" * 500)
    with pytest.raises(StoreError) as caught:
        await salvaged(tmp_path)
    assert caught.value.code == "store.nothing_survives"
    assert [one.name for one in (tmp_path / "sessions/wd_x_0123").iterdir()] == [SESSION]
    with pytest.raises(StoreError) as caught:
        store = await opened(tmp_path)
        try:
            await salvage_session(store, "session_nope")
        finally:
            await store.close()
    assert caught.value.code == "store.not_found"


async def test_a_death_anywhere_leaves_a_whole_session_or_none_after_the_next_try(tmp_path: Path) -> None:
    counter = DyingFs(10**9)
    await _die(tmp_path / "whole", counter)
    for calls in range(0, counter.made, 3):
        home = tmp_path / f"h{calls}"
        fs = DyingFs(calls)
        whole = await _die(home, fs)
        source = fingerprint(home / "sessions/wd_x_0123" / SESSION)
        report = await salvaged(home)
        assert fingerprint(home / "sessions/wd_x_0123" / SESSION) == source
        reading = open_store(home)
        made = {row.stream.session_id for row in await reading.list()} - {SESSION}
        documents = {document.session_id for document in await reading.list_documents()} - {SESSION}
        assert made == documents, (calls, made, documents)
        assert report.session_id in made
        assert len(made) <= 2, "the one that died after its last step, and this one"
        assert not whole or len(made) == 2
        for session_id in made:
            log = EventLog.restore(
                parse_header((await reading.inspect(Stream(session_id, "main"))).header),
                [parse_event(line) for line in await all_lines(reading, Stream(session_id, "main"))],
            )
            assert log.next_seq == len(turn_events()) + 2, "the lost event, its mark, and what was repaired"


async def _die(home: Path, fs: DyingFs) -> bool:
    await filled_home(home, agents=("main",), durability="none")
    flip(log_file(home), b'"tool-result"', at=2)
    with contextlib.suppress(KimiRayError):
        store = await open_store_for_writing(str(home), StoreOptions(claim_timeout_s=0.5), fs=fs)
        await salvage_session(store, SESSION)
        fs.kill()
        return not fs.left < 0
    fs.kill()
    return False


def test_the_marker_is_json_that_anybody_reads(tmp_path: Path) -> None:
    asyncio.run(filled_home(tmp_path, agents=("main",)))
    offset = flip(log_file(tmp_path), b'"do 1"', at=2)
    report = asyncio.run(salvaged(tmp_path))
    lines = asyncio.run(all_lines(open_store(tmp_path), Stream(report.session_id, "main")))
    (marker,) = [json.loads(line) for line in lines if b'"log/salvaged"' in line]
    seq = next(event.seq for event in turn_events() if b'"do 1"' in event.line)
    (lost,) = marker["data"]["lost"]
    assert marker["data"]["source"] == {"session_id": SESSION, "agent_id": "main"}
    assert (lost["after_seq"], lost["count"], lost["file"]) == (seq - 1, 1, str(log_file(tmp_path)))
    assert lost["offset"] <= offset
    assert [entry["after_seq"] for entry in report.logs[0].lost] == [seq - 1]
