"""The token meter: the same number as counting everything, at a cost that does not grow."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings

from kimi_ray.log import EventLog, TokenMeter, message_tokens, surface_tokens, tokens_of
from tests.unit.log.scripts import HEADER, SCRIPTS, ask, begin, chunk, end, new_log, play, user


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        ([], 4),
        ([{"type": "text", "text": ""}], 4 + 4),
        ([{"type": "text", "text": "abcd"}], 4 + 4 + 1),
        ([{"type": "text", "text": "abcde"}], 4 + 4 + 2),
        ([{"type": "reasoning", "text": "abcde"}], 4 + 4 + 2),
        ([{"type": "text", "text": "abcd"}, {"type": "text", "text": "abcd"}], 4 + 2 * (4 + 1)),
        ([{"type": "text", "$blob": "sha256:0", "bytes": 4000}], 4 + 4 + 1000),
        ([{"type": "tool-call", "id": "long id", "name": "abcde", "arguments": "{}"}], 4 + 4 + 2 + 1),
        ([{"type": "tool-call", "id": "c", "name": "a", "arguments": {"$blob": "x", "bytes": 40}}], 4 + 4 + 1 + 10),
        (
            [
                {
                    "type": "tool-result",
                    "tool_call_id": "c",
                    "is_error": False,
                    "content": [{"type": "text", "text": "a"}],
                }
            ],
            4 + 4 + 4 + 1,
        ),
        ([{"type": "image", "url": "https://example.org/a.png"}], 4 + 4 + 1000),
        ([{"type": "audio", "x": 1}], 4 + 4 + tokens_of(len('{"type":"audio","x":1}'))),
        ("plain", 4 + 4 + 2),
    ],
)
def test_the_estimate_of_a_message(content: Any, tokens: int) -> None:
    assert message_tokens({"role": "user", "content": content}) == tokens


@given(SCRIPTS, SCRIPTS)
@settings(max_examples=60, deadline=None)
def test_the_meter_always_says_what_counting_says(before: Any, script: Any) -> None:
    log = new_log()
    play(log, before)
    patient, eager = TokenMeter(log), TokenMeter(log)
    seen: list[bool] = []
    log.observe(lambda _event: seen.append(eager.tokens == surface_tokens(log.surface)))
    play(log, script)
    assert all(seen) and not log.observer_errors
    assert patient.tokens == eager.tokens == surface_tokens(log.surface)


def test_a_meter_that_is_ended_stays_where_it_was() -> None:
    log = new_log()
    meter = TokenMeter(log)
    user(log, "abcd")
    meter.end()
    user(log, "abcd")
    assert meter.tokens == 9 and TokenMeter(log).tokens == 18


def test_a_price_that_cannot_be_told_is_told_of() -> None:
    log = new_log()
    meter = TokenMeter(log)
    user(log, "abcd")
    assert meter.tokens == 9
    log.append("user/message", {"id": "m", "role": "user"}, surface="append")
    assert [type(error) for _, error in log.observer_errors] == [KeyError]
    with pytest.raises(KeyError):
        _ = meter.tokens
    log.append(
        "user/message",
        {"id": "n", "role": "user", "content": [{"type": "text", "text": "abcd"}]},
        surface={"replace": [1, 1]},
        sources=[1],
    )
    assert meter.tokens == 18


def test_forty_thousand_appends_with_a_meter_cost_at_most_half_as_much_again() -> None:
    def log_with(meter: bool) -> tuple[EventLog, Any]:
        log = EventLog(HEADER)
        counted = TokenMeter(log) if meter else None
        return log, counted

    def part(log: EventLog, counted: TokenMeter | None) -> float:
        """Seconds for 1,000 appends: chunks, and a message now and then, the meter read after each."""
        began = time.process_time()
        for number in range(20):
            begin(log)
            for _ in range(44):
                chunk(log, "word ")
                if counted is not None:
                    _ = counted.tokens
            user(log, "x" * number)
            ask(log, text="fine")
            if counted is not None:
                _ = counted.tokens
            end(log)
        return time.process_time() - began

    plain, metered = log_with(False), log_with(True)
    pairs = [(part(*plain), part(*metered)) for _ in range(40)]
    assert plain[0].next_seq == metered[0].next_seq == 40_000
    # Both logs grow side by side, so the busy moments of the machine hit both; the late parts would show a quadratic.
    early, late = pairs[:20], pairs[20:]
    for some in (early, late):
        assert min(m for _, m in some) <= 1.5 * min(p for p, _ in some)
    assert sum(sorted(m for _, m in late)[:10]) <= 1.5 * sum(sorted(m for _, m in early)[:10])
