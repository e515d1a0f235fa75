"""Sessions that were saved out of damaged logs: what a hole breaks is told as a loss, never as a difference."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.config import load_config
from kimi_ray.events import make_event, parse_event
from kimi_ray.hosts.features import load_features
from kimi_ray.llm.script import Step
from kimi_ray.replay import ReplayOptions, ReplayReport, replay_session
from kimi_ray.store.rebuild import Rebuild
from kimi_ray.tools import FunctionTool
from tests.unit.replay.recorded_sessions import Scenes, look, recorded
from tests.unit.replay.test_replay_damage import MAIN, Lines, eventful, look_again, whole_log


def _salvaged(lines: list[bytes], lost: Collection[int]) -> list[bytes]:
    """What a salvage makes of the lines when these are lost."""
    rebuild = Rebuild(MAIN, 1)
    events = [one for seq, line in enumerate(lines) if seq not in lost for one in rebuild.take(seq, line)]
    return [one.line for one in [*events, *rebuild.finish()]]


async def _replayed(tmp_path: Path, source: Lines, lines: list[bytes], own: FunctionTool = look) -> ReplayReport:
    config = load_config(tmp_path / "home")
    source.lines = lines
    options = ReplayOptions(own_tools=(own,))
    return await replay_session(source, "s1", options=options, config=config, features=load_features(config))


async def _eight_turns(tmp_path: Path) -> Lines:
    scenes = Scenes()
    async with recorded(tmp_path, scenes.answer) as session:
        for number in range(8):
            scenes.steps[f"say {number}"] = [Step.call("look", {"what": "a"}), "done"]
            await (await session.main.submit(f"say {number}")).result(10)
    return await whole_log(tmp_path)


@pytest.mark.parametrize("is_marked", [True, False])
async def test_an_answer_that_was_lost_is_told_as_one(tmp_path: Path, is_marked: bool) -> None:
    source = await _eight_turns(tmp_path)
    lines = list(source.lines)
    events = [parse_event(line) for line in lines]
    [seq] = [one.seq for one in events if one.type == "assistant/message" and _place(one.data) == (5, 1)]
    left = _salvaged(lines, {seq})
    assert parse_event(left[seq]).type == "log/salvaged"
    if not is_marked:
        mark = parse_event(left[seq])
        data: dict[str, Any] = {**mark.data, "lost": []}
        left[seq] = make_event(seq, mark.time, mark.type, data, ignorable=mark.ignorable).line
    report = await _replayed(tmp_path, source, left)
    found = report.divergence
    assert not report.ok and found is not None and (found.kind, found.turn) == ("failed", 5), found
    assert "the recording has lost something" in found.message
    assert "the events that an answer belongs to" in found.message and "differs" not in found.message
    assert found.replayed["code"] == "log.out_of_order"


async def test_what_differs_behind_a_loss_is_told_with_it_and_before_it_as_ever(tmp_path: Path) -> None:
    source = await _eight_turns(tmp_path)
    lines = list(source.lines)
    for turn, kind in ((0, "failed"), (5, "request")):
        [seq] = [at for at, line in enumerate(lines) if _is(line, "prompt/submitted", f"say {turn}")]
        left = _salvaged(lines, {seq})
        assert (await _replayed(tmp_path, source, left)).ok
        found = (await _replayed(tmp_path, source, left, look_again)).divergence
        assert found is not None and (found.kind, found.turn) == (kind, 0), found
        assert "request 0 (turn 0, step 0) differs at tools[0].description" in found.message
        assert ("the recording has lost something (1 event," in found.message) == (turn == 0)


async def test_whatever_is_lost_no_difference_of_todays_code_is_told(tmp_path: Path) -> None:
    await eventful(tmp_path)
    source = await whole_log(tmp_path)
    lines = list(source.lines)
    told: dict[int, str] = {}
    for seq in range(len(lines)):
        for lost in [{seq}, set(range(seq, seq + (5 if seq % 2 else 2)))][: 2 - bool(seq % 3)]:
            report = await _replayed(tmp_path, source, _salvaged(lines, lost))
            found = report.divergence
            if found is not None and found.kind != "failed":
                told[seq] = f"{sorted(lost)} {parse_event(lines[seq]).type}: {found.message}"
    assert not told, "\n".join(told.values())


def _place(data: dict[str, int]) -> tuple[int, int]:
    return data["turn"], data["step"]


def _is(line: bytes, kind: str, text: str) -> bool:
    return parse_event(line).type == kind and text.encode() in line
