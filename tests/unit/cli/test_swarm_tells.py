"""What ``swarm`` tells a person beside its rows: limits, long turns, scores, what a resume does, what is left out."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import RolloutContext
from kimi_ray.cli.progress import LineView, LiveView, LongTurns, counts_line
from kimi_ray.cli.results import limiter_line
from kimi_ray.hosts.swarm_words import LongTurn, SwarmProgress
from kimi_ray.llm import ChatRequest, Step
from kimi_ray.runs import read_manifest, read_rows
from tests.unit.cli.conftest import Cli

HERE = "tests.unit.cli.test_swarm_tells"
SAID = ("swarm", "Say {{item}}", "--items", "items.txt", "--in-process", "--model")
_numbers = itertools.count()


LOOKED = "looked"


async def again(request: ChatRequest) -> Step | str:
    """Reads one file, each time another line of it; after 105 steps until somebody has looked at it."""
    if len(request.messages) > 210:
        async with asyncio.timeout(20):
            while not os.path.exists(LOOKED):
                await asyncio.sleep(0.01)
        return "enough"
    return Step.call("Read", {"path": "items.txt", "line_offset": next(_numbers) + 1})


def refused(request: ChatRequest) -> Step:
    return Step.error("context.overflow", 400)


def broken(request: ChatRequest) -> Step:
    if "b" in request.messages[-1]["content"][0]["text"].split()[-1]:
        return Step.error("context.overflow", 400)
    return Step.error("provider.bad_request", 400)


def fine(request: ChatRequest) -> str:
    return "fine"


async def scored(ctx: RolloutContext) -> object:
    item = ctx.item
    ctx.score("exact", item == "a")
    ctx.score("length", {"a": 3, "b": 4.5}[item])
    ctx.score("remark", "text")
    return {"label": item}


async def flaky(ctx: RolloutContext) -> str:
    if ctx.attempt == 1:
        raise ValueError("not yet")
    return "well"


@pytest.fixture(autouse=True)
def items(place: Path) -> None:
    (place / "items.txt").write_text("a\nb\n")


def long(steps: int, agent: str = "agent-1") -> SwarmProgress:
    one = LongTurn(agent_id=agent, item_id="it\x1bem", repeat=0, steps=steps)
    return SwarmProgress(total=1, running=1, steps=steps, long_turns=(one,))


def test_the_progress_line_has_the_steps() -> None:
    assert ", 1234 steps, 0 tokens/s" in counts_line(SwarmProgress(total=1, steps=1234))


@pytest.mark.parametrize("view_of", [LineView, LiveView])
def test_a_long_turn_is_told_once_and_at_each_doubling(
    view_of: type[LineView | LiveView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    view = view_of(stream)
    for steps in (100, 101, 150, 199, 200, 205, 900, 901, 1599, 1600):
        view.update(long(steps))
    view.update(long(100, "agent-2"))
    view.close()
    told = [line.strip() for line in stream.getvalue().splitlines() if "has made" in line]
    text = "agent-1 (it\\x1bem#0) has made {} steps in this turn; --max-steps bounds it"
    assert told == [*map(text.format, (100, 200, 800, 1600)), text.format(100).replace("agent-1", "agent-2")]


def test_a_swarm_whose_model_goes_on_and_on_says_so(cli: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(self: LongTurns, progress: SwarmProgress) -> list[str]:
        if progress.steps >= 105:
            Path(LOOKED).touch()
        return told_by(self, progress)

    told_by = LongTurns.lines
    monkeypatch.setattr(LongTurns, "lines", lines)
    result = cli(*SAID, f"scripted:{HERE}:again", "--limit", 1, "--out", "run")
    assert result.code == 0, result.err
    assert "agent-1 (" in result.err and "has made 100 steps in this turn; --max-steps bounds it" in result.err
    assert "106 steps" in result.err
    Path(LOOKED).unlink()
    bounded = cli(*SAID, f"scripted:{HERE}:again", "--limit", 1, "--out", "bounded", "--max-steps", 120)
    assert "has made" not in bounded.err


def test_a_dry_run_says_when_nothing_bounds_the_run(cli: Cli) -> None:
    said = (*SAID, f"scripted:{HERE}:fine", "--dry-run")
    assert "no limit is set: --max-steps" in cli(*said).out
    assert cli(*said, "--json").document["bounded"] is False
    for bound in (("--max-steps", 3), ("--total-tokens", 9), ("--profile", "bare")):
        assert "no limit" not in cli(*said, *bound).out
        assert cli(*said, *bound, "--json").document["bounded"] is True


def test_again_names_what_a_plain_resume_does_not_do(cli: Cli) -> None:
    result = cli(*SAID, f"scripted:{HERE}:refused", "--profile", "bare", "--out", "run")
    (line,) = [line for line in result.out.splitlines() if line.startswith("again")]
    assert line.startswith("again    kimi-ray swarm --resume ") and line.endswith("run' --retry model_output")


def test_again_for_both_kinds(cli: Cli) -> None:
    result = cli(*SAID, f"scripted:{HERE}:broken", "--profile", "bare", "--out", "run")
    at = [line.startswith("again") for line in result.out.splitlines()].index(True)
    first, second = result.out.splitlines()[at : at + 2]
    assert first.endswith("run'") and "--retry" not in first
    assert second == "         --retry model_output beside it does those failures again, too"


def test_scores_and_checked_answers_are_shown(cli: Cli) -> None:
    said = ("swarm", "--items", "items.txt", "--in-process", "--model", f"scripted:{HERE}:fine", "--profile", "bare")
    result = cli(*said, "--rollout", f"{HERE}:scored", "--out", "run")
    assert result.code == 0, result.err
    assert '{"label":"a"}' in result.out
    assert "scores: exact mean 0.5 (n=2), length mean 3.75 (n=2)\n" in result.out
    document = cli("swarm", "--resume", "run", "--in-process", "--json").document
    assert document["scores"] == {"exact": {"mean": 0.5, "n": 2}, "length": {"mean": 3.75, "n": 2}}


def test_what_is_left_out_of_a_profile_is_told(cli: Cli) -> None:
    said = (*SAID, f"scripted:{HERE}:fine")
    assert "left out: Bash (--tools keeps it)\n" in cli(*said, "--out", "one").err
    told = cli(*said, "--profile", "coder", "--out", "two").err
    assert "left out: Write, Edit, Bash" in told and "(--tools keeps them)" in told
    assert "left out" not in cli(*said, "--tools", "Read", "--out", "three").err


def test_retry_on_from_the_command_line(cli: Cli) -> None:
    said = ("swarm", "--items", "items.txt", "--in-process", "--model", f"scripted:{HERE}:fine", "--profile", "bare")
    more = ("--rollout", f"{HERE}:flaky", "--out", "run")
    refusal = cli(*said, *more, "--retry-on", "user_code")
    assert (refusal.code, "request.conflict" in refusal.err) == (2, True)
    assert "swarm.bad_retry_class" in cli(*said, *more, "--retries", 1, "--retry-on", "nonsense").err
    result = cli(*said, *more, "--retries", 1, "--retry-on", "infra,user_code")
    assert result.code == 0, result.err
    assert [row.attempt for row in read_rows("run")] == [2, 2]
    assert read_manifest("run")["arguments"]["retry_on"] == ["infra", "user_code"]


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({}, None),
        ({"first": 8}, "8 requests at once"),
        (
            {"first": 20, "last": 12, "lowest": 5, "highest": 40, "cuts": 1, "paused_s": 2.0},
            "20 requests at once at first, 12 at last, between 5 and 40, 1 cut, paused for 2.0 s",
        ),
    ],
)
def test_the_line_of_the_limiter(told: dict[str, Any], line: str | None) -> None:
    assert limiter_line({"limiter": told} if told else {}) == line


def test_a_swarm_tells_how_many_requests_at_once_its_model_got(cli: Cli, home: Path) -> None:
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        '[models.tiny]\nprovider = "scripted"\nscript = ["x"]\nmax_connections = 2\nadaptive_connections = false\n'
    )
    out = cli(*SAID, "tiny", "--out", "run").out
    assert "limits   2 requests at once\n" in out
    assert "limits" not in cli(*SAID, "scripted", "--out", "without").out
