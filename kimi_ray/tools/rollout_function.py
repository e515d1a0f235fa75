"""A rollout function on its way to the agent that runs it: the user's code, which travels as the user's tools do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from kimi_ray.errors import RunError
from kimi_ray.tools.carried import CarriedTool
from kimi_ray.tools.contract import Accesses, Tool, ToolContext, ToolOutput
from kimi_ray.tools.function import load_code

Rollout = Callable[[Any], Any]
"""``async def rollout(ctx: RolloutContext) -> ...``, or a plain function, which runs in a thread."""


class RolloutFunction:
    """A rollout function in the shape of a tool, so that it is carried, checked and placed like one. No model sees it.

    Args:
        function: Takes a ``RolloutContext``.
        name: ``package.module:function``, for logs and messages.
    """

    writes = False
    parameters: dict[str, Any] = {}  # noqa: RUF012  the same nothing for all

    def __init__(self, function: Rollout, name: str) -> None:
        self.function = function
        self.name = name

    def __repr__(self) -> str:
        return f"RolloutFunction({self.name})"

    @property
    def description(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        """Not called: no model can."""
        raise NotImplementedError

    def check(self, arguments: Any) -> dict[str, Any]:
        """Not called: no model can."""
        raise NotImplementedError

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        """Not called: no model can."""
        raise NotImplementedError


def carried_rollout(thing: str | Rollout) -> CarriedTool:
    """A rollout function, fit to be sent: from the function itself, or from ``package.module:function``.

    Raises:
        ToolError: ``tool.not_importable``.
        RunError: ``swarm.bad_rollout`` for what cannot be called with one argument.
    """
    function = load_code(thing, "rollout function") if isinstance(thing, str) else thing
    name = thing if isinstance(thing, str) else _name_of(function)
    _check(function, name)
    return CarriedTool(cast("Tool", RolloutFunction(function, name)))


def _name_of(function: Any) -> str:
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}:{name}"


def _check(function: Any, name: str) -> None:
    if not callable(function):
        raise _bad(name, f"is a {type(function).__name__}, not a function")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise _bad(name, "is a generator")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # built in: only a call can tell
    try:
        signature.bind(None)
    except TypeError as error:
        raise _bad(name, f"cannot be called with one argument: {error}") from None


def _bad(name: str, why: str) -> RunError:
    return RunError(
        f"the rollout function {name} {why}",
        code="swarm.bad_rollout",
        hint="write async def rollout(ctx: kimi_ray.RolloutContext): ... and return what the row's output is to be",
        details={"rollout": name},
    )
