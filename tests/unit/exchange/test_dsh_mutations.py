"""Sessions with a few values changed at random: refused by name, or imported into a log that everything can read."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from kimi_ray.agent.fold import AgentFold
from kimi_ray.cli.event_lines import event_line, event_text
from kimi_ray.events import LogHeader, WriterRef
from kimi_ray.exchange.dsh import Reading, Refusal, read_source
from kimi_ray.exchange.dsh.convert import Conversion
from kimi_ray.exchange.dsh.interpret import interpret
from kimi_ray.exchange.dsh.log_file import read_plain
from kimi_ray.exchange.dsh.session_facts import SessionFacts, document, log_header
from kimi_ray.log import EventLog, closing_events, complete_tools
from kimi_ray.store.chunk_rows import pack_rows, unpack_row
from tests.unit.exchange.conftest import FIXTURES
from tests.unit.exchange.dsh_writer import crashed, header, plain

HEADER = LogHeader(session_id="s", agent_id="main", created_at=1, writer=WriterRef(name="t", version="1"))
FULL = next(one for one in read_source(str(FIXTURES / "jsonl-none-full")) if one.id == "full").events
ODD: list[Any] = [
    None, True, 0, -0.0, 1.5, 2**60, 1e300, -7, "", "x", "text", "tool-result", "\ud800", [], {}, [None], [[]],
    {"type": "text"}, {"type": "tool-call"}, {"kind": "user"}, [{"type": "tool-result", "content": [5]}], "append",
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: its container and the key or index."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        container = stack.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                stack.append(container[key])
    return found


def mutated(events: list[Any], rng: random.Random) -> list[Any]:
    events = copy.deepcopy(events)
    for _ in range(rng.choice((1, 1, 2, 4))):
        event = rng.choice([one for one in events if one.get("type") != "assistant/chunk" or rng.random() < 0.02])
        container, key = rng.choice(places(event))
        what = rng.random()
        if what < 0.25 and isinstance(container, dict):
            del container[key]
        elif what < 0.35 and isinstance(container, dict):
            container[rng.choice(["extra", "imported", "turn", "error", "call_id", "type"])] = rng.choice(ODD)
        elif what < 0.4 and isinstance(container, list):
            container.append(copy.deepcopy(rng.choice(container)))
        else:
            container[key] = copy.deepcopy(rng.choice(ODD))
    return events


def read(data: bytes) -> Reading:
    reading = Reading("s1", "log", "none")
    try:
        stored = read_plain(data)
        reading.header = stored.header
        interpret(reading, stored)
    except Refusal as refusal:
        reading.error = refusal
    return reading


def check(events: list[Any]) -> bool:
    """Whether it was read; fails when it was and cannot be used."""
    reading = read(plain(header(), events, pack=False))
    json.dumps(reading.to_data())
    if reading.error is not None:
        assert reading.error.kind in ("corrupt", "unsupported") and reading.error.message and reading.error.at
        return False
    conversion, facts, fold = Conversion(), SessionFacts(), AgentFold()
    made = []
    for event in reading.events:
        ours = conversion.convert(event)
        assert (ours.seq, ours.time) == (event["seq"], event["time"])
        facts.follow(ours)
        fold.apply(ours)
        event_line(ours), event_text(ours)
        made.append(ours)
    log = EventLog.restore(HEADER, made)
    closing_events(log.order, next_seq=log.next_seq, recovered_at=1)
    complete_tools(log.messages())
    assert [line for row, _ in pack_rows(made) for line in unpack_row(row)] == [event.line for event in made]
    head = log_header("s", reading.header or {}, facts, None, conversion.counts)
    json.dumps(document("s", head, facts, {}, None))
    return True


@pytest.mark.parametrize("seed", range(8))
def test_what_is_read_can_be_used(seed: int) -> None:
    rng = random.Random(seed)
    usable = sum(check(mutated(rng.choice((crashed(), FULL)), rng)) for _ in range(40))
    assert 2 < usable < 38
