"""Asking the tiny server of ``conftest`` through the provider, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kimi_ray.errors import ProviderError
from kimi_ray.llm import (
    Assembled,
    Assembler,
    ChatRequest,
    ModelSettings,
)
from kimi_ray.llm.openai import OpenAIProvider

KEY = "sk-test-0123456789abcdef"
HELLO: dict[str, Any] = {"id": "u", "role": "user", "content": [{"type": "text", "text": "hello"}]}
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}

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


async def plain_answer(_: Any, reply: Any) -> None:
    await reply.start()
    await reply.delta(content="hi")
    await reply.delta("stop")
    await reply.end()
