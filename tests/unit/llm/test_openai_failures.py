"""The provider against a server that refuses, falls silent, breaks off, or is asked too much."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

import pytest

from kimi_ray.errors import ProviderError
from kimi_ray.llm import (
    Finish,
    ModelSettings,
    RetryPolicy,
    TextDelta,
    UsageChunk,
)
from kimi_ray.llm.openai import OpenAIProvider
from tests.unit.llm.asking import KEY, Serve, answer, ask, ask_once, failure, plain_answer


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


async def test_a_server_that_closes_behind_each_stream_costs_a_moment_and_no_backoff(serve: Serve) -> None:
    """llama.cpp does so, without a word: the next request may meet the closing connection."""
    asked = 0

    async def closes(_: Any, reply: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            reply.cut()  # it was closing: no byte of an answer
            return
        await plain_answer(_, reply)

    server = await serve(closes)
    provider = OpenAIProvider([server.url, "http://127.0.0.1:1/v1"])
    try:
        await answer(provider)
        with pytest.raises(ProviderError) as caught:
            await answer(provider)
        assert caught.value.code == "provider.connection"
        assert caught.value.details["kind"] == "stale"
        policy = RetryPolicy()
        assert policy.delay_ms(1, caught.value, random.Random(1)) == 10
        assert (policy.delay_ms(2, caught.value, random.Random(1)) or 0) >= 1000, "once is enough"
        assert (await answer(provider)).text == "hi", "the agent stays with its server"
    finally:
        await provider.close()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('{"data": [{"id": "b"}, {"id": 7}, {"object": "model"}, null, "x", {"id": "a"}]}', ["a", "b"]),
        ('{"data": []}', []),
        ('[{"id": "a"}]', None),
        ('{"models": [{"id": "a"}]}', None),
        ('{"data": {"id": "a"}}', None),
        ('{"data": null}', None),
        ("null", None),
        ("", None),
        ("<html>", None),
        ('{"error": {"message": "no such thing"}}', None),
    ],
)
async def test_a_list_of_models_that_is_none_is_told(serve: Serve, body: str, found: list[str] | None) -> None:
    async def handler(_: Any, reply: Any) -> None:
        await reply.full(200, body, content_type="application/json")

    server = await serve(handler)
    provider = OpenAIProvider([server.url])
    if found is None:
        with pytest.raises(ProviderError) as caught:
            await provider.served_models()
        assert caught.value.code in ("provider.bad_stream", "provider.server")
    else:
        assert await provider.served_models() == found
    await provider.close()
