"""Store processes that are killed, and several at once: nobody is told anything that the documents do not say."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from kimi_ray.store import open_store
from kimi_ray.store.session_index_marks import read_marks
from kimi_ray.store.session_index_reader import SessionsReader
from tests.unit.store_index.index_home import EVERYTHING, opened, place, until

ROOT = Path(__file__).parents[3]


class Child:
    """A running ``writer_child`` and what it has acknowledged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.acknowledged: dict[str, int] = {}
        self.said = 0
        self.closed = False
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line == b"closed\n":
                self.closed = True
            elif line.endswith(b"\n"):
                session_id, at = line.decode().split()
                self.acknowledged[session_id] = int(at)
                self.said += 1

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.ended()

    async def ended(self) -> None:
        async with asyncio.timeout(60):
            await self.process.wait()
            await self._listening


async def child(home: Path, name: str, seed: int, count: int = 100_000) -> Child:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.unit.store_index.writer_child", str(home), name, str(seed), str(count),
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    return Child(process)


async def seen(home: Path) -> tuple[dict[str, int], str]:
    reader = SessionsReader(open_store(home))
    page = await reader.page(EVERYTHING)
    assert await reader.count(EVERYTHING) >= len(page.items)  # beside a living writer more may have come meanwhile
    return {one.id: one.updated_at for one in page.items}, reader.standing


async def on_disk(home: Path) -> dict[str, int]:
    documents = await open_store(home).list_documents()
    return {one.session_id: place(one)[0] for one in documents}


@pytest.mark.parametrize("seed", range(2))
async def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    for life in range(3):
        writer = await child(tmp_path, f"w{life}", 100 * seed + life)
        enough = choose.randrange(1, 60)
        await until(lambda writer=writer, enough=enough: writer.said >= enough, 60)
        beside, standing = await seen(tmp_path)  # beside the living writer: complete but for what comes now
        assert standing in ("ready", "none", "degraded") and set(beside) <= set(await on_disk(tmp_path))
        await writer.kill()
        truth = await on_disk(tmp_path)
        assert all(truth[one] >= at for one, at in writer.acknowledged.items())
        found, standing = await seen(tmp_path)
        assert found == truth, "the dead writer's index was believed"
        assert standing in ("degraded", "none") and read_marks(str(tmp_path)).dead
    async with opened(tmp_path) as home:
        assert await home.ids() == await home.scanned()
        await home.ready()
        assert await home.ids() == await home.scanned()
        assert read_marks(str(tmp_path)).dead == ()
    found, standing = await seen(tmp_path)
    assert (found, standing) == (await on_disk(tmp_path), "ready")


async def test_two_writers_and_one_dies(tmp_path: Path) -> None:
    first, second = await asyncio.gather(child(tmp_path, "a", 1), child(tmp_path, "b", 2, 300))
    try:
        await until(lambda: first.said > 20 and second.said > 20, 60)
        await first.kill()
        found, standing = await seen(tmp_path)
        assert standing == "degraded" and set(found) >= set(first.acknowledged)
        await second.ended()
        assert second.closed and second.process.returncode == 0
    finally:
        await first.kill()
        await second.kill()
    async with opened(tmp_path) as home:
        await home.ready()
        assert await home.ids() == await home.scanned()
    assert await seen(tmp_path) == (await on_disk(tmp_path), "ready")


async def test_two_writers_in_one_home_see_each_other(tmp_path: Path) -> None:
    async with opened(tmp_path) as one, opened(tmp_path) as other:
        await one.write("a", at=1)
        await one.ready()
        await other.ready()
        for number in range(20):
            await one.write(f"one-{number}", at=number)
            await other.write(f"other-{number}", at=number)
        await other.remove("other-3")
        waiting = await other.service.index_pending()
        page = await one.service.query_sessions(EVERYTHING, waiting)
        assert [item.id for item in page.items] == await one.scanned()
        await one.ready()
        await other.ready()
        assert await one.ids() == await other.ids() == await one.scanned()
        for end in ("", "-wal", "-shm"):  # deleted while both have it open
            Path(f"{tmp_path}/index.sqlite{end}").unlink(missing_ok=True)
        await one.write("late", at=100)
        assert await one.ids() == await other.ids() == await one.scanned()
        await one.ready()
        await other.ready()
        await other.write("later", at=200)
        await other.ready()
        assert await one.ids() == await other.ids() == await one.scanned()
        assert (await seen(tmp_path))[1] == "ready"


@pytest.mark.parametrize("seed", range(3))
async def test_random_lives(tmp_path: Path, seed: int) -> None:
    """Writes, removals, edits and deletions by hand, losses of the file, restarts: the answer is the documents'."""
    choose = random.Random(seed)
    names = [f"s{number}" for number in range(12)]
    for _ in range(4):
        async with opened(tmp_path) as home:
            known = set(await home.scanned())
            for step in range(25):
                name = choose.choice(names)
                what = choose.choices(["write", "remove", "drop", "lose", "read"], [10, 1, 1, 1, 4])[0]
                if what == "write":
                    await home.write(name, at=choose.randrange(5), archived=choose.random() < 0.3)
                    known.add(name)
                elif what == "remove" and name in known:
                    await home.remove(name)
                    names.remove(name)
                    names.append(f"{name}x")  # a removed id is never used again
                elif what == "drop":
                    await (await home.index()).remove(name)
                    await home.write(name, at=choose.randrange(5))
                elif what == "lose":
                    (tmp_path / "index.sqlite").unlink(missing_ok=True)
                assert await home.ids() == await home.scanned(), (step, what, name)
            if choose.random() < 0.5:
                await home.ready()
                assert await home.ids() == await home.scanned()
        assert [one for one, _ in sorted((await seen(tmp_path))[0].items())] == sorted(await on_disk(tmp_path))
