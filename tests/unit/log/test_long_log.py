"""A log that lives long: its memory is that of its surface, however many events have passed."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from kimi_ray.agent.fold import FOLLOWED, AgentFold
from kimi_ray.log import EventLog, TokenMeter
from tests.unit.log.scripts import HEADER, ask, begin, call, chunk, end, result, user

_A_ROUND = (20_000, 6_000)
_MB = 1 << 20


def rss() -> int:
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def append_turns(log: EventLog, events: int) -> None:
    """Turns of 50 events with a tool call; every hundred turns one message takes the place of all before."""
    until = log.next_seq + events
    while log.next_seq < until:
        begin(log)
        for number in range(42):
            chunk(log, f"word {number} ")
        ask(log, f"c{log.next_seq}", text="an answer of some length " * 20)
        name = f"c{log.next_seq - 1}"
        call(log, name)
        result(log, name, "what the tool had to say " * 20)
        end(log)
        if log.order.next_turn % 100 == 0:
            seqs = log.surface.seqs
            user(log, "what was said so far", surface={"replace": [seqs[0], seqs[-1]]}, sources=seqs)


@pytest.mark.long
def test_the_memory_of_a_living_log_does_not_grow_with_its_age(budget: Any) -> None:
    log = EventLog(HEADER)
    meter = TokenMeter(log)
    a_round = budget.size(*_A_ROUND)
    append_turns(log, 2 * a_round)
    before = rss()
    for _ in budget.rounds():
        append_turns(log, a_round)
        assert len(log.surface) <= 300 and meter.tokens < 300 * 200
        assert rss() - before < 8 * _MB
        if log.next_seq >= 1_000_000:
            break


@pytest.mark.long
def test_the_memory_of_reading_a_log_back_does_not_grow_with_its_length(budget: Any) -> None:
    source, back, fold = EventLog(HEADER), EventLog(HEADER), AgentFold()
    lines: list[bytes] = []
    a_round = budget.size(*_A_ROUND)
    source.observe(lambda event: lines.append(event.line))

    def go_on() -> None:
        append_turns(source, a_round)
        back.read_back(lines, follow=fold.apply, types=FOLLOWED)
        lines.clear()

    go_on()
    go_on()
    before = rss()
    for _ in budget.rounds():
        go_on()
        assert back.surface.seqs == source.surface.seqs and back.next_seq == source.next_seq
        # The fold tells of every turn that it keeps; all else is the surface.
        assert rss() - before < 8 * _MB
        if back.next_seq >= 1_000_000:
            break
