"""The provider and what servers answer, in every dialect and in pieces of every size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import ProviderError
from kimi_ray.events.json_rule import freeze
from kimi_ray.llm import (
    Assembler,
    ModelSettings,
    TextDelta,
    ToolSpec,
)
from kimi_ray.llm.chat import MetaChunk
from kimi_ray.llm.completion import CompletionReader
from kimi_ray.llm.openai import OpenAIProvider
from kimi_ray.settings import Sampling, Usage
from tests.unit.llm.asking import KEY, USAGE, Serve, answer, ask, ask_once, failure, plain_answer

WIRE_KEYS = ["choices", "delta", "message", "content", "tool_calls", "function", "name", "arguments", "index", "id",
             "finish_reason", "logprobs", "token_ids", "usage", "prompt_tokens", "prompt_tokens_details", "reasoning",
             "completion_tokens", "cached_tokens", "total_tokens", "text", "token", "logprob",
             "top_logprobs"]  # fmt: skip


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


@pytest.mark.parametrize("said", [True, 3, "12", [1, None], [1.5], ["\ud800"], [1 << 70], [-1], {"a": 1}, [1e400]])
def test_token_ids_that_are_none_are_not_taken_for_some(said: Any) -> None:
    reader = CompletionReader()
    choice = {"delta": {"content": "a"}, "token_ids": said}
    chunks = reader.read({"id": "r", "prompt_token_ids": said, "choices": [choice]})
    assert [chunk.tokens for chunk in chunks if isinstance(chunk, MetaChunk)] == [None]
