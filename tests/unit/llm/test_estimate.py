"""Estimated usage: the same as by counting everything, at the cost of what is new."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kimi_ray.llm import estimate
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.estimate import Estimator
from kimi_ray.log import message_tokens
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

    def counting(message: dict[str, Any]) -> int:
        counted.append(message)
        return message_tokens(message)

    monkeypatch.setattr(estimate, "message_tokens", counting)
    estimator, messages = Estimator(), [message("x" * 7)] * 100
    for turn in range(500):
        messages.append(message("y" * 4 * turn))
        frames = 8 * len(messages)
        assert estimator.input_tokens(request(messages)) == 200 + sum(range(turn + 1)) + frames
    assert len(counted) < 700, "quadratic: every turn counted its whole conversation"


def test_what_was_replaced_is_counted_anew() -> None:
    estimator, messages = Estimator(), [message("x" * 12)] * 200
    assert estimator.input_tokens(request(messages)) == 200 * 11
    messages[50] = message("x")
    assert estimator.input_tokens(request(messages)) == 199 * 11 + 9
    assert estimator.input_tokens(request(messages, "agent-1")) == 199 * 11 + 9
    assert estimator.input_tokens(request(messages[:70])) == 69 * 11 + 9
    assert estimator.input_tokens(request(messages[:3])) == 33


def test_messages_count_as_the_log_counts_them() -> None:
    messages = [message("x" * size) for size in range(100)]
    assert Estimator().input_tokens(request(messages)) == sum(map(message_tokens, messages))
    asked = request(messages[:1])
    plain = Estimator().input_tokens(asked)
    framed = dataclasses.replace(asked, system="abcd")
    assert Estimator().input_tokens(framed) == plain + 1 + 4
    assert Estimator().usage(framed, text_chars=9, reasoning_chars=4).output == 4
