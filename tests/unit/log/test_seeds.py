"""Where a seed ends: what came before was written by another life of the log, and its open brackets bind nobody."""

from __future__ import annotations

import pytest

from kimi_ray.errors import LogError
from kimi_ray.events import SessionEvent, parse_event
from kimi_ray.log import EventLog
from tests.unit.log.scripts import HEADER, begin, end, new_log, user


def told_by(log: EventLog) -> list[SessionEvent]:
    told: list[SessionEvent] = []
    log.observe(told.append)
    return told


def test_an_explicit_empty_seed_ends_at_once_and_a_fresh_log_has_none() -> None:
    fresh = new_log()
    assert fresh.next_seq == 0 and fresh.last_end_seed is None
    seeded = EventLog.restore(HEADER, [], seed=True)
    assert seeded.last is not None and seeded.last.type == "log/end-seed" and seeded.last.data == {}
    assert (seeded.next_seq, seeded.last_end_seed, seeded.first_live_seq) == (1, 0, 0)


def test_a_seed_that_ends_in_the_mark_gets_no_second_one() -> None:
    log = EventLog.restore(HEADER, [], seed=True)
    events = [log.last]
    for _ in range(3):
        log = EventLog.restore(HEADER, [event for event in events if event], seed=True)
        assert (log.next_seq, log.first_live_seq, log.last_end_seed) == (1, 1, 0)
    user(log, "x")
    assert log.end_seed() is not None and log.end_seed() is None
    assert log.last_end_seed == 2


def test_the_newest_mark_is_known_after_reading_back() -> None:
    log = new_log()
    told = told_by(log)
    user(log, "a")
    log.end_seed()
    user(log, "b")
    log.end_seed()
    user(log, "c")
    assert EventLog.restore(HEADER, told).last_end_seed == 3
    paged = EventLog(HEADER)
    paged.read_back([event.line for event in told])
    assert paged.last_end_seed == 3


def test_the_mark_of_a_seed_is_told_to_nobody_and_stands_in_the_log() -> None:
    log = new_log()
    told = told_by(log)
    user(log, "a")
    seeded = EventLog.restore(HEADER, told, seed=True)
    assert seeded.last is not None and seeded.last.seq == 1 == seeded.first_live_seq
    assert seeded.messages() == log.messages()


@pytest.mark.parametrize("mark", ["log/end-seed", "runtime/activated"])
def test_an_open_compaction_is_a_lock_until_its_end_or_until_another_life_begins(mark: str) -> None:
    log = new_log()
    told = told_by(log)
    log.append("compaction/start", {"compaction_id": "one"})
    assert log.order.open_compaction == "one"
    for kind, other in (("compaction/start", "two"), ("compaction/end", "two")):
        with pytest.raises(LogError) as refused:
            log.append(kind, {"compaction_id": other})
        assert refused.value.code == "log.out_of_order"
    again = EventLog.restore(HEADER, told)
    assert again.order.open_compaction == "one"  # not for the bytes to say: another process may hold it
    again.append(mark, {"epoch": 2} if mark == "runtime/activated" else {})
    assert again.order.open_compaction is None
    with pytest.raises(LogError):
        again.append("compaction/end", {"compaction_id": "one"})
    again.append("compaction/start", {"compaction_id": "two"})
    again.append("compaction/end", {"compaction_id": "two"})
    assert again.order.open_compaction is None


def test_an_open_compaction_in_a_seed_is_stale() -> None:
    log = new_log()
    told = told_by(log)
    begin(log)
    end(log)
    log.append("compaction/start", {"compaction_id": "of the parent"})
    child = EventLog.restore(HEADER, [parse_event(event.line) for event in told], seed=True)
    assert child.order.open_compaction is None
    child.append("compaction/start", {"compaction_id": "its own"})
    assert child.order.open_compaction == "its own"
