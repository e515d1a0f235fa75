"""The log in memory: what is refused changes nothing, what is accepted is frozen, encoded once and told once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import LogError
from kimi_ray.events import CORE, EventType, LogHeader, SessionEvent, WriterRef, parse_event
from kimi_ray.events.payloads import NoteAdded
from kimi_ray.log import EventLog, derive_messages


def new_log(**options: Any) -> EventLog:
    header = LogHeader(session_id="s", agent_id="main", created_at=1, writer=WriterRef(name="k", version="t"))
    return EventLog(header, clock=lambda: 1000, **options)


def user(log: EventLog, text: str, **kwargs: Any) -> SessionEvent:
    return log.append(
        "user/message",
        {"id": f"m{log.next_seq}", "role": "user", "content": [{"type": "text", "text": text}], "source": {}},
        surface=kwargs.pop("surface", "append"),
        **kwargs,
    )


def state(log: EventLog) -> Any:
    return (log.next_seq, log.surface.seqs, log.surface.generation, log.messages(), log.order.open_turn)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("note/added", {"text": float("nan")}, {}, "log.not_json"),
    ("note/added", {"text": ("a",)}, {}, "log.not_json"),
    ("nobody/knows", {}, {}, "log.unknown_type"),
    ("user/message", {"id": "x", "role": "user", "content": [], "source": {}}, {}, "log.bad_surface"),
    ("note/added", {"text": "x"}, {"surface": "append"}, "log.bad_surface"),
    ("note/added", {"text": "x"}, {"sources": [0]}, "log.bad_surface"),
    ("user/message", {"id": "x"}, {"surface": {"replace": [5, 5]}, "sources": [0]}, "log.bad_surface"),
    ("user/message", {"id": "x"}, {"surface": {"replace": [0, 1]}, "sources": [0]}, "log.bad_surface"),
    ("user/message", {"id": "x"}, {"surface": {"replace": [1, 0]}, "sources": [0, 1]}, "log.bad_surface"),
    ("user/message", {"id": "x"}, {"surface": "append", "sources": [7]}, "log.bad_envelope"),
    ("user/message", {"id": "x"}, {"surface": "append", "sources": [0, 0]}, "log.bad_envelope"),
    ("surface/cut", {"reason": "undo", "prompts": []}, {"surface": "append"}, "log.bad_surface"),
    ("turn/end", {"turn": 0, "reason": {"kind": "completed"}}, {}, "log.out_of_order"),
    ("turn/start", {"turn": 3, "prompts": []}, {}, "log.out_of_order"),
    ("step/start", {"turn": 0, "step": 0}, {}, "log.out_of_order"),
    ("request/header", {"header": {}, "reason": "initial"}, {}, "log.out_of_order"),
    ("tool/call", {"turn": 0, "step": 0, "call_id": "c", "name": "x", "arguments": ""}, {}, "log.out_of_order"),
]


@pytest.mark.parametrize(("kind", "data", "options", "code"), REFUSED)
def test_a_refused_append_changes_nothing(kind: str, data: Any, options: Any, code: str) -> None:
    log = new_log()
    user(log, "one")
    user(log, "two")
    told: list[SessionEvent] = []
    log.observe(told.append)
    before = state(log)
    with pytest.raises(LogError) as refused:
        log.append(kind, data, **options)
    assert refused.value.code == code
    assert state(log) == before
    assert told == []
    user(log, "the next one works")


def test_an_event_above_the_limit_is_refused() -> None:
    log = new_log(max_event_bytes=2000)
    with pytest.raises(LogError) as refused:
        user(log, "x" * 3000)
    assert refused.value.code == "log.event_too_large"
    assert log.next_seq == 0


def test_an_observer_that_raises_fails_nobody_and_is_kept() -> None:
    log = new_log()
    told: list[int] = []

    def broken(_event: SessionEvent) -> None:
        raise ValueError("no")

    log.observe(broken)
    log.observe(lambda event: told.append(event.seq))
    user(log, "x")
    assert told == [0]
    assert [(seq, type(error)) for seq, error in log.observer_errors] == [(0, ValueError)]


def test_an_observer_may_not_append_and_order_is_kept() -> None:
    log = new_log()
    codes: list[str] = []

    def nested(_event: SessionEvent) -> None:
        try:
            user(log, "again")
        except LogError as error:
            codes.append(error.code)

    log.observe(nested)
    user(log, "x")
    user(log, "y")
    assert codes == ["log.reentrant", "log.reentrant"]
    assert log.next_seq == 2


def test_a_veto_comes_before_the_commit() -> None:
    log = new_log()
    told: list[SessionEvent] = []
    log.observe(told.append)

    def veto(_event: SessionEvent) -> None:
        raise LogError("not now", code="log.vetoed")

    lift = log.veto_with(veto)
    before = state(log)
    with pytest.raises(LogError):
        user(log, "x")
    assert state(log) == before and told == []
    lift()
    user(log, "x")
    assert len(told) == 1


def test_an_event_is_frozen_and_shares_nothing_with_the_caller() -> None:
    log = new_log()
    content = [{"type": "text", "text": "x"}]
    event = log.append("user/message", {"id": "m", "role": "user", "content": content, "source": {}}, surface="append")
    line = event.line
    content[0]["text"] = "changed"
    content.append({})
    assert event.data["content"] == [{"type": "text", "text": "x"}]
    for change in (
        lambda: event.data.update(a=1),
        lambda: event.data["content"].append(1),
        lambda: event.data["content"][0].__setitem__("text", "y"),
        lambda: setattr(event, "seq", 9),
    ):
        with pytest.raises((TypeError, AttributeError)):
            change()
    assert event.line is line
    assert parse_event(line) == event


def test_a_replace_shadows_a_span_and_needs_every_source() -> None:
    log = new_log()
    for text in "abc":
        user(log, text)
    with pytest.raises(LogError):
        user(log, "summary", surface={"replace": [0, 1]}, sources=[0])
    user(log, "summary", surface={"replace": [0, 1]}, sources=[0, 1])
    assert log.surface.seqs == (3, 2)
    user(log, "again", surface={"replace": [3, 2]}, sources=[3, 2])
    assert log.surface.seqs == (4,)
    assert [message["content"][0]["text"] for message in log.messages()] == ["again"]


def test_a_cut_takes_a_span_off_the_surface() -> None:
    log = new_log()
    for text in "abc":
        user(log, text)
    log.append("surface/cut", {"reason": "undo", "prompts": []}, surface={"replace": [1, 2]}, sources=[1, 2])
    assert log.surface.seqs == (0,)
    assert len(log.messages()) == 1


def test_a_tool_result_is_replaced_alone_and_in_its_content_only() -> None:
    log = new_log()
    log.append("turn/start", {"turn": 0, "prompts": []})
    log.append("step/start", {"turn": 0, "step": 0})
    call = {"type": "tool-call", "id": "c", "name": "x", "arguments": "{}"}
    log.append(
        "assistant/message",
        {"turn": 0, "step": 0, "message": {"id": "a", "role": "assistant", "content": [call], "source": {}}},
        surface="append",
    )
    log.append("tool/call", {"turn": 0, "step": 0, "call_id": "c", "name": "x", "arguments": "{}"})

    def result(text: str, is_error: bool = False) -> dict[str, Any]:
        block = {"type": "tool-result", "tool_call_id": "c", "content": [{"text": text}], "is_error": is_error}
        message = {"id": "r", "role": "user", "source": {"kind": "tool", "call_id": "c"}, "content": [block]}
        return {"turn": 0, "step": 0, "message": message}

    log.append("tool/result", result("long"), surface="append", sources=[3])
    with pytest.raises(LogError):
        log.append("tool/result", result("long"), surface="append")
    with pytest.raises(LogError):
        log.append("tool/result", result("short", is_error=True), surface={"replace": [4, 4]}, sources=[4])
    log.append("tool/result", result("short"), surface={"replace": [4, 4]}, sources=[4])
    assert log.messages()[-1]["content"][0]["content"][0]["text"] == "short"


def test_a_fresh_log_has_no_seed_mark_and_a_seeded_one_has_it_once() -> None:
    log = new_log()
    assert log.next_seq == 0
    assert log.end_seed() is not None
    assert log.end_seed() is None
    again = EventLog.restore(log.header, [parse_event(b'{"seq":0,"time":1000,"type":"log/end-seed","data":{}}')])
    assert again.end_seed() is None
    assert again.first_live_seq == 1


def test_a_seed_with_a_gap_or_an_unknown_type_is_refused() -> None:
    header = new_log().header
    gap = [parse_event(b'{"seq":1,"time":1,"type":"log/end-seed","data":{}}')]
    with pytest.raises(LogError) as refused:
        EventLog.restore(header, gap)
    assert refused.value.details == {"seq": 1, "expected": 0}
    unknown = parse_event(b'{"seq":0,"time":1,"type":"new/thing","data":{}}')
    with pytest.raises(LogError) as refused:
        EventLog.restore(header, [unknown])
    assert refused.value.code == "log.unknown_type"
    skipped = parse_event(b'{"seq":0,"time":1,"type":"new/thing","data":{},"ignorable":true}')
    assert EventLog.restore(header, [skipped]).next_seq == 1


def test_ignorable_comes_from_the_catalogue() -> None:
    log = new_log(catalog=CORE.with_types([EventType("mine/note", NoteAdded, ignorable=True)]))
    assert log.append("mine/note", {"text": "x"}).ignorable is True
    assert b'"ignorable":true' in log.append("note/added", {"text": "x"}).line
    assert b"ignorable" not in log.append("log/end-seed", {}).line


@given(
    st.lists(st.tuples(st.sampled_from(["user", "note", "replace_last", "replace_all", "cut"]), st.text(max_size=5)))
)
def test_replaying_a_log_gives_the_same_surface_and_messages(script: list[tuple[str, str]]) -> None:
    log = new_log()
    events: list[SessionEvent] = []
    log.observe(events.append)
    for what, text in script:
        seqs = log.surface.seqs
        if what == "user":
            user(log, text)
        elif what == "note":
            log.append("note/added", {"text": text})
        elif seqs:
            start = seqs[0] if what == "replace_all" else seqs[-1]
            shadowed = seqs if what == "replace_all" else seqs[-1:]
            span: Any = {"replace": [start, seqs[-1]]}
            if what == "cut":
                log.append("surface/cut", {"reason": "undo", "prompts": []}, surface=span, sources=shadowed)
            else:
                user(log, text, surface=span, sources=shadowed)
        assert log.messages() == derive_messages(log.surface)
    again = EventLog.restore(log.header, [parse_event(event.line) for event in events])
    assert state(again)[:4] == state(log)[:4]
