"""What a session writes into main's log: in few calls, once each, also when main's host dies in between."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from pydantic_core import from_json, to_json

from kimi_ray.errors import RuntimeFault
from kimi_ray.hosts.session_log import SessionLog
from kimi_ray.hosts.specs import EventPage, LogEntry
from kimi_ray.store.seam import Stream

STREAM = Stream("s", "main")


class Main:
    """A host with one log: what is appended is volatile until it is flushed; a crash keeps what was durable."""

    name = "host"

    def __init__(self) -> None:
        self.lines: list[bytes] = [to_json({"seq": 0, "type": "runtime/activated", "data": {}})]
        self.durable = 1
        self.calls = 0
        self.recovered = 0
        self.die_after: dict[str, bool] = {}
        """Method to whether what it did is durable when the host dies behind it."""

    def died(self, keep: bool) -> RuntimeFault:
        if keep:
            self.durable = len(self.lines)
        del self.lines[self.durable :]
        return RuntimeFault("gone", code="infra.actor_died")

    async def call(self, method: str, *args: Any, timeout_s: float, group: str = "default") -> Any:
        self.calls += 1
        if method == "record":
            for entry in args[1]:
                self.lines.append(to_json({"seq": len(self.lines), "type": entry.type, "data": entry.data}))
        elif method == "flush":
            self.durable = len(self.lines)
        if method in self.die_after:
            raise self.died(self.die_after.pop(method))
        if method == "flush":
            return [(len(self.lines), 1)]
        if method == "read_events":
            lines = tuple(self.lines[args[1] : args[1] + args[2]])
            return EventPage(args[1], lines, len(self.lines), self.durable, 1)
        return len(self.lines)

    async def recover(self) -> None:
        self.recovered += 1

    def written(self) -> list[Any]:
        return [from_json(line)["data"].get("n") for line in self.lines[1:]]


def log_of(main: Main, **options: Any) -> SessionLog:
    return SessionLog(STREAM, lambda: main, main.recover, **options)  # type: ignore[arg-type,return-value]


def entries(*numbers: int) -> list[LogEntry]:
    return [LogEntry("note/added", {"n": number}) for number in numbers]


async def test_many_entries_cost_few_calls_and_keep_their_order() -> None:
    main = Main()
    log = log_of(main, spacing_s=0.05)
    for number in range(500):
        log.add(entries(number))
        if number % 50 == 0:
            await asyncio.sleep(0.002)
    assert await log.flush() == (501, 1)
    assert main.written() == list(range(500)) and main.calls <= 8
    await log.close()


async def test_entries_are_written_without_anybody_waiting() -> None:
    main = Main()
    log = log_of(main, spacing_s=0.02)
    log.add(entries(1, 2))
    async with asyncio.timeout(5):
        while main.written() != [1, 2]:
            await asyncio.sleep(0.005)
    await log.close()


@pytest.mark.parametrize("method", ["record", "flush"])
@pytest.mark.parametrize("kept", [True, False])
async def test_a_death_in_the_middle_loses_nothing_and_doubles_nothing(method: str, kept: bool) -> None:
    main = Main()
    log = log_of(main, spacing_s=60.0)
    log.add(entries(1, 2))
    await log.flush()
    log.add(entries(3, 4, 5))
    main.die_after[method] = kept
    await log.flush()
    assert main.written() == [1, 2, 3, 4, 5] and main.recovered == 1
    log.add(entries(6))
    await log.close()
    assert main.written() == [1, 2, 3, 4, 5, 6]


async def test_a_log_that_stays_lost_raises_and_keeps_its_entries() -> None:
    main = Main()
    log = log_of(main, spacing_s=60.0)
    await log.flush()
    log.add(entries(1))

    async def gone(method: str, *args: Any, timeout_s: float, group: str = "default") -> Any:
        raise RuntimeFault("gone", code="infra.actor_died")

    call, main.call = main.call, gone  # type: ignore[method-assign]
    with pytest.raises(RuntimeFault):
        await log.flush()
    main.call = call  # type: ignore[method-assign]
    await log.flush()
    assert main.written() == [1]
    await log.close()


async def test_close_does_not_wait_for_the_spacing() -> None:
    main = Main()
    log = log_of(main, spacing_s=60.0)
    log.add(entries(1))
    await asyncio.sleep(0)
    began = time.monotonic()
    await log.close()
    assert time.monotonic() - began < 5 and main.written() == [1]


async def test_of_two_equal_entries_of_which_one_was_kept_the_other_is_written_again() -> None:
    main = Main()
    log = log_of(main, spacing_s=60.0)
    log.add(entries(1))
    await log.flush()
    log.add(entries(7, 7, 8))
    call = main.call

    async def torn(method: str, *args: Any, timeout_s: float, group: str = "default") -> Any:
        answer = await call(method, *args, timeout_s=timeout_s, group=group)
        if method == "record":
            main.call = call  # type: ignore[method-assign]
            del main.lines[3:]  # the power went behind the first of them
            main.durable = 3
            raise RuntimeFault("gone", code="infra.actor_died")
        return answer

    main.call = torn  # type: ignore[method-assign]
    await log.flush()
    assert main.written() == [1, 7, 7, 8]
    await log.close()


async def test_an_error_that_nobody_foresaw_is_kept_and_loses_no_entry(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Main):
        odd = True

        async def call(self, method: str, *args: Any, timeout_s: float, group: str = "default") -> Any:
            if method == "record" and self.odd:
                raise ValueError("odd")
            return await super().call(method, *args, timeout_s=timeout_s, group=group)

    main = Odd()
    log = log_of(main, spacing_s=0.005)
    log.add(entries(1))
    async with asyncio.timeout(5):
        while log.last_error is None:
            await asyncio.sleep(0.005)
    assert log.last_error.details["exception"] == "ValueError" and "odd" in caplog.text
    main.odd = False
    log.add(entries(2))
    await log.close()
    assert main.written() == [1, 2]
