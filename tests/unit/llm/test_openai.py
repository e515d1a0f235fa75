"""The provider against a server that misbehaves in every way that servers do."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import ProviderError
from kimi_ray.events.json_rule import freeze
from kimi_ray.llm import (
    Assembled,
    Assembler,
    ChatRequest,
    Finish,
    ModelSettings,
    TextDelta,
    ToolSpec,
    UsageChunk,
)
from kimi_ray.llm.completion import CompletionReader
from kimi_ray.llm.openai import OpenAIProvider
from kimi_ray.settings import Sampling, Usage

KEY = "sk-test-0123456789abcdef"
HELLO: dict[str, Any] = {"id": "u", "role": "user", "content": [{"type": "text", "text": "hello"}]}
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}

WIRE_KEYS = ["choices", "delta", "message", "content", "tool_calls", "function", "name", "arguments", "index", "id",
             "finish_reason", "logprobs", "token_ids", "usage", "prompt_tokens", "prompt_tokens_details", "reasoning",
             "completion_tokens", "cached_tokens", "total_tokens", "text", "token", "logprob",
             "top_logprobs"]  # fmt: skip

Serve = Callable[[Callable[[Any, Any], Awaitable[None]]], Awaitable[Any]]


def ask(**more: Any) -> ChatRequest:
    return ChatRequest("tiny", None, [HELLO], **more)


async def answer(provider: OpenAIProvider, request: ChatRequest | None = None) -> Assembled:
    assembler = Assembler()
    async with asyncio.timeout(30):
        async for chunk in provider.stream(request or ask()):
            assembler.add(chunk)
    return assembler.result()


async def ask_once(serve: Serve, handler: Any, request: ChatRequest | None = None, **settings: Any) -> Assembled:
    server = await serve(handler)
    provider = OpenAIProvider([server.url], api_key=KEY, settings=ModelSettings(**settings))
    try:
        return await answer(provider, request)
    finally:
        await provider.close()


async def failure(serve: Serve, handler: Any, request: ChatRequest | None = None, **settings: Any) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        await ask_once(serve, handler, request, **settings)
    text = json.dumps(caught.value.to_data()) + str(caught.value)
    assert KEY not in text
    return caught.value


async def test_a_stream_with_everything(serve: Serve) -> None:
    async def handler(received: Any, reply: Any) -> None:
        await reply.start(x_request_id="req-7")
        await reply.piece(b": keep-alive\n\n")
        facts = {"id": "cmpl-1", "model": "tiny-0815", "system_fingerprint": "fp"}
        await reply.event(facts | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        await reply.delta(reasoning_content="let me ")
        await reply.delta(reasoning_content="think")
        await reply.piece(b": still here\r\n\r\n")
        await reply.delta(content="Hel")
        await reply.delta(content="lo")
        await reply.delta("stop")
        await reply.event({"choices": [], "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 4}}})
        await reply.end()

    result = await ask_once(serve, handler)
    assert result.content == [{"type": "reasoning", "text": "let me think"}, {"type": "text", "text": "Hello"}]
    assert (result.finish, result.raw_finish) == ("stop", "stop")
    assert result.usage == Usage(input=6, cached=4, output=5)
    meta = result.meta
    assert (meta.response_id, meta.served_model, meta.fingerprint) == ("cmpl-1", "tiny-0815", "fp")
    assert (meta.http_status, meta.request_id) == (200, "req-7")
    assert meta.connect_ms is not None


async def test_what_goes_over_the_wire(serve: Serve) -> None:
    server = await serve(plain_answer)
    settings = ModelSettings(extra_body={"user": "me"}, extra_headers={"X-Team": "red"})
    provider = OpenAIProvider([server.url], api_key=KEY, settings=settings)
    tool = ToolSpec("Read", "Reads.", {"type": "object"})
    await answer(provider, ask(tools=(tool,), sampling=Sampling(seed=3, top_k=2, extra_body={"min_p": 0.1})))
    await provider.close()
    received = server.received[0]
    assert received.line.startswith("POST /v1/chat/completions ")
    assert received.headers["authorization"] == f"Bearer {KEY}"
    assert received.headers["x-team"] == "red"
    assert received.json == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": tool.to_data()}],
        "seed": 3,
        "top_k": 2,
        "user": "me",
        "min_p": 0.1,
    }


async def plain_answer(_: Any, reply: Any) -> None:
    await reply.start()
    await reply.delta(content="hi")
    await reply.delta("stop")
    await reply.end()


async def test_without_a_key_no_authorization_is_sent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-the-environment")
    server = await serve(plain_answer)
    provider = OpenAIProvider([server.url])
    await answer(provider)
    await provider.close()
    assert "authorization" not in server.received[0].headers


async def test_a_finished_answer_leaves_its_connection_to_the_next(serve: Serve) -> None:
    server = await serve(plain_answer)
    provider = OpenAIProvider([server.url])
    for _ in range(3):
        assert (await answer(provider)).text == "hi"
    await provider.close()
    await provider.close()
    assert server.connections == 1
    with pytest.raises(ProviderError) as caught:
        await answer(provider)
    assert caught.value.code == "provider.closed"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thoughts"])
async def test_reasoning_under_any_of_its_names(serve: Serve, field: str) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(**{field: "hm"})
        await reply.delta("stop", content="yes")
        await reply.end()

    result = await ask_once(serve, handler, reasoning_field="thoughts")
    assert result.content == [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "yes"}]


async def test_characters_cut_by_packets_and_by_escapes(serve: Serve) -> None:
    text = "gr\u00fc\u00dfe \N{GRINNING FACE} ende"

    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        line = "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False) + "\n\n"
        for byte in line.encode():
            await reply.piece(bytes([byte]))
        await reply.event(r'{"choices": [{"delta": {"content": "x\ud83d"}}]}')
        await reply.event(r'{"choices": [{"delta": {"content": "\ude00y"}}]}')
        await reply.event(r'{"choices": [{"delta": {"content": "\ud83d"}}]}')
        await reply.delta("stop")
        await reply.end()

    server = await serve(handler)
    provider = OpenAIProvider([server.url])
    deltas = [chunk.text async for chunk in provider.stream(ask()) if isinstance(chunk, TextDelta)]
    await provider.close()
    for delta in deltas:
        delta.encode()
    assert "".join(deltas) == text + "x\N{GRINNING FACE}y\ufffd"


async def test_a_stream_cut_before_its_end(serve: Serve) -> None:
    async def half_event(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(content="half an ans")
        await reply.piece(b'data: {"choices": [{"del')
        reply.cut()

    async def clean_close(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(content="half an ans")
        await reply.end(done=False)

    async def no_bytes(_: Any, reply: Any) -> None:
        reply.cut()

    for handler in (half_event, clean_close, no_bytes):
        error = await failure(serve, handler)
        assert (error.code, error.retryable) == ("provider.connection", True), handler.__name__
    assert (await failure(serve, clean_close)).details["kind"] == "cut"


async def test_what_was_received_before_a_cut_is_the_callers(serve: Serve) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(content="half")
        reply.cut()

    server = await serve(handler)
    provider = OpenAIProvider([server.url])
    assembler = Assembler()
    with pytest.raises(ProviderError):
        async for chunk in provider.stream(ask()):
            assembler.add(chunk)
    await provider.close()
    assert assembler.partial() == [{"type": "text", "text": "half"}]
    assert assembler.meta.http_status == 200


async def test_what_came_in_the_same_packet_as_an_error_is_the_callers_too(serve: Serve) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.piece(b'data: {"choices":[{"delta":{"content":"half"}}]}\n\ndata: {"error":{"code":529}}\n\n')
        await reply.end()

    server = await serve(handler)
    provider = OpenAIProvider([server.url])
    assembler = Assembler()
    with pytest.raises(ProviderError) as caught:
        async for chunk in provider.stream(ask()):
            assembler.add(chunk)
    await provider.close()
    assert caught.value.code == "provider.overloaded"
    assert assembler.partial() == [{"type": "text", "text": "half"}]


async def test_bytes_that_are_not_utf8_cost_a_character_and_not_the_answer(serve: Serve) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.piece(b'data: {"choices":[{"delta":{"content":"a\xffb"},"finish_reason":"stop"}]}\n\n')
        await reply.end()

    assert (await ask_once(serve, handler)).text == "a\ufffdb"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(WIRE_KEYS), inner, max_size=3),
    max_leaves=12,
)


wire_objects = st.dictionaries(st.sampled_from(WIRE_KEYS), json_values, max_size=4)


@given(st.lists(st.builds(lambda a, b, c: {"choices": [{"delta": a} | b]} | c, *[wire_objects] * 3), max_size=3))
def test_no_json_makes_the_reader_fail_in_a_way_that_is_not_expected(objects: list[dict[str, Any]]) -> None:
    reader, assembler = CompletionReader(), Assembler()
    try:
        chunks = [chunk for found in objects for chunk in reader.read(found)] + reader.end()
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError):
        return
    for chunk in chunks:
        assembler.add(chunk)
    for block in assembler.result().content:
        json.dumps(block, allow_nan=False).encode()
        freeze(block)


async def test_an_answer_is_complete_with_a_finish_or_with_done(serve: Serve) -> None:
    async def finish_only(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta("stop", content="a")
        await reply.end(done=False)

    async def done_only(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(content="a")
        await reply.end()

    async def reset_after_finish(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta("stop", content="a")
        reply.cut()

    async def no_blank_line_at_the_end(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.piece(b'data:{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}')
        await reply.end(done=False)

    for handler in (finish_only, done_only, reset_after_finish, no_blank_line_at_the_end):
        result = await ask_once(serve, handler)
        assert (result.text, result.finish) == ("a", "stop"), handler.__name__


async def test_missing_usage_is_estimated(serve: Serve) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(reasoning="12345678", content=None)
        await reply.delta("stop", content="1234")
        await reply.end()

    result = await ask_once(serve, handler)
    assert result.usage == Usage(input=10, output=3, reasoning=2, estimated=True)


@pytest.mark.parametrize(
    ("said", "usage"),
    [
        (USAGE, Usage(input=10, output=5)),
        (USAGE | {"cached_tokens": 3}, Usage(input=7, cached=3, output=5)),
        (USAGE | {"prompt_cache_hit_tokens": 10}, Usage(cached=10, output=5)),
        (USAGE | {"prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 3}},
         Usage(input=5, cached=2, cache_write=3, output=5)),
        (USAGE | {"completion_tokens_details": {"reasoning_tokens": 4}}, Usage(input=10, output=5, reasoning=4)),
        (USAGE | {"total_tokens": 19, "completion_tokens_details": {"reasoning_tokens": 4}},
         Usage(input=10, output=9, reasoning=4)),
        (USAGE | {"prompt_tokens_details": None, "completion_tokens_details": None}, Usage(input=10, output=5)),
        ({"prompt_tokens": 2, "cached_tokens": 50, "completion_tokens": -1}, Usage(cached=2)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inside_choice", [False, True])
async def test_usage_in_every_dialect(serve: Serve, said: dict[str, Any], usage: Usage, inside_choice: bool) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.event({"choices": [{"delta": {"content": "x"}}], "usage": None})
        choice: dict[str, Any] = {"delta": {}, "finish_reason": "stop"}
        if inside_choice:
            await reply.event({"choices": [choice | {"usage": said}]})
        else:
            await reply.event({"choices": [choice], "usage": {"prompt_tokens": 1}})
            await reply.event({"choices": [], "usage": said})
        await reply.end()

    assert (await ask_once(serve, handler)).usage == usage


def fragment(index: int | None, id: str | None = None, name: str | None = None, args: str | None = None) -> Any:
    function = {key: value for key, value in (("name", name), ("arguments", args)) if value is not None}
    place = {key: value for key, value in (("index", index), ("id", id)) if value is not None}
    return place | {"function": function}


TWO = [("a", "Read", '{"p":1}'), ("b", "Grep", '{"q":2}')]


@pytest.mark.parametrize(
    "fragments",
    [
        # as OpenAI does it: the id once, then the arguments in pieces
        [[fragment(0, "a", "Read", "")], [fragment(0, args='{"p"')], [fragment(0, args=":1}")],
         [fragment(1, "b", "Grep", "")], [fragment(1, args='{"q":2}')]],
        # interleaved
        [[fragment(0, "a", "Read", '{"p"'), fragment(1, "b", "Grep", '{"q"')],
         [fragment(1, args=":2}"), fragment(0, args=":1}")]],
        # id and name repeated in every fragment
        [[fragment(0, "a", "Read", '{"p"')], [fragment(0, "a", "Read", ":1}")], [fragment(1, "b", "Grep", '{"q":2}')]],
        # every call whole, all with index 0
        [[fragment(0, "a", "Read", '{"p":1}')], [fragment(0, "b", "Grep", '{"q":2}')]],
        # all with index 0, the second in pieces without id
        [[fragment(0, "a", "Read", '{"p":1}')], [fragment(0, "b", "Grep", '{"q"')], [fragment(0, args=":2}")]],
        # no index at all
        [[fragment(None, "a", "Read", '{"p"')], [fragment(None, args=":1}")], [fragment(None, "b", "Grep", '{"q":2}')]],
        [[fragment(None, "a", "Read", '{"p":1}'), fragment(None, "b", "Grep", '{"q":2}')]],
        # another id in every fragment of one call
        [[fragment(0, "a", "Read", '{"p"')], [fragment(0, "zz", args=":1}")], [fragment(1, "b", "Grep", '{"q":2}')]],
        # the id comes late
        [[fragment(0, name="Read", args='{"p"')], [fragment(0, "a", args=":1}"), fragment(1, "b", "Grep", '{"q":2}')]],
    ],
)  # fmt: skip
async def test_tool_calls_in_every_way_to_break_them(serve: Serve, fragments: list[list[Any]]) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(content="I look.")
        for calls in fragments:
            await reply.delta(tool_calls=calls)
        await reply.delta("tool_calls")
        await reply.end()

    result = await ask_once(serve, handler)
    assert result.text == "I look."
    assert [(call["id"], call["name"], call["arguments"]) for call in result.tool_calls] == TWO
    assert result.finish == "tool-calls"


async def test_tool_calls_without_any_id(serve: Serve) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(tool_calls=[fragment(None, None, "Read", '{"p":1}'), fragment(None, None, "Read", "{}")])
        await reply.delta("stop")
        await reply.end()

    result = await ask_once(serve, handler)
    assert [(call["id"], call["arguments"]) for call in result.tool_calls] == [("call-0", '{"p":1}'), ("call-1", "{}")]
    assert (result.finish, result.raw_finish) == ("tool-calls", "stop")


async def test_an_answer_cut_by_the_token_limit_keeps_only_whole_calls(serve: Serve) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(tool_calls=[fragment(0, "a", "Read", '{"p":1}'), fragment(1, "b", "Grep", '{"q"')])
        await reply.delta("length")
        await reply.end()

    result = await ask_once(serve, handler)
    assert ([call["id"] for call in result.tool_calls], result.finish) == (["a"], "max-tokens")


@pytest.mark.parametrize("ask_to_stream", [True, False])
async def test_an_answer_in_one_piece(serve: Serve, ask_to_stream: bool) -> None:
    async def handler(received: Any, reply: Any) -> None:
        assert received.json["stream"] is ask_to_stream
        assert ("stream_options" in received.json) is ask_to_stream
        message = {"role": "assistant", "content": "Hi", "reasoning": "hm", "tool_calls": [
            {"id": "same", "function": {"name": "Read", "arguments": '{"p":1}'}},
            {"id": "same", "function": {"name": "Grep", "arguments": {"q": 2}}},
        ]}  # fmt: skip
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        await reply.full(200, {"id": "c", "model": "m", "choices": [choice], "usage": USAGE}, x_request_id="q")

    result = await ask_once(serve, handler, stream=ask_to_stream)
    assert [block["type"] for block in result.content] == ["reasoning", "text", "tool-call", "tool-call"]
    assert [call["arguments"] for call in result.tool_calls] == ['{"p":1}', '{"q":2}']
    assert result.usage == Usage(input=10, output=5)
    assert (result.meta.response_id, result.meta.request_id) == ("c", "q")


async def test_a_server_that_streams_unasked(serve: Serve) -> None:
    assert (await ask_once(serve, plain_answer, stream=False)).text == "hi"


async def test_log_probabilities_and_token_ids(serve: Serve) -> None:
    async def handler(received: Any, reply: Any) -> None:
        body = received.json
        assert (body["logprobs"], body["top_logprobs"], body["return_token_ids"]) == (True, 1, True)
        await reply.start()
        entry = {"token": "a", "logprob": -0.0, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -0.5}]}
        await reply.event(
            {"id": "r", "prompt_token_ids": [1, 2], "choices": [
                {"delta": {"content": "a"}, "logprobs": {"content": [entry]}, "token_ids": [3]}]}
        )  # fmt: skip
        await reply.event(
            '{"choices": [{"delta": {"content": "b"}, "token_ids": [4, 5],'
            ' "logprobs": {"content": [{"token": "\\ud83d", "logprob": -Infinity}]}, "finish_reason": "stop"}]}'
        )
        await reply.end()

    result = await ask_once(serve, handler, ask(sampling=Sampling(logprobs=1, token_ids=True)))
    assert result.meta.tokens == {
        "prompt_token_ids": [1, 2],
        "token_ids": [3, 4, 5],
        "logprobs": [
            {"token": "a", "logprob": 0.0, "top_logprobs": [{"token": "a", "logprob": -0.5}]},
            {"token": "\ufffd", "logprob": None, "top_logprobs": []},
        ],
    }
    assert str(result.meta.tokens["logprobs"][0]["logprob"]) == "0.0"


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}, "provider.auth"),
        (404, {"error": {"message": "no such model"}}, "provider.not_found"),
        (400, {"error": {"code": "context_length_exceeded", "message": "too long"}}, "context.overflow"),
        (500, "boom", "provider.server"),
        (529, "", "provider.overloaded"),
    ],
)
async def test_statuses(serve: Serve, status: int, body: Any, code: str) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.full(status, body, x_request_id="req-1")

    error = await failure(serve, handler)
    assert error.code == code
    assert (error.details["status"], error.details["request_id"]) == (status, "req-1")


async def test_a_failed_attempt_is_one_request(serve: Serve) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.full(429, {"error": {"message": "slow"}}, retry_after="0")

    server = await serve(handler)
    provider = OpenAIProvider([server.url])
    with pytest.raises(ProviderError):
        await answer(provider)
    await provider.close()
    assert len(server.received) == 1


async def test_retry_after_in_both_forms(serve: Serve) -> None:
    async def seconds(_: Any, reply: Any) -> None:
        await reply.full(429, {"error": {"message": "slow"}}, retry_after="7")

    async def date(_: Any, reply: Any) -> None:
        when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))
        await reply.full(429, {"error": {"message": "slow"}}, retry_after=when)

    assert (await failure(serve, seconds)).retry_after_ms == 7000
    waits = (await failure(serve, date)).retry_after_ms
    assert waits is not None
    assert 55_000 <= waits <= 60_000


async def test_an_error_in_the_middle_of_a_stream(serve: Serve) -> None:
    def handler_of(data: Any) -> Any:
        async def handler(_: Any, reply: Any) -> None:
            await reply.start()
            await reply.delta(content="so ")
            await reply.event(data)
            await reply.end()

        return handler

    overloaded = {"error": {"message": "overloaded", "code": 529}}
    assert (await failure(serve, handler_of(overloaded))).code == "provider.overloaded"
    assert (await failure(serve, handler_of({"error": {"message": "x"}}))).code == "provider.server"
    vllm = {"object": "error", "message": "maximum context length is 10", "code": 400}
    assert (await failure(serve, handler_of(vllm))).code == "context.overflow"


async def test_garbage(serve: Serve) -> None:
    def event(data: str) -> Any:
        async def handler(_: Any, reply: Any) -> None:
            await reply.start()
            await reply.event(data)
            await reply.end()

        return handler

    for garbage in (
        '{"choices": [',
        '{"choices": [7]}',
        '{"choices": [{"delta": {"tool_calls": [null]}}]}',
        "[1]",
        '"x"',
        "<html>",
        "[" * 100_000,
    ):
        error = await failure(serve, event(garbage))
        assert (error.code, error.retryable) == ("provider.bad_stream", True), garbage[:20]

    async def web_page(_: Any, reply: Any) -> None:
        await reply.full(200, "<html>", content_type="text/html; charset=utf-8")

    async def plain_text(_: Any, reply: Any) -> None:
        await reply.full(200, "the server says hello")

    async def empty_json(_: Any, reply: Any) -> None:
        await reply.full(200, {})

    async def broken_gzip(_: Any, reply: Any) -> None:
        await reply.full(200, b"not gzip", content_encoding="gzip", content_type="application/json")

    page = await failure(serve, web_page)
    assert (page.code, page.retryable) == ("provider.bad_stream", False)
    for handler in (plain_text, empty_json, broken_gzip):
        assert (await failure(serve, handler)).code == "provider.bad_stream", handler.__name__


async def test_silence_and_slowness_have_their_bounds(serve: Serve) -> None:
    async def silent_from_the_start(_: Any, reply: Any) -> None:
        await asyncio.sleep(60)

    async def silent_in_the_middle(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(content="so")
        await asyncio.sleep(60)

    async def drip(_: Any, reply: Any) -> None:
        await reply.start()
        while True:
            await reply.piece(b": keep-alive\n\n")
            await asyncio.sleep(0.02)

    start = time.monotonic()
    for handler in (silent_from_the_start, silent_in_the_middle):
        error = await failure(serve, handler, idle_timeout_s=0.15)
        assert (error.code, error.details["kind"], error.retryable) == ("provider.timeout", "idle", True)
    error = await failure(serve, drip, timeout_s=0.3, idle_timeout_s=0.15)
    assert (error.code, error.details["kind"]) == ("provider.timeout", "total")
    error = await failure(serve, silent_from_the_start, timeout_s=0.15, idle_timeout_s=0.01, stream=False)
    assert error.details["kind"] == "total"
    assert time.monotonic() - start < 20


async def test_a_server_that_pauses_within_the_bound_is_waited_for(serve: Serve) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        for _ in range(6):
            await asyncio.sleep(0.05)
            await reply.delta(content="x")
        await reply.delta("stop")
        await reply.end()

    assert (await ask_once(serve, handler, idle_timeout_s=10, timeout_s=20)).text == "xxxxxx"


async def test_refused_connections(unused_tcp_port: int) -> None:
    provider = OpenAIProvider([f"http://127.0.0.1:{unused_tcp_port}/v1"])
    with pytest.raises(ProviderError) as caught:
        await answer(provider)
    await provider.close()
    assert (caught.value.code, caught.value.retryable) == ("provider.connection", True)
    assert str(unused_tcp_port) in caught.value.message


async def test_leaving_closes_the_connection_at_once(serve: Serve) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.start()
        await reply.delta(content="x")
        await asyncio.sleep(60)

    server = await serve(handler)
    provider = OpenAIProvider([server.url])

    async def consume(begun: asyncio.Event) -> None:
        async for chunk in provider.stream(ask()):
            if isinstance(chunk, TextDelta):
                begun.set()

    begun = asyncio.Event()
    task = asyncio.create_task(consume(begun))
    async with asyncio.timeout(10):
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.hung_up.wait()

    server.hung_up.clear()
    stream = provider.stream(ask())
    async with asyncio.timeout(10):
        async for chunk in stream:
            if isinstance(chunk, TextDelta):
                break
        await stream.aclose()  # type: ignore[attr-defined]
        await server.hung_up.wait()
    await provider.close()


async def test_cancelling_before_the_first_byte_closes_too(serve: Serve) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await asyncio.sleep(60)

    server = await serve(handler)
    provider = OpenAIProvider([server.url])
    task = asyncio.create_task(answer(provider))
    async with asyncio.timeout(10):
        while not server.received:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.hung_up.wait()
    await provider.close()


async def test_more_requests_at_once_than_any_default_pool_holds(serve: Serve) -> None:
    everybody = asyncio.Event()

    async def handler(_: Any, reply: Any) -> None:
        if len(server.received) == 150:
            everybody.set()
        await everybody.wait()
        await plain_answer(_, reply)

    server = await serve(handler)
    provider = OpenAIProvider([server.url])
    async with asyncio.timeout(30):
        results = await asyncio.gather(*[answer(provider) for _ in range(150)])
    await provider.close()
    assert [result.text for result in results] == ["hi"] * 150


async def test_max_connections_is_a_bound(serve: Serve) -> None:
    under_way: list[int] = [0, 0]

    async def handler(_: Any, reply: Any) -> None:
        under_way[0] += 1
        under_way[1] = max(under_way)
        await asyncio.sleep(0.01)
        under_way[0] -= 1
        await plain_answer(_, reply)

    server = await serve(handler)
    provider = OpenAIProvider([server.url], settings=ModelSettings(max_connections=2))
    await asyncio.gather(*[answer(provider) for _ in range(8)])
    await provider.close()
    assert server.connections == 2
    assert under_way[1] == 2


async def test_several_addresses_are_shared_out_and_kept_to(serve: Serve, unused_tcp_port: int) -> None:
    one, two = await serve(plain_answer), await serve(plain_answer)
    provider = OpenAIProvider([one.url, two.url])
    for _ in range(3):
        for agent in ("main", "agent-1", "agent-2", "agent-3"):
            await answer(provider, ask(session_id="s", agent_id=agent))
    await provider.close()
    assert (len(one.received), len(two.received)) == (6, 6)

    dead = OpenAIProvider([f"http://127.0.0.1:{unused_tcp_port}/v1", two.url])
    with pytest.raises(ProviderError):
        await answer(dead)
    assert (await answer(dead)).text == "hi"
    await dead.close()


async def test_nothing_is_said_in_the_logs_and_never_the_key(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        await ask_once(serve, plain_answer)
    assert [record for record in caplog.records if record.name != "asyncio"] == []
    provider = OpenAIProvider(["http://127.0.0.1:1/v1"], api_key=KEY, settings=ModelSettings(extra_headers={"X": KEY}))
    assert KEY not in repr(provider)
    await provider.close()


async def test_the_served_models(serve: Serve) -> None:
    async def handler(received: Any, reply: Any) -> None:
        assert received.line.startswith("GET /v1/models ")
        await reply.full(200, {"object": "list", "data": [{"id": "b", "object": "model"}, {"id": "a"}]})

    async def refusing(_: Any, reply: Any) -> None:
        await reply.full(401, {"error": {"message": "no"}})

    server = await serve(handler)
    provider = OpenAIProvider([server.url])
    assert await provider.served_models() == ["a", "b"]
    server.handler = refusing
    with pytest.raises(ProviderError) as caught:
        await provider.served_models()
    assert caught.value.code == "provider.auth"
    await provider.close()


def test_one_provider_under_two_loops() -> None:
    from contextlib import suppress

    provider = OpenAIProvider(["http://127.0.0.1:1/v1"])

    async def refused() -> str:
        with suppress(ProviderError):
            await answer(provider)
            return "answered"
        return "refused"

    assert asyncio.run(refused()) == "refused"
    assert asyncio.run(refused()) == "refused"


async def test_the_order_of_the_last_chunks(serve: Serve) -> None:
    server = await serve(plain_answer)
    provider = OpenAIProvider([server.url])
    chunks = [chunk async for chunk in provider.stream(ask())]
    await provider.close()
    assert isinstance(chunks[-1], Finish)
    assert isinstance(chunks[-2], UsageChunk)
