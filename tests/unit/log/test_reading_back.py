"""A stored log in memory again: the same as it was, without what nobody looks at, and never a damaged one."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings

from kimi_ray.agent.fold import FOLLOWED, AgentFold
from kimi_ray.errors import LogError
from kimi_ray.events import CORE, Catalog, EventType, SessionEvent, parse_event
from kimi_ray.events.payloads import NoteAdded
from kimi_ray.log import EventLog
from tests.unit.log.scripts import HEADER, SCRIPTS, ask, begin, call, chunk, end, new_log, play, result, user


def lines_of(log: EventLog) -> list[bytes]:
    """What ``log`` will hold from now on."""
    lines: list[bytes] = []
    log.observe(lambda event: lines.append(event.line))
    return lines


def state(log: EventLog) -> Any:
    order = log.order
    return (
        log.next_seq,
        log.last,
        log.last_end_seed,
        log.surface.seqs,
        log.surface.generation,
        log.messages(),
        (order.next_turn, order.open_turn, order.open_step, order.next_step),
        (order.pending_calls, order.open_compaction),
    )


@given(SCRIPTS)
@settings(max_examples=60, deadline=None)
def test_a_log_reads_back_as_it_was_whatever_the_pages(script: Any) -> None:
    log = new_log()
    lines = lines_of(log)
    play(log, script)
    whole = EventLog.restore(HEADER, map(parse_event, lines))
    paged, fold, live = EventLog(HEADER), AgentFold(), AgentFold()
    for start in range(0, len(lines), 7):
        paged.read_back(lines[start : start + 7], follow=fold.apply, types=FOLLOWED)
    for line in lines:
        live.apply(parse_event(line))
    assert state(paged) == state(whole) == state(log)
    assert fold == live
    assert paged.first_live_seq == len(lines)
    for event in (*paged.surface, *([paged.last] if paged.last else [])):
        with pytest.raises(TypeError):
            event.data["x"] = 1
    user(paged, "goes on")
    assert paged.surface[-1].seq == len(lines) and paged.first_live_seq == len(lines)


def test_a_gap_names_the_place() -> None:
    log = new_log()
    lines = lines_of(log)
    for _ in range(3):
        user(log, "x")
    for read in (
        lambda some: EventLog.restore(HEADER, map(parse_event, some)),
        lambda some: EventLog(HEADER).read_back(some),
    ):
        with pytest.raises(LogError, match="where 1 belongs") as refused:
            read([lines[0], lines[2]])
        assert refused.value.code == "log.bad_envelope"


def test_a_gap_among_events_that_are_passed_over_is_seen_too() -> None:
    log = new_log()
    lines = lines_of(log)
    for _ in range(4):
        log.append("note/added", {"text": "x"})
    back = EventLog(HEADER)
    back.read_back(lines[:2])
    with pytest.raises(LogError, match="where 2 belongs"):
        back.read_back(lines[3:])


def test_nothing_is_read_back_behind_what_was_appended() -> None:
    log = new_log()
    lines = lines_of(log)
    user(log, "x")
    log.append("note/added", {"text": "x"})
    back = EventLog(HEADER)
    user(back, "mine")
    for line in lines[1:]:
        with pytest.raises(LogError) as refused:
            back.adopt(parse_event(line))
        assert refused.value.code == "log.bad_envelope"
        with pytest.raises(LogError) as refused:
            back.read_back([line])
        assert refused.value.code == "log.bad_envelope"
    assert back.next_seq == 1


NEW_KIND = b'{"seq":0,"time":1,"type":"new/thing","data":{"x":[1, 2]}%s}'


def readers() -> list[Any]:
    def paged(line: bytes) -> EventLog:
        log = EventLog(HEADER)
        log.read_back([line])
        return log

    return [lambda line: EventLog.restore(HEADER, [parse_event(line)]), paged]


@pytest.mark.parametrize("read", readers())
def test_an_unknown_type_is_refused_unless_it_may_be_skipped(read: Any) -> None:
    with pytest.raises(LogError) as refused:
        read(NEW_KIND % b"")
    error = refused.value
    assert error.code == "log.unknown_type" and "upgrade" in (error.hint or "")
    assert "new/thing" in error.message and "event 0" in error.message and "s/main" in error.message
    assert error.details == {"seq": 0, "type": "new/thing"}
    line = NEW_KIND % b',"ignorable":true'
    log = read(line)
    assert log.next_seq == 1 and log.last is not None and log.last.line == line  # byte for byte, odd spacing and all


@pytest.mark.parametrize("read", readers())
def test_for_a_known_type_the_flag_says_nothing(read: Any) -> None:
    """``ignorable`` is for readers that do not know the type; a later writer may judge it otherwise."""
    assert read(b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":0},"ignorable":true}').order.open_turn == 0
    assert read(b'{"seq":0,"time":1,"type":"note/added","data":{"text":"x"}}').next_seq == 1


@pytest.mark.parametrize("read", readers())
def test_version_1_words_are_those_of_the_catalogue_of_the_program(read: Any) -> None:
    line = b'{"seq":0,"time":1,"type":"mine/note","data":{"text":"x"}}'
    with pytest.raises(LogError):
        read(line)
    mine: Catalog = CORE.with_types([EventType("mine/note", NoteAdded)])
    log = EventLog(HEADER, catalog=mine)
    log.read_back([line])
    assert log.next_seq == 1


DAMAGED = [
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":0,"turn":0}}', "log.not_json"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":9223372036854775808}}', "log.not_json"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":-0.0}}', "log.not_json"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":1e400}}', "log.not_json"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":NaN}}', "log.not_json"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":' + b'{"a":' * 70 + b"1" + b"}" * 71, "log.not_json"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":0}', "log.not_json"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":0}}]', "log.not_json"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":0}},{}', "log.not_json"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":[]}', "log.bad_envelope"),
    (b'{"seq":0,"time":1.5,"type":"turn/start","data":{"turn":0}}', "log.bad_envelope"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":0},"more":1}', "log.bad_envelope"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":0},"ignorable":false}', "log.bad_envelope"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{"turn":0},"surface":"append"}', "log.bad_surface"),
    (b'{"seq":0,"time":1,"type":"user/message","data":{},"surface":"prepend"}', "log.bad_envelope"),
    (b'{"seq":0,"time":1,"type":"user/message","data":{}}', "log.bad_surface"),
    (b'{"seq":0,"time":1,"type":"user/message","data":{},"surface":"append","sources":[0]}', "log.bad_envelope"),
    (b'{"seq":0,"time":1,"type":"turn/start","data":{}}', "log.bad_payload"),
    (b'{"seq":0,"time":1,"type":"assistant/message","data":{},"surface":"append"}', "log.bad_payload"),
    (b'{"seq":0,"time":1,"type":"note/added","data":{"text":"x"}', "log.not_json"),
    (b'{"seq":00,"time":1,"type":"note/added","data":{"text":"x"}}', "log.not_json"),
    (b'{"seq":0,"time":x,"type":"note/added","data":{"text":"x"}}', "log.not_json"),
    (b'{"seq":0,"time":1,"type":"note/added","data":1}', "log.bad_envelope"),
    (b'{"seq":0,"time":1,"type":"note","data":{}}', "log.bad_envelope"),
    (b"", "log.not_json"),
    (b"{}", "log.bad_envelope"),
]


@pytest.mark.parametrize(("line", "code"), DAMAGED)
@pytest.mark.parametrize("beside", [False, True])
def test_a_damaged_line_is_refused_and_the_log_stays_where_it_was(line: bytes, code: str, beside: bool) -> None:
    log = EventLog(HEADER)
    rest = [b'{"seq":1,"time":1,"type":"log/end-seed","data":{}}'] if beside else []
    with pytest.raises(LogError) as refused:
        log.read_back([line, *rest], follow=lambda _event: None, types=frozenset({"turn/start"}))
    assert refused.value.code == code
    assert log.next_seq == 0 and log.surface.seqs == () and log.order.open_turn is None


def test_a_fold_that_cannot_read_a_payload_says_where() -> None:
    line = b'{"seq":0,"time":1,"type":"prompt/submitted","data":{}}'
    with pytest.raises(LogError, match=r"event 0 \(prompt/submitted\)") as refused:
        EventLog(HEADER).read_back([line], follow=AgentFold().apply, types=FOLLOWED)
    assert refused.value.code == "log.bad_payload"


def test_reading_back_a_long_log_holds_its_surface_and_no_more() -> None:
    def pages(turns: int) -> Any:
        log = new_log()
        lines = lines_of(log)
        for number in range(turns):
            begin(log)
            for _ in range(40):
                chunk(log, "word " * 10)
            ask(log, f"c{number}", text="x" * 200)
            call(log, f"c{number}")
            result(log, f"c{number}", "y" * 200)
            end(log)
            if number % 10 == 9:
                span = log.surface.seqs
                user(log, "summary", surface={"replace": [span[0], span[-1]]}, sources=span)
            yield tuple(lines)
            lines.clear()

    def grown(turns: int) -> int:
        log, fold = EventLog(HEADER), AgentFold()
        tracemalloc.start()
        try:
            for page in pages(turns):
                log.read_back(page, follow=fold.apply, types=FOLLOWED)
            fold.turns.clear()
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    small, large = grown(20), grown(120)
    assert large < small + 50_000


def test_a_surface_that_was_read_back_is_its_lines_until_somebody_looks() -> None:
    log = new_log()
    lines = lines_of(log)
    for _ in range(300):
        user(log, "x")
    back = EventLog(HEADER)
    back.read_back(lines)

    def parsed() -> int:
        return sum("data" in held(event) for event in back.surface)

    def held(event: SessionEvent) -> set[str]:
        found: set[str] = set()
        for name in SessionEvent.__slots__:
            try:
                object.__getattribute__(event, name)
            except AttributeError:
                continue
            found.add(name)
        return found

    assert parsed() == 0
    assert len(back.messages()) == 300 and parsed() == 300


def test_a_successor_goes_on_where_the_old_log_was_left() -> None:
    log = new_log()
    lines = lines_of(log)
    begin(log)
    ask(log, "c")
    call(log, "c")
    log.veto_with(lambda _event: None)
    next_log = log.successor()
    with pytest.raises(LogError) as refused:
        user(log, "zombie")
    assert refused.value.code == "log.detached"
    again = EventLog.restore(HEADER, map(parse_event, lines))
    assert state(next_log) == state(again) and next_log.first_live_seq == again.first_live_seq
    told: list[int] = []
    next_log.observe(lambda event: told.append(event.seq))
    result(next_log, "c")
    assert told == [4] and len(lines) == 4


def test_a_reserved_log_takes_no_event_until_it_is_published() -> None:
    log = new_log()
    user(log, "x")
    log.reserve()
    with pytest.raises(LogError) as refused:
        user(log, "y")
    assert refused.value.code == "log.reserved" and refused.value.retryable and log.next_seq == 1
    log.publish()
    assert user(log, "y").seq == 1


def test_reading_back_tells_nobody_and_asks_nobody() -> None:
    log = new_log()
    lines = lines_of(log)
    begin(log)
    ask(log, "c")
    log.append("note/added", {"text": "x"})
    back = EventLog(HEADER)
    told: list[SessionEvent] = []

    def refuse(_event: SessionEvent) -> None:
        raise AssertionError

    back.observe(told.append)
    end_veto = back.veto_with(refuse)
    back.read_back(lines[:2])
    back.adopt(parse_event(lines[2]))
    back.read_back(lines[3:])
    assert told == [] and back.next_seq == len(lines)
    end_veto()
    call(back, "c")
    assert [event.type for event in told] == ["tool/call"]
