"""What the harness demands of headers and events, in their order, and the old shapes that it upgrades."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.exchange.dsh import Reading
from kimi_ray.exchange.dsh.vocabulary import KNOWN_TYPES
from tests.unit.exchange.conftest import only, verdict
from tests.unit.exchange.dsh_writer import Log, asks, crashed, header, header_line, plain

EVENTS = crashed()


def read(tmp_path: Path, events: list[Any], **head: Any) -> Reading:
    path = tmp_path / "log.jsonl"
    path.write_bytes(plain(header(**head), events))
    return only(path)


def of_line(tmp_path: Path, first: bytes) -> Reading:
    path = tmp_path / "log.jsonl"
    path.write_bytes(first + plain(header(), EVENTS).partition(b"\n")[2])
    return only(path)


def message(reading: Reading) -> str:
    assert reading.error is not None
    return reading.error.message


# -- headers -----


@pytest.mark.parametrize(
    ("version", "words"), [(1, "newer harness"), (0.5, "newer harness"), (1e300, "newer"), (-1, "no upgrade path")]
)
def test_another_version_is_refused_before_anything_else(tmp_path: Path, version: float, words: str) -> None:
    for shape in ({}, {"id": 5}, {"createdAt": "never"}, {"sandboxMode": "x"}, {"type": "not-a-session"}):
        line = json.dumps({"type": "session", **header(), "version": version, **shape}).encode() + b"\n"
        reading = of_line(tmp_path, line)
        assert reading.error is not None and reading.error.kind == "unsupported" and words in message(reading)
        assert message(reading).endswith(f"(raw log: {reading.source})")
    assert of_line(tmp_path, json.dumps({"version": version}).encode() + b"\n").header is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"not json\n", "header line is not valid JSON"),
        (b"{}\n", "first line is not a session header"),
        (b"[]\n", "first line is not a session header"),
        (b"null\n", "first line is not a session header"),
        (b"\n", "header line is not valid JSON"),
        (b'\xef\xbb\xbf{"type":"session"}\n', "header line is not valid JSON"),
    ],
)
def test_a_first_line_that_is_no_header(tmp_path: Path, line: bytes, words: str) -> None:
    reading = of_line(tmp_path, line)
    assert reading.error is not None and reading.error.kind == "corrupt" and words in message(reading)
    assert reading.header is None and reading.error.at["line"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"createdAt": -1},
        {"createdAt": 1.5},
        {"createdAt": None},
        {"createdAt": 2**53},
        {"id": 5},
        {"version": "0"},
        {"version": True},
        {"delegationDepth": None},
        {"delegationDepth": -1},
        {"origin": "main"},
        {"origin": None},
        {"agentPreset": 1},
    ],
)
def test_a_header_of_another_shape(tmp_path: Path, change: dict[str, Any]) -> None:
    reading = of_line(tmp_path, json.dumps({"type": "session", **header(), **change}).encode() + b"\n")
    assert "first line is not a session header" in message(reading)


@pytest.mark.parametrize("text", ["-0", "-0.0", "1e400", "1.5"])
def test_numbers_that_are_no_counts(tmp_path: Path, text: str) -> None:
    line = header_line(header()).replace(b'"delegationDepth":0', f'"delegationDepth":{text}'.encode())
    assert "first line is not a session header" in message(of_line(tmp_path, line))


def test_numbers_that_are_counts_in_other_spellings(tmp_path: Path) -> None:
    line = header_line(header()).replace(b'"delegationDepth":0', b'"delegationDepth":2.0')
    line = line.replace(b'"version":0', b'"version":-0').replace(b"1700000000000", b"1.7e12")
    reading = of_line(tmp_path, line)
    assert reading.error is None and reading.header is not None
    assert reading.header["delegationDepth"] == 2 and reading.header["createdAt"] == 1_700_000_000_000


def test_retired_fields(tmp_path: Path) -> None:
    line = json.dumps({"type": "session", **header(), "sandboxMode": "x"}).encode() + b"\n"
    assert message(of_line(tmp_path, line)) == "session header uses retired policy baseline fields"


@pytest.mark.parametrize(
    "change", [{"cwd": "relative"}, {"cwd": 5}, {"parentSession": 5}, {"seedLength": -1}, {"seedLength": "3"}]
)
def test_fields_that_only_restoring_looks_at(tmp_path: Path, change: dict[str, Any]) -> None:
    """``readFrom`` gives the events, ``inspect`` refuses."""
    reading = read(
        tmp_path,
        EVENTS,
        **({"cwd": None} if "cwd" in change else {}),
        **{k: v for k, v in change.items() if k != "cwd"},
    )
    if "cwd" in change:
        reading = of_line(tmp_path, header_line(header() | change))
    assert verdict(reading) == "corrupt" and reading.to_data()["stored"] == len(EVENTS)
    assert reading.to_data()["after_repair"] is None and "failed validation" in message(reading)


def test_unknown_header_fields_are_dropped(tmp_path: Path) -> None:
    reading = of_line(tmp_path, header_line(header() | {"future": 1}))
    assert reading.error is None and reading.header == header()


# -- vocabulary -----


def test_there_are_48_known_types() -> None:
    assert len(KNOWN_TYPES) == 48


def test_an_unknown_type_must_be_ignorable(tmp_path: Path) -> None:
    log = Log()
    log.add("x/new", 5, ignorable=True)
    assert verdict(read(tmp_path, log.events)) == (1, 1)
    log.add("x/newer", {})
    reading = read(tmp_path, log.events)
    assert verdict(reading) == "unsupported" and '"x/newer" (seq 1)' in message(reading)
    assert reading.to_data()["stored"] is None and reading.error is not None and reading.error.at["seq"] == 1


def test_ignorable_is_true_or_absent(tmp_path: Path) -> None:
    for mark in (False, 1, "true", None):
        log = Log()
        log.add("x/new", {}, ignorable=mark)
        assert verdict(read(tmp_path, log.events)) == "unsupported"
        log = Log()
        log.add("todo/write", {}, ignorable=mark)
        assert verdict(read(tmp_path, log.events)) == "corrupt"


def test_an_event_without_a_type(tmp_path: Path) -> None:
    log = Log()
    log.add("x", {})
    del log.events[0]["type"]
    assert '"undefined" (seq 0)' in message(read(tmp_path, log.events))
    log.events[0]["type"] = ["turn/start"]
    assert verdict(read(tmp_path, log.events)) == "unsupported"


@pytest.mark.parametrize("retired", ["request/header-delta", "mode/set"])
def test_retired_types(tmp_path: Path, retired: str) -> None:
    log = Log()
    log.start()
    log.add(retired, {}, ignorable=True)
    reading = read(tmp_path, log.events)
    assert verdict(reading) == "corrupt"
    assert message(reading) == f'session "s1" contains unsupported legacy {retired} event at seq 1'


def test_a_fallback_header(tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.add("request/header", {"header": {"config": {"provider": "p", "model": "m"}}, "reason": "fallback"})
    assert 'unsupported legacy request/header reason "fallback" at seq 1' in message(read(tmp_path, log.events))


# -- envelopes, messages, surface -----


@pytest.mark.parametrize(
    "change",
    [{"time": 1.5}, {"time": None}, {"time": 2**53}, {"extra": 1}, {"surfaceOp": "append"}, {"sourceEventSeqs": []}],
)
def test_an_envelope_of_another_shape(tmp_path: Path, change: dict[str, Any]) -> None:
    log = Log()
    log.start()
    log.events[0] |= change
    reading = read(tmp_path, log.events)
    assert verdict(reading) == "corrupt" and reading.to_data()["stored"] == 1


def test_times_may_go_back_and_be_negative(tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.end()
    log.events[1]["time"] = -5
    assert verdict(read(tmp_path, log.events)) == (2, 2)


def test_an_event_without_data(tmp_path: Path) -> None:
    log = Log()
    log.add("todo/write", {})
    del log.events[0]["data"]
    assert verdict(read(tmp_path, log.events)) == "corrupt"


MESSAGE = {"id": "u", "role": "user", "content": [], "source": {"kind": "user"}}
ANSWER = {"id": "a", "role": "assistant", "content": [], "source": {"kind": "model", "provider": "p", "model": "m"}}
RESULT: dict[str, Any] = {
    "id": "r",
    "role": "user",
    "content": [{"type": "tool-result", "toolCallId": "c", "content": []}],
    "source": {"kind": "tool", "callId": "c"},
}


@pytest.mark.parametrize(
    ("kind", "made", "words"),
    [
        ("user/message", None, "lacks an identified message"),
        ("user/message", MESSAGE | {"id": ""}, "lacks an identified message"),
        ("user/message", MESSAGE | {"role": "assistant"}, 'must have role "user"'),
        ("user/message", MESSAGE | {"source": {}}, "invalid source"),
        ("user/message", MESSAGE | {"content": "text"}, "invalid content"),
        ("assistant/message", {"message": None}, "lacks an identified message"),
        ("assistant/message", {"message": ANSWER | {"role": "user"}}, 'must have role "assistant"'),
        ("assistant/message", {"message": ANSWER | {"source": {"kind": "model"}}}, "must have model source"),
        ("tool/result", {"message": RESULT | {"source": {"kind": "tool"}}}, "must have tool source"),
        ("tool/result", {"message": RESULT | {"content": []}}, "must contain one tool-result block"),
        ("tool/result", {"message": RESULT | {"content": RESULT["content"] * 2}}, "must contain one tool-result block"),
        (
            "tool/result",
            {"message": RESULT | {"source": {"kind": "tool", "callId": "d"}}},
            "mismatched tool call ids",
        ),
    ],
)
def test_message_shapes(tmp_path: Path, kind: str, made: Any, words: str) -> None:
    log = Log()
    log.start()
    log.add(kind, made, surfaceOp="append")
    reading = read(tmp_path, log.events)
    assert verdict(reading) == "corrupt" and reading.to_data()["stored"] is None
    assert message(reading).startswith('stored session "s1" failed validation: session event at seq 1 ')
    assert words in message(reading)


def replaced(log: Log, start: int, end: int, sources: list[int]) -> int:
    made = MESSAGE | {"id": f"x{len(log.events)}"}
    op = {"op": "replace", "start": start, "end": end}
    return log.add("user/message", made, sourceEventSeqs=sources, surfaceOp=op)


def test_replacing_a_span_of_the_surface(tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.start_step()
    one, two, three = log.user("1"), log.user("2"), log.user("3")
    four = replaced(log, one, two, [one, two])
    five = replaced(log, four, three, [four, three, 0])  # 4 stands before 3: a span is of places, not of numbers
    assert verdict(read(tmp_path, log.events))[0] == len(log.events)
    for start, end, sources in (
        (one, one, [one]),  # not on the surface any more
        (five, 99, [five]),
        (five, five, []),
        (five, five, [one]),
        (five, five, [five, five]),
        (five, five, [five, 99]),
    ):
        bad = Log()
        bad.events = list(log.events)
        replaced(bad, start, end, sources)
        assert verdict(read(tmp_path, bad.events)) == "corrupt", (start, end, sources)


def test_a_replaced_result_changes_its_content_only(tmp_path: Path) -> None:
    def log() -> tuple[Log, int, int]:
        made = Log()
        made.start()
        made.start_step()
        made.assistant(*asks("c"))
        call = made.call("c")
        return made, call, made.result("c", call, "long")

    good, _call, result = log()
    good.result("c", result, "short", surfaceOp={"op": "replace", "start": result, "end": result})
    assert verdict(read(tmp_path, good.events))[0] == len(good.events)
    for change in ({"id": "other"}, {"extra": 1}):
        bad, _call, result = log()
        bad.result("c", result, "short", surfaceOp={"op": "replace", "start": result, "end": result})
        bad.events[-1]["data"]["message"] |= change
        assert "may only change the content" in message(read(tmp_path, bad.events))
    bad, _call, result = log()
    bad.result("c", 2, "short", surfaceOp={"op": "replace", "start": 2, "end": 2})
    assert "exactly one tool/result" in message(read(tmp_path, bad.events))


def test_surface_events_need_surface_metadata(tmp_path: Path) -> None:
    for op in (None, "replace", {"op": "replace", "start": 0}, {"op": "append"}):
        log = Log()
        log.start()
        log.user("1")
        log.events[1].pop("surfaceOp")
        if op is not None:
            log.events[1]["surfaceOp"] = op
        assert verdict(read(tmp_path, log.events)) == "corrupt"


@pytest.mark.parametrize(
    ("config", "more", "good"),
    [
        ({"provider": "p", "model": "m"}, {}, True),
        ({"provider": "p", "model": ""}, {}, False),
        ({"provider": "p"}, {}, False),
        ({"provider": "p", "model": "m", "reasoningEffort": ""}, {}, False),
        ({"provider": "p", "model": "m", "maxTokens": 5}, {"adapterDefaults": {"maxTokens": True}}, True),
        ({"provider": "p", "model": "m"}, {"adapterDefaults": {"maxTokens": True}}, False),
        ({"provider": "p", "model": "m"}, {"adapterDefaults": {"other": True}}, False),
        ({"provider": "p", "model": "m"}, {"adapterDefaults": []}, False),
    ],
)
def test_request_headers(tmp_path: Path, config: dict[str, Any], more: dict[str, Any], good: bool) -> None:
    log = Log()
    log.start()
    log.add("request/header", {"header": {"config": config, **more}, "reason": "initial"})
    assert (read(tmp_path, log.events).error is None) is good


# -- old shapes -----


def upgraded(tmp_path: Path, kind: str, data: Any, **envelope: Any) -> Any:
    log = Log()
    log.start()
    log.add(kind, data, **envelope)
    reading = read(tmp_path, log.events)
    return message(reading) if reading.error else (reading.stored or [])[1]


def test_turn_start_with_a_trigger(tmp_path: Path) -> None:
    log = Log()
    log.add("turn/start", {"turn": 1, "trigger": {"kind": "user"}})
    reading = read(tmp_path, log.events)
    assert (reading.stored or [])[0]["data"] == {"turn": 1} and reading.notes["legacy_shape"] == 1
    for bad in (
        {"turn": 0, "trigger": {"kind": "user"}},
        {"turn": 1, "trigger": {}},
        {"turn": 1, "trigger": {"kind": ""}},
    ):
        log.events[0]["data"] = bad
        assert message(read(tmp_path, log.events)) == (
            'session "s1" contains malformed pre-react-loop turn/start at seq 0'
        )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"kind": "disposed"}, {"kind": "aborted", "reason": {"kind": "disposed"}}),
        ({"kind": "aborted"}, {"kind": "aborted", "reason": {"kind": "legacy"}}),
        ({"kind": "aborted", "reason": {"kind": "user"}}, {"kind": "aborted", "reason": {"kind": "user"}}),
        ({"kind": "error", "step": 0, "message": "m"}, {"kind": "error", "error": {"message": "m", "code": "UNKNOWN"}}),
        (
            {"kind": "error", "step": 2, "message": "m", "code": "C"},
            {"kind": "error", "error": {"message": "m", "code": "C"}},
        ),
        (
            {"kind": "error", "step": 2, "failure": {"message": "m", "code": "C", "status": 5}},
            {"kind": "error", "error": {"message": "m", "code": "C", "status": 5}},
        ),
        ({"kind": "future", "more": 1}, {"kind": "future", "more": 1}),
    ],
)
def test_turn_ends_of_old(tmp_path: Path, old: Any, new: Any) -> None:
    assert upgraded(tmp_path, "turn/end", {"turn": 1, "reason": old})["data"] == {"turn": 1, "reason": new}


@pytest.mark.parametrize(
    "data",
    [
        {"turn": 1},
        {"turn": 0, "reason": {"kind": "completed"}},
        {"turn": 1, "reason": {"kind": "completed"}, "more": 1},
        {"turn": 1, "reason": {"kind": "completed", "more": 1}},
        {"turn": 1, "reason": {"kind": "disposed", "more": 1}},
        {"turn": 1, "reason": {"kind": "error", "message": "m"}},
        {"turn": 1, "reason": {"kind": "error", "step": 1, "failure": {"message": "m"}}},
        {"turn": 1, "reason": {"kind": "error", "step": 1, "message": "m", "more": 1}},
        {"turn": 1, "reason": {}},
    ],
)
def test_malformed_turn_ends(tmp_path: Path, data: Any) -> None:
    assert upgraded(tmp_path, "turn/end", data) == 'session "s1" contains malformed pre-react-loop turn/end at seq 1'


def test_steering_messages(tmp_path: Path) -> None:
    made = upgraded(tmp_path, "steering/message", {"turn": 1, "message": MESSAGE}, surfaceOp="append")
    assert (made["type"], made["data"]) == ("user/message", MESSAGE)
    old = {"turn": 1, "content": [], "source": {"kind": "user"}}
    made = upgraded(tmp_path, "steering/message", old, surfaceOp="append")
    assert made["data"] == {"id": "legacy-message:s1:1", "role": "user", "content": [], "source": {"kind": "user"}}
    assert "malformed pre-react-loop steering/message" in upgraded(tmp_path, "steering/message", {"turn": 1})


def test_messages_without_identity(tmp_path: Path) -> None:
    log = Log()
    log.start()
    log.start_step()
    log.add("user/message", {"content": [], "source": {"kind": "user"}}, surfaceOp="append")
    old = {**log.place(), "content": asks("c"), "provenance": {"provider": "p", "model": "m"}}
    log.add("assistant/message", old, surfaceOp="append")
    result = {**log.place(), "callId": "c", "content": [], "isError": False}
    log.add("tool/result", result, surfaceOp="append")
    op = {"op": "replace", "start": 4, "end": 4}
    log.add("tool/result", {**result, "content": [{"type": "text", "text": "x"}]}, surfaceOp=op, sourceEventSeqs=[4])
    reading = read(tmp_path, log.events)
    assert reading.error is None and reading.notes["legacy_shape"] == 4
    user, answer, first, second = (reading.stored or [])[2:]
    assert user["data"]["id"] == "legacy-message:s1:2"
    assert answer["data"]["message"]["source"] == {"provider": "p", "model": "m", "kind": "model"}
    assert first["data"]["message"]["id"] == second["data"]["message"]["id"] == "legacy-message:s1:4"
    assert first["data"]["message"]["source"] == {"kind": "tool", "callId": "c"}


# -- JSON as JavaScript reads it -----


def test_values_that_python_and_javascript_read_differently(tmp_path: Path) -> None:
    raw = (
        b'{"type":"todo/write","seq":0,"time":1.0,"data":{"todos":[],"a":1,"a":2,"__proto__":{"x":1},"zero":-0,'
        b'"huge":1e400,"big":12345678901234567890,"odd":9007199254740993,"half":"\\ud83d","whole":2.0,"bad":"\xff"}}\n'
    )
    path = tmp_path / "log.jsonl"
    path.write_bytes(header_line(header()) + raw)
    reading = only(path)
    assert verdict(reading) == (1, 1)
    data = (reading.stored or [])[0]["data"]
    assert data["a"] == 2 and list(data)[1] == "a" and data["__proto__"] == {"x": 1}
    assert str(data["zero"]) == "-0.0" and data["huge"] == float("inf")
    assert data["big"] == 12345678901234567168 and data["odd"] == 9007199254740992
    assert data["half"] == "\ud83d" and type(data["whole"]) is int and data["bad"] == "\ufffd"
    assert dict(reading.notes) == {"duplicate_key": 1, "big_integer": 2, "invalid_utf8": 1}


@pytest.mark.parametrize("seq", [b"-0", b"0.0", b"0e5"])
def test_a_seq_in_another_spelling(tmp_path: Path, seq: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(header_line(header()) + b'{"type":"todo/write","seq":' + seq + b',"time":1,"data":{}}\n')
    reading = only(path)
    assert verdict(reading) == (1, 1) and (reading.stored or [])[0]["seq"] == 0


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"01", b"'x'", b"{a:1}", b'"\t"', b"[1,]", b"+1", b".5"])
def test_what_is_not_json(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(header_line(header()) + b'{"type":"todo/write","seq":0,"time":1,"data":' + text + b"}\n")
    assert verdict(only(path)) == (0, 0)


def test_deep_nesting(tmp_path: Path) -> None:
    deep = b'{"k":' * 5000 + b"1" + b"}" * 5000
    path = tmp_path / "log.jsonl"
    path.write_bytes(header_line(header()) + b'{"type":"todo/write","seq":0,"time":1,"data":' + deep + b"}\n")
    assert verdict(only(path)) == (1, 1)
