"""Whatever a session went through: its replay asks the same, and each request is rebuilt to the byte."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import AgentError
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.replay import rebuild_session
from kimi_ray.session_handle import Session
from kimi_ray.settings import Limits, Sampling
from tests.unit.replay.recorded_sessions import assert_as_recorded, fail, look, recorded_in, scripted, source_of


class Moods:
    """A model of random moods: says little or much, calls tools, fails, is slow."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.requests: list[ChatRequest] = []

    async def answer(self, request: ChatRequest) -> Step:
        if request.purpose == "compaction":
            return Step("## Request and intent\n- much")
        self.requests.append(request)
        mood, rng = self._rng.random(), self._rng
        if mood < 0.08:
            return Step.error(rng.choice(["provider.overloaded", "provider.connection", "context.overflow"]))
        if mood < 0.14:
            await asyncio.sleep(0.02)
        if mood < 0.45:
            names = rng.choices(["look", "fail", "nothing"], [6, 1, 1], k=rng.randint(1, 3))
            what = "w" * rng.choice([3, 300, 900])
            return Step(tool_calls=tuple(ToolCall(name, f'{{"what": "{what}"}}') for name in names))
        return Step("word " * rng.choice([1, 20, 80]), reasoning=rng.choice(["", "hm"]))


async def _act(rng: random.Random, session: Session, number: int) -> None:
    main, kind = session.main, rng.random()
    if kind < 0.1:
        await main.undo(1)
    elif kind < 0.2:
        await main.compact()
    elif kind < 0.3:
        prompt = await main.submit(f"stopped {number}")
        await asyncio.sleep(rng.choice([0, 0.005, 0.02]))
        await prompt.cancel()
        await prompt.result(10)
    elif kind < 0.4:
        first = await main.submit(f"first {number}")
        joined = [await main.submit(f"joins {number} {n}", steer_if_active=True) for n in range(2)]
        for one in (first, *joined):
            await one.result(10)
    else:
        sampling = rng.choice([None, Sampling(temperature=0.5)])
        limits = rng.choice([None, None, Limits(max_steps=2)])
        await (await main.submit(f"question {number} " + "please " * 20, sampling=sampling, limits=limits)).result(10)


@pytest.mark.parametrize("seed", range(6))
async def test_a_random_session(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    moods = Moods(rng)
    table = {
        "provider": "scripted",
        "script": scripted(moods.answer).partition(":")[2],
        "max_context_tokens": 1500,
        "retry_base_s": 0.0,
        "compaction": {"prune_chars": 400, "prune_head_chars": 100, "prune_tail_chars": 50},
    }
    how: dict[str, Any] = {"models": {"m": table}, "tools": (look, fail)}
    async with recorded_in(tmp_path, moods.answer, **how) as (workspace, session):
        await session.main.set_model("m")
        for number in range(14):
            try:
                await _act(rng, session, number)
            except AgentError as error:
                assert error.code.startswith(("compaction.", "undo.", "prompt.")), error
        await workspace.fork("s1", new_session_id="f", tools=[look, fail], model="m")
        fork = await workspace.resume("f", tools=[look, fail])
        await (await fork.main.submit("on its own")).result(10)
    for session_id in ("s1", "f"):
        report = await assert_as_recorded(tmp_path, None, session_id)
        made = [one for one in moods.requests if one.session_id == session_id]
        assert report.requests == len(made)
        main = (await rebuild_session(source_of(tmp_path), session_id)).main
        rebuilt = [(one.request.turn, one.request.step, one.request.messages) async for one in main.requests()]
        asked = [(one.turn, one.step, one.messages) for one in made]
        assert asked == rebuilt
