from __future__ import annotations

import asyncio
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import ConfigError, KimiRayError, ProviderError
from kimi_ray.llm import (
    Assembled,
    Assembler,
    BlockEnd,
    BlockStart,
    ChatRequest,
    Chunk,
    Finish,
    ScriptedProvider,
    Step,
    TextDelta,
    ToolCall,
    ToolSpec,
    UsageChunk,
)
from kimi_ray.llm.script import as_step
from kimi_ray.log import message_tokens
from kimi_ray.settings import Usage

SPEC = ToolSpec("Read", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}}})


def user(text: str) -> dict[str, Any]:
    return {"id": "u", "role": "user", "content": [{"type": "text", "text": text}], "source": {"kind": "user"}}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"id": "a", "role": "assistant", "content": list(blocks)}


def asked(*messages: dict[str, Any], agent: str = "main", attempt: int = 1, **more: Any) -> ChatRequest:
    return ChatRequest("tiny", None, list(messages), agent_id=agent, session_id="s", attempt=attempt, **more)


async def chunks_of(provider: ScriptedProvider, request: ChatRequest) -> list[Chunk]:
    return [chunk async for chunk in provider.stream(request)]


async def answer(provider: ScriptedProvider, request: ChatRequest) -> Assembled:
    assembler = Assembler()
    async for chunk in provider.stream(request):
        assembler.add(chunk)
    return assembler.result()


async def test_steps_are_played_in_order_by_each_agent_for_itself() -> None:
    provider = ScriptedProvider(["one", Step.call("Read", {"path": "a.py"}), {"text": "three"}])
    first = await answer(provider, asked(user("hi")))
    other = await answer(provider, asked(user("hi"), agent="agent-1"))
    second = await answer(provider, asked(user("hi")))
    third = await answer(provider, asked(user("hi")))
    assert (first.text, other.text, third.text) == ("one", "one", "three")
    assert second.finish == "tool-calls"
    assert second.tool_calls == [
        {"type": "tool-call", "id": "call_0_0_0", "name": "Read", "arguments": '{"path":"a.py"}'}
    ]


async def test_a_resumed_agent_goes_on_behind_the_answers_it_has() -> None:
    steps = ["one", Step.error("provider.server", 500), "two", "", "three"]
    history = [user("q"), assistant({"type": "text", "text": "one"}), user("q")]
    with pytest.raises(ProviderError):
        await answer(ScriptedProvider(steps), asked(*history))
    assert (await answer(ScriptedProvider(steps), asked(*history, attempt=2))).text == "two"
    history += [assistant({"type": "text", "text": "two"})]
    assert (await answer(ScriptedProvider(steps), asked(*history))).empty
    assert (await answer(ScriptedProvider(steps), asked(*history, attempt=2))).text == "three"


async def test_the_end_of_a_script() -> None:
    used_up = ScriptedProvider(["a"])
    await answer(used_up, asked())
    with pytest.raises(ProviderError) as caught:
        await answer(used_up, asked())
    assert (caught.value.code, caught.value.retryable) == ("provider.script_exhausted", False)
    repeat, cycle = ScriptedProvider(["a", "b"], on_end="repeat"), ScriptedProvider(["a", "b"], on_end="cycle")
    assert [(await answer(repeat, asked())).text for _ in range(4)] == ["a", "b", "b", "b"]
    assert [(await answer(cycle, asked())).text for _ in range(4)] == ["a", "b", "a", "b"]
    with pytest.raises(ProviderError):
        await answer(ScriptedProvider([], on_end="repeat"), asked())


async def test_a_function_of_the_request_plain_and_async() -> None:
    async def later(request: ChatRequest) -> Step:
        await asyncio.sleep(0)
        return Step(text=request.model, reasoning="hm")

    assert (await answer(ScriptedProvider(lambda request: request.model), asked())).text == "tiny"
    result = await answer(ScriptedProvider(later), asked())
    assert [block["type"] for block in result.content] == ["reasoning", "text"]


async def test_a_function_that_fails_or_answers_nonsense_is_named() -> None:
    def broken(_: ChatRequest) -> str:
        raise ValueError("boom")

    def refusing(_: ChatRequest) -> str:
        raise ProviderError("no", code="provider.auth")

    for script, code in ((broken, "provider.script_failed"), (refusing, "provider.auth")):
        with pytest.raises(ProviderError) as caught:
            await answer(ScriptedProvider(script), asked())
        assert caught.value.code == code
    with pytest.raises(ConfigError) as invalid:
        await answer(ScriptedProvider(lambda _: 3), asked())  # type: ignore[arg-type,return-value]
    assert invalid.value.code == "config.invalid_script"


async def test_scripted_errors_come_with_their_facts_and_the_retryability_of_their_code() -> None:
    provider = ScriptedProvider(
        [
            Step.error("provider.rate_limit", 429, 1500),
            {"error": {"code": "context.overflow", "status": 400, "message": "too long"}},
        ]
    )
    with pytest.raises(ProviderError) as limited:
        await answer(provider, asked())
    assert limited.value.retryable
    assert limited.value.retry_after_ms == 1500
    assert limited.value.details["status"] == 429
    with pytest.raises(ProviderError) as overflow:
        await answer(provider, asked())
    assert (overflow.value.code, overflow.value.retryable) == ("context.overflow", False)
    assert overflow.value.message == "too long"


@pytest.mark.parametrize("chunk_chars", [None, 2])
async def test_a_stream_that_breaks_has_said_something_before(chunk_chars: int | None) -> None:
    step = Step.error("provider.connection", text="hello", after_chunks=1)
    got: list[Chunk] = []
    with pytest.raises(ProviderError):
        async for chunk in ScriptedProvider([step], chunk_chars=chunk_chars).stream(asked()):
            got.append(chunk)  # noqa: PERF401  what came before the error counts
    assert [chunk.text for chunk in got if isinstance(chunk, TextDelta)] == ["hello" if chunk_chars is None else "he"]


async def test_cut_into_chunks_the_answer_is_the_same_and_its_grammar_complete() -> None:
    step = Step(text="hello", reasoning="hm\N{GRINNING FACE}", tool_calls=(ToolCall("Read", '{"path":"x"}', "id1"),))
    result = await answer(ScriptedProvider([step]), asked())
    for size in (1, 2, 100):
        provider = ScriptedProvider([step, step], chunk_chars=size)
        assert (await answer(provider, asked())).content == result.content
        chunks = await chunks_of(provider, asked())
        starts = [chunk.index for chunk in chunks if isinstance(chunk, BlockStart)]
        assert starts == [chunk.index for chunk in chunks if isinstance(chunk, BlockEnd)] == [0, 1, 2]
        assert isinstance(chunks[-1], Finish)


async def test_usage_is_estimated_alike_every_time_or_said() -> None:
    provider = ScriptedProvider(["12345678", Step("x", usage=Usage(input=1, cached=2, output=3))])
    request = asked(user("1234"), tools=(SPEC,))
    usage = (await answer(provider, request)).usage
    again = (await answer(ScriptedProvider(["12345678"]), request)).usage
    assert usage is not None
    assert usage == again
    assert usage.estimated
    assert usage.output == 2
    parameters = '{"type":"object","properties":{"path":{"type":"string"}}}'
    tools = f'[{{"name":"Read","description":"Reads.","parameters":{parameters}}}]'
    assert usage.input == message_tokens(user("1234")) + -(-len(tools) // 4) + 4
    assert (await answer(provider, request)).usage == Usage(input=1, cached=2, output=3)


async def test_latency_and_pace_take_their_time() -> None:
    start = time.monotonic()
    await answer(ScriptedProvider(["x"], latency_s=0.03), asked())
    assert time.monotonic() - start >= 0.03
    start = time.monotonic()
    await answer(ScriptedProvider(["x" * 40], tokens_per_s=200), asked())
    assert time.monotonic() - start >= 0.045
    start = time.monotonic()
    await answer(ScriptedProvider([Step("x", latency_s=0)], latency_s=60), asked())
    assert time.monotonic() - start < 30


async def test_a_waiting_answer_can_be_cancelled() -> None:
    task = asyncio.ensure_future(answer(ScriptedProvider(["x"], latency_s=60), asked()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_scripts_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("kimi_ray_test_script")
    module.steps = ["a", {"tool_calls": [{"name": "Read", "arguments": {"path": "x"}}]}]  # type: ignore[attr-defined]
    module.function = lambda request: "f"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert (await answer(ScriptedProvider("kimi_ray_test_script:steps"), asked())).text == "a"
    assert (await answer(ScriptedProvider("kimi_ray_test_script:function"), asked())).text == "f"


@pytest.mark.parametrize(
    "script",
    ["nocolon", "no_such_module_here:x", "kimi_ray.llm.scripts:nothing", "kimi_ray.llm.scripts:__name__", 7,
     [{"txt": "x"}], [{"tool_calls": [{"arguments": {}}]}], [3]],
)  # fmt: skip
def test_a_script_that_cannot_be_used_is_refused_at_once(script: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        ScriptedProvider(script)
    assert caught.value.code == "config.invalid_script"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (["a", {"call": {"name": "Bash"}}], ("step 1 ", "call: there is no such key", "tool_calls", "latency_s")),
        ([{"tool_calls": [{"name": "Bash", "args": {}}]}], ("step 0 ", "tool_calls.0.args", "name, arguments, id")),
        ([{"tool_calls": [{"arguments": {}}]}], ("step 0 ", "tool_calls.0.name: it is missing",)),
        ([{"error": {"code": "provider.auth", "state": 3}}], ("error.state", "code, status, retry_after_ms")),
        (["a", "b", 3], ("step 2 ", "int")),
    ],
)  # fmt: skip
def test_a_wrong_step_is_told_by_its_place_and_with_the_keys_that_there_are(script: Any, words: tuple[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ScriptedProvider(script)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "Extra inputs" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import asyncio\nasync def main(): ...\nasyncio.run(main())\n",
         "RuntimeError: asyncio.run() cannot be called from a running event loop"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("x = = 1\n", "SyntaxError"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:coroutine 'main' was never awaited")
async def test_a_module_that_runs_its_program_when_imported_is_told_with_the_guard(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kimi_ray_test_unguarded.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        ScriptedProvider("kimi_ray_test_unguarded:answer")
    assert caught.value.code == "config.invalid_script"
    assert "the module kimi_ray_test_unguarded " in caught.value.message and said in caught.value.message
    assert 'if __name__ == "__main__":' in (caught.value.hint or "")


def test_steps_have_one_meaning_in_every_form() -> None:
    assert as_step("x") == Step("x")
    form = {"text": "t", "reasoning": "r", "tool_calls": [{"name": "A", "arguments": {"b": 1}}], "finish": "other",
            "usage": {"input": 1}, "latency_s": 0.5}  # fmt: skip
    assert as_step(form) == Step("t", "r", (ToolCall("A", '{"b":1}'),), "other", Usage(input=1), 0.5)
    assert not Step.error("provider.server").answers


async def test_a_request_costs_little() -> None:
    provider = ScriptedProvider(lambda _: "a short answer")
    request = asked(*[user("what is this about? " * 5)] * 10, tools=(SPEC,))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(200):
            async for _chunk in provider.stream(request):
                pass
        best = min(best, (time.perf_counter() - start) / 200)
    assert best < 200e-6  # measured 13 us; the room is for a busy machine


async def test_usage_comes_before_the_finish() -> None:
    kinds = [type(chunk) for chunk in await chunks_of(ScriptedProvider(["x"]), asked())]
    assert kinds.index(UsageChunk) < kinds.index(Finish) == len(kinds) - 1


async def test_errors_are_kimi_ray_errors() -> None:
    with pytest.raises(KimiRayError):
        await answer(ScriptedProvider([Step.error("provider.timeout")]), asked())
