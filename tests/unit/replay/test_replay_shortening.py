"""What shortened a conversation is done again by today's code: where it does otherwise, that is named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kimi_ray.agent.summarizer as summarizer
import kimi_ray.features.compaction.checkpoint as checkpoint
import kimi_ray.features.compaction.engine as engine
import kimi_ray.features.compaction.pruner as pruner
from kimi_ray.config import load_config
from kimi_ray.errors import ConfigError
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.context_window import CompactionSettings
from kimi_ray.llm.script import Step
from kimi_ray.log import pruned
from kimi_ray.replay import AgentReplay, ReplayOptions, ReplayReport, replay_session
from kimi_ray.settings import Sampling
from tests.unit.replay.recorded_sessions import look, recorded, replayed
from tests.unit.replay.test_replay_compactions import Talk, window
from tests.unit.replay.test_replay_damage import Lines, whole_log

PRUNE = {"prune_chars": 200, "prune_head_chars": 100, "prune_tail_chars": 50}


async def _record(tmp_path: Path, talk: Talk | None = None, turns: int = 6, **table: Any) -> Lines:
    talk = talk or Talk()
    async with recorded(tmp_path, talk.answer, **window(talk.answer, **table)) as session:
        await session.main.set_model("small")
        for number in range(turns):
            await (await session.main.submit(f"question {number} " + "please " * 30)).result(10)
        await session.main.compact("keep the numbers")
        await (await session.main.submit("after it")).result(10)
        await session.main.compact()
    return await whole_log(tmp_path)


def _types(source: Lines) -> list[str]:
    return [json.loads(line)["type"] for line in source.lines]


def _edit(source: Lines, kind: str, change: Callable[[dict[str, Any]], None], nth: int = 0) -> None:
    places = [at for at, one in enumerate(_types(source)) if one == kind]
    event = json.loads(source.lines[places[nth]])
    change(event["data"])
    source.lines[places[nth]] = json.dumps(event, separators=(",", ":")).encode()


async def _of(tmp_path: Path, source: Lines, **options: Any) -> ReplayReport:
    how = ReplayOptions(own_tools=(look,), **options)
    return await replay_session(source, "s1", options=how, config=load_config(tmp_path / "home"))


async def _differs(tmp_path: Path, source: Lines | None = None) -> tuple[str, str, str]:
    report = await replayed(tmp_path) if source is None else await _of(tmp_path, source)
    found = report.divergence
    assert found is not None
    return found.kind, found.field, found.message


async def _main(tmp_path: Path, **options: Any) -> AgentReplay:
    report = await replayed(tmp_path, **options)
    assert report.ok, report.divergence
    return report.agents[0]


async def test_all_of_it_is_done_again_and_counted(tmp_path: Path) -> None:
    source = await _record(tmp_path, compaction=PRUNE)
    types = _types(source)
    assert types.count("compaction/prune") > 1 and types.count("compaction/summary") > 2
    main = await _main(tmp_path)
    assert main.summary_requests == types.count("compaction/request")
    assert main.shortenings >= types.count("compaction/summary") - 1 and main.shortenings_taken == 0


async def test_another_instruction_for_summaries_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await _record(tmp_path)
    monkeypatch.setattr(summarizer, "INSTRUCTION", summarizer.INSTRUCTION.replace("Stop here", "Halt"))
    kind, field, message = await _differs(tmp_path)
    assert kind == "request" and field.endswith(".content[0].text")
    assert "the request for the summary" in message


async def test_another_form_of_the_message_that_stands_for_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _record(tmp_path)
    monkeypatch.setattr(checkpoint, "PREAMBLE", "Otherwise.")
    assert (await _differs(tmp_path))[:2] == ("compaction", "compactions[0].content[0].text")


async def test_another_way_of_pruning_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await _record(tmp_path, compaction=PRUNE)

    def shorter(content: Any, rule: Any) -> Any:
        found = pruned(content, rule)
        return found and [{**found[0], "text": found[0]["text"][1:]}]

    monkeypatch.setattr(pruner, "pruned", shorter)
    assert (await _differs(tmp_path))[:2] == ("compaction", "prunes[0].content[0].text")


async def test_another_range_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await _record(tmp_path)
    select = engine.select_range

    def less(surface: Any, prices: Any, retain: int) -> Any:
        return select(surface, prices, retain * 3)

    monkeypatch.setattr(engine, "select_range", less)
    kind, field, _ = await _differs(tmp_path)
    assert kind == "compaction" and field == "compactions[0].range[1]"


async def test_a_pressure_that_comes_sooner_or_later_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await _record(tmp_path)
    was = CompactionSettings.threshold

    def sooner(settings: CompactionSettings, window: int) -> int:
        return was(settings, window) - 500

    def never(_settings: CompactionSettings, _window: int) -> int:
        return 100_000

    monkeypatch.setattr(CompactionSettings, "threshold", sooner)
    kind, field, message = await _differs(tmp_path)
    assert (kind, field) == ("compaction", "compactions[0]")
    assert "today's code compacts" in message and "the recording does not" in message
    monkeypatch.setattr(CompactionSettings, "threshold", never)
    kind, field, message = await _differs(tmp_path)
    assert (kind, field) == ("compaction", "compactions[0]")
    assert "the recording compacts" in message and "today's code does not" in message
    main = await _main(tmp_path, ignore=["compaction"])
    assert main.shortenings_taken == main.ignored["compaction"] > 2 and main.summary_requests == 0


EDITS: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("compaction/start", lambda data: data.update(threshold=1), "compactions[0].threshold"),
    ("compaction/start", lambda data: data.update(tokens=1), "compactions[0].tokens"),
    ("compaction/start", lambda data: data["shadowed_range"].update(end=data["shadowed_range"]["start"]), "range"),
    ("compaction/request", lambda data: data.update(model="other"), "model"),
    ("compaction/request", lambda data: data["sampling"].update(max_output_tokens=7), "sampling.max_output_tokens"),
    ("compaction/request", lambda data: data["message"]["content"][0].update(text="no"), ".content[0].text"),
    ("compaction/request", lambda data: data.update(left_out=1), "messages[0]"),
    ("compaction/summary", lambda data: data["summary"][0].update(text="other"), "compactions[0].content["),
    ("compaction/end", lambda data: data.update(error={"code": "compaction.summary", "message": "x"}), ".error"),
]


@pytest.mark.parametrize("at", range(len(EDITS)))
async def test_an_edited_recording_is_named_where_it_was_edited(tmp_path: Path, at: int) -> None:
    kind, change, field = EDITS[at]
    source = await _record(tmp_path)
    _edit(source, kind, change)
    found = await _differs(tmp_path, source)
    assert field in found[1], found


async def test_the_instruction_of_a_compaction_by_hand_is_that_of_the_recording(tmp_path: Path) -> None:
    source = await _record(tmp_path, turns=1)
    _edit(source, "compaction/start", lambda data: data.update(instruction="keep the letters"))
    kind, field, message = await _differs(tmp_path, source)
    assert kind == "request" and field.endswith("].content[0].text") and "before turn" in message


async def test_what_is_behind_the_last_turn_is_compared_too(tmp_path: Path) -> None:
    source = await _record(tmp_path, turns=1)
    last = len([one for one in _types(source) if one == "compaction/request"]) - 1
    _edit(source, "compaction/request", lambda data: data["message"]["content"][0].update(text="no"), last)
    kind, field, message = await _differs(tmp_path, source)
    assert kind == "request" and field.endswith("].content[0].text") and "behind the last turn" in message


async def test_a_recording_that_does_not_say_with_which_settings_has_its_compactions_taken_over(tmp_path: Path) -> None:
    source = await _record(tmp_path)
    for nth in range(_types(source).count("request/header")):
        _edit(source, "request/header", lambda data: data["header"].pop("context", None), nth)
    by_itself = sum('"trigger":"pressure"' in line.decode() for line in source.lines)
    report = await _of(tmp_path, source)
    assert report.agents[0].shortenings_taken == by_itself > 0
    assert report.divergence is not None and report.divergence.field == "sampling.max_output_tokens"


class Failing(Talk):
    """A model whose summaries come to nothing, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: list[Step] = [
            Step.error("provider.overloaded"),
            Step.error("context.overflow", 400),
            Step("## s\n- enough"),
            Step("long " * 4000),
            Step.error("provider.bad_request", 400),
        ]

    def answer(self, request: ChatRequest) -> Step:
        if request.purpose == "compaction" and self.fails:
            return self.fails.pop(0)
        return super().answer(request)


async def test_summaries_that_failed_fail_again(tmp_path: Path) -> None:
    talk = Failing()
    async with recorded(tmp_path, talk.answer, **window(talk.answer, retry_base_s=0.0)) as session:
        await session.main.set_model("small")
        for number in range(9):
            await (await session.main.submit(f"question {number} " + "please " * 30)).result(10)
    types = _types(await whole_log(tmp_path))
    assert not talk.fails and types.count("compaction/start") > types.count("compaction/summary") > 0
    main = await _main(tmp_path)
    assert main.summary_requests == types.count("compaction/request")


class Slow(Talk):
    """A model whose first summary takes for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def speak(self, request: ChatRequest) -> Step:
        """As ``answer``."""
        if request.purpose == "compaction" and not self.asked.is_set():
            self.asked.set()
            await asyncio.Event().wait()
        return self.answer(request)


async def test_a_compaction_that_was_cancelled_leaves_the_header_of_the_turn_before(tmp_path: Path) -> None:
    talk = Slow()
    async with recorded(tmp_path, talk.speak, **window(talk.speak)) as session:
        await session.main.set_model("small")
        for number in range(20):
            said = Sampling(temperature=0.5)
            prompt = await session.main.submit(f"question {number} " + "please " * 30, sampling=said)
            ended = asyncio.ensure_future(prompt.result(10))
            asked = asyncio.ensure_future(talk.asked.wait())
            await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if talk.asked.is_set():
                await prompt.cancel()
                await ended
                break
            await ended
        await (await session.main.submit("and again")).result(10)
    source = await whole_log(tmp_path)
    assert "compaction.cancelled" in b"".join(source.lines).decode()
    main = await _main(tmp_path)
    assert main.summary_requests == _types(source).count("compaction/request") > 1


@pytest.mark.parametrize("field", ["compactions", "prunes[0]", "compaction.range"])
def test_only_all_of_it_can_be_ignored(field: str) -> None:
    with pytest.raises(ConfigError):
        ReplayOptions(ignore=[field])
