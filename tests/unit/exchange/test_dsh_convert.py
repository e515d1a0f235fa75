"""Our events for theirs: one for one, nothing lost, each change counted; and what a log of ours makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.events import CORE, LogHeader, SessionEvent, WriterRef, parse_event
from kimi_ray.exchange.dsh import read_source
from kimi_ray.exchange.dsh.convert import Conversion
from kimi_ray.exchange.dsh.lossless import text_of, within_rule
from kimi_ray.exchange.dsh.vocabulary import KNOWN_TYPES
from kimi_ray.log import EventLog
from tests.unit.exchange.conftest import FIXTURES
from tests.unit.exchange.dsh_writer import Log, asks

HEADER = LogHeader(session_id="s", agent_id="main", created_at=1, writer=WriterRef(name="t", version="1"))
_RENAMED = {"toolCallId": "tool_call_id", "isError": "is_error", "callId": "call_id", "compactionId": "compaction_id"}


def converted(events: list[Any]) -> tuple[list[SessionEvent], dict[str, int]]:
    conversion = Conversion()
    return [conversion.convert(event) for event in events], dict(conversion.counts)


def one(kind: str, data: Any, **envelope: Any) -> tuple[SessionEvent, dict[str, int]]:
    (made,), counts = converted([{"type": kind, "seq": 0, "time": 5, "data": data, **envelope}])
    return made, counts


def renamed(value: Any) -> Any:
    """A message of the harness as ours would be written."""
    if isinstance(value, dict):
        return {_RENAMED.get(key, key): renamed(item) for key, item in value.items()}
    return [renamed(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ["jsonl-none-full", "jsonl-zstd-full", "sqlite-full"])
def test_a_log_of_ours_shows_what_the_original_derived(name: str) -> None:
    derived = json.loads((FIXTURES / f"{name}.derived.json").read_text())
    found = {reading.id: reading for reading in read_source(str(FIXTURES / name))}
    events, counts = converted(found["full"].events)
    log = EventLog.restore(HEADER, events)
    assert [renamed(message) for message in derived["messages"]] == log.messages()
    assert list(log.surface.seqs) == derived["surface"] and log.surface.generation == derived["replaceGeneration"]
    assert [(e.seq, e.time) for e in events] == [(e["seq"], e["time"]) for e in found["full"].events]
    assert counts == {"foreign:request/context": 1}
    child = derived["child"]
    events, _ = converted(found["child"].events)
    log = EventLog.restore(HEADER, events)
    assert [renamed(message) for message in child["messages"]] == log.messages()
    assert log.last_end_seed == child["firstLiveSeq"] == found["child"].header["seedLength"]  # type: ignore[index]
    assert (log.order.next_turn, log.order.open_turn) == (3, None)


def test_every_fixture_converts_into_a_log_that_keeps_our_payloads() -> None:
    for root in sorted(path for path in FIXTURES.iterdir() if path.is_dir()):
        for reading in read_source(str(root)):
            if reading.error is not None:
                continue
            events, _ = converted(reading.events)
            log = EventLog.restore(HEADER, events)
            assert log.next_seq == len(events) and log.order.open_turn is None
            for event in events:
                entry = CORE.get(event.type)
                if entry is None:
                    assert event.type.startswith("dsh/") and event.ignorable
                else:
                    entry.payload.model_validate(event.data)
                    assert event.ignorable == entry.ignorable
                assert parse_event(event.line) == event


@pytest.mark.parametrize("kind", sorted(KNOWN_TYPES))
def test_a_payload_that_does_not_fit_is_kept_as_it_was(kind: str) -> None:
    if kind in ("user/message", "assistant/message", "tool/result"):
        return  # these have passed the rules of the harness
    odd = {"some": {"camelCase": [1]}, "turn": "x"}
    event, counts = one(kind, odd)
    if kind == "session/end-seed":
        assert event.type == "log/end-seed" and event.data == {"imported": odd}
        return
    assert (event.type, event.data, event.ignorable) == (f"dsh/{kind}", odd, True)
    assert counts[f"foreign:{kind}"] == 1


@pytest.mark.parametrize("data", [5, None, "text", [1], True, 1.5])
def test_a_payload_that_is_no_object(data: Any) -> None:
    event, counts = one("x/new", data, ignorable=True)
    assert (event.type, event.data, event.ignorable) == ("dsh/x/new", {"value": data}, True)
    assert counts == {"unknown_ignorable": 1, "foreign:x/new": 1, "wrapped_payload": 1}


def test_types_without_a_family() -> None:
    assert one("plain", {}, ignorable=True)[0].type == "dsh/plain"
    assert one("", {}, ignorable=True)[0].type == "dsh/unnamed"


REASONS = [
    ({"kind": "completed"}, {"kind": "completed"}),
    ({"kind": "blocked"}, {"kind": "blocked"}),
    ({"kind": "interrupted"}, {"kind": "interrupted"}),
    ({"kind": "max-tokens"}, {"kind": "truncated"}),
    ({"kind": "aborted", "reason": {"kind": "user"}}, {"kind": "cancelled", "cause": "user"}),
    ({"kind": "aborted", "reason": {"kind": "hook", "reason": "no"}}, {"kind": "cancelled", "cause": "hook: no"}),
]


@pytest.mark.parametrize(("theirs", "ours"), REASONS)
def test_turn_reasons(theirs: Any, ours: Any) -> None:
    event, counts = one("turn/end", {"turn": 1, "reason": theirs})
    assert event.data == {"turn": 1, "reason": ours} and counts == {}


def test_failed_turns() -> None:
    failure = {"message": "no", "code": "HTTP", "status": 500, "requestId": "r"}
    event, _ = one("turn/end", {"turn": 1, "reason": {"kind": "error", "error": failure}})
    error = event.data["reason"]["error"]
    assert event.data["reason"]["kind"] == "failed" and error["code"] == "dsh.error" and error["message"] == "no"
    assert error["details"] == {"code": "HTTP", "status": 500, "requestId": "r"}
    event, counts = one("turn/end", {"turn": 1, "reason": {"kind": "future", "why": 1}})
    assert event.data["reason"]["error"]["details"] == {"reason": {"kind": "future", "why": 1}}
    assert counts == {"unknown_turn_reason": 1}


def test_chunks_count_their_attempts() -> None:
    log = Log()
    log.start()
    log.start_step()
    log.chunks("a")
    retry = {**log.place(), "retryId": "r", "provider": "p", "mode": "normal", "policyKey": "k", "retry": 1}
    log.add("llm/retry", {**retry, "maxRetries": 3, "delayMs": 10, "failure": {"message": "m", "code": "C"}})
    log.add("llm/retry-started", {**log.place(), "retryId": "r", "retry": 1})
    log.chunks("{", kind="tool-call-delta", id="c", name="n")
    log.end_step()
    log.start_step()
    log.chunks("b")
    events, _ = converted(log.events)
    assert [event.data["attempt"] for event in events if event.type == "assistant/chunk"] == [1, 2, 1]
    retried = next(event for event in events if event.type == "llm/retry")
    assert (retried.data["attempt"], retried.data["max_attempts"], retried.data["delay_ms"]) == (1, 4, 10)
    assert retried.data["imported"] == {
        "retryId": "r",
        "provider": "p",
        "mode": "normal",
        "policyKey": "k",
        "retry": 1,
        "maxRetries": 3,
    }
    assert events[5].data["chunk"] == {"type": "tool-call-delta", "index": 0, "id": "c", "name": "n", "arguments": "{"}
    endless, counts = one("llm/retry", {**retry, "delayMs": 1, "failure": {}})
    assert endless.type == "dsh/llm/retry" and counts["kept_as_foreign"] == 1


def test_request_headers() -> None:
    config = {"provider": "p", "model": "m", "reasoningEffort": "high", "maxTokens": 5, "stop": ["x"], "other": 1}
    header = {"config": config, "adapterDefaults": {"maxTokens": True}, "system": "s", "tools": [{"name": "t"}]}
    event, _ = one("request/header", {"header": header, "reason": "initial"})
    assert event.data == {
        "header": {
            "provider": "p",
            "model": "m",
            "sampling": {"max_output_tokens": 5, "stop": ["x"], "reasoning_effort": "high"},
            "system": "s",
            "tools": [{"name": "t"}],
        },
        "reason": "initial",
        "imported": {"header": {"adapterDefaults": {"maxTokens": True}, "config": {"other": 1}}},
    }


def test_fields_without_a_place_are_kept() -> None:
    data = {"compactionId": "c", "sourceCommandId": "x", "turn": None}
    event, _ = one("compaction/start", data)
    assert event.data == {"compaction_id": "c", "turn": None, "imported": {"sourceCommandId": "x"}}
    event, _ = one("compaction/end", {"compactionId": "c", "turn": 1, "error": "broke"})
    assert event.data["error"]["message"] == "broke"


def test_messages_keep_what_belongs_to_the_user() -> None:
    log = Log()
    log.start()
    log.start_step()
    blocks = [
        {"type": "image", "attachment": {"mediaType": "x", "toolCallId": "kept"}},
        {"type": "text", "text": "t", "providerKey": 1},
        {"type": "tool-call", "id": "c", "name": "n", "arguments": '{"toolCallId":1}'},
        {"type": "tool-call", "id": 5},
        "bare",
        {"no": "type"},
    ]
    log.assistant(*blocks)  # type: ignore[arg-type]
    log.events[-1]["data"] |= {"usage": {"inputTokens": 3, "outputTokens": 4, "strange": 1}, "extra": {"aB": 1}}
    log.result("c", log.call("c"))
    log.events[-1]["data"] |= {"meta": [1], "error": {"name": "N", "code": "TOOL_NOT_STARTED"}}
    events, counts = converted(log.events)
    answer, result = events[2].data, events[4].data
    assert answer["message"]["content"][:3] == blocks[:3]
    assert answer["message"]["content"][3:] == [{"type": "dsh/block", "value": block} for block in blocks[3:]]
    assert answer["usage"] == {"input": 3, "output": 4, "strange": 1} and answer["imported"] == {"extra": {"aB": 1}}
    assert result["error"] == {"name": "N", "code": "tool.not_started"} and result["imported"] == {"meta": [1]}
    assert result["message"]["content"][0]["tool_call_id"] == "c" and counts == {"odd_block": 3}
    log_of_ours = EventLog.restore(HEADER, events)
    assert log_of_ours.messages()[0]["content"][0]["type"] == "image"


def test_a_message_without_its_step_is_put_into_the_open_one() -> None:
    log = Log()
    log.start()
    log.start_step()
    log.assistant(*asks("c"))
    del log.events[-1]["data"]["step"]
    events, counts = converted(log.events)
    assert events[2].data["step"] == 1 and counts == {"position_filled": 1}


# -- the narrower JSON rule -----


def test_each_rule_is_named() -> None:
    half = "a\ud83db"
    deep: Any = 1
    for _ in range(100):
        deep = {"k": [deep]}
    data = {"half": half, half: 1, "zero": -0.0, "zeros": [-0.0], "huge": float("inf"), "deep": deep, "ok": "工🚀"}
    event, counts = one("todo/other", data, ignorable=True)
    assert event.data["half"] == "a\ufffdb" and event.data["a\ufffdb"] == 1
    assert event.data["zero"] == 0 and event.data["huge"] is None and event.data["ok"] == "工🚀"
    assert {key: n for key, n in counts.items() if key.islower() and ":" not in key} == {
        "unknown_ignorable": 1,
        "lone_surrogate": 2,
        "negative_zero": 2,
        "not_finite": 1,
        "nesting": 1,
    }
    inner: Any = event.data["deep"]
    depth = 1
    while isinstance(inner, dict | list):
        inner, depth = inner["k"] if isinstance(inner, dict) else inner[0], depth + 1
    assert depth == 63 and isinstance(inner, str) and json.loads(inner)


def test_keys_that_differ_in_halves_of_pairs_stay_apart() -> None:
    keys = [chr(code) for code in (0xD800, 0xDC00, 0xFFFD)]
    event, _ = one("x/y", dict(zip(keys, (1, 2, 3), strict=True)), ignorable=True)
    assert sorted(event.data.values()) == [1, 2, 3]


def test_integers_beyond_64_bits_become_doubles() -> None:
    event, _ = one("x/y", {"n": 2**64, "m": -(2**63), "f": 1e300}, ignorable=True)
    assert event.data == {"n": 2.0**64, "m": -(2**63), "f": 1e300}


def test_nesting_beyond_what_python_follows() -> None:
    deep: Any = {"end": ["\u2028", '"', {}, []]}
    for _ in range(20_000):
        deep = {"k": deep}
    event, counts = one("x/y", deep, ignorable=True)
    assert counts["nesting"] == 1
    text = event.line.decode()
    assert text.count("k") == 20_000


JSON: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=()), max_size=3), inner, max_size=4)
    ),
    max_leaves=25,
)


@settings(max_examples=60, deadline=None)
@given(JSON)
def test_whatever_was_there_becomes_an_event(data: Any) -> None:
    event, _ = one("x/y", data, ignorable=True)
    assert parse_event(event.line) == event


@settings(max_examples=50, deadline=None)
@given(JSON)
def test_text_of_deep_values_is_their_json(data: Any) -> None:
    from kimi_ray.exchange.dsh.lossless import _pieces

    assert "".join(_pieces(data)) == text_of(data)


@settings(max_examples=50, deadline=None)
@given(JSON)
def test_what_obeys_the_rule_is_left_alone(data: Any) -> None:
    from collections import Counter

    counts: Counter[str] = Counter()
    once = within_rule(data, counts)
    again: Counter[str] = Counter()
    assert within_rule(once, again) == once and not again
    if not counts and "e+" not in repr(data):
        assert once == data


def test_the_digest_follows_the_events() -> None:
    log = Log()
    log.start()
    log.end()
    digests = []
    for change in (0, 0, 1):
        log.events[1]["time"] += change
        conversion = Conversion()
        for event in log.events:
            conversion.convert(event)
        digests.append(conversion.digest)
    assert digests[0] == digests[1] != digests[2]
