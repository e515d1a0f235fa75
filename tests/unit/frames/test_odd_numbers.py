"""Numbers that no count, no duration and no time can be: told, harming nothing else, in tables anybody can read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kimi_ray import frames
from kimi_ray.errors import KimiRayError
from tests.unit.frames.homes import Scribe, pylist, store_logs

S = "session_one"
TIMING = {"total_ms": 30, "ttft_ms": 5, "limiter_ms": 2, "connect_ms": 1}


def with_response(**data: Any) -> tuple[Scribe, int]:
    """A sound turn, one whose response says this, another sound turn; and the seq of that response."""
    log = Scribe()
    log.plain_turn("one")
    log.turn()
    log.step()
    seq = log.log.next_seq
    log.raw("llm/response", {**log.where, "attempt": 1, "timing": TIMING, "finish_reason": "stop"} | data)
    log.answer("odd", attempt=1)
    log.end()
    log.plain_turn("three")
    return log, seq


async def read(home: Path, log: Scribe) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All tables, each of which can be read, and what is told of them."""
    await store_logs(home, [log])
    tables = frames.tables(S, home=home, on_damage="skip")
    for table in tables.values():
        table.to_pylist()
    return tables, frames.problems(tables["rows"])


@pytest.mark.parametrize("name", ["input", "cached", "cache_write", "output", "reasoning"])
@pytest.mark.parametrize("count", [1.5, 1e308, "x", -5, True], ids=str)
async def test_a_count_that_is_none_is_told_with_its_event_and_the_rest_is_read(
    tmp_path: Path, name: str, count: object
) -> None:
    log, seq = with_response(usage={"input": 1, "output": 1, name: count})
    tables, problems = await read(tmp_path, log)
    told = [one for one in problems if one["code"] == "log.bad_payload"]
    assert told and {one["details"]["seq"] for one in told} == {seq}
    assert name in " ".join(one["message"] for one in told) or count == "x"
    [row] = tables["rows"].to_pylist()
    sound, _ = with_response(timing={})
    for key, value in (await read(tmp_path / "sound", sound))[0]["rows"].to_pylist()[0].items():
        assert row[key] == value, key
    assert len(tables["steps"]) == 3 and len(tables["messages"]) == 5
    with pytest.raises(KimiRayError, match=r"log\.bad_payload"):
        frames.rows(S, home=tmp_path)


@pytest.mark.parametrize("timing", [{"queued_ms": 0.5}, {"limiter_ms": 1e300}, {"queued_ms": "x"}], ids=str)
async def test_a_time_that_is_summed_up_is_whole(tmp_path: Path, timing: dict[str, Any]) -> None:
    log, seq = with_response(timing=TIMING | timing)
    tables, problems = await read(tmp_path, log)
    assert [one["details"]["seq"] for one in problems if one["code"] == "log.bad_payload"] == [seq]
    assert pylist(tables["rows"], "turns", "limiter_ms") == [(3, 4)]


async def test_a_whole_number_that_is_written_with_a_point_is_one(tmp_path: Path) -> None:
    log, _ = with_response(usage={"input": 7.0, "output": 2})
    tables, problems = await read(tmp_path, log)
    assert problems == []
    assert pylist(tables["model_calls"], "input_tokens")[1] == 7


@pytest.mark.parametrize("total_ms", [10**15, 2**63, 10**30, -(10**17), -1], ids=str)
async def test_times_and_durations_out_of_all_range_are_null_and_told(tmp_path: Path, total_ms: int) -> None:
    log, seq = with_response(timing=TIMING | {"total_ms": 777_777})
    line = log.events[seq].line.replace(b"777777", str(total_ms).encode())  # no log of ours would take it
    log.events[seq] = cast("Any", SimpleNamespace(line=line))
    tables, problems = await read(tmp_path, log)
    first, odd, third = pylist(tables["model_calls"], "started", "total_ms", "ended")
    assert None not in first and None not in third and odd[2] is not None
    assert (odd[0] is None) == (total_ms != -1) and (odd[1] is None) == (total_ms != 10**15)
    told = {one["details"]["column"] for one in problems if one["code"] == "frames.bad_value"}
    assert told == {name for name, value in zip(("started", "total_ms"), odd[:2], strict=True) if value is None}
    with pytest.raises(KimiRayError, match=r"frames\.bad_value"):
        frames.model_calls(S, home=tmp_path)


async def test_what_can_be_below_zero_is_taken(tmp_path: Path) -> None:
    log = Scribe()
    log.turn()
    log.step()
    log.response(finish_reason="tool_calls")
    log.answer("", ("c1", "Bash", "{}"), attempt=1)
    log.call("c1", "Bash", "{}")
    log.result("c1", "killed", error="tool.failed", exit_code=-9)
    log.end()
    tables, problems = await read(tmp_path, log)
    assert problems == [] and pylist(tables["tool_calls"], "exit_code") == [-9]


async def test_an_end_that_makes_no_sense_is_told(tmp_path: Path) -> None:
    log = Scribe()
    log.plain_turn("one")
    log.turn()
    log.raw("turn/end", {"turn": 1, "reason": {"kind": "failed", "error": "oops"}})
    tables, problems = await read(tmp_path, log)
    assert [one["code"] for one in problems] == ["log.bad_payload"]
    assert len(tables["steps"]) == 1
