"""Tools from typed Python functions."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast, overload

from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import ToolError
from kimi_ray.events import thaw
from kimi_ray.named_code import CannotLoadError, load_named
from kimi_ray.tools.contract import Accesses, Tool, ToolContext, ToolOutput
from kimi_ray.tools.results import error_output, value_output
from kimi_ray.tools.schema import validate
from kimi_ray.tools.signature import Function, read_signature
from kimi_ray.user_threads import call_in_thread, raisable

AccessRule = Accesses | Callable[[dict[str, Any]], Accesses] | None


class FunctionTool:
    """A typed function as a tool.

    A parameter annotated ``ToolContext`` is given the call's context and is not part of the schema. A plain function
    runs in a thread of this tool (it cannot be interrupted: it should look at ``context.cancelled``), an ``async``
    one on the loop. What it returns: see ``results.value_output``; an exception becomes an error result.

    Args:
        function: Every parameter annotated with a type that pydantic knows; no ``*args``, no ``**kwargs``.
        name: What the model calls it; None takes the function's name.
        description: What the model reads; None takes the docstring up to its first section.
        accesses: What a call touches, or a function of its arguments. None: nothing, or everything when it writes.
        writes: Whether a call may change the working directory.
        max_threads: Calls of a plain function at a time.

    Raises:
        ToolError: ``tool.bad_signature``.
    """

    def __init__(
        self,
        function: Function,
        *,
        name: str | None = None,
        description: str | None = None,
        accesses: AccessRule = None,
        writes: bool = False,
        max_threads: int = 8,
    ) -> None:
        found = read_signature(function, name)
        self.function = function
        self.name = found.name
        self.description = description if description is not None else found.description
        self.parameters: dict[str, Any] = found.schema
        self.writes = writes
        self._accesses = accesses
        self._max_threads = max_threads
        self._signature = found
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places: asyncio.Semaphore | None = None
        self._given = (function, name, description, accesses, writes, max_threads)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, for Python callers."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"FunctionTool({self.name})"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        # a decorated function's name leads to the tool, so only its import form can be found again by name
        reference = _importable(self)
        return (load_tool, (reference,)) if reference is not None else (_rebuild, self._given)

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        """See ``Tool.accesses``."""
        rule = self._accesses
        if rule is None:
            return Accesses.all() if self.writes else Accesses.none()
        if isinstance(rule, Accesses):
            return rule
        try:
            return rule(thaw(arguments))
        except BaseException as error:
            raise ToolError(
                f"the access rule of {self.name} failed: {type(error).__name__}: {error}",
                code="tool.user_code",
                details={"tool": self.name, "exception": type(error).__name__},
            ) from error

    def check(self, arguments: Any) -> dict[str, Any]:
        """See ``Tool.check``: the JSON that came, with the defaults filled in that JSON can hold."""
        validate(self._signature.model, arguments, tool=self.name)
        return {**self._signature.defaults, **(arguments or {})}

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        """See ``Tool.run``."""
        try:
            values = self._values(arguments, context)
            if self._signature.is_async:
                result = await self.function(**values)
            else:
                result = await self._in_thread(values)
            while inspect.isawaitable(result):
                result = await result
            return value_output(result, tool=self.name)
        except BaseException as error:
            if ends_this_task(error):
                raise
            return error_output(error)

    def _values(self, arguments: dict[str, Any], context: ToolContext) -> dict[str, Any]:
        # a copy: what the function does to its arguments must not reach the log's
        model = validate(self._signature.model, thaw(arguments), tool=self.name)
        values = {name: getattr(model, field) for name, field in self._signature.fields.items()}
        for name in self._signature.context:
            values[name] = context
        return values

    async def _in_thread(self, values: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        if self._places is None or self._loop is not loop:
            self._loop, self._places = loop, asyncio.Semaphore(self._max_threads)
        places = self._places
        await places.acquire()
        try:
            ended = call_in_thread(partial(self.function, **values), f"tool-{self.name}")
        except RuntimeError:
            places.release()
            raise
        # only then: a thread that nobody waits for any more still counts
        ended.add_done_callback(lambda _: places.release())
        failed, outcome = await asyncio.shield(ended)
        if failed is not None:
            raise raisable(failed)
        return outcome


@overload
def tool(function: Function, /) -> FunctionTool: ...
@overload
def tool(
    function: Function,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    accesses: AccessRule = None,
    writes: bool = False,
) -> FunctionTool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    accesses: AccessRule = None,
    writes: bool = False,
) -> Callable[[Function], FunctionTool]: ...


def tool(
    function: Function | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    accesses: AccessRule = None,
    writes: bool = False,
) -> FunctionTool | Callable[[Function], FunctionTool]:
    """Make a tool of a typed function: ``@tool``, ``@tool(name=...)`` or ``tool(function, ...)``.

    See ``FunctionTool`` for the arguments.

    Raises:
        ToolError: ``tool.bad_signature``.
    """

    def make(given: Function) -> FunctionTool:
        return FunctionTool(given, name=name, description=description, accesses=accesses, writes=writes)

    return make if function is None else make(function)


def as_tool(thing: Any) -> Tool:
    """A tool from whatever a user may give: a tool, a typed function, or ``"package.module:function"``.

    Raises:
        ToolError: ``tool.bad_signature``, ``tool.not_importable``.
    """
    if isinstance(thing, str):
        return load_tool(thing)
    if all(hasattr(thing, part) for part in ("name", "description", "parameters", "check", "run", "accesses")):
        return cast("Tool", thing)
    return FunctionTool(thing)


def load_tool(reference: str) -> Tool:
    """The tool named ``"package.module:function"``: a function, or a tool made of one.

    Raises:
        ToolError: ``tool.not_importable``, with the import's own error; ``tool.bad_signature``.
    """
    found = load_code(reference, "tool")
    if not callable(found):
        what = f"{reference.partition(':')[2]} is a {type(found).__name__}, not a function or a tool"
        raise _not_importable(reference, "tool", what)
    return as_tool(found)


def load_code(reference: str, kind: str) -> Any:
    """What the name of a user's code means.

    Args:
        reference: ``package.module:attribute``.
        kind: What it should be, for messages: ``tool``, ``rollout function``.

    Raises:
        ToolError: ``tool.not_importable`` {reference, reason}, with the import's own error.
    """
    try:
        return load_named(reference)
    except CannotLoadError as error:
        raise _not_importable(reference, kind, error.why, error.hint) from error


def _not_importable(reference: str, kind: str, why: str, hint: str | None = None) -> ToolError:
    return ToolError(
        f"the {kind} {reference!r} cannot be imported: {why}",
        code="tool.not_importable",
        hint=hint
        or "write package.module:function; the module must be importable on every node: install it there, or pass it"
        " by runtime_env",
        details={"reference": reference, "reason": why},
    )


def _rebuild(
    function: Function,
    name: str | None,
    description: str | None,
    accesses: AccessRule,
    writes: bool,
    max_threads: int,
) -> FunctionTool:
    return FunctionTool(
        function, name=name, description=description, accesses=accesses, writes=writes, max_threads=max_threads
    )


def _importable(made: FunctionTool) -> str | None:
    module_name = str(getattr(made.function, "__module__", ""))
    path = str(getattr(made.function, "__qualname__", "<none>"))
    if module_name == "__main__" or "<" in path:
        return None
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module_name}:{path}" if found is made else None
