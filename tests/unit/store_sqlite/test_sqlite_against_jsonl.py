"""The same logs in every backend: equal lines, pages, views and closers, whatever the cuts of the batches."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from kimi_ray.errors import KimiRayError
from kimi_ray.store import RealFs, Store, StoreOptions, Stream, open_store_for_writing
from kimi_ray.store.reserve import Reserve
from kimi_ray.store.seam import Batch
from tests.conformance.store_contract import MAIN, all_lines, batch, header, line

BACKENDS = (("jsonl", "none"), ("jsonl", "zstd"), ("sqlite", "none"))


def random_log(dice: random.Random) -> list[Any]:
    """Events of turns with steps, tools, runs of chunks and large texts; it may end anywhere."""
    from kimi_ray.events import event_from_data

    found: list[dict[str, Any]] = []

    def add(kind: str, **data: Any) -> None:
        found.append({"seq": len(found), "time": 1700 + dice.randrange(10**6), "type": kind, "data": data})

    for turn in range(dice.randint(1, 4)):
        add("turn/start", turn=turn)
        for step in range(dice.randint(0, 3)):
            add("step/start", turn=turn, step=step)
            for index in range(dice.choice([0, 1, 4, 30, 1100])):
                delta = {"type": "text-delta", "index": 0, "text": f"é{index} "}
                add("assistant/chunk", turn=turn, step=step, attempt=1, chunk=delta)
            if dice.random() < 0.3:
                add("note/added", text="x" * dice.choice([10, 5_000, 70_000]))
            add("step/end", turn=turn, step=step)
        add("turn/end", turn=turn, reason={"kind": "completed"})
    end = dice.randint(1, len(found)) if dice.random() < 0.7 else len(found)
    return [event_from_data(data) for data in found[:end]]


def random_batches(dice: random.Random, events: list[Any]) -> list[tuple[Batch, bool]]:
    """The events cut anyhow, packed or not, some of it sent again."""
    from kimi_ray.store.chunk_rows import pack_rows

    found: list[tuple[Batch, bool]] = []
    first = 0
    while first < len(events):
        end = min(len(events), first + dice.choice([1, 2, 7, 60, 500, 2000]))
        start = max(0, first - dice.choice([0, 0, 0, 3, 40]))
        rows = pack_rows(events[start:end]) if dice.random() < 0.7 else [(e.line + b"\n", 1) for e in events[start:end]]
        payload = b"".join(row for row, _ in rows)
        cut = Batch(MAIN, 1, "w", start, payload, tuple(len(row) for row, _ in rows), tuple(n for _, n in rows))
        found.append((cut, dice.random() < 0.3))
        first = end
    return found


async def facts_of(store: Store, dice: random.Random, count: int) -> list[Any]:
    """What can be asked about the log, in an order that ``dice`` decides."""
    found: list[Any] = [await all_lines(store)]
    for _ in range(6):
        seq, limit, size = dice.randrange(count + 2), dice.choice([1, 3, 100]), dice.choice([1, 400, 1 << 20])
        page = await store.read_from(MAIN, seq, limit, size)
        found.append((page.first_seq, page.lines, page.next_seq))
    view = await store.inspect(MAIN)
    found.append((view.header, view.next_seq, _untimed(view.closers), view.cut))
    return found


def _untimed(closers: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    text = json.dumps([{**closer, "time": 0} for closer in closers])
    facts = json.loads(text)
    for fact in facts:
        fact["data"].pop("recovered_at", None)
    return facts


async def test_randomized_logs_are_alike_in_every_backend(tmp_path: Path) -> None:
    for round_ in range(6):
        told: list[list[Any]] = []
        for backend, compression in BACKENDS:
            dice = random.Random(round_)
            events = random_log(dice)
            home = str(tmp_path / f"{round_}-{backend}-{compression}")
            options = StoreOptions(backend=backend, compression=compression, durability="none")
            store = await open_store_for_writing(home, options)
            await store.open_session("s1", "n", workspace_id="wd_x_0123")
            await store.open_writer(header(), "w")
            answers = []
            for cut, sync in random_batches(dice, events):
                result = (await store.append([cut], sync=sync))[0]
                answers.append((result.written, result.error and result.error["code"]))
            facts = [answers, *await facts_of(store, dice, len(events))]
            assert facts[1] == [event.line for event in events]
            cut = dice.randint(0, len(events))
            target = Stream("s1", "copy")
            await store.fork(MAIN, cut, header(target), "f")
            facts.append(await all_lines(store, target))
            assert facts[-1] == [event.line for event in events[:cut]]
            report = await store.verify(target)
            facts.append((report.ok, report.events, report.epoch))
            facts.append([row.stream for row in await store.list_logs()])
            await store.close_writer(MAIN, 1, "w")
            await store.close()
            again = await open_store_for_writing(home, options)
            loaded = await again.load(MAIN, is_live=False)
            facts.append((loaded.next_seq, _untimed(loaded.closers), loaded.cut, loaded.epoch))
            facts.append([json.loads(text)["type"] for text in await all_lines(again)])
            assert (await again.verify(MAIN)).ok
            await again.close()
            told.append(facts)
        for (backend, compression), facts in zip(BACKENDS[1:], told[1:], strict=True):
            assert facts == told[0], (round_, backend, compression)


async def test_a_stale_append_by_a_second_connection_is_refused_without_damage(tmp_path: Path) -> None:
    """Two processes that both believe to have the log: the database itself decides, inside its transaction."""
    from kimi_ray.store.sqlite.appending import append_batches
    from tests.unit.store_sqlite.sqlite_home import SqliteHome

    home = SqliteHome(tmp_path / "home", syncs=False)
    store = await home.open()
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_writer(header(), "old")
    lines = [line(seq, text=f"n{seq}") for seq in range(6)]

    async def behind_its_back(*batches: Batch) -> list[Any]:
        """What another process would commit that missed every claim."""
        file = str(home.database())
        shard = type(store._shards[0])(
            store._shards[0].file,
            store._shards[0]._fs,
            store._shards[0]._directories,
            "none",
            "w",
            Reserve(RealFs(), "", size=0),
            sync_interval_s=1,
        )
        try:
            return await shard.transactions.run(lambda c: append_batches(c, file, list(batches)))
        finally:
            await shard.close()

    assert (await store.append([batch(lines[:3], 0, nonce="old")], sync=True))[0].error is None
    assert await behind_its_back(batch(lines[3:5], 3, nonce="old")) == [5], "the same grant: the log goes on"
    answer = (await store.append([batch([lines[3], line(4, text="mine")], 3, nonce="old")], sync=True))[0]
    assert answer.error is not None and answer.error["code"] == "store.conflict"
    assert (await store.append([batch(lines[3:6], 3, nonce="old")], sync=True))[0].written == 6
    await store.open_writer(Stream("s1", "main"), "new")
    stale = await behind_its_back(batch([line(6)], 6, nonce="old"), batch([line(9)], 9, epoch=2, nonce="new"))
    assert [error.code for error in stale if isinstance(error, KimiRayError)] == ["store.fenced", "store.gap"]
    assert await all_lines(store) == lines
    assert (await store.verify(MAIN)).ok
    await store.close()
