"""Closing: everything durable, or told by name; only force discards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kimi_ray.errors import StoreError
from tests.unit.store_writer.conftest import GONE, refused, task_of


async def test_close_makes_everything_durable_and_detaches(rig: Any) -> None:
    log = rig.log()
    log.add(3)
    assert await rig.done(task_of(log.writer.close())) == 0
    assert rig.durable(log) == 3 and log.writer.state == "closed" and rig.sender.stats()["logs"] == 0
    assert rig.clock.alarms == 0
    assert await log.writer.close() == 0
    with pytest.raises(StoreError, match=r"store\.closed"):
        log.add()
    with pytest.raises(StoreError, match=r"store\.closed"):
        await log.writer.flush()


async def test_close_takes_along_what_is_appended_meanwhile(rig: Any) -> None:
    log = rig.log()
    log.add()
    rig.store.gate.clear()
    close = task_of(log.writer.close())
    await rig.settle()
    assert log.writer.state == "closing"
    log.add()
    rig.store.gate.set()
    assert await rig.done(close) == 0
    assert rig.stored(log) == log.lines


async def test_close_against_a_dead_store_ends_names_the_log_and_keeps_it(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(close_timeout_s=4)
    log = rig.log()
    log.add(2)
    rig.store.down = GONE
    close = task_of(log.writer.close())
    await rig.advance(3.9)
    assert not close.done()
    await rig.advance(0.2)
    error = await refused(close, rig)
    assert error.code == "store.unavailable"
    assert error.details["stream"] == "s/main" and error.details["retained_events"] == 2
    rig.store.down = None
    again = task_of(log.writer.close())
    await rig.advance(3)
    assert await rig.done(again) == 0
    assert rig.stored(log) == log.lines


async def test_only_force_discards(rig: Any) -> None:
    log = rig.log()
    log.add(2)
    rig.store.down = GONE
    close = task_of(log.writer.close(1, force=True))
    await rig.advance(1.1)
    assert await rig.done(close) == 2
    assert rig.budget.retained == 0 and rig.clock.alarms <= 1  # the sender's own pause
    rig.store.down = None
    await rig.advance(10)
    assert rig.stored(log) == []
