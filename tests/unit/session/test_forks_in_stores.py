"""Forks through real stores: copied by a backend, verified, read back, forked again; and fixture logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_ray.exchange.dsh.importer import import_sessions
from kimi_ray.session import ColdReader, compare_sessions, parse_fork_point, plan_fork
from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.open import open_store
from kimi_ray.store.seam import Batch, LogCopy, SessionCopy, Store, StoreOptions, Stream
from tests.unit.session.trees import NOW, MemoryHome, Tree, check_fork, grown, places, script_of

BACKENDS = [("jsonl", "none"), ("jsonl", "zstd"), ("sqlite", "none")]
FIXTURES = Path(__file__).parents[2] / "fixtures" / "dsh"
WORKSPACE = "wd_x_0123456789ab"


async def put(store: Store, tree: Tree) -> None:
    """The logs of a tree into a store, in a few batches each, as its writers would."""
    grant = await store.open_session(tree.session_id, "n", workspace_id=WORKSPACE)
    for agent_id in tree.lives:
        stream = tree.stream(agent_id)
        lines = tree.home.lines[stream]
        epoch = (await store.open_writer(tree.home.headers[stream], "w")).epoch
        for first in range(0, len(lines), 13):
            rows = [line + b"\n" for line in lines[first : first + 13]]
            sizes = tuple(map(len, rows))
            batch = Batch(stream, epoch, "w", first, b"".join(rows), sizes, (1,) * len(rows))
            (answer,) = await store.append([batch], sync=False)
            assert answer.error is None, answer
        await store.close_writer(stream, epoch, "w")
    await store.write_document(tree.session_id, {"title": "t"}, grant=grant.grant, nonce="n", revision=0)


async def publish(store: Store, group: str, sessions: dict[str, tuple[LogCopy, ...]]) -> None:
    await store.begin_publication(group, dict.fromkeys(sessions, WORKSPACE))
    for session_id, logs in sessions.items():
        await store.copy_session(group, SessionCopy(session_id, WORKSPACE, {"title": session_id}, logs))
    await store.publish(group)


async def stored(home: Path, session_id: str) -> MemoryHome:
    """A session of a home in memory, as a reader beside the writer sees it."""
    reader, found = open_store(home), MemoryHome()
    for log in await reader.list(session_id):
        assert log.header is not None, log
        found.headers[log.stream] = log.header
        found.lines[log.stream] = list((await reader.read_from(log.stream, 0, 1 << 20, 1 << 30)).lines)
    return found


@pytest.mark.parametrize(("backend", "compression"), BACKENDS)
async def test_a_tree_forked_and_forked_again(tmp_path: Path, backend: str, compression: str) -> None:
    tree = grown(script_of(11, 180))
    store = await open_store_for_writing(
        str(tmp_path), StoreOptions(backend=backend, compression=compression, durability="none")
    )
    try:
        await put(store, tree)
        reader = ColdReader(open_store(tmp_path))
        points = [*places(tree.home, tree.stream()), None]
        assert len(tree.lives) > 5 and len(points) > 5
        copies: dict[str, tuple[LogCopy, ...]] = {}
        for number, at in enumerate(points):
            plan = await plan_fork(reader, tree.stream(), parse_fork_point(at), now=NOW)
            assert plan == await plan_fork(tree.home, tree.stream(), parse_fork_point(at), now=NOW)
            check_fork(tree.home, plan, f"expected-{number}", plan.main.cut)
            copies[f"fork-{number}"] = plan.for_target(f"fork-{number}", group="g", index=number, seed=number)
        await publish(store, "all", copies)
        for number in range(len(points)):
            found = await stored(tmp_path, f"fork-{number}")
            assert len(found.headers) == len(copies[f"fork-{number}"])
            for stream, lines in found.lines.items():
                assert lines == tree.home.lines[Stream(f"expected-{number}", stream.agent_id)]
                report = await store.verify(stream)
                assert report.ok and report.events == len(lines), report
        last = len(points) - 1
        again = await plan_fork(reader, Stream(f"fork-{last}", "main"), None, now=NOW)
        await publish(store, "again", {"again": again.for_target("again", seed=last)})
        found = await compare_sessions(reader, Stream(f"fork-{last}", "main"), Stream("again", "main"))
        assert [one for one in found.differences if one.area != "agents"] == []
        assert found.agents == len(again.logs)
    finally:
        await store.close()


async def test_a_source_that_grows_between_plan_and_copy(tmp_path: Path) -> None:
    tree = grown(script_of(3, 120))
    store = await open_store_for_writing(str(tmp_path), StoreOptions(durability="none"))
    try:
        await put(store, tree)
        reader = ColdReader(open_store(tmp_path))
        plan = await plan_fork(reader, tree.stream(), None, now=NOW)
        end = len(tree.home.lines[tree.stream()])
        grant = await store.open_writer(tree.stream(), "later")
        line = b'{"seq":%d,"time":1,"type":"note/added","data":{"text":"later"}}\n' % end
        (answer,) = await store.append(
            [Batch(tree.stream(), grant.epoch, "later", end, line, (len(line),), (1,))], sync=True
        )
        assert answer.error is None
        await publish(store, "g", {"fork": plan.for_target("fork")})
        lines = (await stored(tmp_path, "fork")).lines[Stream("fork", "main")]
        assert lines == [*tree.home.lines[tree.stream()], *plan.main.tail]
    finally:
        await store.close()


@pytest.mark.parametrize("fixture", ["jsonl-none-full", "jsonl-none-crash-kill-after-flush", "sqlite-full"])
async def test_all_points_of_the_fixture_logs(tmp_path: Path, fixture: str) -> None:
    """Another program's sessions: every turn, every step, before every turn."""
    store = await open_store_for_writing(str(tmp_path), StoreOptions(durability="none"))
    try:
        found = [one async for one in import_sessions(store, str(FIXTURES / fixture))]
    finally:
        await store.close()
    names = [one.session_id for one in found if one.outcome == "imported"]
    assert names
    points = 0
    for session_id in names:
        assert session_id is not None
        home = await stored(tmp_path, session_id)
        source = Stream(session_id, "main")
        for number, (at, cut) in enumerate(places(home, source).items()):
            points += 1
            plan = await plan_fork(home, source, parse_fork_point(at), now=NOW)
            assert plan.main.bind is not None, "an imported header says how"
            check_fork(home, plan, f"{session_id}-{number}", cut)
        for event in home.events(source):
            if event.type == "turn/start":
                plan = await plan_fork(home, source, parse_fork_point(f"^{event.data['turn']}"), now=NOW)
                check_fork(home, plan, f"{session_id}-before-{event.seq}", plan.main.cut)
                assert home.messages(plan.main.source, plan.main.cut) == home.messages(source, event.seq)
    assert points > 1
