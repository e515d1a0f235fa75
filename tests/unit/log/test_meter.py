"""The token meter: the same number as counting everything, at a cost that does not grow."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings

from kimi_ray.events import encode
from kimi_ray.log import Counted, EventLog, Measurement, TokenMeter, message_tokens, surface_tokens, tokens_of
from tests.unit.log.scripts import HEADER, SCRIPTS, ask, begin, chunk, cut, end, new_log, play, step, step_end, user


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


# -- what a server counted -------------------------------------------------------------------------------------------


def head(log: EventLog, system: str = "Be brief.", **more: Any) -> None:
    header = {"provider": "p", "model": "m", "system": system, **more}
    log.append("request/header", {"header": header, "reason": "initial"})


def respond(log: EventLog, attempt: int = 1, *, usage: dict[str, Any] | None = None, **more: Any) -> None:
    place = {"turn": log.order.open_turn, "step": log.order.open_step, "attempt": attempt}
    log.append("llm/response", {**place, "usage": usage, "timing": {}, **more} if usage else {**place, "timing": {}})


def answer(log: EventLog, text: str, attempt: int | None = 1, **more: Any) -> None:
    message = {"id": f"a{log.next_seq}", "role": "assistant", "content": [{"type": "text", "text": text}], "source": {}}
    data = {"turn": log.order.open_turn, "step": log.order.open_step, "message": message, **more}
    log.append("assistant/message", data | ({} if attempt is None else {"attempt": attempt}), surface="append")


def counted(total: int) -> dict[str, Any]:
    return {"input": total - 4, "cached": 1, "cache_write": 1, "output": 2, "reasoning": 1}


def opened() -> tuple[EventLog, TokenMeter]:
    log = new_log()
    meter = TokenMeter(log)
    begin(log)
    user(log, "abcd" * 10)
    return log, meter


def test_before_anything_was_counted_all_is_estimated_header_included() -> None:
    log, meter = opened()
    assert meter.measure() == Measurement(log.next_seq, "none", 0, 18, 18)
    head(log)
    tokens = 3 + 4
    assert meter.measure() == Measurement(log.next_seq, "estimated", tokens, 18, 18)
    assert meter.total == tokens + 18
    tools = [{"name": "t", "description": "d", "parameters": {}}]
    head(log, tools=tools)
    assert meter.measure().baseline_tokens == tokens + tokens_of(len(encode(tools))) + 4
    head(log, system={"$blob": "sha256:0", "bytes": 4_000}, tools={"$blob": "sha256:0", "bytes": 400})  # type: ignore[arg-type]
    assert meter.measure().baseline_tokens == 1_004 + 104


@pytest.mark.parametrize("scale", [1, 3])
def test_what_a_server_counted_is_the_base_of_what_comes_and_goes_behind_it(scale: int) -> None:
    log, meter = opened()
    head(log)
    estimate = 7 + 18 + 9
    respond(log, usage=counted(scale * estimate))
    answer(log, "abcd")
    assert meter.measure() == Measurement(log.next_seq, "usage", scale * estimate, 0, 18 + 9, scale)
    user(log, "abcd")
    assert meter.total == scale * (estimate + 9)
    seqs = log.surface.seqs
    user(log, "ab", surface={"replace": [seqs[0], seqs[1]]}, sources=seqs[:2])
    assert meter.total == scale * (estimate + 9 - 27 + 9)
    end(log)
    cut(log, log.surface.seqs[0], log.surface.seqs[-1], log.surface.seqs)
    assert meter.measure() == Measurement(log.next_seq, "usage", scale * estimate, -27 * scale, 0, scale)


def test_a_proportion_beyond_all_measure_is_bounded() -> None:
    log, meter = opened()
    head(log)
    respond(log, usage=counted(34_000))
    answer(log, "abcd")
    user(log, "abcd")
    assert meter.total == 34_000 + 9 * 8


def test_the_size_is_never_below_nothing() -> None:
    assert Measurement(1, "usage", 80, -81, 0).total_tokens == 0
    log, meter = opened()
    head(log)
    user(log, "x" * 400)
    respond(log, usage=counted(80))
    answer(log, "abcd")
    end(log)
    cut(log, log.surface.seqs[0], log.surface.seqs[-1], log.surface.seqs)
    assert 0 <= meter.total <= 7  # the header is left


@pytest.mark.parametrize(
    ("usage", "kind"),
    [
        ({**counted(500), "estimated": True}, "estimated"),
        ({"input": 0, "output": 0}, "estimated"),
        (None, "estimated"),
        (counted(41), "usage"),
        ({"input": 5, "output": 5}, "estimated"),  # less than half of the estimate: something is left out
        ({"input": 30, "output": 5}, "usage"),
    ],
)
def test_what_is_believed(usage: dict[str, Any] | None, kind: str) -> None:
    log, meter = opened()
    head(log)
    respond(log, usage=usage)
    answer(log, "abcd")
    assert meter.measure().baseline_kind == kind


def test_only_the_answer_of_the_attempt_that_was_counted_is_its_answer() -> None:
    log, meter = opened()
    head(log)
    respond(log, 1, usage=counted(500), error={"code": "provider.server"})
    answer(log, "abcd", 1)
    assert meter.measure().baseline_kind == "estimated"
    respond(log, 2, usage=counted(500))
    answer(log, "abcd", 3)
    assert meter.measure().baseline_kind == "estimated"
    respond(log, 4, usage=counted(500))
    answer(log, "abcd", 4, interrupted=True)
    assert meter.measure().baseline_kind == "estimated"
    answer(log, "abcd", None, usage=counted(600))  # an imported log has it in the message
    assert meter.measure().baseline_tokens == 600


def test_with_another_header_all_is_estimated_anew_and_with_the_same_nothing_changes() -> None:
    log, meter = opened()
    head(log)
    respond(log, usage=counted(500))
    answer(log, "abcd")
    head(log)
    assert meter.measure().baseline_kind == "usage"
    head(log, "Be verbose.")
    assert meter.measure().baseline_kind == "estimated"


def test_a_resumed_meter_takes_up_what_was_counted_unless_something_was_replaced_behind_it() -> None:
    log, meter = opened()
    known, header = Counted(), {"provider": "p", "model": "m", "system": "Be brief."}

    def follow(event: Any) -> None:
        if event.type == "llm/response":
            known.response(event.data)
        elif event.type == "assistant/message":
            known.message(event)

    log.observe(follow)
    head(log)
    respond(log, usage=counted(500))
    answer(log, "abcd")
    user(log, "abcd" * 4)
    assert TokenMeter(log, header=header, counted=known).measure() == meter.measure()
    late = TokenMeter(log, header=header, counted=known)
    seqs = log.surface.seqs
    user(log, "ab", surface={"replace": [seqs[0], seqs[0]]}, sources=seqs[:1])
    assert late.measure().baseline_kind == "estimated"
    assert TokenMeter(log, header=header, counted=known).measure().baseline_kind == "estimated"
    step_end(log)
    step(log)
    respond(log, usage=counted(700))
    answer(log, "abcd")
    assert late.measure() == TokenMeter(log, header=header, counted=known).measure() == meter.measure()
    known.forget()
    assert TokenMeter(log, header=header, counted=known).measure().baseline_kind == "estimated"
