"""Archives of sessions: the same bytes for the same content, whole or not at all, and honest about what is missing."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.exchange import archive, export_session, verify_archive
from kimi_ray.store import open_store
from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.seam import Batch, StoreOptions, Stream

BACKENDS = [("jsonl", "none"), ("jsonl", "zstd"), ("sqlite", "none")]
SESSION = "session_one"


def line(seq: int, blob: str | None = None) -> bytes:
    data: dict[str, Any] = {"n": seq}
    if blob is not None:
        data["content"] = {"$blob": blob, "bytes": 3}
    return json.dumps({"seq": seq, "time": 5, "type": "x/y", "data": data}, separators=(",", ":")).encode()


def header(agent_id: str) -> dict[str, Any]:
    return {
        "type": "log", "version": 1, "enc": 1, "session_id": SESSION, "agent_id": agent_id, "created_at": 1,
        "writer": {"name": "t", "version": "1"},
    }  # fmt: skip


async def append(store: Any, agent_id: str, first: int, lines: list[bytes], grant: Any = None) -> Any:
    stream = Stream(SESSION, agent_id)
    nonce = f"nonce-{agent_id}"
    grant = grant or await store.open_writer(header(agent_id), nonce)
    rows = [one + b"\n" for one in lines]
    batch = Batch(stream, grant.epoch, nonce, first, b"".join(rows), tuple(map(len, rows)), (1,) * len(rows))
    (result,) = await store.append([batch], sync=True)
    assert result.error is None, result.error
    return grant


async def fill(home: Path, backend: tuple[str, str], events: int = 30, *, close: bool = True) -> Any:
    store = await open_store_for_writing(str(home), StoreOptions(backend=backend[0], compression=backend[1]))
    claim = await store.open_session(SESSION, "claim", workspace_id="wd_x")
    content = b"abc"
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    await store.put_blobs({digest: content})
    grant = await append(store, "main", 0, [line(n, digest if n == 3 else None) for n in range(events)])
    await append(store, "agent-1", 0, [line(n) for n in range(5)])
    value = {"title": "T \u00e9", "archived": True, "cwd": "/gone/for/good"}
    await store.write_document(SESSION, value, grant=claim.grant, nonce="claim", revision=0)
    if close:
        await store.close()
        return digest
    return store, grant


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
async def test_everything_is_in_it(tmp_path: Path, backend: tuple[str, str]) -> None:
    digest = await fill(tmp_path / "home", backend)
    manifest = await export_session(open_store(tmp_path / "home"), SESSION, tmp_path / "a.zip")
    assert manifest["ok"] and manifest["problems"] == [] and manifest["source"] == {"backend": backend[0]}
    assert [(one["agent_id"], one["events"], one["prefix"]) for one in manifest["agents"]] == [
        ("agent-1", 5, False),
        ("main", 30, False),
    ]
    with zipfile.ZipFile(tmp_path / "a.zip") as found:
        assert found.testzip() is None
        assert json.loads(found.read("manifest.json")) == manifest
        assert json.loads(found.read("document.json"))["title"] == "T \u00e9"
        lines = found.read("agents/main/events.jsonl").splitlines()
        assert json.loads(lines[0])["agent_id"] == "main"
        assert lines[1:] == [line(n, digest if n == 3 else None) for n in range(30)]
        assert found.read(f"blobs/{digest[7:]}") == b"abc"
        assert {info.date_time for info in found.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert str(tmp_path) not in found.read("manifest.json").decode()
    check = verify_archive(tmp_path / "a.zip")
    assert check.ok and check.problems == () and (check.agents, check.events, check.blobs) == (2, 35, 1)
    assert sorted(os.listdir(tmp_path)) == ["a.zip", "home"]


async def test_the_same_bytes_whatever_the_backend_and_wherever_they_go(tmp_path: Path) -> None:
    contents: set[bytes] = set()
    for number, backend in enumerate(BACKENDS):
        await fill(tmp_path / f"home{number}", backend)
        store = open_store(tmp_path / f"home{number}")
        for again in range(2):
            await export_session(store, SESSION, tmp_path / f"{number}{again}.zip")
        sink = io.BytesIO()
        await export_session(store, SESSION, sink)
        whole = {(tmp_path / f"{number}{again}.zip").read_bytes() for again in range(2)} | {sink.getvalue()}
        assert len(whole) == 1
        with zipfile.ZipFile(tmp_path / f"{number}0.zip") as found:
            contents.add(b"".join(found.read(name) for name in found.namelist() if name != "manifest.json"))
    assert len(contents) == 1


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=str)
async def test_a_damaged_log_goes_in_as_far_as_it_verifies(tmp_path: Path, backend: tuple[str, str]) -> None:
    home = tmp_path / "home"
    store, grant = await fill(home, backend, close=False)
    for first in (30, 40, 50):
        await append(store, "main", first, [line(n) for n in range(first, first + 10)], grant)
    await store.close()
    reading = open_store(home)
    file = Path(str(await reading.locate(Stream(SESSION, "main"))))
    whole = file.read_bytes()
    at = whole.index(b'"n":45') if backend[1] == "none" else len(whole) * 7 // 10
    file.write_bytes(whole[:at] + b"\xff\xff\xff" + whole[at + 3 :])
    manifest = await export_session(reading, SESSION, tmp_path / "a.zip")
    main = next(one for one in manifest["agents"] if one["agent_id"] == "main")
    assert not manifest["ok"] and main["prefix"] and 30 <= main["events"] < 60
    if backend[1] == "none":
        assert main["events"] == 45
    (problem,) = manifest["problems"]
    assert problem["code"] == "store.corrupt" and problem["details"] == {"agent_id": "main", "seq": main["events"]}
    assert str(tmp_path) not in json.dumps(manifest)
    assert verify_archive(tmp_path / "a.zip").ok  # the archive is whole, and says that the session is not


async def test_missing_blobs_documents_and_headers(tmp_path: Path) -> None:
    home = tmp_path / "home"
    digest = await fill(home, BACKENDS[0])
    reading = open_store(home)
    for file in home.rglob(digest[7:]):
        file.unlink()
    agent = Path(str(await reading.locate(Stream(SESSION, "agent-1"))))
    agent.write_bytes(b"rubbish\n" + agent.read_bytes())
    (document,) = home.rglob("state.json")
    document.write_bytes(b"{")
    manifest = await export_session(reading, SESSION, tmp_path / "a.zip")
    codes = sorted(problem["code"] for problem in manifest["problems"])
    assert codes == ["store.blob_missing", "store.corrupt", "store.corrupt"] and not manifest["ok"]
    assert manifest["blobs"] == [{"digest": digest, "missing": True}]
    assert verify_archive(tmp_path / "a.zip").ok
    document.unlink()
    manifest = await export_session(reading, SESSION, tmp_path / "b.zip")
    assert manifest["session"] == {"session_id": SESSION}


async def test_beside_a_writer_it_is_a_prefix(tmp_path: Path) -> None:
    home = tmp_path / "home"
    store, grant = await fill(home, BACKENDS[0], close=False)

    async def write() -> None:
        for first in range(30, 930, 10):
            await append(store, "main", first, [line(n) for n in range(first, first + 10)], grant)

    writing = asyncio.create_task(write())
    counts: list[int] = []
    for number in range(6):
        manifest = await export_session(open_store(home), SESSION, tmp_path / f"{number}.zip")
        assert manifest["ok"], manifest["problems"]
        assert verify_archive(tmp_path / f"{number}.zip").ok
        counts.append(next(one["events"] for one in manifest["agents"] if one["agent_id"] == "main"))
    await writing
    await store.close()
    assert counts == sorted(counts) and counts[0] >= 30


async def test_a_log_that_grows_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    store, grant = await fill(home, BACKENDS[0], close=False)
    monkeypatch.setattr(archive, "_PAGE_EVENTS", 7)
    reading = open_store(home)
    real, grown = reading.read_from, []

    async def growing(stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Any:
        page = await real(stream, seq, limit, max_bytes)
        if stream.agent_id == "main" and not grown:
            grown.append(await append(store, "main", 30, [line(n) for n in range(30, 40)], grant))
        return page

    monkeypatch.setattr(reading, "read_from", growing)
    manifest = await export_session(reading, SESSION, tmp_path / "a.zip")
    main = next(one for one in manifest["agents"] if one["agent_id"] == "main")
    assert (main["events"], main["prefix"]) == (30, True) and manifest["ok"]
    await store.close()


async def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    await fill(tmp_path / "home", BACKENDS[0])
    store = open_store(tmp_path / "home")
    target = tmp_path / "a.zip"
    target.write_text("mine")
    with pytest.raises(KimiRayError) as caught:
        await export_session(store, SESSION, target)
    assert caught.value.code == "export.exists" and target.read_text() == "mine"
    await export_session(store, SESSION, target, force=True)
    assert verify_archive(target).ok
    for wrong in (tmp_path / "no such" / "a.zip", tmp_path):
        with pytest.raises(KimiRayError) as caught:
            await export_session(store, SESSION, wrong, force=True)
        assert caught.value.code == "export.failed" and caught.value.hint
    with pytest.raises(KimiRayError) as caught:
        await export_session(store, "nobody", tmp_path / "b.zip")
    assert caught.value.code == "session.not_found"
    assert sorted(os.listdir(tmp_path)) == ["a.zip", "home"]


async def test_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes first to the name keeps it, and a failure in the middle leaves nothing."""
    await fill(tmp_path / "home", BACKENDS[0])
    store = open_store(tmp_path / "home")
    real = store.read_blob

    async def slow(digest: str) -> bytes:
        (tmp_path / "a.zip").write_text("somebody else's")
        return await real(digest)

    monkeypatch.setattr(store, "read_blob", slow)
    with pytest.raises(KimiRayError) as caught:
        await export_session(store, SESSION, tmp_path / "a.zip")
    assert caught.value.code == "export.exists" and (tmp_path / "a.zip").read_text() == "somebody else's"

    async def cancelled(digest: str) -> bytes:
        raise asyncio.CancelledError

    monkeypatch.setattr(store, "read_blob", cancelled)
    with pytest.raises(asyncio.CancelledError):
        await export_session(store, SESSION, tmp_path / "b.zip")
    assert sorted(os.listdir(tmp_path)) == ["a.zip", "home"]


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "export.failed"), (errno.EPIPE, None)])
async def test_a_stream_that_takes_no_more(tmp_path: Path, number: int, code: str | None) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any, /) -> int:
            raise OSError(number, os.strerror(number))

    await fill(tmp_path / "home", BACKENDS[0])
    with pytest.raises(BrokenPipeError if code is None else KimiRayError) as caught:  # whose reader left knows it
        await export_session(open_store(tmp_path / "home"), SESSION, Full())
    assert getattr(caught.value, "code", None) == code


async def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    await fill(tmp_path / "home", BACKENDS[0])
    target = tmp_path / "a.zip"
    await export_session(open_store(tmp_path / "home"), SESSION, target)
    whole = target.read_bytes()
    with zipfile.ZipFile(target) as found:
        spans = [(info.header_offset + 30 + len(info.filename) + 20, info.compress_size) for info in found.infolist()]
    # the contents: a change of what a zip says about itself twice may change nothing
    places = [start + size // 2 for start, size in spans] + [start + 1 for start, _ in spans]
    places += random.Random(4).sample([at for start, size in spans for at in range(start, start + size)], 100)
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= 0x41
        target.write_bytes(damaged)
        try:
            assert not verify_archive(target).ok, at
        except KimiRayError as error:
            assert error.code == "export.not_an_archive", at


async def test_what_readers_of_zip_files_could_see_differently_is_noticed(tmp_path: Path) -> None:
    await fill(tmp_path / "home", BACKENDS[0], events=4)
    source, target = tmp_path / "a.zip", tmp_path / "b.zip"
    await export_session(open_store(tmp_path / "home"), SESSION, source)
    whole = source.read_bytes()
    with zipfile.ZipFile(source) as found:
        _, second, *_ = found.infolist()
        start = found.start_dir
    harmless = range(10, 14)  # the time, in a header that readers may or may not look at
    places = [at for at in (*range(30), *range(second.header_offset - 24, second.header_offset)) if at not in harmless]
    cases = {f"byte {at}": whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in places}
    cases |= {f"end {at}": whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in range(-22, 0)}
    cases |= {"in front": b"x" * 40 + whole, "behind": whole + b"x" * 40}
    cases |= {"between": whole[:start] + b"x" * 8 + whole[start:-6] + (start + 8).to_bytes(4, "little") + whole[-2:]}
    for name, damaged in cases.items():
        target.write_bytes(damaged)
        try:
            assert not verify_archive(target).ok, name
        except KimiRayError as error:
            assert error.code == "export.not_an_archive", name
    rewritten(source, target, lambda files: None)  # by another program, with another frame
    assert verify_archive(target).ok


async def test_what_cannot_be_unpacked_is_told(tmp_path: Path) -> None:
    await fill(tmp_path / "home", BACKENDS[0], events=4)
    source, target = tmp_path / "a.zip", tmp_path / "b.zip"
    await export_session(open_store(tmp_path / "home"), SESSION, source)
    with zipfile.ZipFile(source) as found:
        directory, first = found.start_dir, found.infolist()[0].filename
    for name, offset, value in (("encrypted", 8, 1), ("packed in another way", 10, 99)):
        damaged = bytearray(source.read_bytes())
        for entry in (0, directory + 2):  # in the file's own header, and in the directory's
            damaged[entry + offset - 2] = value
        target.write_bytes(damaged)
        told = [one for one in verify_archive(target).problems if one["message"].startswith("a file cannot be read")]
        assert [one["details"]["path"] for one in told] == [first], name
    rewritten(source, target, lambda files: files.update({"manifest.json": b"[" * 100_000}))
    with pytest.raises(KimiRayError) as caught:
        verify_archive(target)
    assert caught.value.code == "export.not_an_archive"


async def test_a_log_that_was_cut_off_behind_its_header_stops_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    await fill(home, BACKENDS[0])
    reading = open_store(home)
    agent = Path(str(await reading.locate(Stream(SESSION, "agent-1"))))
    agent.write_bytes(agent.read_bytes().split(b"\n")[0] + b"\n")
    manifest = await export_session(reading, SESSION, tmp_path / "a.zip")
    assert [(one["agent_id"], one["events"]) for one in manifest["agents"]] == [("agent-1", 0), ("main", 30)]
    assert [one["code"] for one in manifest["problems"]] == ["store.not_found"]
    assert verify_archive(tmp_path / "a.zip").ok


def rewritten(source: Path, target: Path, change: Any) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        files = {name: old.read(name) for name in old.namelist()}
        change(files)
        for name, data in files.items():
            new.writestr(name, data)


async def test_forgeries(tmp_path: Path) -> None:
    digest = await fill(tmp_path / "home", BACKENDS[0])
    await export_session(open_store(tmp_path / "home"), SESSION, tmp_path / "a.zip")
    log = "agents/main/events.jsonl"

    def edit_manifest(files: dict[str, bytes], change: Any) -> None:
        manifest = json.loads(files["manifest.json"])
        change(manifest)
        files["manifest.json"] = json.dumps(manifest).encode()

    def consistent(files: dict[str, bytes], content: bytes) -> None:
        files[log] = content

        def change(manifest: dict[str, Any]) -> None:
            for one in manifest["files"]:
                if one["path"] == log:
                    one.update(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))

        edit_manifest(files, change)

    def swapped(files: dict[str, bytes]) -> None:
        lines = files[log].splitlines(keepends=True)
        lines[3], lines[4] = lines[4], lines[3]
        consistent(files, b"".join(lines))

    forgeries: dict[str, Any] = {
        "an event fewer": lambda files: consistent(files, b"".join(files[log].splitlines(keepends=True)[:-1])),
        "swapped": swapped,
        "another header": lambda files: consistent(files, files[log].replace(b'"main"', b'"mine"', 1)),
        "a file more": lambda files: files.update(extra=b"x"),
        "a file fewer": lambda files: files.pop("document.json"),
        "a blob unlisted": lambda files: edit_manifest(files, lambda m: m["blobs"].clear()),
        "a log of nobody": lambda files: edit_manifest(files, lambda m: m["agents"].clear()),
        "a file named twice": lambda files: edit_manifest(files, lambda m: m.update(files=m["files"] * 2)),
        "a blob of nowhere": lambda files: edit_manifest(files, lambda m: m["blobs"].append({"digest": "sha256:00"})),
        "another blob": lambda files: files.update({f"blobs/{digest[7:]}": b"abd"}),
    }
    for name, change in forgeries.items():
        rewritten(tmp_path / "a.zip", tmp_path / "b.zip", change)
        assert not verify_archive(tmp_path / "b.zip").ok, name
    newer = {
        "newer": lambda files: edit_manifest(files, lambda m: m.update(version=2)),
        "other": lambda files: edit_manifest(files, lambda m: m.update(format="x")),
        "list": lambda files: files.update({"manifest.json": b"[]"}),
        "none": lambda files: files.pop("manifest.json"),
        "agents": lambda files: edit_manifest(files, lambda m: m.update(agents=[3])),
        "agent": lambda files: edit_manifest(files, lambda m: m["agents"][0].update(file=["a"])),
        "blobs": lambda files: edit_manifest(files, lambda m: m.update(blobs=[{"digest": [1]}])),
        "files": lambda files: edit_manifest(files, lambda m: m.update(files=[{"path": 3}])),
        "session": lambda files: edit_manifest(files, lambda m: m.update(session=[1])),
        "session id": lambda files: edit_manifest(files, lambda m: m["session"].update(session_id=3)),
        "problems": lambda files: edit_manifest(files, lambda m: m.update(problems="none")),
    }
    for name, change in newer.items():
        rewritten(tmp_path / "a.zip", tmp_path / "b.zip", change)
        with pytest.raises(KimiRayError) as caught:
            verify_archive(tmp_path / "b.zip")
        assert caught.value.code == "export.not_an_archive", name
    (tmp_path / "text").write_text("text")
    for path in (tmp_path / "text", tmp_path / "missing", tmp_path):
        with pytest.raises(KimiRayError) as caught:
            verify_archive(path)
        assert caught.value.code == "export.not_an_archive"
