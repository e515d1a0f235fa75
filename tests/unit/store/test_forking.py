"""A fork is the source at the cut, byte for byte, whatever the cut goes through."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.store import JsonlStore, StoreOptions, Stream, open_store_for_writing
from kimi_ray.store.chunk_rows import pack_rows
from kimi_ray.store.faults import FaultyFs
from kimi_ray.store.fs import RealFs
from kimi_ray.store.seam import Batch
from tests.conformance.store_contract import MAIN, all_lines, chunk_events, code, header, line, notes, ok


async def source_store(home: Path) -> JsonlStore:
    store = await open_store_for_writing(str(home), StoreOptions(durability="os"))
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    return store


async def test_a_fork_at_every_cut(tmp_path: Path) -> None:
    store = await source_store(tmp_path)
    for first in (0, 3, 4):
        ok(await store.append([notes(first, {0: 3, 3: 4, 4: 9}[first])], sync=True))
    await store.open_writer(MAIN, "w2")
    ok(await store.append([notes(9, 12, epoch=2, nonce="w2")], sync=True))
    lines = await all_lines(store)
    for cut in range(13):
        target = Stream(f"fork{cut}", "main")
        grant = await store.fork(MAIN, cut, header(target), "f")
        assert grant.next_seq == cut
        assert grant.epoch in (2, 3), "above what was copied"
        assert await all_lines(store, target) == lines[:cut]
        assert (await store.fork(MAIN, cut, header(target), "f")) == grant, "idempotent by nonce"
        more = notes(cut, cut + 2, epoch=grant.epoch, nonce="f", stream=target)
        ok(await store.append([more], sync=True))
        report = await store.verify(target)
        assert (report.ok, report.events) == (True, cut + 2)
        assert (await store.inspect(target)).header == header(target)
    assert await all_lines(store) == lines
    await store.close()


async def test_a_cut_through_a_packed_row(tmp_path: Path) -> None:
    store = await source_store(tmp_path)
    events = chunk_events(30)
    ok(await store.append([notes(0, 0)], sync=True))
    rows = pack_rows(events)
    packed = Batch(MAIN, 1, "w", 0, b"".join(r for r, _ in rows), tuple(len(r) for r, _ in rows), (30,))
    ok(await store.append([packed], sync=True))
    target = Stream("s2", "main")
    await store.fork(MAIN, 17, header(target), "f")
    assert await all_lines(store, target) == [event.line for event in events[:17]]
    await store.close()


async def test_refusals(tmp_path: Path) -> None:
    store = await source_store(tmp_path)
    target = Stream("s2", "main")
    with pytest.raises(StoreError) as caught:
        await store.fork(MAIN, 0, header(target), "f")
    assert caught.value.code == "store.not_found"
    ok(await store.append([notes(0, 5)], sync=True))
    with pytest.raises(StoreError) as caught:
        await store.fork(MAIN, 6, header(target), "f")
    assert (caught.value.code, caught.value.details["expected"]) == ("store.gap", 5)
    assert [row.stream for row in await store.list_logs()] == [MAIN]
    await store.fork(MAIN, 5, header(target), "f")
    with pytest.raises(StoreError) as caught:
        await store.fork(MAIN, 5, header(target), "other")
    assert caught.value.code == "store.exists"
    assert code((await store.append([notes(5, 6, stream=target)], sync=True))[0]) == "store.fenced"
    await store.close()


async def test_twenty_forks_at_once_while_the_source_goes_on(tmp_path: Path) -> None:
    store = await source_store(tmp_path)
    ok(await store.append([notes(0, 50)], sync=True))

    async def go_on() -> None:
        for first in range(50, 250, 5):
            ok(await store.append([notes(first, first + 5)], sync=False))

    targets = [Stream(f"f{n}", "main") for n in range(20)]
    await asyncio.gather(go_on(), *(store.fork(MAIN, 50, header(target), "f") for target in targets))
    for target in targets:
        assert await all_lines(store, target) == [line(seq, text=f"n{seq}") for seq in range(50)]
    await store.close()


@pytest.mark.parametrize("refusal", [None, errno.EXDEV, errno.EINVAL])
@pytest.mark.parametrize("most", [None, 97])
async def test_a_copy_in_pieces_and_on_file_systems_that_cannot_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int | None, most: int | None
) -> None:
    copies = 0
    real = os.copy_file_range

    def copy_file_range(*args: Any) -> int:
        nonlocal copies
        copies += 1
        if refusal is not None:
            raise OSError(refusal, os.strerror(refusal))
        return real(*args)

    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    store = await source_store(tmp_path)
    for first in range(0, 40, 8):
        ok(await store.append([notes(first, first + 8)], sync=True))
    await store.close()
    store = await open_store_for_writing(str(tmp_path), StoreOptions(durability="os"), fs=FaultyFs(short_write=most))
    target = Stream("s2", "main")
    await store.fork(MAIN, 36, header(target), "f")
    assert copies > 0
    assert await all_lines(store, target) == (await all_lines(store))[:36]
    assert (await store.verify(target)).ok
    await store.close()


def test_a_range_is_copied_as_far_as_the_source_goes(tmp_path: Path) -> None:
    fs = RealFs()
    (tmp_path / "a").write_bytes(b"0123456789")
    source, target = fs.open(str(tmp_path / "a"), os.O_RDONLY), fs.open(str(tmp_path / "b"), os.O_RDWR | os.O_CREAT)
    assert fs.copy_range(source, 4, target, 2, 100) == 6
    assert fs.copy_range(source, 10, target, 8, 100) == 0
    assert (tmp_path / "b").read_bytes() == bytes(2) + b"456789"
    fs.close(source)
    fs.close(target)
