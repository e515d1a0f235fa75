"""Chaos: the faults are those that were asked for, as often as asked for, and the same again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kimi_ray.errors import ConfigError, ProviderError
from kimi_ray.llm import Assembled, Assembler, ModelSettings, ScriptedProvider, Step, build_provider, resolve_model
from kimi_ray.llm.chaos import BAD_DAY, ChaosProvider, ChaosSettings
from kimi_ray.llm.chat import ChatProvider, ChatRequest, Chunk
from kimi_ray.llm.script import tool_call

CALLS = Step(
    text="I look.",
    tool_calls=(tool_call("Read", {"path": "a.py", "limit": 3}), tool_call("Glob", {"pattern": "*"})),
)


def request(number: int = 0, **more: Any) -> ChatRequest:
    message = {"id": "u", "role": "user", "content": [{"type": "text", "text": "hello"}], "source": {"kind": "user"}}
    return ChatRequest("tiny", None, [message], session_id="s", agent_id=f"agent-{number}", **more)


def chaos(step: Step | str = CALLS, chunk_chars: int | None = None, **settings: Any) -> ChaosProvider:
    inner = ScriptedProvider(lambda _request: step, chunk_chars=chunk_chars)
    return ChaosProvider(inner, ChaosSettings(**settings))


async def outcome(provider: ChatProvider, asked: ChatRequest) -> tuple[Assembled, ProviderError | None]:
    assembler = Assembler()
    try:
        async for chunk in provider.stream(asked):
            assembler.add(chunk)
    except ProviderError as error:
        return assembler.result(), error
    return assembler.result(), None


def code_of(error: ProviderError | None) -> str:
    return "fine" if error is None else f"{error.code}:{error.details.get('status', '')}"


async def test_rates_are_kept_and_faults_are_those_of_a_real_server() -> None:
    provider = chaos(rate_limit=0.1, server_error=0.1, timeout=0.1, cut_stream=0.1, timeout_after_s=0.0)
    ends: Counter[str] = Counter()
    said_when = 0
    for number in range(2000):
        _, error = await outcome(provider, request(number))
        ends[code_of(error)] += 1
        if error is not None:
            assert error.retryable
            said_when += error.retry_after_ms is not None
    assert 1100 < ends["fine"] < 1300
    assert 150 < ends["provider.rate_limit:429"] < 250
    assert 60 < said_when < 140, "half of the 429s say how long"
    assert 150 < ends["provider.timeout:"] < 250
    assert 150 < ends["provider.connection:"] < 250
    statuses = {code.partition(":")[2] for code in ends if code.startswith(("provider.server", "provider.overloaded"))}
    assert statuses == {"500", "502", "503", "529"}


async def test_the_same_requests_meet_the_same_faults_in_any_order_and_at_any_concurrency() -> None:
    settings: dict[str, Any] = {"rate_limit": 0.2, "server_error": 0.2, "cut_stream": 0.2, "bad_arguments": 0.3}
    asked = [request(number, turn=number % 3, step=number % 5) for number in range(300)]

    async def ends(order: list[ChatRequest], provider: ChaosProvider) -> dict[str, Any]:
        found = await asyncio.gather(*(outcome(provider, one) for one in order))
        return {
            one.agent_id: (code_of(error), answer.content, error and error.retry_after_ms)
            for one, (answer, error) in zip(order, found, strict=True)
        }

    first = await ends(asked, chaos(**settings))
    assert await ends(asked[::-1], chaos(**settings)) == first
    one_by_one: dict[str, Any] = {}
    provider = chaos(**settings)
    for one in asked:
        one_by_one |= await ends([one], provider)
    assert one_by_one == first
    assert await ends(asked, chaos(seed=1, **settings)) != first


async def test_another_attempt_has_another_fate() -> None:
    provider = chaos(rate_limit=0.5)
    fates = [code_of((await outcome(provider, request(1, attempt=attempt)))[1]) for attempt in range(1, 30)]
    assert set(fates) == {"fine", "provider.rate_limit:429"}


async def test_each_part_of_an_address_counts() -> None:
    provider = chaos(rate_limit=0.5)
    base = request(1)
    changed = [
        [replace(base, **{name: value(number)}) for number in range(40)]
        for name, value in {
            "session_id": str,
            "agent_id": str,
            "turn": int,
            "step": int,
            "attempt": int,
        }.items()
    ]
    for requests in changed:
        assert len({code_of((await outcome(provider, one))[1]) for one in requests}) == 2


@pytest.mark.parametrize("chunk_chars", [None, 2])
async def test_streams_are_cut_in_texts_and_in_tool_calls(chunk_chars: int | None) -> None:
    provider = chaos(cut_stream=1.0, chunk_chars=chunk_chars)
    in_text = in_call = 0
    for number in range(60):
        answer, error = await outcome(provider, request(number))
        assert code_of(error) == "provider.connection:"
        assert error is not None
        assert error.details["kind"] == "cut"
        if answer.tool_calls:
            in_call += 1
            with pytest.raises(ValueError, match=r"."):
                json.loads(answer.tool_calls[-1]["arguments"])
        else:
            in_text += 1
            assert answer.text != CALLS.text
    assert min(in_text, in_call) > 10


async def test_an_answer_with_nothing_to_cut_is_cut_before_its_end() -> None:
    provider = chaos("", cut_stream=1.0)
    answer, error = await outcome(provider, request())
    assert (answer.content, code_of(error)) == ([], "provider.connection:")


@pytest.mark.parametrize("chunk_chars", [None, 3])
async def test_arguments_are_cut_or_of_wrong_types_and_all_else_is_as_it_was(chunk_chars: int | None) -> None:
    provider = chaos(bad_arguments=1.0, chunk_chars=chunk_chars)
    cut = mistyped = 0
    for number in range(40):
        answer, error = await outcome(provider, request(number))
        assert error is None
        assert answer.text == CALLS.text
        assert [call["name"] for call in answer.tool_calls] == ["Read", "Glob"]
        assert len({call["id"] for call in answer.tool_calls}) == 2
        for call in answer.tool_calls:
            try:
                value = json.loads(call["arguments"])
            except ValueError:
                cut += 1
            else:
                mistyped += 1
                assert value in ({"path": {"wrong": 1}, "limit": "wrong"}, {"pattern": {"wrong": 1}})
    assert min(cut, mistyped) > 10


@pytest.mark.parametrize("arguments", ["{}", "", "[1]", "nonsense", '"text"', '{"a": {}}', "{ }  "])
async def test_any_arguments_can_be_broken(arguments: str) -> None:
    provider = chaos(Step(tool_calls=(tool_call("T", arguments),)), bad_arguments=1.0)
    for number in range(20):
        answer, _ = await outcome(provider, request(number))
        broken = answer.tool_calls[0]["arguments"]
        try:
            value = json.loads(broken)
        except ValueError:
            continue
        assert value == [1, 2] or "wrong" in json.dumps(value)


async def test_all_calls_get_one_id() -> None:
    provider = chaos(duplicate_ids=1.0)
    ids = [call["id"] for number in range(3) for call in (await outcome(provider, request(number)))[0].tool_calls]
    assert len(ids) == 6
    assert len(set(ids)) == 1


async def test_answers_without_tool_calls_are_left_alone() -> None:
    answer, error = await outcome(chaos("plain", bad_arguments=1.0, duplicate_ids=1.0), request())
    assert (answer.text, error) == ("plain", None)


async def test_the_first_chunk_can_be_late() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await outcome(chaos(slow_first_token=1.0, slow_s=0.05), request())
    assert loop.time() - began >= 0.045


async def test_leaving_early_closes_the_inner_stream() -> None:
    closed = asyncio.Event()

    class Inner:
        name = "inner"

        async def stream(self, asked: ChatRequest) -> AsyncIterator[Chunk]:
            try:
                async for chunk in ScriptedProvider(["a text"], chunk_chars=1).stream(asked):
                    yield chunk
            finally:
                closed.set()

        async def close(self) -> None: ...

    stream = ChaosProvider(Inner(), ChaosSettings()).stream(request())
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    assert closed.is_set()
    closed.clear()
    await outcome(ChaosProvider(Inner(), ChaosSettings(cut_stream=1.0)), request())
    assert closed.is_set()


def test_shares_above_one_are_refused() -> None:
    with pytest.raises(ValidationError, match="above 1"):
        ChaosSettings(rate_limit=0.6, server_error=0.5)
    with pytest.raises(ValidationError):
        ChaosSettings(rate_limit=1.5)


# -- models --------------------------------------------------------------------------------------------------------


def test_a_chaos_table_is_its_inner_model_with_what_it_says_itself() -> None:
    models = {
        "big": ModelSettings(
            model="vendor/big", base_url="http://127.0.0.1:1/v1", max_context_tokens=1000, extra_headers={"X": "secret"}
        ),
        "flaky": ModelSettings(provider="chaos", inner="big", max_attempts=3, chaos=ChaosSettings(rate_limit=0.5)),
    }
    found = resolve_model("flaky", models, None, {})
    assert (found.name, found.provider, found.inner_provider, found.model) == ("flaky", "chaos", "openai", "vendor/big")
    assert (found.settings.max_context_tokens, found.settings.max_attempts) == (1000, 3)
    assert found.base_urls == ("http://127.0.0.1:1/v1",)
    assert "secret" not in repr(found)
    assert found.cache_key() != resolve_model("big", models, None, {}).cache_key()
    assert found.limiter_key() == resolve_model("big", models, None, {}).limiter_key(), "it is one server"
    provider = build_provider(found)
    assert provider.name == "chaos"


async def test_chaos_without_a_table_is_a_bad_day_of_the_scripted_model() -> None:
    for name in ("chaos", "chaos:scripted"):
        found = resolve_model(name, {}, None, {})
        assert (found.name, found.model, found.limiter_key()) == (name, "scripted", None)
        provider = build_provider(found)
        codes = Counter([code_of((await outcome(provider, request(number)))[1]) for number in range(300)])
        assert 200 < codes["fine"] < 270
    assert (BAD_DAY.rate_limit, BAD_DAY.server_error, BAD_DAY.cut_stream, BAD_DAY.bad_arguments) == (
        0.1,
        0.05,
        0.05,
        0.05,
    )
    assert resolve_model("chaos:x", {}, "http://127.0.0.1:1/v1", {}).model == "x"


def test_chaos_in_chaos_and_chaos_of_nothing_are_refused() -> None:
    models = {
        "self": ModelSettings(provider="chaos", inner="self"),
        "two": ModelSettings(provider="chaos", inner="self"),
        "none": ModelSettings(provider="chaos", inner="gone"),
    }
    for name, code in (
        ("self", "config.invalid"),
        ("two", "config.invalid"),
        ("chaos:chaos", "config.invalid"),
        ("none", "model.not_configured"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve_model(name, models, None, {})
        assert caught.value.code == code


def test_backoffs_are_settings() -> None:
    found = resolve_model("m", {"m": ModelSettings(provider="scripted", retry_base_s=0.01, retry_max_s=0.05)}, None, {})
    assert (found.retry.base_ms, found.retry.max_ms) == (10, 50)


def test_the_page_explains_every_fault() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert [name for name in ChaosSettings.model_fields if f"| `{name}` |" not in page] == []
