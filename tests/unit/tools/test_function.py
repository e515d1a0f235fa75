"""Tools from functions: signatures, arguments, results, failures, and the way to another process."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import datetime
import functools
import json
import math
import pickle
import subprocess
import sys
import threading
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from kimi_ray.errors import ToolError
from kimi_ray.events import freeze
from kimi_ray.tools import Accesses, FunctionTool, LocalEnvironment, ToolContext, ToolOutput, as_tool, load_tool, tool
from kimi_ray.tools.results import check_output


@pytest.fixture
def context() -> ToolContext:
    return ToolContext(LocalEnvironment(None), "session_1", "main", "call_1", asyncio.Event(), item={"x": 1})


async def call(made: FunctionTool, arguments: Any, context: ToolContext) -> ToolOutput:
    return await made.run(made.check(arguments), context)


class Color(Enum):
    RED = "red"


class Point(BaseModel):
    x: int
    y: int = 0


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


async def test_schema_comes_from_signature_and_docstring(context: ToolContext) -> None:
    @tool
    def lookup(
        title: str,
        limit: Annotated[int, Field(ge=1, le=9)] = 3,
        where: Literal["a", "b"] | None = None,
        points: list[Point] | None = None,
    ) -> str:
        """Find a thing.

        Two lines of it.

        Args:
            title: What it is called,
                in full.
            limit (int): How many.

        Returns:
            Not for the model.
        """
        return f"{title} {limit} {where} {points}"

    assert lookup.name == "lookup" and lookup.description == "Find a thing.\n\nTwo lines of it."
    schema = lookup.parameters
    assert schema["type"] == "object" and schema["required"] == ["title"] and schema["additionalProperties"] is False
    assert schema["properties"]["title"] == {"description": "What it is called, in full.", "type": "string"}
    assert schema["properties"]["limit"] == {
        "default": 3, "description": "How many.", "maximum": 9, "minimum": 1, "type": "integer"
    }  # fmt: skip
    assert schema["properties"]["where"] == {"enum": ["a", "b"], "type": "string"}
    assert "null" not in json.dumps(schema)
    output = await call(lookup, {"title": "t", "points": [{"x": 1}]}, context)
    assert output.content == "t 3 None [Point(x=1, y=0)]"
    assert lookup("direct") == "direct 3 None None"


async def test_context_is_given_and_not_in_the_schema(context: ToolContext) -> None:
    @tool(name="who", description="Says who.", writes=True)
    async def function(context: ToolContext, copy: int, schema: int = 1, _x: int = 2, model_dump: int = 3) -> Any:
        return [context.agent_id, context.item, copy, schema, _x, model_dump]

    assert set(function.parameters["properties"]) == {"copy", "schema", "_x", "model_dump"}
    assert (function.name, function.writes, function.accesses({})) == ("who", True, Accesses.all())
    output = await call(function, {"copy": 7}, context)
    assert json.loads(str(output.content)) == ["main", {"x": 1}, 7, 1, 2, 3]


async def test_defaults_are_filled_in_and_odd_ones_stay_the_functions_business(context: ToolContext) -> None:
    marker = object()

    @tool
    def odd(a: int = None, b: int = "auto", c: Any = marker, d: tuple[int, int] = (1, 2), e: Path = Path("x")) -> str:  # noqa: RUF013
        return f"{a} {b} {c is marker} {d} {e!r}"

    assert odd.check({}) == {"d": [1, 2], "e": "x"}
    assert (await call(odd, None, context)).content == "None auto True (1, 2) PosixPath('x')"
    assert (await call(odd, {"a": 1, "b": 2}, context)).content == "1 2 True (1, 2) PosixPath('x')"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "`n` is required"),
        ({"n": "x"}, "`n`: Input should be a valid integer"),
        ({"n": 1, "m": 2}, "`m` is not an argument"),
        ({"n": 1, "deep": [{"x": "no"}]}, "`deep[0].x`"),
        ("{broken", "not valid JSON"),
        ([1], "of type list"),
        ({"n": 1, "s": "\ud800"}, "surrogates"),
        ({"n": 1, "\ud800": 1}, "surrogates"),
    ],
)
async def test_bad_arguments_are_told_so_that_a_model_can_mend_them(arguments: Any, told: str) -> None:
    @tool
    def f(n: int, s: str = "", deep: list[Point] | None = None) -> str:
        return ""

    with pytest.raises(ToolError) as caught:
        f.check(arguments)
    assert caught.value.code == "tool.bad_arguments"
    assert told in caught.value.message and caught.value.hint == "f takes n, s?, deep?"
    json.dumps(caught.value.to_data(), ensure_ascii=False).encode()


def varargs(*args: int) -> str: ...
def kwargs(**kw: int) -> str: ...
def untyped(a) -> str: ...  # type: ignore[no-untyped-def]
def positional(a: int, /) -> str: ...
def unknown(a: NoSuchName) -> str: ...  # noqa: F821  # type: ignore[name-defined]
def unusable(a: threading.Lock) -> str: ...
def not_json(a: asyncio.Event) -> str: ...
def generates(a: int) -> Any:
    yield a


async def agenerates(a: int) -> Any:
    yield a


@pytest.mark.parametrize(
    "function",
    [varargs, kwargs, untyped, positional, unknown, unusable, not_json, generates, agenerates, lambda: "", 3, len],
)
def test_functions_that_cannot_be_tools_are_refused_by_name(function: Any) -> None:
    with pytest.raises(ToolError) as caught:
        FunctionTool(function)
    assert caught.value.code == "tool.bad_signature" and caught.value.hint


def test_names_no_server_takes_are_refused() -> None:
    def f(a: int) -> str: ...

    for name in ("a b", "é", "x" * 65, "a.b"):
        with pytest.raises(ToolError) as caught:
            FunctionTool(f, name=name)
        assert caught.value.code == "tool.bad_signature"


async def test_methods_partials_and_callable_objects(context: ToolContext) -> None:
    class Adder:
        def __init__(self, base: int) -> None:
            self.base = base

        def add(self, n: int) -> int:
            return self.base + n

        async def __call__(self, n: int) -> int:
            return self.base * n

    def power(n: int, exponent: int) -> int:
        return n**exponent

    assert (await call(FunctionTool(Adder(40).add), {"n": 2}, context)).content == "42"
    assert (await call(FunctionTool(Adder(40), name="mul"), {"n": 2}, context)).content == "80"
    square = FunctionTool(functools.partial(power, exponent=2), name="square")
    assert (await call(square, {"n": 5}, context)).content == "25"


@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("as it is\n", "as it is\n"),
        (None, "null"),
        ({"a": [1, 2.5, True, "é"]}, '{"a": [1, 2.5, true, "é"]}'),
        ((1, 2), "[1, 2]"),
        (Point(x=1), '{"x": 1, "y": 0}'),
        (Pair(Pair(1, 2), [Color.RED]), '{"left": {"left": 1, "right": 2}, "right": ["red"]}'),
        (datetime.date(2020, 1, 2), '"2020-01-02"'),
        (Path("a/b"), '"a/b"'),
        (10**30, str(10**30)),
    ],
)
async def test_results(value: Any, content: str, context: ToolContext) -> None:
    @tool
    def f() -> Any:
        return value

    output = await call(f, {}, context)
    assert output == ToolOutput(content)


async def test_a_tool_output_is_given_on_as_it_is(context: ToolContext) -> None:
    wanted = ToolOutput([{"type": "text", "text": "x"}], is_error=True, error_code="tool.mine", meta={"k": 1})

    @tool
    async def f() -> ToolOutput:
        return wanted

    assert await call(f, {}, context) == wanted


cyclic: list[Any] = []
cyclic.append(cyclic)


@pytest.mark.parametrize(
    ("value", "place", "found"),
    [
        ({"a": [1, {2, 3}]}, "the result['a'][1]", "builtins.set"),
        ({"a": math.nan}, "the result['a']", "nan"),
        ([math.inf], "the result[0]", "inf"),
        ({1: 2}, "the result", "key of type int"),
        (Pair(1, object()), "the result.right", "builtins.object"),
        (b"bytes", "the result", "builtins.bytes"),
        ("\ud800", "the result", "surrogate"),
        ({"k": "\udfff"}, "the result['k']", "surrogate"),
        (cyclic, "[0][0]", "cycle"),
        ([10**5000], "the result", "integer string conversion"),
        (ToolOutput(3), "content", "int"),  # type: ignore[arg-type]
        (ToolOutput(["x"]), "content", "block"),  # type: ignore[list-item]
        (ToolOutput("x", meta={"a": {1}}), "meta['a']", "builtins.set"),
    ],
)
async def test_a_result_json_cannot_hold_is_named_by_type_and_place(
    value: Any, place: str, found: str, context: ToolContext
) -> None:
    @tool
    def f() -> Any:
        return value

    output = await call(f, {}, context)
    assert output.is_error and output.error_code == "tool.bad_result"
    assert place in str(output.content) and found in str(output.content)
    json.dumps(output.meta, allow_nan=False, ensure_ascii=False).encode()


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (KeyError(), "KeyError"),
        (StopIteration(1), "StopIteration"),
        (SystemExit(2), "SystemExit: 2"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "CancelledError"),
        (Rude(), "Rude: (its message could not be made: RuntimeError)"),
        (ValueError("\ud800" + "x" * 9000), "ValueError: ?xxx"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_exceptions_are_results(error: BaseException, told: str, is_async: bool, context: ToolContext) -> None:
    def plain() -> str:
        raise error

    async def on_loop() -> str:
        raise error

    output = await asyncio.wait_for(call(FunctionTool(on_loop if is_async else plain), {}, context), 5)
    assert output.is_error and output.error_code == "tool.user_code"
    assert told in str(output.content) and len(str(output.content)) < 5000
    str(output.content).encode()


async def test_a_tool_error_keeps_its_code_and_loses_what_a_log_cannot_hold(context: ToolContext) -> None:
    @tool
    def f() -> str:
        raise ToolError("no such row", code="tool.no_row", hint="try another", details={"x": object()})

    output = await call(f, {}, context)
    assert (output.error_code, output.content) == ("tool.no_row", "no such row\nHint: try another")
    json.dumps(output.meta)


async def test_a_functions_own_cancelled_error_is_a_failure_but_ours_passes(context: ToolContext) -> None:
    @tool
    async def own() -> str:
        raise asyncio.CancelledError

    assert (await call(own, {}, context)).error_code == "tool.user_code"
    entered = asyncio.Event()

    @tool
    async def waits() -> str:
        entered.set()
        await asyncio.Event().wait()
        return ""

    task = asyncio.create_task(call(waits, {}, context))
    await asyncio.wait_for(entered.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_plain_functions_run_in_bounded_threads_with_the_callers_context(context: ToolContext) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("seen")
    lock = threading.Lock()
    state = {"now": 0, "most": 0}
    gate = threading.Barrier(2)

    def f() -> str:
        with lock:
            state["now"] += 1
            state["most"] = max(state["most"], state["now"])
        gate.wait(5)
        with lock:
            state["now"] -= 1
        assert threading.current_thread() is not threading.main_thread()
        return variable.get()

    made = FunctionTool(f, max_threads=2)
    outputs = await asyncio.gather(*(call(made, {}, context) for _ in range(6)))
    assert [output.content for output in outputs] == ["seen"] * 6 and state["most"] == 2


async def test_a_function_that_was_left_behind_still_counts(context: ToolContext) -> None:
    release = threading.Event()
    started = threading.Semaphore(0)

    def f() -> str:
        started.release()
        assert release.wait(10)
        return "done"

    made = FunctionTool(f, max_threads=1)
    first = asyncio.create_task(call(made, {}, context))
    assert await asyncio.to_thread(started.acquire, timeout=5)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(call(made, {}, context))
    assert not await asyncio.to_thread(started.acquire, timeout=0.05)
    release.set()
    assert (await asyncio.wait_for(second, 5)).content == "done"


def test_a_function_that_never_ends_does_not_keep_the_program(tmp_path: Path) -> None:
    script = """
import asyncio, threading
from kimi_ray.tools import LocalEnvironment, ToolContext, tool

@tool
def stuck() -> str:
    threading.Event().wait()
    return ""

async def main():
    context = ToolContext(LocalEnvironment(None), "s", "a", "c", asyncio.Event())
    try:
        await asyncio.wait_for(stuck.run({}, context), 0.05)
    except TimeoutError:
        print("left")

asyncio.run(main())
"""
    assert in_process(script, tmp_path).strip() == b"left"


def test_a_tool_serves_one_loop_after_another(context: ToolContext) -> None:
    barrier = threading.Barrier(2)

    def f() -> int:
        barrier.wait(5)
        return 1

    made = FunctionTool(f, max_threads=2)

    async def several() -> list[ToolOutput]:
        return list(await asyncio.gather(*(call(made, {}, context) for _ in range(6))))

    for _ in range(2):
        assert [output.content for output in asyncio.run(several())] == ["1"] * 6


async def test_a_function_cannot_change_the_arguments_that_were_logged(context: ToolContext) -> None:
    @tool
    def f(anything: Any) -> str:
        anything["list"].append(1)
        return "changed"

    arguments = freeze({"anything": {"list": []}})
    assert (await call(f, arguments, context)).content == "changed"
    assert arguments == {"anything": {"list": []}}
    plain = {"anything": {"list": []}}
    await call(f, plain, context)
    assert plain == {"anything": {"list": []}}


async def test_a_failing_access_rule_is_named() -> None:
    def f(path: str) -> str: ...

    with pytest.raises(ToolError) as caught:
        tool(f, accesses=lambda a: a["missing"]).accesses({"path": "x"})
    assert caught.value.code == "tool.user_code" and "KeyError" in caught.value.message


async def test_access_rules() -> None:
    def f(path: str) -> str: ...

    assert tool(f).accesses({"path": "a"}) == Accesses.none()
    assert tool(f, accesses=Accesses.reads("x")).accesses({}) == Accesses.reads("x")
    assert tool(f, accesses=lambda a: Accesses.writes(a["path"])).accesses({"path": "p"}) == Accesses.writes("p")


MODULE = """
from kimi_ray.tools import tool

@tool(name="decorated", writes=True)
def lookup(n: int) -> str:
    "Looks."
    return "from module %d" % n

def plain(n: int) -> int:
    return n + 1

class Space:
    @staticmethod
    def inner(n: int) -> int:
        return n * 2

not_callable = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "user_tools_of_test.py").write_text(MODULE)
    (tmp_path / "broken_tools_of_test.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("user_tools_of_test", None)


DUMP = """
import sys
from ray import cloudpickle  # what Ray sends tools with
from kimi_ray.tools import FunctionTool, tool

base = 10

@tool(name="local")
def add(n: int) -> int:
    return base + n

sys.stdout.buffer.write(cloudpickle.dumps(add))
"""

LOAD = """
import asyncio, pickle, sys
from kimi_ray.tools import LocalEnvironment, ToolContext
sys.path.insert(0, sys.argv[1])
made = pickle.loads(sys.stdin.buffer.read())
context = ToolContext(LocalEnvironment(None), "s", "a", "c", asyncio.Event())
print(made.name, made.writes, asyncio.run(made.run(made.check({"n": 4}), context)).content)
"""


def in_process(script: str, path: Path, data: bytes = b"") -> bytes:
    done = subprocess.run([sys.executable, "-c", script, str(path)], input=data, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_an_importable_tool_travels_by_name(module: Path) -> None:
    decorated = load_tool("user_tools_of_test:lookup")
    assert isinstance(decorated, FunctionTool) and decorated.name == "decorated"
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert in_process(LOAD, module, pickle.dumps(decorated)).strip() == b"decorated True from module 4"


def test_a_tool_of_the_main_script_travels_by_value(tmp_path: Path) -> None:
    assert in_process(LOAD, tmp_path, in_process(DUMP, tmp_path)).strip() == b"local False 14"


def test_loading_by_name(module: Path) -> None:
    assert load_tool("user_tools_of_test:plain").name == "plain"
    assert load_tool("user_tools_of_test:Space.inner").name == "inner"
    assert as_tool("user_tools_of_test:plain").name == "plain"
    for reference, told in {
        "user_tools_of_test": "form",
        ":f": "form",
        "no_such_module_xyz:f": "no module 'no_such_module_xyz' in ",
        "broken_tools_of_test:f": "ZeroDivisionError",
        "user_tools_of_test:nothing": "has no nothing",
        "user_tools_of_test:not_callable": "int",
    }.items():
        with pytest.raises(ToolError) as caught:
            load_tool(reference)
        assert caught.value.code == "tool.not_importable" and told in caught.value.message, reference


@pytest.mark.parametrize(
    "output",
    [
        ToolOutput("x", exit_code=10**400),
        ToolOutput("x", exit_code=-(1 << 63) - 1),
        ToolOutput("x", is_error=True, error_code="\ud800"),
        ToolOutput("x", is_error=True, error_code=5),  # type: ignore[arg-type]
    ],
)
def test_codes_that_no_log_can_hold_are_refused(output: ToolOutput) -> None:
    with pytest.raises(ToolError) as caught:
        check_output(output)
    assert caught.value.code == "tool.bad_result"
    check_output(ToolOutput("x", exit_code=-(1 << 63), error_code="\u0301"))
