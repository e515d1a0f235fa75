"""The surface: what may be replaced by what, what it costs, and that nothing about it depends on how it came to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from kimi_ray.errors import LogError
from kimi_ray.events import SessionEvent, parse_event
from kimi_ray.log import EventLog, Surface, derive_messages, tools_balanced
from tests.unit.log.scripts import (
    HEADER,
    SCRIPTS,
    ask,
    begin,
    call,
    cut,
    end,
    new_log,
    play,
    result,
    result_data,
    user,
)


def refused(log: EventLog, *args: Any, **kwargs: Any) -> LogError:
    before = (log.next_seq, log.surface.seqs, log.surface.generation, log.messages())
    with pytest.raises(LogError) as caught:
        log.append(*args, **kwargs)
    assert (log.next_seq, log.surface.seqs, log.surface.generation, log.messages()) == before
    return caught.value


def with_results(*calls: str) -> EventLog:
    """An open step with answered calls: seqs 0 and 1 open it, 2 asks, then a call and a result each."""
    log = new_log()
    begin(log)
    ask(log, *calls)
    for name in calls:
        call(log, name)
        result(log, name, "long " * 10)
    return log


def test_a_tool_result_gives_way_to_one_tool_result_only() -> None:
    log = with_results("a", "b")
    span = {"replace": [4, 6]}
    assert refused(log, "tool/result", result_data(log, "a", "x"), surface=span, sources=[4, 6]).code == (
        "log.bad_surface"
    )
    on_message = {"replace": [2, 2]}
    assert refused(log, "tool/result", result_data(log, "a", "x"), surface=on_message, sources=[2]).code == (
        "log.bad_surface"
    )
    log.append("tool/result", result_data(log, "a", "x"), surface={"replace": [4, 4]}, sources=[4])
    assert log.surface.seqs == (2, 7, 6)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(step=7),
        lambda data: data.update(run_ms=1),
        lambda data: data.update(error={"code": "tool.failed"}),
        lambda data: data.update(meta={"x": 1}),
        lambda data: data["message"].update(id="other"),
        lambda data: data["message"]["source"].update(call_id="b"),
        lambda data: data["message"]["content"][0].update(is_error=True),
        lambda data: data["message"]["content"][0].update(tool_call_id="b"),
        lambda data: data["message"]["content"][0].update(more=1),
    ],
)
def test_a_replaced_tool_result_may_change_its_content_only(change: Any) -> None:
    log = with_results("a", "b")
    data = result_data(log, "a", "short")
    change(data)
    error = refused(log, "tool/result", data, surface={"replace": [4, 4]}, sources=[4])
    assert "only its content" in error.message


@pytest.mark.parametrize(
    ("sources", "code"),
    [
        ([0, 2], "log.bad_surface"),
        ([0, 1], "log.bad_surface"),
        ([], "log.bad_surface"),
        (None, "log.bad_surface"),
        ([0, 1, 2, 2], "log.bad_envelope"),
        ([0, 1, 2, 3], "log.bad_envelope"),
        ([0, 1, 2, -1], "log.bad_envelope"),
        ([0, 1, 2, True], "log.bad_envelope"),
    ],
)
def test_a_replace_cites_all_that_it_shadows_once_each_and_nothing_later(sources: Any, code: str) -> None:
    log = new_log()
    for text in "abc":
        user(log, text)
    body = {"id": "m", "role": "user", "content": [], "source": {}}
    assert refused(log, "user/message", body, surface={"replace": [0, 2]}, sources=sources).code == code


def test_a_replace_may_cite_more_than_it_shadows() -> None:
    log = new_log()
    for text in "abc":
        user(log, text)
    user(log, "ab", surface={"replace": [0, 1]}, sources=[2, 1, 0])
    assert log.surface.seqs == (3, 2)


def test_a_span_is_places_not_numbers() -> None:
    log = new_log()
    for text in "abcd":
        user(log, text)
    user(log, "bc", surface={"replace": [1, 2]}, sources=[1, 2])
    assert log.surface.seqs == (0, 4, 3)
    user(log, "bcd", surface={"replace": [4, 3]}, sources=[4, 3])
    assert log.surface.seqs == (0, 5)


def test_a_window_of_a_log_takes_replaces_inside_of_it_only() -> None:
    log = new_log()
    told: list[SessionEvent] = []
    log.observe(told.append)
    for text in "abcd":
        user(log, text)
    user(log, "bc", surface={"replace": [1, 2]}, sources=[1, 2])
    user(log, "bcd", surface={"replace": [4, 3]}, sources=[4, 3])

    def fold(events: list[SessionEvent]) -> tuple[int, ...]:
        window = Surface()
        for event in events:
            plan = window.check(event)
            assert plan is not None
            window.apply(plan)
        return window.seqs

    assert fold(told[1:]) == (5,)
    with pytest.raises(LogError, match="1 is not on the surface"):
        fold(told[2:])


def test_a_cut_comes_between_turns_and_leaves_every_call_its_result() -> None:
    log = with_results("a")
    seqs = log.surface.seqs
    assert refused(log, *cut_of(seqs)[0], **cut_of(seqs)[1]).code == "log.out_of_order"
    end(log)
    for span in ((2,), (4,)):
        error = refused(log, *cut_of(span)[0], **cut_of(span)[1])
        assert "splits a tool call from its result" in error.message
    cut(log, 2, 4, [2, 4])
    assert log.surface.seqs == () and log.messages() == []


def cut_of(seqs: tuple[int, ...]) -> tuple[tuple[str, Any], dict[str, Any]]:
    data = {"reason": "undo", "prompts": []}
    return ("surface/cut", data), {"surface": {"replace": [seqs[0], seqs[-1]]}, "sources": list(seqs)}


def test_balance_over_all_cuts_and_a_result_before_its_call() -> None:
    log = with_results("a", "b")
    end(log)
    user(log, "x")
    assert tools_balanced(log.surface) == [True, False, False, True, True]
    with pytest.raises(LogError, match="before its call"):
        tools_balanced(list(log.surface)[1:])


@given(SCRIPTS)
@settings(max_examples=70, deadline=None)
def test_what_is_kept_up_event_by_event_is_what_the_whole_log_gives(script: Any) -> None:
    log = new_log()
    told: list[SessionEvent] = []
    naive: list[SessionEvent] = []

    def follow(event: SessionEvent) -> None:
        told.append(event)
        span = event.replaced
        if span is not None:
            seqs = [node.seq for node in naive]
            shadowed = naive[seqs.index(span[0]) : seqs.index(span[1]) + 1]
            assert list(log.replaced) == shadowed
            naive[seqs.index(span[0]) : seqs.index(span[1]) + 1] = [] if event.type == "surface/cut" else [event]
        else:
            assert log.replaced == ()
            if event.surface is not None:
                naive.append(event)
        assert log.surface.seqs == tuple(node.seq for node in naive)
        assert log.messages() == derive_messages(naive)
        balanced = [sum(map(calls_less_results, naive[:end])) == 0 for end in range(len(naive) + 1)]
        for start in range(len(naive)):
            for stop in range(start + 1, len(naive) + 1):
                assert log.surface.is_balanced(start, stop) == (balanced[start] and balanced[stop])

    log.observe(follow)
    play(log, script)
    assert not log.observer_errors
    again = EventLog.restore(HEADER, [parse_event(event.line) for event in told])
    assert again.surface.seqs == log.surface.seqs and again.surface.generation == log.surface.generation
    assert again.messages() == log.messages()


def calls_less_results(node: SessionEvent) -> int:
    if node.type == "tool/result":
        return -1
    content = node.data["message"]["content"] if node.type == "assistant/message" else ()
    return sum(block["type"] == "tool-call" for block in content)


@given(SCRIPTS, SCRIPTS)
@settings(max_examples=50, deadline=None)
def test_events_beside_the_surface_never_change_what_the_model_sees(script: Any, noise: Any) -> None:
    quiet, noisy = new_log(), new_log()
    spoken = [one for one in script if one[0] == "user"]
    play(quiet, spoken)
    for index, one in enumerate(spoken):
        play(noisy, [other for other in noise[index::3] if other[0] in ("note", "chunk", "response", "compaction")])
        play(noisy, [one])

    def texts(log: EventLog) -> list[Any]:
        return [message["content"] for message in log.messages()]

    assert texts(noisy) == texts(quiet)


class Counted(list[Any]):
    """A list that counts looks at its items."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.looks += 1
            yield item

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.looks += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.parametrize("first", [0, 1_500])
def test_replacing_nodes_of_a_large_surface_one_by_one_looks_at_it_once(first: int) -> None:
    log = new_log()
    for _ in range(2_000):
        user(log, "x")
    nodes = log.surface._nodes = Counted(log.surface)  # pyright: ignore[reportPrivateUsage]
    for seq in range(first, first + 500):
        user(log, "y", surface={"replace": [seq, seq]}, sources=[seq])
        user(log, "z")
    assert log.surface[first].seq == 2_000
    assert nodes.looks < 2_000 + 500 * 5  # a search each would take half a million


def test_undoing_turn_by_turn_costs_what_is_taken_out() -> None:
    log = new_log()
    contents: list[Counted] = []
    for number in range(300):
        begin(log)
        ask(log, f"c{number}")
        call(log, f"c{number}")
        result(log, f"c{number}")
        end(log)
    for node in log.surface:
        if node.type == "assistant/message":
            contents.append(Counted(node.data["message"]["content"]))
            dict.__setitem__(node.data["message"], "content", contents[-1])
    for _ in range(300):
        span = log.surface.seqs[-2:]
        cut(log, span[0], span[-1], span)
    assert len(log.surface) == 0
    assert sum(content.looks for content in contents) < 300 * 4


def test_places_stay_right_through_every_kind_of_change() -> None:
    log = new_log()
    naive: list[int] = []

    def append() -> None:
        naive.append(user(log, "x").seq)

    def replace(low: int, high: int) -> None:
        span = naive[low : high + 1]
        naive[low : high + 1] = [user(log, "y", surface={"replace": [span[0], span[-1]]}, sources=span).seq]

    def take_out(low: int, high: int) -> None:
        span = naive[low : high + 1]
        cut(log, span[0], span[-1], span)
        del naive[low : high + 1]

    def check() -> None:
        """Each node can be found where it stands."""
        assert list(log.surface.seqs) == naive
        for place in range(len(naive)):
            replace(place, place)
        assert list(log.surface.seqs) == naive

    for _ in range(5):
        append()
    steps: list[Any] = [
        append,
        lambda: replace(2, 2),
        append,
        lambda: replace(1, 3),
        append,
        lambda: replace(len(naive) - 2, len(naive) - 1),
        append,
        lambda: take_out(0, 0),
        append,
        lambda: take_out(len(naive) - 2, len(naive) - 1),
        append,
        lambda: replace(0, len(naive) - 1),
        append,
        lambda: take_out(0, len(naive) - 1),
        append,
    ]
    check()
    for step in steps:
        step()
        check()
