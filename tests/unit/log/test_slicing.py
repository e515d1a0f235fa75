"""Where logs are cut, event by event."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings

from kimi_ray.errors import LogError
from kimi_ray.events import encode, parse_event
from kimi_ray.log import WHOLE, EventLog, LogScanner, LogSlice, Where, closing_events, slice_log
from tests.unit.log.scripts import SCRIPTS, ask, begin, call, chunk, end, new_log, play, result, step, step_end, user


def stored(log: EventLog) -> list[bytes]:
    lines: list[bytes] = []
    log.observe(lambda event: lines.append(event.line))
    return lines


def fresh() -> tuple[EventLog, list[bytes]]:
    log = new_log()
    return log, stored(log)


def cut_at(lines: list[bytes], where: Where, **options: Any) -> int | None:
    found = slice_log(lines, where, **options)
    return None if found is None else found.cut


def submit(log: EventLog, prompt_id: str) -> int:
    content = [{"type": "text", "text": prompt_id}]
    return log.append("prompt/submitted", {"prompt_id": prompt_id, "content": content}).seq


def start(log: EventLog, *prompts: str) -> int:
    seq = log.append("turn/start", {"turn": log.order.next_turn, "prompts": list(prompts)}).seq
    for one in prompts:
        log.append("prompt/started", {"prompt_id": one, "turn": log.order.open_turn})
    step(log)
    return seq


def settle(log: EventLog, prompt_id: str, turn: int | None) -> None:
    data: dict[str, Any] = {"prompt_id": prompt_id, "state": "completed"}
    log.append("prompt/completed", data if turn is None else data | {"turn": turn})


def say(log: EventLog, text: str, kind: str = "user", **more: Any) -> None:
    content = [{"type": "text", "text": text}]
    body = {"id": text, "role": "user", "content": content, "source": {"kind": kind}}
    log.append("user/message", body, surface=more.pop("surface", "append"), **more)


# -- the place ---------------------------------------------------------------------------------------------------------


def test_through_a_turn_with_what_settles_it_and_no_more() -> None:
    log, lines = fresh()
    submit(log, "p")
    start(log, "p")
    end(log)
    settle(log, "p", 0)
    settle(log, "q", 0)
    behind = log.next_seq
    settle(log, "r", None)  # a queued one that was cancelled
    log.append("profile/model", {"model": "m"})
    begin(log)
    end(log)
    assert cut_at(lines, Where("turn", 0)) == behind
    assert cut_at(lines[:behind], Where("turn", 0)) == behind
    assert cut_at(lines[: behind - 1], Where("turn", 0)) == behind - 1
    assert cut_at(lines, Where("turn", 1)) == log.next_seq


def test_what_settles_a_turn_is_of_that_turn() -> None:
    log, lines = fresh()
    begin(log)
    end(log)
    behind = log.next_seq
    settle(log, "other", 7)
    assert cut_at(lines, Where("turn", 0)) == behind


def test_through_a_step_with_its_results() -> None:
    log, lines = fresh()
    begin(log)
    ask(log, "a", "b")
    call(log, "a")
    result(log, "a")
    call(log, "b")
    result(log, "b")
    step_end(log)
    first = log.next_seq
    step(log)
    ask(log, "c")
    found = slice_log(lines, Where("step", 0, 0))
    assert found is not None and found.cut == first
    assert (found.order.open_turn, found.order.open_step, found.order.pending_calls) == (0, None, {})
    assert cut_at(lines, Where("step", 0, 1)) is None
    assert cut_at(lines, Where("step", 0, 1), ended=True) == log.next_seq
    assert cut_at(lines, Where("turn", 0)) is None
    assert cut_at(lines, Where("turn", 0), ended=True) == log.next_seq


def test_before_a_turn_whose_prompt_came_when_all_was_idle() -> None:
    log, lines = fresh()
    begin(log)
    end(log)
    behind = submit(log, "p")
    start(log, "p")
    assert cut_at(lines, Where("before", 1)) == behind


def test_the_times_before_a_turn_are_those_of_what_is_kept() -> None:
    times = iter([10, 20, 99, 99])
    log = EventLog(new_log().header, clock=lambda: next(times))
    lines = stored(log)
    log.append("note/added", {"text": "x"})
    log.append("note/added", {"text": "x"})
    submit(log, "p")
    log.append("turn/start", {"turn": 0, "prompts": ["p"]})
    found = slice_log(lines, Where("before", 0))
    assert found is not None and (found.cut, found.last_time, found.latest_time) == (2, 20, 20)


def test_before_a_turn_whose_prompt_had_waited() -> None:
    log, lines = fresh()
    submit(log, "p")
    start(log, "p")
    early = submit(log, "q")
    log.append("prompt/queued", {"prompt_id": "q", "queue_length": 1})
    end(log)
    settle(log, "p", 0)
    began = start(log, "q")
    assert early < began
    assert cut_at(lines, Where("before", 1)) == began


def test_before_a_turn_with_other_submissions_in_front() -> None:
    log, lines = fresh()
    first = submit(log, "p")
    second = submit(log, "q")
    log.append("prompt/queued", {"prompt_id": "q", "queue_length": 2})
    began = start(log, "p")
    # Between p's own submission and its turn stand q's: they stay, and are dropped with all that is pending.
    assert cut_at(lines, Where("before", 0)) == began
    assert first < second < began


def test_before_a_turn_comes_what_came_in_between() -> None:
    log, lines = fresh()
    begin(log)
    message = user(log, "x")
    end(log)
    undo = log.append(
        "surface/cut",
        {"reason": "undo", "prompts": []},
        surface={"replace": [message.seq, message.seq]},
        sources=[message.seq],
    )
    log.append("profile/model", {"model": "m2"})
    behind = submit(log, "p")
    start(log, "p")
    found = slice_log(lines, Where("before", 1))
    assert found is not None and (found.cut, found.model) == (behind, "m2")
    ended = cut_at(lines, Where("turn", 0))
    assert ended is not None and ended <= undo.seq, "the undo is not a part of the turn before it"


def test_a_continuation_and_an_empty_turn_are_turns() -> None:
    log, lines = fresh()
    log.append("turn/start", {"turn": 0, "prompts": []})
    log.append("turn/end", {"turn": 0, "reason": {"kind": "cancelled"}})
    began = log.append("turn/start", {"turn": 1, "prompts": [], "continuation": "user"}).seq
    log.append("turn/end", {"turn": 1, "reason": {"kind": "completed"}})
    assert cut_at(lines, Where("turn", 0)) == began == cut_at(lines, Where("before", 1))
    assert cut_at(lines, Where("before", 0)) == 0
    assert cut_at(lines, Where("step", 0, 0)) is None


def test_logs_without_the_place() -> None:
    for where in (Where("turn", 0), Where("step", 0, 0), Where("before", 0)):
        assert cut_at([], where) is None
    assert cut_at([], WHOLE) == 0 == cut_at([], Where("seq", 0)) == cut_at([], Where("time", 5))
    assert cut_at([], Where("seq", 1)) is None
    log, lines = fresh()
    begin(log)
    end(log)
    scanner = LogScanner(Where("step", 0, 4))
    assert not scanner.feed(lines)
    assert scanner.finish() is None
    assert (scanner.turns, scanner.steps, scanner.open_turn, scanner.next_seq) == (1, 1, None, len(lines))


def test_steps_and_turns_without_their_end_end_where_the_next_begins() -> None:
    """No writer of ours leaves them so; another program's log may."""
    bare = [
        ("turn/start", {"turn": 0}),
        ("step/start", {"turn": 0, "step": 0}),
        ("step/start", {"turn": 0, "step": 1}),
        ("turn/start", {"turn": 1}),
        ("step/start", {"turn": 1, "step": 0}),
        ("turn/end", {"turn": 1, "reason": {"kind": "completed"}}),
    ]
    lines = [encode({"seq": seq, "time": 1, "type": kind, "data": data}) for seq, (kind, data) in enumerate(bare)]
    assert cut_at(lines, Where("step", 0, 0)) == 2
    assert cut_at(lines, Where("step", 0, 1)) == 3 == cut_at(lines, Where("turn", 0))
    assert cut_at(lines, Where("step", 1, 0)) == 5
    assert cut_at(lines, Where("turn", 1)) == 6


def test_by_seq_and_by_time() -> None:
    times = iter([10, 30, 20, 40, 40])
    log = EventLog(new_log().header, clock=lambda: next(times))
    lines = stored(log)
    for _ in range(5):
        log.append("note/added", {"text": "x"})
    assert [cut_at(lines, Where("seq", seq)) for seq in range(7)] == [0, 1, 2, 3, 4, 5, None]
    assert [cut_at(lines, Where("time", at)) for at in (9, 10, 20, 29, 30, 39, 40)] == [0, 1, 1, 1, 3, 3, 5]
    found = slice_log(lines, Where("seq", 3))
    assert found is not None and (found.last_time, found.latest_time) == (20, 30)


# -- what is known there -----------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(SCRIPTS)
def test_what_is_open_is_what_the_log_itself_says(script: list[tuple[int, str, int, str]]) -> None:
    log, lines = fresh()
    play(log, script)  # type: ignore[arg-type]
    begin(log)
    ask(log, "x", "y")
    call(log, "y")
    for seq in range(len(lines) + 1):
        found = slice_log(lines, Where("seq", seq))
        assert found is not None
        part = EventLog.restore(log.header, [parse_event(line) for line in lines[:seq]])
        expected = closing_events(part.order, next_seq=seq, recovered_at=1)
        assert closing_events(found.order, next_seq=seq, recovered_at=1) == expected


def test_the_last_prompt_is_what_the_user_said_last() -> None:
    log, lines = fresh()
    submit(log, "waits")
    begin(log)
    say(log, "one")
    say(log, "two")  # steered
    say(log, "reminder", kind="runtime")
    say(log, "summary", surface={"replace": [log.surface.seqs[0], log.surface.seqs[0]]}, sources=log.surface.seqs[:1])
    found = slice_log(lines, WHOLE)
    assert found is not None and found.prompt == [{"type": "text", "text": "two"}]


def test_bindings_of_a_seed_and_of_the_log_itself() -> None:
    log, lines = fresh()
    log.append("profile/bind", {"profile": {"name": "a"}, "model": "m1"})
    log.append("profile/model", {"model": "m2"})
    log.append("log/end-seed", {})
    seed = log.next_seq
    log.append("profile/model", {"model": "m3"})
    between = log.next_seq
    log.append("profile/bind", {"profile": {"name": "b"}, "model": "m4"})

    def said(cut: int) -> tuple[Any, ...]:
        found = slice_log(lines, Where("seq", cut), seed_length=seed)
        assert found is not None
        names = [None if bind is None else bind["profile"]["name"] for bind in (found.seed_bind, found.bind)]
        return (names[0], found.seed_model, names[1], found.model)

    assert said(seed) == ("a", "m2", None, None)
    assert said(between) == ("a", "m2", None, "m3")
    assert said(log.next_seq) == ("a", "m2", "b", None)


def test_children_and_the_newest_word_on_each() -> None:
    log, lines = fresh()
    for agent_id in ("agent-1", "agent-12", "agent-3"):
        log.append("subagent/spawned", {"agent_id": agent_id})
    log.append("subagent/completed", {"agent_id": "agent-1", "seq": 9, "epoch": 2})
    log.append("subagent/suspended", {"agent_id": "agent-1", "reason": "host lost"})
    log.append("swarm/end", {"run_id": "r", "counts": {}, "agents": {"agent-3": {"seq": 4, "epoch": 1}}})
    log.append("subagent/failed", {"agent_id": "agent-3", "error": {}, "seq": 6, "epoch": 3})
    log.append("subagent/started", {"agent_id": "stranger"})
    begin(log)
    place = {"turn": 0, "step": 0}
    log.append("step/end", {**place, "agents": {"agent-12": {"seq": 1, "epoch": 1}}})
    ended = {"turn": 0, "reason": {"kind": "completed"}, "agents": {"agent-12": {"seq": 2, "epoch": 1}}}
    log.append("turn/end", ended)
    found = slice_log(lines, WHOLE)
    assert found is not None and found.highest_agent == 12
    told = {name: (one.seq, one.epoch, one.spawned) for name, one in found.children.items()}
    assert told == {
        "agent-1": (9, 2, True),
        "agent-12": (2, 1, True),
        "agent-3": (6, 3, True),
        "stranger": (None, None, False),
    }


def test_the_writer_of_the_last_event() -> None:
    log, lines = fresh()
    log.append("note/added", {"text": "x"})
    log.append("runtime/activated", {"epoch": 3, "node": "n1"})
    log.append("runtime/activated", {"epoch": 5, "node": "n2"})
    log.append("log/end-seed", {})
    log.append("runtime/activated", {"epoch": 9})
    found: list[LogSlice | None] = [slice_log(lines, Where("seq", seq)) for seq in range(1, 6)]
    told = [(one.epoch, one.node) for one in found if one is not None]
    assert told == [(None, None), (3, "n1"), (5, "n2"), (None, "n2"), (9, None)]


# -- reading -----------------------------------------------------------------------------------------------------------


def test_nothing_behind_the_cut_is_looked_at() -> None:
    log, lines = fresh()
    begin(log)
    end(log)
    begin(log)
    end(log)
    cut = cut_at(lines, Where("turn", 0))
    assert cut is not None
    for where in (Where("turn", 0), Where("step", 0, 0), Where("before", 1), Where("seq", cut)):
        assert cut_at([*lines[: cut + 1], b"garbage"], where) is not None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"garbage",
        b'{"seq":7,"time":1,"type":"note/added","data":{}}',
        b'{"seq":0,"time":"1","type":"note/added","data":{}}',
        b'{"seq":0,"time":1,"type":"turn/start","data":{}}',
        b'{"seq":0,"time":1,"type":"turn/start","data":[]}',
        b'{"seq":0,"time":1,"type":"turn/end","data":{"turn":0}}',
        b'{"seq":0,"time":1,"type":"runtime/activated","data":{"node":"n"}}',
        b'{"seq":0,"time":1,"type":"subagent/spawned","data":{}}',
        b'{"seq":0,"time":1,"type":"swarm/end","data":{"agents":[1]}}',
        b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":0',
    ],
)
def test_lines_that_are_no_events(line: bytes) -> None:
    with pytest.raises(LogError):
        slice_log([line], WHOLE)


def test_a_line_in_another_spelling_is_read_all_the_same() -> None:
    lines = [
        b'{"seq": 0, "time": 1, "type": "turn/start", "data": {"turn": 0}}',
        b'{"time":2,"seq":1,"type":"turn/end","data":{"turn":0,"reason":{"kind":"completed"}}}',
        b'{"seq":2,"time":-5,"type":"note/added","data":{}}',
    ]
    found = slice_log(lines, WHOLE)
    assert found is not None and found.reason == {"kind": "completed"} and found.last_time == -5


def test_a_long_log_in_well_under_half_a_second() -> None:
    log, lines = fresh()
    for _ in range(4):
        begin(log)
        for number in range(5):
            for _ in range(60):
                chunk(log, "some words of an answer")
            ask(log, f"c{number}", text="x" * 500)
            call(log, f"c{number}")
            result(log, f"c{number}", "y" * 1000)
            step_end(log)
            step(log)
        end(log)
    block, long = len(lines), []
    for repeat in range(200_000 // block):
        for seq, line in enumerate(lines):
            _, _, rest = line.partition(b",")
            rest = rest.replace(b'"turn":', b'"turn":%d' % (repeat + 1))
            long.append(b'{"seq":%d,' % (repeat * block + seq) + rest)
    best = 9.0
    for _ in range(4):
        began = time.process_time()  # other tests may run beside
        found = slice_log(long, WHOLE)
        best = min(best, time.process_time() - began)
    assert found is not None and found.cut == len(long) > 190_000
    assert best < 0.5, f"{len(long)} events took {best:.2f} s"
