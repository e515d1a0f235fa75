"""What frames of calls and steps add up to is what rows say: tokens, cost, steps, tool calls, for random runs."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import Limits, Profile, frames
from kimi_ray.llm.script import Step
from tests.unit.frames.homes import USAGE, Scribe, pylist, row_of, run_directory, store_logs
from tests.unit.runtime_fixtures import MODULE, running

PRICE = {"input": 3.0, "cached_input": 0.5, "output": 7.0}
TOKENS = ("input_tokens", "cached_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")
KEY = ("run_id", "item_id", "repeat")


def note(what: str) -> str:
    """Notes something, or fails."""
    if what.startswith("b"):
        raise ValueError("no such thing")
    return f"noted {what}" * (2_000 if what.startswith("l") else 1)


def course(dice: random.Random) -> list[Step]:
    """Answers with calls side by side, failures that are tried again, at last an answer, or a failure for good."""
    steps: list[Step] = []
    for _ in range(dice.randrange(4)):
        if dice.random() < 0.3:
            steps.append(Step.error("provider.overloaded", 503))
            continue
        calls = [Step.call("note", {"what": dice.choice(["a", "b", "l", "ü🦆"])}) for _ in range(dice.randint(1, 3))]
        steps.append(Step(text="hm", tool_calls=tuple(one for call in calls for one in call.tool_calls)))
    if dice.random() < 0.25:
        steps.append(Step.error(dice.choice(["provider.auth", "provider.bad_request"])))
    return steps


def sums(table: Any, *names: str) -> dict[tuple[Any, ...], dict[str, float]]:
    found: dict[tuple[Any, ...], dict[str, float]] = defaultdict(lambda: dict.fromkeys(names, 0))
    for row in table.to_pylist():
        for name in names:
            found[tuple(row[part] for part in (*KEY, "attempt"))][name] += row[name] or 0
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_frames_add_up_to_rows(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    home = tmp_path / "home"
    home.mkdir()
    table = f'[models.priced]\nprovider = "scripted"\nscript = "{MODULE}:answer"\nretry_base_s = 0.001\n'
    price = ", ".join(f"{name} = {value}" for name, value in PRICE.items())
    (home / "config.toml").write_text(f"{table}price = {{{price}}}\n")
    async with running(tmp_path) as (runtime, stage, _):
        items = [f"item ü{n}" for n in range(8)]
        stage.faults = {f"do {item}": course(dice) for item in items}
        session = await runtime.workspace(tmp_path / "work").create_session(model="priced")
        report = await session.swarm(
            "do {{item}}", items, profile=Profile(name="p"), tools=[note], model="priced", out=tmp_path / "run",
            limits=Limits(max_steps=3), repeats=2, retries=1, retry_on=("provider",), seed=seed, tags={"t": "1"},
        )  # fmt: skip
        run_id = report.run_id
    found, alone = frames.tables(tmp_path / "run"), frames.tables(run_id, home=home)
    steps, calls = sums(found["steps"], *TOKENS, "cost_usd"), sums(found["model_calls"], *TOKENS, "cost_usd")
    assert alone["model_calls"].to_pylist() == found["model_calls"].to_pylist()
    per_key: dict[Any, float] = defaultdict(float)
    for key, told in calls.items():
        per_key[key[:3]] += told["cost_usd"]
    counted: dict[Any, int] = defaultdict(int)
    for one in found["steps"].to_pylist():
        counted[tuple(one[part] for part in (*KEY, "attempt"))] += 1
    for row in found["rows"].to_pylist():
        key = tuple(row[part] for part in (*KEY, "attempt"))
        assert row["cost_usd"] is not None and row["price_date"]
        for name in TOKENS:
            assert steps[key][name] == calls[key][name] == row[name], (key, name)
        for told in (steps, calls):
            assert told[key]["cost_usd"] == pytest.approx(row["cost_usd"], abs=1e-12)
        assert per_key[key[:3]] == pytest.approx(row["total_cost_usd"], abs=1e-12)
        assert counted[key] == row["steps"]
        mine = [one for one in found["tool_calls"].to_pylist() if tuple(one[p] for p in (*KEY, "attempt")) == key]
        assert sum(one["call_seq"] is not None for one in mine) == row["tool_calls"]
        said = [one for one in found["messages"].to_pylist() if tuple(one[p] for p in (*KEY, "attempt")) == key]
        assert sum(one["role"] == "tool" for one in said) == sum(one["result_seq"] is not None for one in mine)
    assert {one["outcome"] for one in found["model_calls"].to_pylist()} == {"answered", "failed"}
    assert max(one["index"] or 0 for one in found["tool_calls"].to_pylist()) > 0
    assert sum(row["total_cost_usd"] for row in found["rows"].to_pylist()) == pytest.approx(report.cost_usd)
    logs = {tuple(row[part] for part in KEY): row for row in alone["rows"].to_pylist()}
    for row in found["rows"].to_pylist():
        other = logs[tuple(row[part] for part in KEY)]
        for name in ("cost_usd", "total_cost_usd"):
            assert other[name] == pytest.approx(row[name], abs=1e-12)
        assert other["price_date"] == row["price_date"]
        assert (other["item"], other["tags"], json.loads(row["tags"])) == (None, None, {"t": "1"})
        assert json.loads(other["labels"]) == {"item": row["item_id"]}


def priced_home(home: Path, **tables: str) -> None:
    home.mkdir(exist_ok=True)
    text = "".join(f"[models.{name}]\n{body}\n" for name, body in tables.items())
    (home / "config.toml").write_text(text)


async def test_which_price_counts(tmp_path: Path) -> None:
    home = tmp_path / "home"
    priced_home(
        home,
        small='model = "small-wire"\nprice = {input = 1000000.0, cached_input = 0.0, output = 0.0}',
        other='model = "not-what-was-asked"\nprice = {input = 1.0}',
        free='model = "free-wire"',
    )
    logs: list[Scribe] = []
    for number, name in enumerate(("small", "other", "free", "unknown"), 1):
        log = Scribe("session_one", f"agent-{number}", run_id="run_a", item_id=name, repeat=0, attempt=1)
        log.bind(name)
        log.plain_turn("x")
        logs.append(log)
    await store_logs(home, logs)
    fresh = USAGE["input"] + USAGE["cache_write"]
    for name in ("steps", "model_calls"):
        table = frames.tables("session_one", name, home=home)[name]
        assert pylist(table, "cost_usd") == [pytest.approx(fresh), None, None, None]
    assert pylist(frames.rows("run_a", home=home), "item_id", "cost_usd", "total_cost_usd") == [
        ("small", pytest.approx(fresh), pytest.approx(fresh)),
        ("other", None, None),
        ("free", None, None),
        ("unknown", None, None),
    ]
    # a run directory says what it cost then; where it says nothing nobody knows
    rows = [row_of(one.header.item_id or "", n, session_id="session_one", agent_id=one.header.agent_id)
            for n, one in enumerate(logs)]  # fmt: skip
    run = run_directory(tmp_path / "run", home, rows)
    assert pylist(frames.steps(run), "cost_usd") == [None] * 4
    manifest = json.loads((run / "run.json").read_text())
    manifest |= {"prices": {"free": {"input": 2_000_000.0, "output": 0.0}, "small": "?"}, "created_at": "2026-01-02T"}
    (run / "run.json").write_text(json.dumps(manifest))
    used = (fresh + USAGE["cached"]) * 2
    assert pylist(frames.steps(run), "cost_usd") == [None, None, pytest.approx(used), None]


async def test_a_config_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    log = Scribe()
    log.bind("small")
    log.plain_turn("x")
    await store_logs(tmp_path, [log])
    (tmp_path / "config.toml").write_text("[models.small\n")
    with pytest.raises(Exception, match=r"config\.invalid"):
        frames.steps("session_one", home=tmp_path)
    table = frames.steps("session_one", home=tmp_path, on_damage="skip")
    assert pylist(table, "cost_usd") == [None]
    assert [one["code"] for one in frames.problems(table)] == ["config.invalid"]


async def test_another_model_from_the_next_turn_on(tmp_path: Path) -> None:
    """The turn that runs when a model is set is of the one before, in its steps and in its price."""
    priced_home(
        tmp_path,
        small='model = "small-wire"\nprice = {output = 1000000.0}',
        large='model = "large-wire"\nprice = {output = 2000000.0}',
    )
    log = Scribe()
    log.bind("small")
    log.turn()
    log.step()
    log.user("x")
    log.response(finish_reason="tool_calls", usage=USAGE)
    log.answer("", ("c1", "Read", "{}"))
    log.call("c1", "Read", "{}")
    log.add("profile/model", model="large")
    log.result("c1", "y")
    log.step_end()
    log.step()
    log.response(finish_reason="stop", usage=USAGE)
    log.answer("done")
    log.end()
    log._unsaid = {"provider": "openai", "model": "large-wire"}
    log.plain_turn("z")
    await store_logs(tmp_path, [log])
    found = frames.tables("session_one", home=tmp_path)
    seven = USAGE["output"]
    told = [("small", seven), ("small", seven), ("large", 2 * seven)]
    for name in ("steps", "model_calls"):
        assert pylist(found[name], "model", "cost_usd") == told
    assert pylist(found["rows"], "model", "cost_usd") == [("large", 4 * seven)]
