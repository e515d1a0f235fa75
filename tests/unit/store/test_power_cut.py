"""A small life of a store on a disk that loses everything unsynced, cut short after each changing call.

Oracles: the log is a prefix of what was sent; everything acknowledged is there, events and document; sequence numbers
have no gap; recovery ends without leftovers, also when it is cut short itself; nothing removed comes back.
"""

from __future__ import annotations

from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.store import JsonlStore, StoreOptions
from tests.conformance.store_contract import MAIN, all_lines, header, line, notes
from tests.unit.store.lossy_fs import Disk, LossyFs

SEEDS = (None, 1, 2, 3, 4)
WANTED = [line(seq, text=f"n{seq}") for seq in range(200)]


class Life:
    """What was acknowledged."""

    def __init__(self) -> None:
        self.durable = 0
        self.revision = 0
        self.removed = False

    async def append(self, store: JsonlStore, first: int, end: int, *, epoch: int, nonce: str) -> None:
        result = (await store.append([notes(first, end, epoch=epoch, nonce=nonce)], sync=True))[0]
        if result.error is not None:
            raise KimiRayError("refused", code=result.error["code"])
        self.durable = result.durable

    async def live(self, store: JsonlStore) -> None:
        grant = await store.open_session("s1", "n", workspace_id="wd_x_0123")
        self.revision = await store.write_document("s1", {"v": 1}, grant=grant.grant, nonce="n", revision=0)
        await store.open_writer(header(), "w")
        await self.append(store, 0, 12, epoch=1, nonce="w")
        await self.append(store, 12, 24, epoch=1, nonce="w")
        self.revision = await store.write_document("s1", {"v": 2}, grant=grant.grant, nonce="n", revision=1)
        await store.close_writer(MAIN, 1, "w")
        again = await store.open_writer(MAIN, "w2")
        await self.append(store, 24, 50, epoch=again.epoch, nonce="w2")
        await store.append([notes(50, 75, epoch=again.epoch, nonce="w2")], sync=False)


async def process(disk: Disk, boot: int, calls: int = 10**9) -> tuple[JsonlStore, LossyFs]:
    fs = LossyFs(disk, calls)
    extra: dict[str, Any] = {"boot_id": f"boot-{boot}", "sync_interval_ms": 60_000}
    return await JsonlStore.open("/home", StoreOptions(claim_timeout_s=0.2, extra=extra), fs=fs), fs


async def cut_short(disk: Disk, life: Life, calls: int) -> int:
    fs = LossyFs(disk, calls)
    try:
        store = await JsonlStore.open(
            "/home", StoreOptions(extra={"boot_id": "boot-0", "sync_interval_ms": 60_000}), fs=fs
        )
        await life.live(store)
    except KimiRayError:
        assert fs.dead
    fs.kill()
    return fs.made


async def recover(disk: Disk, boot: int, calls: int = 10**9) -> JsonlStore:
    """What the next process does first: claim, finish, grant."""
    store, _ = await process(disk, boot, calls)
    await store.open_session("s1", "n9", workspace_id="wd_x_0123")
    known = bool(await store.list_logs())
    await store.open_writer(MAIN if known else header(), f"w{boot}")
    return store


def leftovers(disk: Disk) -> list[str]:
    found: list[str] = []

    def visit(directory: Any, path: str) -> None:
        for name, node in directory.names.items():
            if hasattr(node, "names"):
                visit(node, f"{path}/{name}")
            elif (".tmp-" in name or name.endswith(".redo")) and "/reserved" not in path and path != "/home":
                found.append(f"{path}/{name}")

    visit(disk.root, "")
    return found


async def whole_life() -> int:
    return await cut_short(Disk(), Life(), 10**9)


async def check(disk: Disk, life: Life, boot: int, where: object) -> None:
    store = await recover(disk, boot)
    document = await store.read_document("s1")
    assert (0 if document is None else document.revision) >= life.revision, where
    known = bool(await store.list_logs())
    lines = await all_lines(store) if known else []
    assert lines == WANTED[: len(lines)], where
    assert len(lines) >= life.durable, where
    grant = await store.open_writer(MAIN if known else header(), "last")
    await life.append(store, grant.next_seq, grant.next_seq + 5, epoch=grant.epoch, nonce="last")
    report = await store.verify(MAIN)
    assert report.ok, (where, report)
    assert leftovers(disk) == [], where
    await store.close()


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_power_cut_after_every_call(seed: int | None) -> None:
    for calls in range(await whole_life() + 1):
        disk, life = Disk(), Life()
        await cut_short(disk, life, calls)
        disk.crash(None if seed is None else seed * 10_000 + calls)
        await check(disk, life, 0 if seed is None else 1, (seed, calls))


@pytest.mark.parametrize("seed", range(1, 9))
async def test_a_grant_outlives_a_power_cut_and_fences_the_earlier_writer(seed: int) -> None:
    disk, life = Disk(), Life()
    store, fs = await process(disk, 0)
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "w")
    await life.append(store, 0, 12, epoch=1, nonce="w")
    assert (await store.open_writer(MAIN, "w2")).epoch == 2
    fs.kill()
    disk.crash(seed)
    after, _ = await process(disk, 1)
    for nonce, epoch, expected in (("w", 1, "store.fenced"), ("w2", 2, None)):
        result = (await after.append([notes(12, 15, epoch=epoch, nonce=nonce)], sync=True))[0]
        assert (None if result.error is None else result.error["code"]) == expected
    await after.close()


@pytest.mark.parametrize("seed", [11, 12])
async def test_a_power_cut_inside_recovery(seed: int) -> None:
    """The log ends in a written batch that was not synced; the recovery is cut at each of its own calls, twice."""
    calls = 0
    while True:
        disk, life = Disk(), Life()
        await cut_short(disk, life, 10**9)
        disk.crash(seed)
        finished = True
        for boot in (1, 2):
            try:
                await recover(disk, boot, calls)
            except KimiRayError:
                finished = False
            disk.crash(seed * 1000 + calls * 10 + boot)
        await check(disk, life, 3, (seed, calls))
        calls += 1
        if finished:
            return
        assert calls < 200


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_removed_session_never_comes_back(seed: int | None) -> None:
    calls = 0
    while True:
        disk, life = Disk(), Life()
        store, fs = await process(disk, 0)
        await life.live(store)
        fs.left = calls
        removed = True
        try:
            await store.remove("s1")
        except KimiRayError:
            removed = False
        fs.kill()
        disk.crash(None if seed is None else seed * 1000 + calls)
        after, _ = await process(disk, 1)
        code = None
        try:
            await after.open_writer(MAIN, "w9")
        except KimiRayError as error:
            code = error.code
        assert code in ((None, "store.deleted") if not removed else ("store.deleted",)), (seed, calls)
        if code is not None:
            assert (await after.list_logs(), await after.list_documents()) == ([], [])
        else:
            assert await all_lines(after) == WANTED[: life.durable] or len(await all_lines(after)) > life.durable
        await after.close()
        calls += 1
        if removed:
            return
        assert calls < 200
