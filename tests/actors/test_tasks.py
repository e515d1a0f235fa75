"""Background tasks on Ray: their processes die with their host, and the model hears of it once."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kimi_ray import Profile, Runtime, Session
from kimi_ray.config import RuntimeConfig
from tests.actors.conftest import until
from tests.actors.faults import counts, kill, read_session
from tests.actors.task_models import WORKER
from tests.actors.test_processes import assert_all_gone, living

PROFILE = Profile(name="worker", tools=("Bash", "TaskList", "TaskOutput", "TaskStop"))


@pytest.fixture
async def runtime(config: RuntimeConfig) -> AsyncIterator[Runtime]:
    async with Runtime.connect(config=config) as runtime:
        yield runtime


async def ask(session: Session, text: str) -> str:
    return (await (await session.main.submit(text)).result(60)).raise_for_state().text


async def test_a_task_ends_with_its_host_and_one_that_ends_wakes_its_agent(
    runtime: Runtime, config: RuntimeConfig, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    session = await runtime.workspace(work).create_session(model=WORKER, profile=PROFILE)
    assert await ask(session, "start until test -e go; do sleep 0.05; done; echo quick") == "told nothing"
    (work / "go").touch()

    async def woken() -> bool:
        return [event.type async for event in session.main.events()].count("turn/end") == 2

    await until(woken)
    await ask(
        session, "start echo $$ > pid.part && mv pid.part pid; (setsid sleep 600 & echo $! > daemon); exec sleep 600"
    )
    await until(lambda: written(work, "pid", "daemon"))
    pids = {int((work / name).read_text()) for name in ("pid", "daemon")}
    assert living(pids) == pids
    await session.flush()

    await kill(runtime, await session._link.call("find_agent", session.id, "main", group="control"))
    assert await ask(session, "and?") == "told completed,lost"
    assert_all_gone(pids, 20)
    assert await ask(session, "and now?") == "told completed,lost"

    await ask(session, "start echo $$ > third; exec sleep 600")
    await until(lambda: written(work, "third"))
    third = {int((work / "third").read_text())}
    await session.close()
    assert_all_gone(third, 5)
    (main,) = (await read_session(config.home, session.id)).values()
    found = counts(main)
    assert (found["task/started"], found["task/ended"], found["task/lost"]) == (3, 2, 1)
    assert [event.data["status"] for event in main if event.type == "task/ended"] == ["completed", "killed"]


async def written(work: Path, *names: str) -> bool:
    return all(os.path.exists(work / name) and (work / name).read_text().strip() for name in names)
