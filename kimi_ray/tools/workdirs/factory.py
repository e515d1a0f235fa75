"""Directories that a user's function makes."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import ToolError
from kimi_ray.named_code import CannotLoadError, load_named
from kimi_ray.tools.workdirs.spec import invalid
from kimi_ray.user_threads import call_in_thread, raisable

FACTORY_S = 600.0
_CANCEL_S = 5.0
_THREAD = "workdir-factory"

Leave = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class FactoryContext:
    """For whom a factory makes a directory.

    ``attempt`` counts from 1; ``seed`` is the rollout's, ``item`` what it works on (also the factory's first argument).
    ``base_dir`` is an empty private directory of this agent: what is made in it goes with the agent.
    """

    session_id: str
    agent_id: str
    seed: int | None = None
    item: Any = None
    attempt: int = 1
    base_dir: str = ""


def load_factory(reference: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names.

    Raises:
        ToolError: ``workdir.invalid`` saying why it cannot be had.
    """
    try:
        found = load_named(reference)
    except CannotLoadError as error:
        hint = error.hint or "the module must be importable here and on the nodes where agents work"
        raise invalid(f"factory:{reference}", error.why, hint=hint) from error
    if not callable(found):
        what = f"{reference.partition(':')[2]} is not a function"
        raise invalid(f"factory:{reference}", what, hint="name a function of (item, ctx)")
    return found


async def call_factory(reference: str, context: FactoryContext, timeout_s: float | None) -> tuple[str, Leave | None]:
    """Let a factory make a directory.

    A function that is not ``async`` runs in a thread. It cannot be interrupted: one that takes too long is left alone,
    and if it ends later what it made is released.

    Returns:
        The directory's path, absolute, and how to release it (None: nothing to do).

    Raises:
        ToolError: ``workdir.invalid``; ``workdir.failed`` naming the function and the cause.
    """
    bound_s = FACTORY_S if timeout_s is None else timeout_s
    entering = _Entering(reference, context, bound_s)
    task = asyncio.create_task(entering.enter(), name=f"workdir-{reference}")
    try:
        done, _ = await asyncio.wait({task}, timeout=bound_s)
    except asyncio.CancelledError:
        await _abandon(entering, task)
        raise
    if not done:
        await _abandon(entering, task)
        raise _failed(reference, f"it took longer than {bound_s:g} s", context)
    path = task.result()
    try:
        place = _directory_of(path, reference, context)
    except ToolError:
        if entering.leave is not None:
            await entering.leave()
        raise
    return place, entering.leave


async def _abandon(entering: _Entering, task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=_CANCEL_S)
    if task.done() and not task.cancelled() and task.exception() is None and entering.leave is not None:
        await entering.leave()


class _Entering:
    """One call of a factory, up to the moment at which its directory is there."""

    def __init__(self, reference: str, context: FactoryContext, timeout_s: float) -> None:
        self._reference = reference
        self._context = context
        self._timeout_s = timeout_s
        self.leave: Leave | None = None

    async def enter(self) -> Any:
        """The path, however the function gives it."""
        try:
            function = await in_thread(load_factory, self._reference)
            call = (self._context.item, self._context)
            if inspect.isasyncgenfunction(function):
                return await self._enter_async(asynccontextmanager(function)(*call))
            if inspect.iscoroutinefunction(function):
                return await self._entered(await function(*call))
            if inspect.isgeneratorfunction(function):
                return await self._enter_plain(lambda: contextmanager(function)(*call))
            made: list[Any] = []
            result = await in_thread(self._call, function, made, late=lambda: _exit(made))
            return await self._entered(result, made)
        except BaseException as error:
            if ends_this_task(error) or isinstance(error, ToolError):
                raise
            raise _failed(self._reference, f"{type(error).__name__}: {error}", self._context) from error

    def _call(self, function: Callable[..., Any], made: list[Any]) -> Any:
        result = function(self._context.item, self._context)
        if not _is_path(result) and hasattr(result, "__enter__"):
            path = result.__enter__()
            made.append(result)
            return path
        return result

    async def _entered(self, result: Any, made: list[Any] | None = None) -> Any:
        while inspect.isawaitable(result):
            result = await result
        if made:
            self.leave = self._leaving(made[0].__exit__)
            return result
        if _is_path(result):
            return result
        if hasattr(result, "__aenter__"):
            return await self._enter_async(result)
        if hasattr(result, "__enter__"):
            return await self._enter_plain(lambda: result)
        return result

    async def _enter_async(self, manager: Any) -> Any:
        path = await manager.__aenter__()

        async def leave() -> None:
            await self._bounded(manager.__aexit__(None, None, None))

        self.leave = leave
        return path

    async def _enter_plain(self, make: Callable[[], Any]) -> Any:
        made: list[Any] = []

        def work() -> Any:
            manager = make()
            path = manager.__enter__()
            made.append(manager)
            return path

        path = await in_thread(work, late=lambda: _exit(made))
        self.leave = self._leaving(made[0].__exit__)
        return path

    def _leaving(self, leave: Callable[..., Any]) -> Leave:
        async def leaving() -> None:
            await self._bounded(in_thread(leave, None, None, None))

        return leaving

    async def _bounded(self, work: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await work
        except BaseException as error:
            if ends_this_task(error):
                raise
            why = f"{type(error).__name__}: {error}"
            raise _failed(self._reference, f"what it made could not be released: {why}", self._context) from error


def _exit(made: list[Any]) -> None:
    for manager in made:
        manager.__exit__(None, None, None)


async def in_thread(function: Callable[..., Any], *arguments: Any, late: Callable[[], None] | None = None) -> Any:
    """Run in a thread; ``late`` is run in another one when the function ends after nobody waits for it any more."""
    ended = call_in_thread(partial(function, *arguments), _THREAD)
    try:
        failed, result = await asyncio.shield(ended)
    except asyncio.CancelledError:
        if late is not None:
            ended.add_done_callback(lambda _: call_in_thread(late, _THREAD))
        raise
    if failed is None:
        return result
    raise raisable(failed)


def _is_path(result: Any) -> bool:
    return isinstance(result, str | os.PathLike)


def _directory_of(result: Any, reference: str, context: FactoryContext) -> str:
    if not _is_path(result):
        raise _failed(reference, f"it gave {type(result).__name__}, not the path of a directory", context)
    path = os.fsdecode(cast("os.PathLike[str]", result))
    shown = path.encode(errors="replace").decode()
    if "\0" in path or shown != path:
        raise _failed(reference, f"no directory has the name {shown!r}", context)
    place = os.path.realpath(os.path.join(context.base_dir, path))
    if not os.path.isdir(place):
        raise _failed(reference, f"it gave {place}, which is not a directory", context)
    return place


def _failed(reference: str, why: str, context: FactoryContext) -> ToolError:
    return ToolError(
        f"the workdir factory {reference} failed for {context.session_id}/{context.agent_id}: {why}",
        code="workdir.failed",
        hint="it is called with the item and a FactoryContext, and gives the path of a directory",
        details={"factory": reference, "session_id": context.session_id, "agent_id": context.agent_id, "reason": why},
    )
