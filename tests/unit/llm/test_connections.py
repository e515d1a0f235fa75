"""Connections: a place that could not be used is free again."""

from __future__ import annotations

import asyncio

import pytest

from kimi_ray.llm.connections import Connections
from kimi_ray.llm.models import ModelSettings


async def test_a_pool_that_cannot_be_made_costs_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "nonsense://proxy")
    connections = Connections(("https://model.invalid/v1",), "key", ModelSettings(max_connections=1))
    for _ in range(2):
        with pytest.raises(ValueError, match="nonsense"):
            await asyncio.wait_for(connections.lease(), 10)
    await connections.close()
