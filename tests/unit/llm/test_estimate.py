"""Estimated usage: the same as by counting everything, at the cost of what is new."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_ray.llm import estimate
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.estimate import Estimator
from kimi_ray.settings import Sampling


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def request(messages: list[dict[str, Any]], agent: str = "main") -> ChatRequest:
    return ChatRequest(
        model="m", system=None, messages=list(messages), tools=(), sampling=Sampling(), session_id="s", agent_id=agent,
        turn=0, step=0,
    )  # fmt: skip


def test_a_long_conversation_costs_what_is_new_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []
    inner = estimate._content_chars  # pyright: ignore[reportPrivateUsage]

    def counting(content: Any) -> int:
        counted.append(content)
        return inner(content)

    monkeypatch.setattr(estimate, "_content_chars", counting)
    estimator, messages = Estimator(), [message("x" * 7)] * 100
    for turn in range(500):
        messages.append(message("y" * turn))
        assert estimator.input_chars(request(messages)) == 700 + sum(range(turn + 1))
    assert len(counted) < 700, "quadratic: every turn counted its whole conversation"


def test_what_was_replaced_is_counted_anew() -> None:
    estimator, messages = Estimator(), [message("x" * 10)] * 200
    assert estimator.input_chars(request(messages)) == 2000
    messages[50] = message("x")
    assert estimator.input_chars(request(messages)) == 1991
    assert estimator.input_chars(request(messages, "agent-1")) == 1991
    assert estimator.input_chars(request(messages[:70])) == 691
    assert estimator.input_chars(request(messages[:3])) == 30
