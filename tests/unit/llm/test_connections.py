"""Connections: a place that could not be used is free again."""

from __future__ import annotations

import asyncio

import pytest

from kimi_ray.errors import ProviderError
from kimi_ray.llm.connections import Connections
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.openai import OpenAIProvider
from tests.unit.llm.asking import answer


async def test_a_pool_that_cannot_be_made_costs_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "nonsense://proxy")
    connections = Connections(("https://model.invalid/v1",), "key", ModelSettings(max_connections=1))
    for _ in range(2):
        with pytest.raises(ValueError, match="nonsense"):
            await asyncio.wait_for(connections.lease(), 10)
    await connections.close()


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("https://model.invalid/v1", "nonsense://proxy"),
        ("https://model.invalid/v1", "http://somebody:secret@proxy:port"),
        ("https://model.invalid/v1", "socks9://proxy"),
        ("https://model.invalid:port/v1", ""),
        ("https://model\x00.invalid/v1", ""),
        ("ftp://model.invalid/v1", ""),
    ],
)
async def test_an_address_that_cannot_be_used_is_named_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, url: str, proxy: str
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    provider = OpenAIProvider([url], api_key="key", settings=ModelSettings(max_connections=1))
    for ask in (lambda: answer(provider), lambda: provider.model_list(timeout_s=5)):
        with pytest.raises(ProviderError) as caught:
            await asyncio.wait_for(ask(), 10)
        error = caught.value
        assert (error.code, error.retryable, error.details["kind"]) == ("provider.connection", False, "address")
        assert "HTTPS_PROXY" in str(error.hint) and "secret" not in str(error)
    await provider.close()
