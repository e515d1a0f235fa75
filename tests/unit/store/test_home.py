"""The home: its identity, its claims, its readers, and the service in front of it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.store import (
    PersistenceService,
    RealFs,
    StoreIdentity,
    StoreOptions,
    Stream,
    open_store,
    open_store_for_writing,
    pack_call,
    unpack_call,
)
from kimi_ray.store.faults import FaultyFs, Rule
from kimi_ray.store.identity import locks_exclude, open_identity
from kimi_ray.store.owners import orphans, remove_orphans
from kimi_ray.store.seam import Batch
from tests.conformance.store_contract import MAIN, all_lines, code, fingerprint, header, notes, ok
from tests.unit.store.killable_fs import KillableFs

FS = RealFs()


def identity(home: Path, **options: Any) -> StoreIdentity:
    return open_identity(FS, str(home), StoreOptions(**options))


# -- identity ----------------------------------------------------------------------------------------------------------


def test_the_identity_is_made_once(tmp_path: Path) -> None:
    first = identity(tmp_path / "a/b/home")
    assert identity(tmp_path / "a/b/home") == first
    assert identity(tmp_path / "other").home_id != first.home_id
    facts = json.loads((tmp_path / "a/b/home/store.json").read_text())
    assert facts == {"format": 1, "uuid": first.home_id, "backend": "jsonl", "compression": "none", "shards": 1}


async def test_racing_creators_get_one_identity(tmp_path: Path) -> None:
    found = await asyncio.gather(*(asyncio.to_thread(identity, tmp_path / "home") for _ in range(16)))
    assert len(set(found)) == 1
    assert os.listdir(tmp_path / "home") == ["store.json"]


def test_other_settings_are_refused(tmp_path: Path) -> None:
    identity(tmp_path)
    with pytest.raises(StoreError) as caught:
        identity(tmp_path, shards=4)
    assert caught.value.code == "store.settings_mismatch"
    assert caught.value.details["stored"] == 1


@pytest.mark.parametrize("options", [{"compression": "lz4"}, {"backend": "etcd"}])
def test_a_backend_that_is_not_there_is_refused_by_name(tmp_path: Path, options: dict[str, str]) -> None:
    with pytest.raises(StoreError) as caught:
        identity(tmp_path / "home", **options)
    assert caught.value.code == "store.backend_unavailable"
    assert not (tmp_path / "home").exists()


def test_another_home_is_refused_and_never_made(tmp_path: Path) -> None:
    expected = identity(tmp_path / "a").home_id
    assert identity(tmp_path / "a", expected_home_id=expected).home_id == expected
    identity(tmp_path / "b")
    for home in ("b", "empty"):
        with pytest.raises(StoreError) as caught:
            identity(tmp_path / home, expected_home_id=expected)
        assert caught.value.code == "store.wrong_home"
    assert not (tmp_path / "empty").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"format":2,"uuid":"u"}', "store.format_unsupported"), ("{", "store.corrupt"), ("[]", "store.corrupt")],
)
def test_a_newer_or_damaged_identity_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(StoreError) as caught:
        identity(tmp_path)
    assert caught.value.code == expected


def test_a_home_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError) as caught:
        identity(tmp_path / "file" / "home")
    assert caught.value.code == "store.home_not_writable"
    assert caught.value.hint
    denied = FaultyFs(rules=[Rule("create", errno.EACCES)])
    with pytest.raises(StoreError) as caught:
        open_identity(denied, str(tmp_path / "home"), StoreOptions())
    assert caught.value.code == "store.home_not_writable"


class NetworkFs(RealFs):
    def fs_type(self, path: str) -> str:
        return "nfs4"


def test_network_file_systems_need_consent_and_a_probe(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        open_identity(NetworkFs(), str(tmp_path), StoreOptions())
    assert caught.value.code == "store.unsupported_filesystem"
    assert locks_exclude(str(tmp_path))
    assert open_identity(NetworkFs(), str(tmp_path), StoreOptions(network_home=True)).home_id
    assert os.listdir(tmp_path) == ["store.json"]


async def test_everything_is_private(tmp_path: Path) -> None:
    store = await open_store_for_writing(str(tmp_path / "home"), StoreOptions())
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 1)], sync=True))
    await store.write_document("s1", {}, grant=1, nonce="n", revision=0)
    for path in (tmp_path / "home").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    await store.close()


# -- owners ------------------------------------------------------------------------------------------------------------


async def test_stale_writer_locks_are_listed_and_removed_when_nobody_names_them(tmp_path: Path) -> None:
    files = [KillableFs(), KillableFs(), KillableFs()]
    stores = [await open_store_for_writing(str(tmp_path), StoreOptions(claim_timeout_s=0.1), fs=fs) for fs in files]
    for index, store in enumerate(stores):
        await store.open_session(f"s{index}", "n", workspace_id="wd_x_0123")
    await stores[0].close_session("s0", "n")
    files[0].kill()  # dead, owns nothing
    files[1].kill()  # dead, still named by s1
    found = orphans(FS, str(tmp_path))
    assert len(found) == 1
    assert found[0].facts["pid"] == os.getpid()
    assert [orphan.path for orphan in remove_orphans(FS, str(tmp_path))] == [found[0].path]
    assert orphans(FS, str(tmp_path)) == []
    assert len(os.listdir(tmp_path / "writers")) == 2
    await stores[2].open_session("s1", "m", workspace_id="wd_x_0123")
    assert (await stores[2].open_session("s2", "n")).grant == 1
    await stores[2].close()
    assert len(os.listdir(tmp_path / "writers")) == 1, "a closed store takes its own lock away"


async def test_claims_are_given_back_when_their_last_use_ends(tmp_path: Path) -> None:
    store = await open_store_for_writing(str(tmp_path), StoreOptions())
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 2)], sync=True))
    await store.close_writer(MAIN, 1, "w")
    assert os.listdir(tmp_path / "owners") == ["s1"], "an open session stays claimed"
    await store.close_session("s1", "n")
    assert os.listdir(tmp_path / "owners") == []
    await store.load(MAIN)
    assert os.listdir(tmp_path / "owners") == [], "a load holds it only for its length"
    grant = await store.open_writer(MAIN, "w2")
    assert os.listdir(tmp_path / "owners") == ["s1"], "a writer claims without a session being open"
    await store.close_writer(MAIN, grant.epoch, "w2")
    assert os.listdir(tmp_path / "owners") == []
    await store.close()


async def test_a_load_of_another_process_leaves_the_session_grant_of_a_dead_runtime(tmp_path: Path) -> None:
    fs = KillableFs()
    first = await open_store_for_writing(str(tmp_path), StoreOptions(), fs=fs)
    await first.open_session("s1", "n", workspace_id="wd_x_0123")
    await first.write_document("s1", {"v": 1}, grant=1, nonce="n", revision=0)
    await first.open_writer(header(), "w")
    ok(await first.append([notes(0, 2)], sync=True))
    reader = open_store(tmp_path, claim_timeout_s=0.1)
    with pytest.raises(StoreError) as caught:
        await reader.load(MAIN)
    assert caught.value.code == "session.in_use"
    fs.kill()
    assert (await reader.load(MAIN)).next_seq == 2
    second = await open_store_for_writing(str(tmp_path), StoreOptions())
    assert await second.write_document("s1", {"v": 2}, grant=1, nonce="n", revision=1) == 2
    ok(await second.append([notes(2, 3)], sync=True))
    await second.close()


async def test_a_refused_document_leaves_no_claim_and_no_path_is_escaped(tmp_path: Path) -> None:
    store = await open_store_for_writing(str(tmp_path / "home"), StoreOptions())
    with pytest.raises(StoreError) as caught:
        await store.write_document("never", {}, grant=1, nonce="n", revision=0)
    assert caught.value.code == "store.fenced"
    assert os.listdir(tmp_path / "home" / "owners") == []
    for attempt in (
        store.write_document("../../x", {}, grant=1, nonce="n", revision=0),
        store.remove("../../x"),
        store.read_document("../x"),
        store.read_from(Stream("s", "../x"), 0),
        store.read_blob("sha256:../../x"),
    ):
        with pytest.raises(StoreError) as caught:
            await attempt
        assert caught.value.code in ("store.invalid_id", "store.bad_blob", "store.not_found")
    assert os.listdir(tmp_path) == ["home"]
    await store.close()


async def test_opens_and_closes_at_the_same_time_end_in_one_order(tmp_path: Path) -> None:
    store = await open_store_for_writing(str(tmp_path), StoreOptions())
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, 1)], sync=True))

    async def visit(nonce: str) -> int:
        grant = await store.open_writer(MAIN, nonce)
        await store.close_writer(MAIN, grant.epoch, nonce)
        return grant.epoch

    epochs = await asyncio.gather(*(visit(f"v{n}") for n in range(12)))
    assert sorted(epochs) == list(range(2, 14)), "rising, one nonce each"
    report = await store.verify(MAIN)
    assert (report.ok, report.epoch, report.closed) == (True, 13, True)
    await store.close()


async def test_a_cancelled_claim_is_not_kept(tmp_path: Path) -> None:
    fs = FaultyFs(sync_delay_s=0.05)
    store = await open_store_for_writing(str(tmp_path), StoreOptions(), fs=fs)
    await store.open_session("s0", "n", workspace_id="wd_x_0123")
    claiming = asyncio.create_task(store.open_session("s1", "n", workspace_id="wd_x_0123"))
    await asyncio.sleep(0.03)
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    other = await open_store_for_writing(str(tmp_path), StoreOptions(claim_timeout_s=5))
    await other.open_session("s1", "m", workspace_id="wd_x_0123")
    await other.close()
    await store.close()


async def test_two_hundred_sessions_are_created_in_two_seconds(tmp_path: Path) -> None:
    store = await open_store_for_writing(str(tmp_path), StoreOptions())

    async def create(index: int) -> None:
        grant = await store.open_session(f"s{index}", "n", workspace_id="wd_x_0123")
        await store.write_document(f"s{index}", {"title": "t"}, grant=grant.grant, nonce="n", revision=0)

    async with asyncio.timeout(4):  # twice the target: the machine is shared
        await asyncio.gather(*map(create, range(200)))
    await store.close()


# -- readers -----------------------------------------------------------------------------------------------------------


def test_a_home_without_a_store_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path / "nothing")
    assert caught.value.code == "store.not_found"
    assert os.listdir(tmp_path) == []


async def test_reading_beside_a_live_writer_writes_nothing_and_sees_whole_events(tmp_path: Path) -> None:
    store = await open_store_for_writing(str(tmp_path), StoreOptions())
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    await store.write_document("s1", {"title": "t"}, grant=1, nonce="n", revision=0)
    ok(await store.append([notes(0, 5)], sync=True))
    reader = open_store(tmp_path)
    assert reader.identity == store.identity
    before = fingerprint(tmp_path)
    assert await all_lines(reader) == await all_lines(store)
    assert [row.stream for row in await reader.list()] == [MAIN]
    assert (await reader.inspect(MAIN)).next_seq == 5
    assert (await reader.verify(MAIN)).ok
    assert (await reader.read_document("s1")) == (await reader.list_documents())[0]
    path = await reader.locate(MAIN)
    assert path is not None
    assert await reader.read_raw(MAIN) == Path(path).read_bytes()
    assert fingerprint(tmp_path) == before

    async def write() -> None:
        for first in range(5, 400, 5):
            ok(await store.append([notes(first, first + 5)], sync=False))

    writing = asyncio.create_task(write())
    while not writing.done():
        lines = await all_lines_so_far(reader)
        assert lines == sorted(lines, key=lambda text: json.loads(text)["seq"])
        assert [json.loads(text)["seq"] for text in lines] == list(range(len(lines)))
    await writing
    await store.close()


async def all_lines_so_far(reader: Any) -> list[bytes]:
    page = await reader.read_from(MAIN, 0, 10_000)
    return list(page.lines)


# -- the service -------------------------------------------------------------------------------------------------------


def test_a_call_is_one_blob_and_comes_back_the_same() -> None:
    batches = [
        notes(0, 3),
        notes(7, 7, stream=Stream("a", "b")),
        Batch(MAIN, 2, "x", 5, b'{"type":"text-chunks"}\n{"seq":9}\n', (23, 10), (4, 1)),
    ]
    call = pickle.loads(pickle.dumps(pack_call(batches, sync=False)))
    assert call.sync is False
    back = unpack_call(call)
    assert [(b.stream, b.epoch, b.nonce, b.first_seq, bytes(b.payload), b.row_bytes, b.row_events) for b in back] == [
        (b.stream, b.epoch, b.nonce, b.first_seq, bytes(b.payload), b.row_bytes, b.row_events) for b in batches
    ]


async def test_the_service_opens_lazily_and_once(tmp_path: Path) -> None:
    service = PersistenceService(str(tmp_path / "home"))
    assert not (tmp_path / "home").exists()
    assert (await service.stats())["open"] is False
    found = await asyncio.gather(*(service.identity() for _ in range(8)))
    assert len(set(found)) == 1
    await service.close()
    with pytest.raises(StoreError) as caught:
        await service.identity()
    assert caught.value.code == "store.closed"


async def test_the_service_passes_errors_of_opening_on_and_can_be_asked_again(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    service = PersistenceService(str(tmp_path / "home"), open_timeout_s=0.2)
    with pytest.raises(StoreError) as caught:
        await service.open_session("s1", "n", "wd_x_0123")
    assert caught.value.code == "store.home_not_writable"
    (tmp_path / "home").unlink()
    assert (await service.open_session("s1", "n", "wd_x_0123")).grant == 1
    await service.close()


async def test_a_full_queue_is_busy_and_frees_itself(tmp_path: Path) -> None:
    service = PersistenceService(
        str(tmp_path), StoreOptions(extra={"fs": "sync_delay_ms=30"}), queue_bytes=len(notes(0, 5).payload) + 10
    )
    await service.open_session("s1", "n", "wd_x_0123")
    await service.open_writer(header(), "w")
    first = asyncio.create_task(service.append_call(pack_call([notes(0, 5)])))
    await asyncio.sleep(0)
    with pytest.raises(StoreError) as caught:
        await service.append_call(pack_call([notes(5, 6)]))
    assert (caught.value.code, caught.value.retryable) == ("store.busy", True)
    ok(await first)
    ok(await service.append_call(pack_call([notes(5, 6)])))
    assert code((await service.append_call(pack_call([notes(9, 10)])))[0]) == "store.gap"
    stats = await service.stats()
    assert (stats["queue_bytes"], stats["streams"]) == (0, 1)
    await service.close()


async def test_concurrent_callers_share_commits(tmp_path: Path) -> None:
    service = PersistenceService(str(tmp_path), StoreOptions(extra={"fs": "sync_delay_ms=5"}))
    streams = [Stream(f"s{n}", "main") for n in range(40)]
    for stream in streams:
        await service.open_session(stream.session_id, "n", "wd_x_0123")
        await service.open_writer(header(stream), "w")
    await asyncio.gather(*(service.append_call(pack_call([notes(0, 3, stream=stream)])) for stream in streams))
    before = await service.stats()
    await asyncio.gather(*(service.append_call(pack_call([notes(3, 6, stream=stream)])) for stream in streams))
    after = await service.stats()
    assert after["commits"] - before["commits"] <= 5
    assert after["syncs"] - before["syncs"] == 40
    await service.close()


async def test_a_home_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(tmp_path / "nothing")
    with pytest.raises(StoreError) as failed:
        await open_store_for_writing(str(tmp_path / "home"), StoreOptions())
    assert failed.value.code == "store.home_not_writable"
