"""Rows: the contract with whoever reads results.jsonl."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kimi_ray.errors import ProviderError, RunError, StoreError, ToolError
from kimi_ray.runs import (
    AttemptRow,
    ResultRow,
    RolloutKey,
    RowError,
    RowModel,
    SwarmReport,
    Timing,
    error_of,
    status_of,
    stop_of,
)
from kimi_ray.runs.rows import attempt_from_line, result_from_line
from kimi_ray.settings import Usage

ROW_KEYS = (
    "v run_id item_id index repeat attempt seed session_id agent_id last_seq status stop error item text output scores"
    " usage cost_usd price_date turns steps tool_calls interruptions timing attempts model node_id tags metadata"
).split()


def attempt(number: int = 1, **facts: Any) -> AttemptRow:
    given: dict[str, Any] = {
        "run_id": "r", "item_id": "i", "index": 0, "repeat": 0, "attempt": number, "seed": 10 + number,
        "status": "completed", "stop": "completed", **facts,
    }  # fmt: skip
    return AttemptRow(**given)


def test_the_keys_of_a_row_and_their_order() -> None:
    row = ResultRow.of_attempts((attempt(),), item={"a": 1})
    value = json.loads(row.to_line())
    assert list(value) == ROW_KEYS
    assert value["v"] == 1
    assert list(value["timing"]) == [
        "queued_ms", "limiter_ms", "model_ms", "tools_ms", "store_ms", "retry_wait_ms", "wall_ms",
    ]  # fmt: skip
    assert list(value["model"]) == ["name", "served", "fingerprint"]
    assert row.to_line().endswith(b"\n")
    assert row.to_line().count(b"\n") == 1


def test_an_error_in_a_row_has_the_six_keys_of_the_contract() -> None:
    error = error_of("failed", ProviderError("slow down", code="provider.rate_limit", retryable=True))
    value = json.loads(attempt(status="failed", stop="failed", error=error).to_line())["error"]
    assert value == {
        "code": "provider.rate_limit",
        "class": "rate_limit",
        "origin": "provider",
        "retryable": True,
        "message": "slow down",
        "cause": None,
    }


def test_rows_are_read_back_as_they_were() -> None:
    failed = attempt(1, status="failed", stop="failed", error=RowError.of(StoreError("m", code="store.busy")))
    done = attempt(
        2, text="ünï\ncode\u2028", usage=Usage(input=3, output=4), cost_usd=0.5, timing=Timing(wall_ms=9),
        model=RowModel(name="m"), session_id="s", agent_id="agent-1", last_seq=12,
    )  # fmt: skip
    row = ResultRow.of_attempts((failed, done), item={"x": [1, None]}, tags={"t": "1"}, metadata={"m": 1})
    assert result_from_line(row.to_line()) == row
    assert attempt_from_line(failed.to_line()) == failed
    assert (row.attempt, row.seed, row.status) == (2, 12, "completed")
    assert [one.status for one in row.attempts] == ["failed", "completed"]
    assert row.attempts[0].error is not None


def test_a_row_from_a_later_release_with_more_keys_is_read_and_of_another_version_refused() -> None:
    value = json.loads(ResultRow.of_attempts((attempt(),), item="x").to_line())
    assert result_from_line(json.dumps({**value, "new_key": 1}).encode()).item == "x"
    with pytest.raises(RunError) as error:
        result_from_line(json.dumps({**value, "v": 2}).encode())
    assert error.value.code == "run.version_unsupported"
    for bad in (b"[]", b"{", b'"x"', json.dumps({**value, "index": -1}).encode()):
        with pytest.raises(RunError):
            result_from_line(bad)


@pytest.mark.parametrize(
    ("reason", "stop", "status"),
    [
        ({"kind": "completed"}, "completed", "completed"),
        ({"kind": "truncated"}, "truncated", "completed"),
        ({"kind": "limit", "name": "max_steps"}, "limit:max_steps", "limit"),
        ({"kind": "failed", "error": {}}, "failed", "failed"),
        ({"kind": "timeout"}, "timeout", "failed"),
        ({"kind": "interrupted"}, "interrupted", "failed"),
        ({"kind": "blocked"}, "blocked", "failed"),
        ({"kind": "cancelled"}, "cancelled", "cancelled"),
        ({"kind": "from-the-future"}, "from-the-future", "failed"),
    ],
)
def test_every_end_of_a_turn(reason: dict[str, Any], stop: str, status: str) -> None:
    assert stop_of(reason) == stop
    assert status_of(stop) == status
    error = error_of(stop, None)
    assert (error is None) == (status in ("completed", "limit"))


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("interrupted", "infra"),
        ("timeout", "provider"),
        ("cancelled", "cancelled"),
        ("blocked", "user_code"),
        ("failed", "infra"),
    ],
)
def test_the_class_of_an_end_without_an_error(stop: str, expected: str) -> None:
    error = error_of(stop, None)
    assert error is not None
    assert error.error_class == expected


def test_an_error_as_a_log_holds_it() -> None:
    data = ToolError(
        "boom", code="tool.user_code", details={"origin": "tool:search", "cause": "ZeroDivisionError: x"}
    ).to_data()
    error = RowError.of(data)
    assert (error.error_class, error.origin, error.cause) == ("user_code", "tool:search", "ZeroDivisionError: x")
    assert RowError.of({**data, "details": {"class": "nonsense"}}).error_class == "user_code"


def not_started(item_id: str, repeat: int = 0) -> ResultRow:
    key = RolloutKey(item_id, repeat)
    return ResultRow.not_started(run_id="r", key=key, index=0, item="x", stop="cancelled")


def test_a_row_that_never_started() -> None:
    row = not_started("i")
    assert (row.status, row.attempt, row.seed, row.attempts) == ("not_started", 0, None, ())
    assert result_from_line(row.to_line()) == row


def test_a_report_is_in_the_order_asked_for_and_sums_over_all_attempts() -> None:
    keys = [RolloutKey("i", 0), RolloutKey("i", 1), RolloutKey("j", 0)]
    first = attempt(1, status="failed", stop="failed", usage=Usage(input=1), cost_usd=0.25,
                    error=RowError.of(StoreError("m", code="store.busy")))  # fmt: skip
    row = ResultRow.of_attempts((first, attempt(2, usage=Usage(input=10), cost_usd=1.0)), item="x")
    rows = [
        not_started("j"),
        ResultRow.of_attempts((attempt(1, repeat=1, status="limit", stop="limit:time_s"),), item="x"),
        row,
    ]
    report = SwarmReport.of(keys, rows, run_id="r")
    assert [one.key for one in report.rows] == keys
    assert report.totals == {"completed": 1, "limit": 1, "failed": 0, "cancelled": 0, "not_started": 1}
    assert report.usage.input == 11
    assert report.cost_usd == 1.25
    with pytest.raises(RunError) as error:
        report.raise_for_status()
    assert error.value.code == "swarm.failed"
    assert error.value.details["totals"]["not_started"] == 1


def test_a_report_without_failures_is_itself() -> None:
    report = SwarmReport.of([RolloutKey("i", 0)], [ResultRow.of_attempts((attempt(),), item="x")], run_id="r")
    assert report.raise_for_status() is report
    assert report.cost_usd is None


@pytest.mark.parametrize("returned", [[], ["i", "i"], ["i", "k"]])
def test_n_asked_for_and_m_returned_is_an_error(returned: list[str]) -> None:
    with pytest.raises(RunError) as error:
        SwarmReport.of([RolloutKey("i", 0)], [not_started(name) for name in returned], run_id="r")
    assert error.value.code == "swarm.incomplete"
