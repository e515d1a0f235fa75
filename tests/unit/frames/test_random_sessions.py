"""Random sessions with compactions, undos, cancels, retries, forks and trees of agents: frames agree with each other
and with the log, and what is exported has the shape that trainers take."""

from __future__ import annotations

import asyncio
import io
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import Feature, Profile, frames
from kimi_ray.errors import AgentError
from kimi_ray.exchange import export_conversations
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.store import open_store
from tests.unit.replay.recorded_sessions import fail, look, recorded_in, scripted
from tests.unit.replay.test_replay_random import Moods, _act

TOKENS = ("input_tokens", "cached_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")
PRICE = {"input": 2.0, "cached_input": 0.1, "output": 5.0}


def of(table: Any, agent: tuple[str, str]) -> list[dict[str, Any]]:
    return [row for row in table.to_pylist() if (row["session_id"], row["agent_id"]) == agent]


def check_frames(found: dict[str, Any]) -> None:
    rows = found["rows"].to_pylist()
    assert rows
    for row in rows:
        agent = (row["session_id"], row["agent_id"])
        steps, calls, tools, said = (of(found[name], agent) for name in frames.FRAMES[1:])
        for name in TOKENS:
            assert sum(one[name] or 0 for one in calls) == row[name], name
            in_steps = [one for one in calls if one["purpose"] == "step"]
            assert sum(one[name] or 0 for one in in_steps) == sum(one[name] or 0 for one in steps)
        assert sum(one["cost_usd"] or 0 for one in calls) == pytest.approx(row["cost_usd"])
        assert len(steps) == row["steps"]
        assert sum(one["requests"] for one in steps) == sum(one["purpose"] == "step" for one in calls)
        assert sum(one["retries"] for one in steps) == sum(one["retry_delay_ms"] is not None for one in calls)
        assert sum(one["call_seq"] is not None for one in tools) == row["tool_calls"]
        assert sum(one["tool_calls"] for one in steps) == len(tools)
        assert Counter((one["turn"], one["step"]) for one in tools) == Counter(
            {(one["turn"], one["step"]): one["tool_calls"] for one in steps if one["tool_calls"]}
        )
        assert len({one["call_id"] for one in tools}) == len(tools)
        results = [one for one in said if one["role"] == "tool" and one["replaces"] is None]
        assert sorted(one["seq"] for one in results) == sorted(one["result_seq"] for one in tools if one["result_seq"])
        answers = [one["seq"] for one in said if one["role"] == "assistant" and one["replaces"] is None]
        assert sorted(one["message_seq"] for one in steps if one["message_seq"] is not None) == answers
        assert [one["seq"] for one in said] == sorted({one["seq"] for one in said})


def check_openai(line: dict[str, Any]) -> None:
    """As OpenAI's chat format is checked: roles in order, each call answered once, right behind it."""
    waiting: list[str] = []
    for place, message in enumerate(line["messages"]):
        role = message["role"]
        assert role in ("system", "user", "assistant", "tool") and (role != "system" or place == 0)
        if role == "tool":
            waiting.remove(message["tool_call_id"])
            assert isinstance(message["content"], str | list)
            continue
        assert not waiting
        if role == "assistant":
            calls = message.get("tool_calls") or []
            waiting = [call["id"] for call in calls]
            assert len(set(waiting)) == len(waiting) and (calls or message["content"])
            for call in calls:
                assert call["type"] == "function" and isinstance(json.loads(call["function"]["arguments"]), dict)
        else:
            assert message["content"]
    assert not waiting


def check_sharegpt(line: dict[str, Any]) -> None:
    turns = line["conversations"]
    sides = [turn["from"] for turn in turns]
    assert "system" not in sides[1:] and all(a != b for a, b in pairwise(sides))
    for before, turn in pairwise(turns):
        if turn["from"] == "tool":
            asked = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", before["value"], re.S)
            told = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", turn["value"], re.S)
            assert before["from"] == "gpt" and len(asked) == len(told) == len(list(map(json.loads, asked + told))) / 2
        elif before["from"] == "gpt":
            assert "<tool_call>" not in before["value"]


async def check_exports(home: Path, session_id: str, found: dict[str, Any]) -> None:
    async def lines(form: Any) -> list[Any]:
        out = io.BytesIO()
        report = await export_conversations(open_store(home), session_id, form, out)
        assert report.ok, report.problems
        return [json.loads(line) for line in out.getvalue().splitlines()]

    conversations = await lines("openai")
    assert len(conversations) == found["rows"].num_rows
    for line in conversations:
        check_openai(line)
    for line in await lines("sharegpt"):
        check_sharegpt(line)
    waiting = await lines("atif")
    assert len(waiting) == 1
    agents = 0
    if find_spec("atif"):
        from atif import Trajectory

        Trajectory.model_validate(waiting[0])
    while waiting:
        one = waiting.pop()
        waiting += one.get("subagent_trajectories", [])
        agents += 1
        own = [step for step in one["steps"] if not step.get("is_copied_context")]
        _, _, agent_id = one["trajectory_id"].partition("/")
        answered = [row for row in of(found["model_calls"], (session_id, agent_id)) if row["message_seq"] is not None]
        assert sum(step["source"] == "agent" for step in own) == len(answered)
        paid = sum(step.get("metrics", {}).get("completion_tokens", 0) for step in own)
        assert paid == sum(row["output_tokens"] or 0 for row in answered)
    assert agents == found["rows"].num_rows


def priced(home: Path, script: str, **more: Any) -> dict[str, Any]:
    """A model with a price, for the runtime and for whoever reads the home later."""
    home.mkdir()
    price = ", ".join(f"{name} = {value}" for name, value in PRICE.items())
    (home / "config.toml").write_text(f'[models.m]\nprovider = "scripted"\nprice = {{{price}}}\n')
    return {"provider": "scripted", "script": script.partition(":")[2], "retry_base_s": 0.0, "price": PRICE, **more}


@pytest.mark.parametrize("seed", [11, 12])
async def test_a_random_session(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    moods = Moods(rng)
    table = priced(
        tmp_path / "home",
        scripted(moods.answer),
        max_context_tokens=1500,
        compaction={"prune_chars": 400, "prune_head_chars": 100, "prune_tail_chars": 50},
    )
    async with recorded_in(tmp_path, moods.answer, models={"m": table}, tools=(look, fail)) as (workspace, session):
        await session.main.set_model("m")
        for number in range(12):
            try:
                await _act(rng, session, number)
            except AgentError as error:
                assert error.code.startswith(("compaction.", "agent.undo", "prompt.")), error
        await workspace.fork("s1", new_session_id="f", tools=[look, fail], model="m")
        fork = await workspace.resume("f", tools=[look, fail])
        await (await fork.main.submit("on its own")).result(10)
    home = tmp_path / "home"
    both = await asyncio.to_thread(frames.tables, ["s1", "f"], home=home)
    check_frames(both)
    assert both["rows"].num_rows == 2
    with_copies = frames.tables("f", home=home, copied=True)
    for name in frames.FRAMES[1:]:
        own, all_of_it = of(both[name], ("f", "main")), with_copies[name].to_pylist()
        assert [one for one in all_of_it if not one["copied"]] == own
        assert len(all_of_it) - len(own) == len(of(both[name], ("s1", "main")))
    for session_id in ("s1", "f"):
        await check_exports(home, session_id, frames.tables(session_id, home=home))


async def test_a_fork_of_which_nothing_but_a_compaction_came(tmp_path: Path) -> None:
    async def talk(request: ChatRequest) -> Step:
        return Step("in short" if request.purpose == "compaction" else "word " * 60)

    async with recorded_in(tmp_path, talk) as (workspace, session):
        for number in range(3):
            await (await session.main.submit(f"{number} " + "please " * 40)).result(10)
        await workspace.fork("s1", new_session_id="f")
        fork = await workspace.resume("f")
        assert await fork.main.compact() is not None
    found = await asyncio.to_thread(frames.tables, ["s1", "f"], home=tmp_path / "home")
    rows = {row["session_id"]: row for row in found["rows"].to_pylist()}
    calls = of(found["model_calls"], ("f", "main"))
    assert [one["purpose"] for one in calls] == ["compaction"] and calls[0]["input_tokens"] > 0
    for name in TOKENS:
        assert rows["f"][name] == calls[0][name], name


class DeepFeature(Feature):
    name = "deep"

    def profiles(self) -> Sequence[Profile]:
        return [Profile(name="deep", tools=("Agent", "AgentSwarm"), subagents=("deep",))]


class Tree:
    """A model that starts agents, which start agents, side by side and as a swarm."""

    async def answer(self, request: ChatRequest) -> Step:
        said = request.messages[-1]["content"]
        text = str(said[-1].get("text", ""))
        if said[0]["type"] == "tool-result":
            return Step("all of it " * 3, reasoning="hm")
        if text.startswith("deep"):
            left = int(text.partition(" ")[2].split()[0]) - 1
            if left:
                given = {"description": "one", "subagent_type": "deep"}
                prompts = [{**given, "prompt": f"deep {left} {n} ünder 🦆"} for n in range(2)]
                return Step(tool_calls=tuple(ToolCall("Agent", json.dumps(one)) for one in prompts))
        if text.startswith("wide"):
            swarm = {"description": "s", "prompt_template": "deep 2 {{item}}", "items": ["a", "ü"]}
            swarm["subagent_type"] = "deep"
            return Step(tool_calls=(ToolCall("AgentSwarm", json.dumps(swarm)),))
        return Step("leaf")


async def test_a_tree_of_agents(tmp_path: Path) -> None:
    tree = Tree()
    table = priced(tmp_path / "home", scripted(tree.answer))
    more: dict[str, Any] = {"features": [f"{__name__}:DeepFeature"], "profile": "deep"}
    async with recorded_in(tmp_path, tree.answer, models={"m": table}, tools=(), **more) as (_, session):
        await session.main.set_model("m")
        await (await session.main.submit("deep 3 x")).result(20)
        await (await session.main.submit("wide x")).result(20)
        await session.flush()
    home = tmp_path / "home"
    found = frames.tables("s1", home=home)
    check_frames(found)
    parents = {row["agent_id"]: row["parent_agent_id"] for row in found["steps"].to_pylist()}
    below = [above for above in parents.values() if above not in (None, "main")]
    assert below and set(below) <= set(parents), [one["result"] for one in found["tool_calls"].to_pylist()]
    assert Counter(one["name"] for one in found["tool_calls"].to_pylist()) == {"Agent": 10, "AgentSwarm": 1}
    assert found["rows"].num_rows == 1 + 6 + 2 + 4
    await check_exports(home, "s1", found)
