"""Code of users may raise what ends a task, or a process. It ends a call or a turn, and nobody is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kimi_ray.agent.slots import StepStarting
from kimi_ray.errors import ConfigError, KimiRayError
from kimi_ray.llm.chat import ChatRequest, Chunk, TextDelta
from kimi_ray.llm.script import Step
from kimi_ray.tools import ToolOutput
from kimi_ray.tools.contract import Accesses, ToolContext
from tests.unit.agent.bench import AgentBench


class Unheard(BaseException):
    """No ``Exception``: what a test framework or a scheduler may raise."""


KINDS: list[Callable[[], BaseException]] = [
    asyncio.CancelledError,
    SystemExit,
    GeneratorExit,
    KeyboardInterrupt,
    Unheard,
]


class Raiser:
    """A tool that is no function of ours: it raises wherever it is told to."""

    name = "Raiser"
    description = "raises"
    writes = False

    def __init__(self, where: str, error: BaseException) -> None:
        self.parameters: dict[str, Any] = {"type": "object", "properties": {}}
        self._where = where
        self._error = error

    def _raise(self, where: str) -> None:
        if where == self._where:
            raise self._error

    def accesses(self, arguments: dict[str, object]) -> Accesses:
        self._raise("accesses")
        return Accesses.none()

    def check(self, arguments: object) -> dict[str, object]:
        self._raise("check")
        return {}

    async def run(self, arguments: dict[str, object], context: ToolContext) -> ToolOutput:
        await asyncio.sleep(0)
        self._raise("run")
        return ToolOutput("fine")


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_models_function_raises_fails_its_turn(kind: Callable[[], BaseException]) -> None:
    said = iter([kind(), None])

    def model(request: object) -> str:
        error = next(said)
        if error is not None:
            raise error
        return "fine"

    bench = AgentBench(model)
    bench.submit("one", "two")
    first = await bench.result("p0", within_s=5)
    assert first.result.state == "failed"
    assert first.result.error is not None and first.result.error["code"] == "provider.script_failed"
    assert (await bench.result("p1", within_s=5)).result.text == "fine"


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, GeneratorExit, Unheard, ValueError])
async def test_whatever_a_provider_raises_leaves_what_came_and_a_response(
    kind: Callable[[], BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stream(_request: ChatRequest) -> AsyncIterator[Chunk]:
        yield TextDelta(0, "half of ")
        yield TextDelta(0, "it")
        raise kind()

    bench = AgentBench(["never"])
    monkeypatch.setattr(bench.provider, "stream", stream)
    bench.submit("go")
    told = (await bench.result(within_s=5)).result
    assert told.state == "failed" and told.error is not None and told.error["code"] == "internal"
    (response,) = bench.of("llm/response")
    assert response["error"]["code"] == "internal"
    (message,) = bench.of("assistant/message")
    assert message["interrupted"] and message["message"]["content"] == [{"type": "text", "text": "half of it"}]


@pytest.mark.parametrize("where", ["accesses", "check", "run"])
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_tool_raises_is_its_result(kind: Callable[[], BaseException], where: str) -> None:
    bench = AgentBench([Step.call("Raiser"), "went on"], tools=(Raiser(where, kind()),))
    bench.submit("go")
    assert (await bench.result(within_s=5)).result.text == "went on"
    (result,) = bench.of("tool/result")
    assert result["error"]["code"] in ("tool.user_code", "tool.cancelled")


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, GeneratorExit, Unheard, ValueError])
async def test_an_agent_that_breaks_tells_all_who_wait(
    kind: Callable[[], BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = AgentBench(["never", "never"])

    def broken(*_: object) -> Any:
        raise kind()

    monkeypatch.setattr(bench.agent, "_next_work", broken)
    bench.submit("one", "two")
    for prompt_id in ("p0", "p1"):
        told = await bench.result(prompt_id, within_s=5)
        assert told.result.state == "failed"
        assert told.result.error is not None and told.result.error["code"] == "internal"
        assert not bench.agent.is_waiting(prompt_id)
        assert bench.agent.outcome(prompt_id) is not None
    with pytest.raises(KimiRayError, match="closed"):
        bench.submit("three")
    await bench.agent.close()


class Returner(Raiser):
    """A tool that is no function of ours: it returns whatever it is told to."""

    def __init__(self, output: Any) -> None:
        super().__init__("nowhere", ValueError())
        self._output = output

    async def run(self, arguments: dict[str, object], context: ToolContext) -> ToolOutput:
        return self._output


OUTPUTS: list[Any] = [
    None,
    "text",
    ToolOutput([{}]),
    ToolOutput([5]),  # type: ignore[list-item]
    ToolOutput([{"type": "text"}]),
    ToolOutput([{"type": "text", "text": 5}]),
    ToolOutput([{"type": "tool-call", "id": "x"}]),
    ToolOutput([{"type": "image", "data": b"x"}]),
    ToolOutput(None),  # type: ignore[arg-type]
    ToolOutput("x", meta={"big": "x" * (20 << 20)}),
    ToolOutput("x" * (20 << 20)),
    ToolOutput([{"type": "text", "text": "x" * (5 << 20)}] * 4),
    ToolOutput("x", error_code=5, is_error=True),  # type: ignore[arg-type]
    ToolOutput("x", exit_code="1"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("output", OUTPUTS, ids=range(len(OUTPUTS)))
async def test_whatever_a_tool_returns_the_agent_goes_on(output: Any) -> None:
    bench = AgentBench([Step.call("Raiser"), "went on", "and on"], tools=(Returner(output),))
    bench.submit("go", "again")
    assert (await bench.result("p0", within_s=5)).result.text == "went on"
    assert (await bench.result("p1", within_s=5)).result.text == "and on"
    (result,) = bench.of("tool/result")
    assert result["error"]["code"] == "tool.bad_result"


async def test_ten_thousand_waiting_prompts_are_cancelled_at_once() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def model(request: object) -> str:
        entered.set()
        await leave.wait()
        return "done"

    bench = AgentBench(model)
    bench.submit(*("go" for _ in range(10_000)))
    async with asyncio.timeout(5):
        await entered.wait()
    before = asyncio.get_running_loop().time()
    assert len(bench.agent.cancel(None, "user")) == 10_000
    assert asyncio.get_running_loop().time() - before < 3
    leave.set()
    await bench.agent.close()


async def test_a_handlers_error_that_only_sounds_like_a_limit_fails_its_turn_as_itself() -> None:
    bench = AgentBench(["hello", "again"])

    async def step(event: StepStarting) -> None:
        if event.turn == 0:
            raise ConfigError("no price", code="limit.needs_price", details={"kind": "completed"})

    bench.slots.step.register("test", step)
    bench.submit("one", "two")
    first = (await bench.result()).result
    assert first.state == "failed" and first.error is not None and first.error["code"] == "limit.needs_price"
    assert (await bench.result("p1")).result.state == "completed"
    await bench.agent.close()
