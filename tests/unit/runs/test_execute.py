"""A run's directory as a place for rows: what is given up in the middle is neither half done nor left open."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.agent.profiles import resolve_profile
from kimi_ray.errors import RunError
from kimi_ray.runs import RunDirectory, SwarmSettings, read_attempts
from kimi_ray.runs import execute as execute_module
from kimi_ray.runs.execute import RunSink, open_run, reopen_run
from kimi_ray.runs.plan import RunPlan, plan_run
from tests.unit.runs.test_run_directory import MANIFEST, attempt


class Model:
    name = "m"
    settings = type("Settings", (), {"price": None})()


def plan() -> RunPlan:
    return plan_run("Do {{item}}", ["a", "b"], SwarmSettings(profile=resolve_profile("bare")), run_id="r", seed=1)


async def opened(out: Path) -> RunSink:
    return await open_run(plan(), out, arguments={}, config={}, model=Model(), cwd=out.parent)


async def test_a_close_waits_for_a_write_that_was_given_up(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", MANIFEST)
    sink = RunSink(directory)
    began, goes_on, order = threading.Event(), threading.Event(), list[str]()
    append, close = directory.append, directory.close

    def slowly(*args: Any) -> None:
        began.set()
        assert goes_on.wait(10)
        append(*args)
        order.append("written")

    def closed() -> None:
        order.append("closed")
        close()

    directory.append, directory.close = slowly, closed  # type: ignore[method-assign]
    writing = asyncio.create_task(sink.write([], [attempt()]))
    assert await asyncio.to_thread(began.wait, 10)
    writing.cancel()
    await asyncio.wait([writing])
    closing = asyncio.create_task(sink.close())
    await asyncio.sleep(0.05)
    goes_on.set()
    await asyncio.wait_for(closing, 10)
    assert order == ["written", "closed"]
    assert len(read_attempts(tmp_path / "run")) == 1


@pytest.mark.parametrize("again", [False, True])
async def test_a_run_whose_opening_is_given_up_is_not_in_use(
    tmp_path: Path, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    if again:
        await (await opened(out)).close()
    began, goes_on = threading.Event(), threading.Event()
    real = RunDirectory.open if again else RunDirectory.create

    def slowly(*args: Any, **said: Any) -> RunDirectory:
        began.set()
        assert goes_on.wait(10)
        return real(*args, **said)

    monkeypatch.setattr(execute_module.RunDirectory, "open" if again else "create", slowly)
    opening = asyncio.create_task(reopen_run(plan(), out) if again else opened(out))  # type: ignore[arg-type]
    assert await asyncio.to_thread(began.wait, 10)
    opening.cancel()
    await asyncio.wait([opening])
    goes_on.set()
    monkeypatch.undo()
    async with asyncio.timeout(10):
        while True:
            try:
                _, sink = await reopen_run(plan(), out)
                break
            except RunError as error:
                assert error.code in ("run.in_use", "run.not_found")
                await asyncio.sleep(0.01)
    await sink.close()
