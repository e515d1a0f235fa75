"""Publications with real processes and many sessions, the same for every backend."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.store import Store, StoreOptions, open_store, open_store_for_writing
from kimi_ray.store.faults import FaultyFs, Rule
from kimi_ray.store.seam import LogCopy, SessionCopy, Stream
from tests.conformance.publication_contract import names_below
from tests.conformance.store_contract import MAIN, code, header, line, notes, ok
from tests.unit.store.killable_fs import KillableFs

W = "wd_x_0123"
BACKENDS = [("jsonl", "none"), ("jsonl", "zstd"), ("sqlite", "none")]
EVERY = pytest.mark.parametrize(("backend", "compression"), BACKENDS, ids=["jsonl", "zstd", "sqlite"])
ROOT = str(Path(__file__).parents[3])


async def opened(home: Path, backend: str, compression: str, fs: Any = None, **options: Any) -> Store:
    how = {"durability": "os", "shards": 2, **options}
    files = fs if fs is not None or backend == "sqlite" else KillableFs(syncs=False)
    return await open_store_for_writing(
        str(home), StoreOptions(backend=backend, compression=compression, **how), fs=files
    )


async def with_source(store: Store, count: int = 8) -> None:
    await store.open_session("s1", "n", workspace_id=W, create=True)
    await store.open_writer(header(), "w")
    ok(await store.append([notes(0, count)], sync=True))
    await store.write_document("s1", {}, grant=1, nonce="n", revision=0)


def fork_of(session_id: str, cut: int = 5) -> SessionCopy:
    log = LogCopy(MAIN, cut, header(Stream(session_id, "main")), (line(cut, "log/forked"),))
    return SessionCopy(session_id, W, {"title": session_id}, (log,))


_MAKER = """
import asyncio, sys
from kimi_ray.store import StoreOptions, open_store_for_writing
from tests.unit.store.test_publications import W, fork_of
from tests.conformance.store_contract import header, notes, ok
from kimi_ray.store.seam import Stream

async def main():
    home, backend, compression, prefix = sys.argv[1:]
    how = StoreOptions(backend=backend, compression=compression, shards=2, durability="os")
    store = await open_store_for_writing(home, how)
    for number in range(10_000):
        name = f"{prefix}-{number}-new"
        print("asked", name, flush=True)
        claim = await store.open_session(name, "n", workspace_id=W, create=True)
        stream = Stream(name, "main")
        await store.open_writer(header(stream), "w")
        ok(await store.append([notes(0, 4, stream=stream)], sync=True))
        await store.write_document(name, {}, grant=claim.grant, nonce="n", revision=0)
        print("done", name, flush=True)
        names = [f"{prefix}-{number}-{part}" for part in range(4)]
        print("asked", *names, flush=True)
        await store.begin_publication(f"{prefix}-{number}", dict.fromkeys(names, W))
        await asyncio.gather(*(store.copy_session(f"{prefix}-{number}", fork_of(name)) for name in names))
        await store.publish(f"{prefix}-{number}")
        print("done", *names, flush=True)

asyncio.run(main())
"""


@EVERY
async def test_sigkill_of_a_process_that_makes_sessions_leaves_all_or_none(
    tmp_path: Path, backend: str, compression: str
) -> None:
    home = tmp_path / "home"
    store = await opened(home, backend, compression)
    await with_source(store)
    await store.close()
    for round_ in range(2):
        lines = await _killed_maker(home, backend, compression, f"r{round_}", 3 + 2 * round_)
        groups = [words[1:] for words in lines if words[0] == "asked"]
        done = {name for words in lines if words[0] == "done" for name in words[1:]}
        store = await opened(home, backend, compression)
        documents = {document.session_id for document in await store.list_documents()}
        assert documents == {row.stream.session_id for row in await store.list_logs()}
        assert done <= documents
        for group in groups:
            assert documents.isdisjoint(group) or documents.issuperset(group), "some of a publication"
        for name in documents:
            assert (await store.verify(Stream(name, "main"))).ok
        for path in names_below(home):
            parts = path.split("/")
            session = parts[2] if parts[0] == "sessions" and len(parts) > 2 else parts[1].split(".")[0]
            assert (parts[0] == "sessions" and len(parts) == 2) or session in documents, path
        gone = {name for group in groups for name in group} - documents
        for name in gone:
            await store.open_session(name, "m", workspace_id=W, create=True)
        await store.close()


async def _killed_maker(home: Path, backend: str, compression: str, prefix: str, answers: int) -> list[list[str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _MAKER, str(home), backend, compression, prefix,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": ROOT},
    )  # fmt: skip
    assert process.stdout is not None
    told: list[bytes] = []
    async with asyncio.timeout(60):
        while len(told) < answers:
            told.append(await process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    told += (await process.stdout.read()).splitlines(keepends=True)
    await process.wait()
    return [text.decode().split() for text in told if text.endswith(b"\n")]


@EVERY
async def test_a_thousand_sessions_in_one_publication(tmp_path: Path, backend: str, compression: str) -> None:
    store = await opened(tmp_path / "home", backend, compression)
    await with_source(store)
    names = [f"f{number}" for number in range(1000)]
    await store.begin_publication("g", dict.fromkeys(names, W))
    await asyncio.gather(*(store.copy_session("g", SessionCopy(name, W, {}, ())) for name in names[1:]))
    await store.copy_session("g", fork_of("f0"))
    assert [document.session_id for document in await store.list_documents()] == ["s1"]
    await store.publish("g")
    assert {document.session_id for document in await store.list_documents()} == {"s1", *names}
    await store.begin_publication("h", {f"h{number}": W for number in range(1000)})
    await asyncio.gather(*(store.copy_session("h", SessionCopy(f"h{n}", W, {}, ())) for n in range(200)))
    await store.discard_publication("h")
    assert len(await store.list_documents()) == 1001
    assert not [name for name in names_below(tmp_path / "home") if "/h" in name]
    await store.close()


@EVERY
async def test_a_listing_never_shows_some_of_a_publication(tmp_path: Path, backend: str, compression: str) -> None:
    store, other = [await opened(tmp_path / "home", backend, compression) for _ in range(2)]
    await with_source(store)
    reader = open_store(tmp_path / "home")
    stop = asyncio.Event()

    async def look(who: Any) -> int:
        looks = 0
        while not stop.is_set():
            documents = {document.session_id for document in await who.list_documents()} - {"s1"}
            for number in range(20):
                group = {f"f{number}-{part}" for part in range(5)}
                assert group <= documents or group.isdisjoint(documents), group & documents
            looks += 1
        return looks

    async def publish() -> None:
        try:
            for number in range(20):
                names = [f"f{number}-{part}" for part in range(5)]
                await store.begin_publication(f"g{number}", dict.fromkeys(names, W))
                for name in names:
                    await (store, other)[int(name[-1]) % 2].copy_session(f"g{number}", fork_of(name))
                await store.publish(f"g{number}")
        finally:
            stop.set()

    *looks, _ = await asyncio.gather(look(reader), look(other), publish())
    assert all(looks)
    assert len(await reader.list_documents()) == 101
    await other.close()
    await store.close()


async def test_removing_while_another_process_holds_the_claim_is_refused_and_then_leaves_nothing(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    store, other = [await opened(home, "jsonl", "none", claim_timeout_s=0.1) for _ in range(2)]
    await with_source(store)
    await store.open_writer(header(Stream("s1", "agent-1")), "w2")
    assert (home / "reserved" / "s1.agent-1").exists()
    with pytest.raises(KimiRayError) as caught:
        await other.remove("s1")
    assert caught.value.code == "session.in_use"
    await other.close()
    await store.remove("s1")
    assert {str(path.relative_to(home)) for path in home.rglob("*") if "s1" in path.name or W in path.name} == {
        "tombstones/s1"
    }
    with pytest.raises(KimiRayError) as caught:
        await store.open_session("s1", "n", workspace_id=W, create=True)
    assert caught.value.code == "store.deleted"
    await store.close()


async def test_a_marker_that_cannot_be_removed_does_not_hide_the_session_nor_survive_it(tmp_path: Path) -> None:
    fs = FaultyFs(rules=[Rule("unlink", errno.EIO, count=0, path="/unpublished/new/")])
    store = await opened(tmp_path, "jsonl", "none", fs)
    await with_source(store)
    assert (tmp_path / "unpublished/new/s1").exists()
    assert [row.stream for row in await open_store(tmp_path).list()] == [MAIN]
    fs.rules.clear()
    await store.close()
    again = await opened(tmp_path, "jsonl", "none")
    assert not (tmp_path / "unpublished/new/s1").exists()
    assert [document.session_id for document in await again.list_documents()] == ["s1"]
    await again.remove("s1")
    await again.close()


async def test_a_creation_costs_one_sync_of_a_directory_more_and_a_hundred_share_it(tmp_path: Path) -> None:
    counts: dict[bool, dict[str, int]] = {}
    for create in (False, True):
        fs = FaultyFs()
        store = await opened(tmp_path / str(create), "jsonl", "none", fs, durability="disk")
        await store.open_session("warm", "n", workspace_id=W, create=create)
        await store.write_document("warm", {}, grant=1, nonce="n", revision=0)
        before = dict(fs.calls)
        await store.open_session("s1", "n", workspace_id=W, create=create)
        await store.write_document("s1", {}, grant=1, nonce="n", revision=0)
        counts[create] = {name: fs.calls[name] - before.get(name, 0) for name in ("sync_dir", "fsync")}
        before = dict(fs.calls)
        await asyncio.gather(*(store.open_session(f"m{n}", "n", workspace_id=W, create=create) for n in range(100)))
        counts[create]["hundred"] = fs.calls["sync_dir"] - before["sync_dir"]
        await store.close()
    assert counts[True]["sync_dir"] == counts[False]["sync_dir"] + 1
    assert counts[True]["fsync"] == counts[False]["fsync"]
    assert counts[True]["hundred"] <= 12


@EVERY
async def test_a_zombie_of_a_session_that_came_to_nothing_writes_nothing(
    tmp_path: Path, backend: str, compression: str
) -> None:
    store = await opened(tmp_path, backend, compression)
    await store.open_session("s1", "n", workspace_id=W, create=True)
    await store.open_writer(header(), "w", claim="n")
    ok(await store.append([notes(0, 2)], sync=True))
    flying = [asyncio.create_task(store.append([notes(2, 2 + n)], sync=n % 2 == 0)) for n in range(1, 9)]
    await store.close_session("s1", "n")
    for (answer,) in await asyncio.gather(*flying):
        assert answer.error is None or code(answer) in ("store.deleted", "store.not_found", "store.fenced")
    assert code((await store.append([notes(2, 3)], sync=True))[0]) == "store.not_found"
    assert await store.list_logs(session_id="s1") == []
    assert not [name for name in names_below(tmp_path) if "s1" in name]
    await store.close()


@EVERY
async def test_many_discards_wait_for_copies_under_way_without_holding_them_up(
    tmp_path: Path, backend: str, compression: str
) -> None:
    store = await opened(tmp_path, backend, compression)
    await with_source(store)
    groups = [f"g{number}" for number in range(30)]
    for group in groups:
        await store.begin_publication(group, {f"{group}-{part}": W for part in range(3)})

    async def copy(name: str) -> None:
        with contextlib.suppress(KimiRayError):
            await store.copy_session(name.partition("-")[0], fork_of(name))

    async with asyncio.timeout(25):
        await asyncio.gather(
            *(copy(f"{group}-{part}") for group in groups for part in range(3)),
            *(store.discard_publication(group) for group in groups),
        )
    assert [document.session_id for document in await store.list_documents()] == ["s1"]
    assert not [name for name in names_below(tmp_path) if "/g" in name]
    await store.close()


@EVERY
async def test_a_copy_that_is_given_up_lets_go_of_its_publication(
    tmp_path: Path, backend: str, compression: str
) -> None:
    store = await opened(tmp_path, backend, compression)
    await with_source(store)
    await store.begin_publication("g", {"f0": W})
    for _ in range(20):
        task = asyncio.create_task(store.copy_session("g", fork_of("f0")))
        for _ in range(len(asyncio.all_tasks()) % 5 + 1):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(10):
        await store.copy_session("g", fork_of("f0"))
        await store.publish("g")
    assert (await store.verify(Stream("f0", "main"))).ok
    await store.close()


async def test_the_next_process_finishes_a_removal_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    fs = KillableFs(syncs=False)
    store = await opened(tmp_path, "jsonl", "none", fs)
    await with_source(store)
    await store.open_writer(header(Stream("s1", "agent-1")), "w2")
    fs.rules.append(Rule("rmdir", errno.EIO, count=0))
    with pytest.raises(KimiRayError):
        await store.remove("s1")
    fs.kill()
    assert (tmp_path / "sessions" / W / "s1").exists() and (tmp_path / "owners/s1").exists()
    again = await opened(tmp_path, "jsonl", "none")
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "s1" in path.name or W in path.name} == {
        "tombstones/s1"
    }
    await again.close()


async def test_a_leftover_that_cannot_be_deleted_stays_hidden_and_hides_no_other(tmp_path: Path) -> None:
    store = await opened(tmp_path, "jsonl", "none", files := KillableFs(syncs=False))
    await with_source(store)
    await store.begin_publication("g", {"f0": W})
    await store.copy_session("g", fork_of("f0"))
    files.kill()
    fs = FaultyFs(rules=[Rule("rmdir", errno.EIO, count=0)])
    again = await opened(tmp_path, "jsonl", "none", fs)
    assert [document.session_id for document in await again.list_documents()] == ["s1"]
    with pytest.raises(KimiRayError) as caught:
        await again.open_session("f0", "n", workspace_id=W, create=True)
    assert caught.value.code == "store.io_failed"
    fs.rules.clear()
    await again.open_session("f0", "n", workspace_id=W, create=True)
    await again.close()
