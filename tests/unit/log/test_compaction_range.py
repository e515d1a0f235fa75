"""Range selection and undo spans: never between a call and its result."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.errors import LogError
from kimi_ray.log import EventLog, PricedNode, select_range, span_between, surface_prices, tools_balanced, undo_span
from tests.unit.log.scripts import SCRIPTS, ask, begin, call, end, new_log, play, result, user


def talk(*calls: str) -> EventLog:
    log = new_log()
    begin(log)
    user(log, "go")
    ask(log, *calls)
    for name in calls:
        call(log, name)
        result(log, name)
    ask(log, text="done")
    end(log)
    return log


def select(log: EventLog, retain: int) -> tuple[int, ...] | None:
    span = select_range(list(log.surface), surface_prices(log.surface), retain)
    return None if span is None else span.seqs


def test_nothing_is_selected_of_an_empty_surface_or_of_one_node() -> None:
    log = new_log()
    assert select(log, 0) is None
    user(log, "one")
    assert select(log, 0) is None and select(log, 10_000) is None


def test_with_nothing_to_retain_the_last_node_stays() -> None:
    log = talk("a", "b")
    assert select(log, 0) == log.surface.seqs[:-1]


def test_the_cut_moves_to_the_head_until_no_call_is_parted_from_its_result() -> None:
    log = talk("a", "b")
    go, asking, a, b, done = log.surface.seqs
    prices = {node.seq: node.tokens for node in surface_prices(log.surface)}
    for retain in range(prices[done] + 1, prices[done] + prices[b] + prices[a] + prices[asking] + 1):
        assert select(log, retain) == (go,)
    assert select(log, prices[done]) == (go, asking, a, b)
    assert select(log, sum(prices.values()) - prices[go] + 1) is None


def test_prices_of_another_surface_are_refused() -> None:
    log = talk()
    with pytest.raises(LogError):
        select_range(list(log.surface), [PricedNode(99, 1)], 0)


def test_a_named_span_is_checked() -> None:
    log = talk("a")
    nodes, prices = list(log.surface), surface_prices(log.surface)
    go, asking, a, done = log.surface.seqs
    assert span_between(nodes, prices, asking, a).seqs == (asking, a)
    assert span_between(nodes, prices, go, done).tokens == sum(node.tokens for node in prices)
    for start, last in ((a, done), (go, asking), (done, go), (go, 99), (99, done)):
        with pytest.raises(LogError) as raised:
            span_between(nodes, prices, start, last)
        assert raised.value.code == "log.bad_surface"


@given(SCRIPTS, st.integers(0, 200))
@settings(max_examples=150, deadline=None)
def test_a_selected_range_begins_at_the_head_is_balanced_and_leaves_enough(script: Any, retain: int) -> None:
    log = new_log()
    play(log, script)
    prices = surface_prices(log.surface)
    try:
        balanced = tools_balanced(log.surface)
    except LogError:  # a replace of this script has parted a result from its call: that is told, not mended
        with pytest.raises(LogError):
            select_range(list(log.surface), prices, retain)
        return
    span = select_range(list(log.surface), prices, retain)
    if span is None:
        return
    count = len(span.seqs)
    assert span.seqs == log.surface.seqs[:count] and 0 < count < len(log.surface)
    assert balanced[count]
    assert sum(node.tokens for node in prices[count:]) >= retain
    assert span.tokens == sum(node.tokens for node in prices[:count])


def said(log: EventLog, name: str, kind: str = "user") -> int:
    body = {"id": name, "role": "user", "content": [{"type": "text", "text": name}], "source": {"kind": kind}}
    return log.append("user/message", body, surface="append").seq


def test_an_undo_takes_whole_prompts_with_what_stood_before_them() -> None:
    log = new_log()
    assert undo_span(list(log.surface), 1) == "empty"
    begin(log)
    said(log, "a notice", "task")
    said(log, "p0")
    ask(log, text="fine")
    end(log)
    begin(log)
    said(log, "other notice", "task")
    hook = said(log, "a hook's", "hook_result")
    said(log, "p1")
    ask(log, "c")
    call(log, "c")
    result(log, "c")
    ask(log, text="fine")
    said(log, "interruption", "interruption")
    end(log)
    one = undo_span(list(log.surface), 1)
    assert not isinstance(one, str) and one.prompts == ("p1",) and one.seqs[0] == hook
    assert one.seqs[-1] == log.surface.seqs[-1]
    two = undo_span(list(log.surface), 2)
    assert not isinstance(two, str) and two.prompts == ("p0", "p1") and len(two.seqs) == len(log.surface) - 1
    assert undo_span(list(log.surface), 3) == "insufficient"


def test_an_undo_does_not_pass_a_message_that_replaced_others() -> None:
    log = talk()
    seqs = log.surface.seqs
    user(log, "summary", surface={"replace": [seqs[0], seqs[-1]]}, sources=seqs)
    assert undo_span(list(log.surface), 1) == "compaction_boundary"
    begin(log)
    said(log, "p1")
    end(log)
    assert not isinstance(undo_span(list(log.surface), 1), str)
    assert undo_span(list(log.surface), 2) == "compaction_boundary"
