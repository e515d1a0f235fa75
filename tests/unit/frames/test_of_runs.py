"""Frames of what a runtime writes: the same told by a run directory and by logs alone, also while it goes on."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import Limits, Profile, frames
from kimi_ray.llm.script import Step
from tests.unit.runtime_fixtures import running

TOLD_BY_BOTH = """
run_id item_id repeat attempt attempts seed session_id agent_id last_seq status stop error_code error_class text output
scores input_tokens cached_tokens cache_write_tokens output_tokens reasoning_tokens usage_estimated total_tokens turns
steps tool_calls interruptions limiter_ms model_ms tools_ms store_ms retry_wait_ms model served_model fingerprint
node_id
""".split()


def note(what: str) -> str:
    """Notes something, or fails."""
    if what == "bad":
        raise ValueError("no such thing")
    return f"noted {what}"


@pytest.mark.parametrize("backend", ["jsonl", "sqlite"])
async def test_a_run_is_told_by_its_directory_and_by_its_logs(tmp_path: Path, backend: str) -> None:
    async with running(tmp_path, backend=backend) as (runtime, stage, model):
        calls = [Step.call("note", {"what": "good"}), Step.call("note", {"what": "bad"})]
        stage.faults = {
            "do works": calls[:1],
            "do fails": [Step.error("provider.auth")],
            "do retries": [Step.error("provider.overloaded", 503), *calls],
            "do again": [Step.error("provider.bad_request")],
            "do limit": [Step.call("note", {"what": str(n)}) for n in range(9)],
        }
        session = await runtime.workspace(tmp_path / "work").create_session(model=model)
        items = ["works", "fails", "retries", "again", "limit", "ünïcödé 🦆"]
        report = await session.swarm(
            "do {{item}}", items, profile=Profile(name="p"), tools=[note], model=model, out=tmp_path / "run",
            limits=Limits(max_steps=4), retries=1, retry_on=("provider",), seed=3,
        )  # fmt: skip
        live = frames.tables(tmp_path / "run")  # its session is open still
    assert report.totals == {"completed": 4, "limit": 1, "failed": 1, "cancelled": 0, "not_started": 0}
    told, alone = frames.rows(tmp_path / "run"), frames.rows(report.run_id, home=tmp_path / "home")
    by_item = [sorted(one.select(TOLD_BY_BOTH).to_pylist(), key=lambda row: row["item_id"]) for one in (told, alone)]
    assert by_item[0] == by_item[1]
    rows = {json.loads(row["item"]): row for row in told.to_pylist()}
    assert (rows["again"]["attempts"], rows["limit"]["stop"], rows["fails"]["error_class"]) == (
        2,
        "limit:max_steps",
        "auth",
    )

    found = frames.tables(tmp_path / "run")
    for name, table in found.items():
        assert table.num_rows == live[name].num_rows, name
    steps, models, tools = (found[name].to_pylist() for name in ("steps", "model_calls", "tool_calls"))
    places = Counter((one["item_id"], one["attempt"]) for one in steps)
    for row in told.to_pylist():
        key = (row["item_id"], row["attempt"])
        assert places[key] == row["steps"]
        own = [one for one in models if (one["item_id"], one["attempt"]) == key]
        for column in ("input_tokens", "output_tokens"):
            assert sum(one[column] or 0 for one in own) == row[column]
        assert (
            sum(one["call_seq"] is not None for one in tools if (one["item_id"], one["attempt"]) == key)
            == row["tool_calls"]
        )
    assert places[rows["again"]["item_id"], 1] == 1  # the attempt before is there too
    assert sorted({one["status"] for one in tools}) == ["error", "ok"]
    retried = [one for one in models if one["retry_delay_ms"] is not None]
    assert [(one["outcome"], one["http_status"], one["error_code"]) for one in retried] == [
        ("failed", 503, "provider.overloaded")
    ]
    assert sum(one["retries"] for one in steps) == 1


async def test_a_cancelled_turn_and_one_that_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        handle = await session.main.submit("first")
        await stage.until_running(1)
        await session.flush()

        def read() -> Any:
            return frames.tables(session.id, home=tmp_path / "home")

        open_ = await asyncio.to_thread(read)
        assert open_["rows"].to_pylist()[0]["status"] == "open"
        assert [(one["state"], one["ended"]) for one in open_["steps"].to_pylist()] == [("open", None)]
        await handle.cancel()
        await handle.result()
        stage.gate.set()
        await (await session.main.submit("second")).result()
        await session.flush()
        after = await asyncio.to_thread(read)
    assert after["model_calls"].column("outcome").to_pylist() == ["cut", "answered"]
    assert [one["state"] for one in after["steps"].to_pylist()] == ["ended", "ended"]
    (row,) = after["rows"].to_pylist()
    assert (row["status"], row["turns"], row["text"]) == ("completed", 2, "did second")
    said = [one["text"] for one in after["messages"].to_pylist() if one["source"] in ("user", "model")]
    assert said == ["first", "second", "did second"]
