"""Directories that a user's function makes: every way of giving one, every way of failing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import ToolError
from kimi_ray.settings import Workdir
from kimi_ray.tools import FactoryContext, prepare_workdir
from kimi_ray.tools.workdirs import check_factory

MODULE = "kimi_ray_test_factories"


@pytest.fixture
def made() -> Any:
    module: Any = types.ModuleType(MODULE)
    module.calls = []
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


async def prepare(tmp_path: Path, function: Any, **rest: Any) -> Any:
    sys.modules[MODULE].f = function  # type: ignore[attr-defined]
    spec = Workdir.factory(f"{MODULE}:f", timeout_s=rest.pop("timeout_s", None))
    context = FactoryContext("s", "agent-1", 7, {"word": "x"}, 2)
    return await prepare_workdir(spec, base_dir=str(tmp_path / "w"), name="s.agent-1.1", context=context, **rest)


def left(tmp_path: Path) -> list[str]:
    return os.listdir(tmp_path / "w") if (tmp_path / "w").exists() else []


def ways(calls: list[Any]) -> dict[str, Any]:
    def plain(item: Any, ctx: FactoryContext) -> Any:
        calls.append((item, ctx, threading.current_thread() is threading.main_thread()))
        path = Path(ctx.base_dir, "tree")
        path.mkdir()
        return path

    async def coroutine(item: Any, ctx: FactoryContext) -> Any:
        return plain(item, ctx)

    def generator(item: Any, ctx: FactoryContext) -> Any:
        yield plain(item, ctx)
        calls.append("released")

    async def async_generator(item: Any, ctx: FactoryContext) -> Any:
        yield plain(item, ctx)
        calls.append("released")

    return {
        "plain": plain,
        "coroutine": coroutine,
        "generator": generator,
        "async generator": async_generator,
        "context manager": contextlib.contextmanager(generator),
        "async context manager": contextlib.asynccontextmanager(async_generator),
        "returns one": lambda item, ctx: contextlib.contextmanager(generator)(item, ctx),
        "returns an async one": lambda item, ctx: contextlib.asynccontextmanager(async_generator)(item, ctx),
        "returns a coroutine": lambda item, ctx: coroutine(item, ctx),
        "relative": lambda item, ctx: plain(item, ctx).name,
    }


@pytest.mark.parametrize("way", ways([]))
async def test_every_way_of_giving_a_directory(tmp_path: Path, made: Any, way: str) -> None:
    prepared = await prepare(tmp_path, ways(made.calls)[way])
    assert prepared.path == str(tmp_path / "w" / "s.agent-1.1" / "tree") and prepared.kind == "factory"
    item, ctx, on_loop = made.calls[0]
    assert item == {"word": "x"} == ctx.item
    assert (ctx.session_id, ctx.agent_id, ctx.seed, ctx.attempt) == ("s", "agent-1", 7, 2)
    assert on_loop == (way in ("coroutine", "async generator", "async context manager", "returns an async one",
                               "returns a coroutine"))  # fmt: skip
    assert len(made.calls) == 1
    await prepared.release()
    assert left(tmp_path) == []
    releases = "generator" in way or "context" in way or "one" in way
    assert made.calls[1:] == (["released"] if releases else [])


async def test_kept_is_left_even_so(tmp_path: Path, made: Any) -> None:
    prepared = await prepare(tmp_path, ways(made.calls)["generator"], keep=True)
    await prepared.release()
    assert made.calls[1:] == ["released"] and Path(prepared.path).is_dir()


async def test_another_place_is_the_functions_own(tmp_path: Path, made: Any) -> None:
    (tmp_path / "mine").mkdir()
    prepared = await prepare(tmp_path, lambda item, ctx: str(tmp_path / "mine"))
    assert prepared.path == str(tmp_path / "mine") and not prepared.created
    await prepared.release()
    assert (tmp_path / "mine").is_dir() and left(tmp_path) == []
    temporary = await prepare(tmp_path, lambda item, ctx: tempfile.TemporaryDirectory(dir=tmp_path))
    assert Path(temporary.path).is_dir()
    await temporary.release()
    assert not Path(temporary.path).exists()


async def test_a_function_may_remove_the_directory_that_it_does_not_need(tmp_path: Path, made: Any) -> None:
    def elsewhere(item: Any, ctx: FactoryContext) -> str:
        os.rmdir(ctx.base_dir)
        return str(tmp_path)

    found = await prepare(tmp_path, elsewhere)
    assert (found.path, found.created) == (str(tmp_path), False) and left(tmp_path) == []
    await found.release()
    assert tmp_path.is_dir()


def boom(item: Any, ctx: Any) -> Any:
    Path(ctx.base_dir, "half").mkdir()
    raise ValueError("no space on the moon")


def exits(item: Any, ctx: Any) -> Any:
    sys.exit(3)


async def cancels(item: Any, ctx: Any) -> Any:
    raise asyncio.CancelledError


def broken_generator(item: Any, ctx: Any) -> Any:
    return
    yield


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (boom, "ValueError: no space on the moon"),
        (exits, "SystemExit"),
        (cancels, "CancelledError"),
        (broken_generator, "didn't yield"),
        (lambda item, ctx: None, "NoneType"),
        (lambda item, ctx: ctx.base_dir + "/missing", "not a directory"),
        (lambda item, ctx: "a\0b", "no directory"),
        (lambda item, ctx: "a\ud800b", "no directory"),
        (lambda: "x", "TypeError"),
        (lambda item, ctx: next(iter(())), "StopIteration"),
    ],
)
async def test_failures_name_function_and_cause_and_leave_nothing(
    tmp_path: Path, made: Any, function: Any, cause: str
) -> None:
    with pytest.raises(ToolError) as caught:
        await prepare(tmp_path, function)
    error = caught.value
    assert error.code == "workdir.failed" and f"{MODULE}:f" in error.message and cause in error.message
    assert error.hint and "s/agent-1" in error.message
    assert left(tmp_path) == []


@pytest.mark.parametrize("kind", ["thread", "coroutine", "generator"])
async def test_a_time_out(tmp_path: Path, made: Any, kind: str) -> None:
    go_on, ended = threading.Event(), threading.Event()

    def thread(item: Any, ctx: Any) -> Any:
        go_on.wait(10)
        return ctx.base_dir

    def generator(item: Any, ctx: Any) -> Any:
        go_on.wait(10)
        yield str(tmp_path)
        ended.set()

    async def coroutine(item: Any, ctx: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ToolError) as caught:
        await prepare(tmp_path, {"thread": thread, "generator": generator, "coroutine": coroutine}[kind], timeout_s=0.1)
    assert caught.value.code == "workdir.failed" and "0.1 s" in caught.value.message
    assert left(tmp_path) == []
    go_on.set()
    if kind != "thread":  # what comes too late is released all the same
        assert await asyncio.to_thread(ended.wait, 10)


async def test_cancelled(tmp_path: Path, made: Any) -> None:
    entered, ended = asyncio.Event(), asyncio.Event()

    async def slow(item: Any, ctx: Any) -> Any:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(prepare(tmp_path, slow))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert ended.is_set() and left(tmp_path) == []


async def test_a_release_that_fails_is_told_and_what_is_private_goes(tmp_path: Path, made: Any) -> None:
    def bad(item: Any, ctx: Any) -> Any:
        yield ctx.base_dir
        raise OSError("busy")

    prepared = await prepare(tmp_path, bad)
    with pytest.raises(ToolError) as caught:
        await prepared.release()
    assert caught.value.code == "workdir.failed" and "busy" in caught.value.message
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    "reference", ["no_such_module_here:f", f"{MODULE}:missing", f"{MODULE}:calls", "json", ":f", "json:"]
)
async def test_what_cannot_be_had_is_told(made: Any, tmp_path: Path, reference: str) -> None:
    with pytest.raises(ToolError) as caught:
        check_factory(Workdir.factory(reference))
    assert caught.value.code == "workdir.invalid" and caught.value.hint
    with pytest.raises(ToolError) as caught:
        await prepare_workdir(Workdir.factory(reference), base_dir=str(tmp_path / "w"), name="n")
    assert caught.value.code == "workdir.invalid" and left(tmp_path) == []


def test_a_name_with_placeholders_waits_for_its_item() -> None:
    check_factory(Workdir.factory("{{module}}:f"))
    check_factory(Workdir.copy("/nowhere"))
