"""The rules of a salvage: whatever is lost, the result restores, its messages derive, and its agent can go on."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.events import CORE, SessionEvent, make_event, parse_event, parse_header
from kimi_ray.log import EventLog, closing_events, complete_tools
from kimi_ray.store.rebuild import LOST_RESULT, Rebuild
from kimi_ray.store.seam import Stream
from tests.unit.store.random_logs import random_log
from tests.unit.store.rescue_homes import AT, header_of, turn_events

SOURCE = Stream("session_one", "main")


def rebuilt(events: list[SessionEvent], *, damage: list[dict[str, Any]] | None = None) -> tuple[list[bytes], Rebuild]:
    rebuild = Rebuild(SOURCE, AT)
    rebuild.damaged(damage or [])
    out = [made for event in events for made in rebuild.take(event.seq, event.line)] + rebuild.finish()
    assert [event.seq for event in out] == list(range(len(out))) == list(range(rebuild.next_seq))
    return [event.line for event in out], rebuild


def restored(lines: list[bytes]) -> EventLog:
    return EventLog.restore(parse_header(header_of()), [parse_event(line, at=at) for at, line in enumerate(lines)])


def what(line: bytes) -> tuple[str, str, int]:
    value = json.loads(line)
    return value["type"], json.dumps(value["data"]), value["time"]


def check_pairs(messages: list[dict[str, Any]]) -> None:
    """Every call is answered right behind its message, in order, and every result has its call."""
    waiting: list[str] = []
    for message in messages:
        content = message["content"]
        first = content[0] if isinstance(content, list) and content else {}
        if first.get("type") == "tool-result":
            assert waiting, "a result without a call"
            assert first["tool_call_id"] == waiting.pop(0)
            continue
        assert waiting == [], "a call without a result"
        if message["role"] == "assistant":
            waiting = [block["id"] for block in content if block["type"] == "tool-call"]
    assert waiting == []


def go_on(log: EventLog) -> None:
    """What the next life of the agent does: close what is open, and run a turn."""
    for event in closing_events(log.order, next_seq=log.next_seq, recovered_at=AT):
        log.append(event["type"], event["data"], surface=event.get("surface"), sources=event.get("sources"))
    turn = log.order.next_turn
    log.append("turn/start", {"turn": turn, "prompts": []})
    log.append("step/start", {"turn": turn, "step": 0})
    user = {"id": "next", "role": "user", "content": [{"type": "text", "text": "x"}], "source": {"kind": "user"}}
    log.append("user/message", user, surface="append")
    log.append("step/end", {"turn": turn, "step": 0})
    log.append("turn/end", {"turn": turn, "reason": {"kind": "completed"}})


@settings(deadline=None, max_examples=50)
@given(st.randoms(use_true_random=False), st.data())
def test_whatever_is_lost_the_rest_restores(dice: Random, data: st.DataObject) -> None:
    events = random_log(dice, turns=3)
    lost = data.draw(st.sets(st.integers(0, len(events) - 1), max_size=8))
    kept = [event for event in events if event.seq not in lost]
    lines, rebuild = rebuilt(kept)
    counts = rebuild.counts
    log = restored(lines)
    check_pairs(complete_tools(log.messages()))
    for line in lines:
        event = parse_event(line)
        entry = CORE.get(event.type)
        assert entry is not None
        entry.payload.model_validate_json(json.dumps(json.loads(line)["data"]))
    left_out = {entry["seq"] for entry in counts.repaired if str(entry["change"]).startswith("left out")}
    assert {event.type for event in kept if event.seq in left_out} <= {"surface/cut"}
    survivors = [what(event.line) for event in kept if event.seq not in left_out]
    added = iter([what(line) for line in lines])
    assert all(any(one == other for other in added) for one in survivors), "in order, type, data and time untouched"
    assert counts.survived == len(survivors)
    if not lost or min(lost) == len(kept):
        assert lines == [event.line for event in kept], "nothing is lost before them"
        assert counts.lost == counts.repaired == []
    else:
        gaps = [json.loads(line)["data"]["lost"] for line in lines if b'"log/salvaged"' in line]
        assert [entry for entry in gaps if entry] == [[entry] for entry in counts.lost]
        inner = {seq for seq in lost if seq < kept[-1].seq} if kept else set()
        assert sum(int(entry["count"]) for entry in counts.lost) == len(inner)
    assert rebuilt(kept)[0] == lines, "deterministic"
    again = [parse_event(line) for line in lines]
    assert rebuilt(again)[0] == lines, "a salvage of a salvage changes nothing"
    go_on(log)
    check_pairs(complete_tools(log.messages()))


@settings(deadline=None, max_examples=50)
@given(st.randoms(use_true_random=False), st.data())
def test_the_surface_stays_balanced_so_that_an_undo_is_possible(dice: Random, data: st.DataObject) -> None:
    events = random_log(dice, turns=3, prunes=False)
    lost = data.draw(st.sets(st.integers(0, len(events) - 1), min_size=1, max_size=6))
    lines, _ = rebuilt([event for event in events if event.seq not in lost])
    log = restored(lines)
    go_on(log)
    seqs = log.surface.seqs
    cut = {"reason": "undo", "prompts": []}
    log.append("surface/cut", cut, surface={"replace": [seqs[-1], seqs[-1]]}, sources=[seqs[-1]])


def make(kinds: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[SessionEvent]:
    return [make_event(seq, AT + seq, kind, data, **how) for seq, (kind, data, how) in enumerate(kinds)]


def say(name: str, **how: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    content = [{"type": "text", "text": name}]
    data = {"id": name, "role": "user", "content": content, "source": {"kind": "user"}}
    return "user/message", data, {"surface": "append", **how}


def texts(lines: list[bytes]) -> list[str]:
    return [message["content"][0]["text"] for message in restored(lines).messages()]


def test_a_replace_shrinks_to_what_is_left_of_its_span() -> None:
    summary = say("sum", surface={"replace": [1, 3]}, sources=(1, 2, 3))
    events = make([say("a"), say("b"), say("c"), say("d"), say("e"), summary])
    for lost, shown in (
        ({1}, ["a", "sum", "e"]),
        ({3}, ["a", "sum", "e"]),
        ({1, 2}, ["a", "sum", "e"]),
        ({1, 2, 3}, ["a", "e", "sum"]),
    ):
        lines, rebuild = rebuilt([event for event in events if event.seq not in lost])
        assert texts(lines) == shown
        (entry,) = rebuild.counts.repaired
        assert entry["seq"] == 5
        assert ("appended" in str(entry["change"])) == (len(lost) == 3)


def test_what_a_lost_replace_had_hidden_goes_with_the_next_one_around_it() -> None:
    first = say("sum1", surface={"replace": [1, 2]}, sources=(1, 2))
    second = say("sum2", surface={"replace": [0, 3]}, sources=(0, 4, 3))
    events = make([say("a"), say("b"), say("c"), say("d"), first, say("e"), second])
    assert texts(rebuilt(events)[0]) == ["sum2", "e"]
    lines, _ = rebuilt([event for event in events if event.seq != 4])
    assert texts(lines) == ["sum2", "e"], "b and c stand between a and d"
    moved = json.loads(lines[-2] if b"log/salvaged" in lines[-1] else lines[-1])
    assert sorted(moved["sources"]) == [0, 1, 2, 3]


def test_a_cut_of_what_is_lost_is_left_out_and_told() -> None:
    cut = ("surface/cut", {"reason": "undo", "prompts": []}, {"surface": {"replace": [1, 1]}, "sources": (1,)})
    events = make([say("a"), say("b"), cut, say("c")])
    lines, rebuild = rebuilt([event for event in events if event.seq != 1])
    assert texts(lines) == ["a", "c"]
    assert [entry["seq"] for entry in rebuild.counts.repaired] == [2]
    end = json.loads(lines[-1])
    assert (end["type"], end["ignorable"]) == ("log/salvaged", True)
    assert end["data"]["repaired"] == rebuild.counts.repaired


def test_a_lost_result_is_stated_and_a_lost_call_is_made_again() -> None:
    events = turn_events(1)
    by_type = {event.type: event for event in events}
    lines, _ = rebuilt([event for event in events if event.type != "tool/result"])
    messages = restored(lines).messages()
    assert messages[-1]["content"][0]["content"][0]["text"] == LOST_RESULT
    lines, _ = rebuilt([event for event in events if event.type != "assistant/message"])
    messages = restored(lines).messages()
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    block = messages[1]["content"][0]
    assert (block["id"], block["name"], block["arguments"]) == ("c0", "Read", "{}"), "as the tool/call tells"
    assert messages[2] == by_type["tool/result"].data["message"]


def test_a_prompt_whose_end_is_lost_does_not_run_again() -> None:
    events = turn_events(2)
    gone = {"prompt/started", "prompt/completed", "turn/start", "turn/end"}
    lines, _ = rebuilt([event for event in events if not (event.type in gone and event.seq < 13)])
    ends = [json.loads(line)["data"] for line in lines if b'"prompt/completed"' in line]
    assert [(end["prompt_id"], end["state"]) for end in ends] == [("p1", "completed"), ("p0", "failed")]
    assert ends[1]["error"]["code"] == "prompt.lost"


def test_an_open_turn_at_the_end_is_left_to_the_next_load() -> None:
    events = turn_events(2)
    end = next(event.seq for event in events if event.type == "tool/call" and event.data["turn"] == 1)
    lines, rebuild = rebuilt([event for event in events if event.seq <= end and event.seq != 2])
    log = restored(lines)
    assert (log.order.open_turn, log.order.open_step) == (1, 0)
    assert list(log.order.pending_calls) == ["c1"]
    assert rebuild.counts.repaired == []
    go_on(log)


def test_damage_gives_a_loss_its_place() -> None:
    events = turn_events(2)
    facts = {"file": "/h/wire.jsonl", "offset": 77, "seq": 5}
    tail = {"file": "/h/wire.jsonl", "offset": 900, "seq": -1}
    kept = [event for event in events[:-2] if event.seq not in (5, 6)]
    _, rebuild = rebuilt(kept, damage=[{"code": "store.corrupt", "details": one} for one in (facts, tail)])
    assert rebuild.counts.lost == [
        {"after_seq": 4, "count": 2, "file": "/h/wire.jsonl", "offset": 77},
        {"after_seq": len(events) - 3, "file": "/h/wire.jsonl", "offset": 900},
    ]


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b'{"seq":1,"time":1,"type":"assistant/message","data":{},"surface":"append"}',
        b'{"seq":1,"time":1,"type":"turn/start","data":{}}',
        b'{"seq":9,"time":1,"type":"note/added","data":{"text":"x"}}',
        b'{"seq":1,"time":1,"type":"tool/result","data":{"turn":0,"step":0,"message":{"content":[]}},"surface":"append"}',
    ],
)
def test_a_row_that_verifies_but_is_no_event_counts_as_lost(line: bytes) -> None:
    events = turn_events(1)
    rebuild = Rebuild(SOURCE, AT)
    out = rebuild.take(0, events[0].line) + rebuild.take(1, line) + rebuild.take(2, events[2].line)
    out += rebuild.finish()
    restored([event.line for event in out])
    assert rebuild.counts.survived == 2
    assert rebuild.counts.lost == [{"after_seq": 0, "count": 1}]
