"""``AgentSwarm`` through the public API, all in this process: a scripted main that starts and resumes a swarm."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.features.swarm import launch_plan
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Limits, Profile
from tests.unit.runtime_fixtures import MODULE, Stage, running

LEAD = Profile(name="lead", tools=("AgentSwarm", "Glob"), subagents=("coder", "explore"))
MODELS = {"m": {"provider": "scripted", "script": f"{MODULE}:answer", "max_attempts": 1}}
ITEMS = [f"item-{n}" for n in range(1, 13)]


class Play:
    """A main agent whose answers are queued, and children that do what the test says."""

    def __init__(self) -> None:
        self.main: list[Step] = []
        self.child: Callable[[str, str], Step] = lambda _, prompt: Step(text=f"did {prompt}")
        """From an agent's id and its last prompt."""
        self.prompts: list[tuple[str, str]] = []
        self.results: list[str] = []
        """What main read of its calls."""
        sys.modules[MODULE].answer = self.answer  # type: ignore[attr-defined]

    async def answer(self, request: ChatRequest) -> Step:
        if request.agent_id == "main":
            blocks = [block for message in request.messages[-1:] for block in message["content"]]
            found = [block for block in blocks if block["type"] == "tool-result"]
            self.results += ["".join(part["text"] for part in block["content"]) for block in found]
            return self.main.pop(0)
        users = [m for m in request.messages if m["role"] == "user" and m["source"]["kind"] != "tool"]
        prompt = "".join(block.get("text", "") for block in users[-1]["content"])
        self.prompts.append((str(request.agent_id), prompt))
        return self.child(str(request.agent_id), prompt)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules, a hundred times as fast."""
    for name in ("LAUNCH_INTERVAL_MS", "RETRY_BASE_MS", "SHRINK_INTERVAL_MS", "RECOVERY_INTERVAL_MS"):
        monkeypatch.setattr(launch_plan, name, getattr(launch_plan, name) // 100)


def swarm(**arguments: Any) -> Step:
    return Step.call("AgentSwarm", {"description": "Review", **arguments})


def outcomes(result: str) -> list[tuple[dict[str, str], str]]:
    """The attributes and text of each subagent."""
    found = re.findall(r"^<subagent ([^>]*)>(.*?)</subagent>$", result, re.MULTILINE | re.DOTALL)
    return [(dict(re.findall(r'(\w+)="([^"]*)"', attributes)), text) for attributes, text in found]


async def events_of(runtime: Runtime, session_id: str) -> list[Any]:
    session = await runtime.workspace(".").resume(session_id)
    await session.flush()
    return [event async for event in session.main.events()]


async def test_a_swarm_of_twelve_and_the_failed_ones_after_a_restart(tmp_path: Path, fast: None) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, _, _):
        play = Play()
        limited = Counter[str]()

        def child(agent_id: str, prompt: str) -> Step:
            if prompt in ("Review item-3", "Review item-7"):
                return Step.error("provider.bad_request", 400, message="cannot be read")
            if prompt == "Review item-5" and limited[agent_id] == 0:
                limited[agent_id] += 1
                return Step.error("provider.rate_limit", 429)
            return Step(text=f"did {prompt}")

        play.child = child
        play.main = [swarm(prompt_template="Review {{item}}", items=ITEMS), Step(text="two are left")]
        session = await runtime.workspace(tmp_path / "work").create_session("s", model="m", profile=LEAD)
        result = await (await session.main.submit("review all")).result(60)
        assert (result.state, result.text) == ("completed", "two are left")
        (text,) = play.results
        assert "<summary>completed: 10, failed: 2</summary>" in text and "<resume_hint>" in text
        found = outcomes(text)
        assert [attributes["item"] for attributes, _ in found] == ITEMS
        agents = [attributes["agent_id"] for attributes, _ in found]
        assert agents == [f"agent-{n}" for n in range(1, 13)]
        for (attributes, said), item in zip(found, ITEMS, strict=True):
            if item in ("item-3", "item-7"):
                assert (attributes["outcome"], attributes["state"]) == ("failed", "started")
                assert "cannot be read" in said
            else:
                assert (attributes["outcome"], said) == ("completed", f"did Review {item}")
        assert Counter(prompt for _, prompt in play.prompts) == Counter(
            {f"Review {item}": 1 + (item == "item-5") for item in ITEMS}
        )
        assert len({agent_id for agent_id, prompt in play.prompts if prompt == "Review item-5"}) == 1
        events = [event async for event in session.main.events()]
        counts = Counter(event.type for event in events)
        assert counts["subagent/spawned"] == 12 and counts["subagent/completed"] == 10
        assert counts["subagent/suspended"] == 1 and counts["subagent/failed"] == 2
        spawned = [event.data for event in events if event.type == "subagent/spawned"]
        assert [data["description"] for data in spawned] == [f"Review #{n} (coder)" for n in range(1, 13)]
        assert {data["call_id"] for data in spawned} == {
            event.data["call_id"] for event in events if event.type == "tool/call"
        }
        await session.close()

    failed = {attributes["agent_id"]: "continue" for attributes, _ in found if attributes["outcome"] == "failed"}
    async with running(tmp_path, models=MODELS) as (runtime, _, _):
        play = Play()
        play.main = [
            swarm(prompt_template="Review {{item}}", items=["item-13"], resume_agent_ids={**failed, "agent-99": "go"}),
            Step(text="all done"),
        ]
        session = await runtime.workspace(tmp_path / "work").resume("s")
        result = await (await session.main.submit("the rest")).result(60)
        assert result.text == "all done"
        (text,) = play.results
        first, second, unknown, new = outcomes(text)
        for (attributes, said), item in ((first, "item-3"), (second, "item-7")):
            assert attributes == {
                "mode": "resume",
                "agent_id": agents[ITEMS.index(item)],
                "item": item,
                "outcome": "completed",
            }
            assert said == "did continue"
        assert unknown[0] == {"mode": "resume", "state": "not_started", "outcome": "failed"}
        assert new[0]["agent_id"] not in agents and new[0]["item"] == "item-13"
        assert sorted(agent_id for agent_id, prompt in play.prompts if prompt == "continue") == sorted(failed)


async def test_nothing_starts_and_nobody_is_asked_when_the_swarm_is_not_the_only_call(tmp_path: Path) -> None:
    hook = {"event": "PreToolUse", "command": f"cat >> {tmp_path / 'asked'}"}
    rule = {"tool": "Glob", "decision": "deny"}
    async with running(tmp_path, models=MODELS, hooks=[hook], permissions=[rule]) as (runtime, _, _):
        play = Play()
        call = {"description": "d", "prompt_template": "{{item}}", "items": ["a", "b"]}
        both = (ToolCall("AgentSwarm", json.dumps(call)), ToolCall("Glob", '{"pattern": "*"}'))
        play.main = [Step(tool_calls=both), Step(text="ok")]
        session = await runtime.workspace(tmp_path / "work").create_session(model="m", profile=LEAD)
        await (await session.main.submit("go")).result(30)
        events = [event async for event in session.main.events()]
        errors = [event.data["error"]["code"] for event in events if event.type == "tool/result"]
        assert errors == ["validation.failed"] * 2
        assert not {"subagent/spawned", "permission/decided", "hook/invoked"} & {event.type for event in events}
        assert not (tmp_path / "asked").exists()
        assert play.prompts == []


async def test_a_cancel_ends_all_subagents_and_the_result_says_how_far_they_came(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, stage, _):
        play = Play()
        stage.gate.clear()

        async def answer(request: ChatRequest) -> Step:
            if request.agent_id != "main":
                stage.running += 1
                try:
                    await stage.gate.wait()
                finally:
                    stage.running -= 1
            return await play.answer(request)

        sys.modules[MODULE].answer = answer  # type: ignore[attr-defined]
        play.main = [swarm(prompt_template="Review {{item}}", items=ITEMS[:6])]
        session = await runtime.workspace(tmp_path / "work").create_session(model="m", profile=LEAD)
        prompt = await session.main.submit("review all")
        await stage.until_running(5)
        await session.main.cancel()
        result = await prompt.result(30)
        assert result.state == "cancelled"
        events = [event async for event in session.main.events()]
        (text,) = [
            event.data["message"]["content"][0]["content"][0]["text"] for event in events if event.type == "tool/result"
        ]
        assert Counter(attributes["outcome"] for attributes, _ in outcomes(text)) == {"aborted": 6}
        assert Counter(attributes["state"] for attributes, _ in outcomes(text))["started"] >= 5
        async with asyncio.timeout(10):
            while stage.running:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("whole", [False, True], ids=["session", "runtime"])
async def test_a_close_in_the_middle_ends_all_and_all_can_be_resumed(tmp_path: Path, whole: bool) -> None:
    def held(play: Play, stage: Stage) -> None:
        async def answer(request: ChatRequest) -> Step:
            if request.agent_id != "main":
                stage.running += 1
                try:
                    await stage.gate.wait()
                finally:
                    stage.running -= 1
            return await play.answer(request)

        sys.modules[MODULE].answer = answer  # type: ignore[attr-defined]

    async with running(tmp_path, models=MODELS) as (runtime, stage, _):
        play = Play()
        held(play, stage)
        stage.gate.clear()
        play.main = [swarm(prompt_template="Review {{item}}", items=ITEMS[:4])]
        session = await runtime.workspace(tmp_path / "work").create_session("s", model="m", profile=LEAD)
        await session.main.submit("review all")
        await stage.until_running(4)
        await asyncio.wait_for(runtime.close() if whole else session.close(), 20)
        async with asyncio.timeout(5):
            while stage.running:
                await asyncio.sleep(0.01)
    async with running(tmp_path, models=MODELS) as (runtime, stage, _):
        play = Play()
        session = await runtime.workspace(tmp_path / "work").resume("s")
        play.main = [swarm(resume_agent_ids={f"agent-{n}": "go on" for n in range(1, 5)}), Step(text="ok")]
        assert (await (await session.main.submit("go on")).result(30)).text == "ok"
        assert [(attributes["item"], text) for attributes, text in outcomes(play.results[-1])] == [
            (item, "did go on") for item in ITEMS[:4]
        ]
        events = [event async for event in session.main.events()]
        counts = Counter(event.type for event in events)
        assert counts["tool/call"] == counts["tool/result"] == 2 and counts["turn/start"] == counts["turn/end"]


async def test_explorers_are_told_of_the_repository_once_and_swarms_of_programs_are_not(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, _, _):
        subprocess.run(["git", "-c", "init.defaultBranch=trunk", "init", "-q"], cwd=tmp_path / "work", check=True)
        play = Play()
        play.main = [
            swarm(prompt_template="Look at {{item}}", items=["a", "b"], subagent_type="explore"),
            swarm(resume_agent_ids={"agent-1": "again"}),
            swarm(prompt_template="Change {{item}}", items=["a", "b"]),
            Step(text="ok"),
        ]
        session = await runtime.workspace(tmp_path / "work").create_session(model="m", profile=LEAD)
        assert (await (await session.main.submit("go")).result(30)).text == "ok"
        told = [prompt for _, prompt in play.prompts if prompt.startswith("<git-context>")]
        assert len(told) == 2 and all("Branch: trunk\n</git-context>" in prompt for prompt in told)
        assert sorted(prompt.rsplit("\n", 1)[-1] for prompt in told) == ["Look at a", "Look at b"]
        assert sorted(prompt for _, prompt in play.prompts if "git-context" not in prompt) == [
            "Change a",
            "Change b",
            "again",
        ]
        play.prompts.clear()
        await session.swarm("{{item}}", ["x", "y"], profile="explore")
        assert sorted(prompt for _, prompt in play.prompts) == ["x", "y"]


async def test_forks_begin_with_what_was_said(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, _, _):
        play = Play()
        seen: dict[str, list[str]] = {}

        async def answer(request: ChatRequest) -> Step:
            if request.agent_id != "main":
                texts = [block.get("text", "") for message in request.messages for block in message["content"]]
                seen[str(request.agent_id)] = texts
            return await play.answer(request)

        sys.modules[MODULE].answer = answer  # type: ignore[attr-defined]
        play.main = [swarm(prompt_template="Now {{item}}", items=["a", "b"], fork=True), Step(text="ok")]
        session = await runtime.workspace(tmp_path / "work").create_session(model="m", profile=LEAD)
        assert (await (await session.main.submit("the secret is 7")).result(30)).text == "ok"
        assert "<summary>completed: 2</summary>" in play.results[-1]
        assert len(seen) == 2
        for texts, item in zip(seen.values(), ("a", "b"), strict=True):
            assert "the secret is 7" in texts and texts[-1].endswith(f"\n\nNow {item}")
        (text,) = [text for text in play.results if "agent_swarm_result" in text]
        assert [attributes["item"] for attributes, _ in outcomes(text)] == ["a", "b"]


async def test_the_time_of_a_subagent_ends_it_alone(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS, subagent_timeout_s=2) as (runtime, _, _):
        play = Play()
        play.child = lambda _, prompt: Step(text="late", latency_s=30 if prompt.endswith("slow") else 0)
        play.main = [swarm(prompt_template="Be {{item}}", items=["quick", "slow"]), Step(text="ok")]
        session = await runtime.workspace(tmp_path / "work").create_session(model="m", profile=LEAD)
        await (await session.main.submit("go")).result(30)
        (first, second) = outcomes(play.results[-1])
        assert first[0]["outcome"] == "completed"
        assert second == (
            {"agent_id": "agent-2", "item": "slow", "state": "started", "outcome": "failed"},
            "Subagent timed out.",
        )
        failed = [event.data async for event in session.main.events() if event.type == "subagent/failed"]
        assert [(data["agent_id"], data["error"]["code"]) for data in failed] == [("agent-2", "agent.timed_out")]


async def test_the_limits_of_the_session_bound_a_swarm_and_all_its_tasks_have_results(
    tmp_path: Path, fast: None
) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, _, _):
        play = Play()
        play.child = lambda _, prompt: Step(text=f"did {prompt}", latency_s=5)
        play.main = [swarm(prompt_template="Do {{item}}", items=ITEMS), Step(text="never")]
        session = await runtime.workspace(tmp_path / "work").create_session(
            model="m", profile=LEAD, limits=Limits(max_steps=6)
        )
        result = await (await session.main.submit("go")).result(60)
        assert (result.state, result.stop) == ("failed", "limit:max_steps"), result
        events = [event async for event in session.main.events()]
        (text,) = [
            event.data["message"]["content"][0]["content"][0]["text"] for event in events if event.type == "tool/result"
        ]
        counted = Counter(attributes["outcome"] for attributes, _ in outcomes(text))
        assert counted == {"failed": 12}


async def test_a_swarm_below_a_swarm(tmp_path: Path) -> None:
    lead = LEAD.model_copy(update={"subagents": ("agent",)})
    async with running(tmp_path, models=MODELS, max_delegation_depth=2) as (runtime, _, _):
        play = Play()

        def child(agent_id: str, prompt: str) -> Step:
            if len(prompt.split()) == 2:
                if sum(who == agent_id for who, _ in play.prompts) == 1:
                    return swarm(prompt_template=f"{prompt} {{{{item}}}}", items=["x", "y"])
                return Step(text=f"led {prompt}")
            return Step(text=f"did {prompt}")

        play.child = child
        play.main = [
            swarm(prompt_template="Lead {{item}}", items=["a", "b"], subagent_type="agent"),
            Step(text="ok"),
        ]
        session = await runtime.workspace(tmp_path / "work").create_session(model="m", profile=lead)
        await (await session.main.submit("go")).result(60)
        assert [text for _, text in outcomes(play.results[-1])] == ["led Lead a", "led Lead b"]
        leaves = [prompt for _, prompt in play.prompts if len(prompt.split()) == 3]
        assert sorted(leaves) == ["Lead a x", "Lead a y", "Lead b x", "Lead b y"]


async def test_a_server_that_lets_few_through_gets_all_done_once(tmp_path: Path, fast: None) -> None:
    items = [f"item-{n}" for n in range(1, 61)]
    async with running(tmp_path, models=MODELS) as (runtime, stage, _):
        play = Play()
        refused, full = 0, asyncio.Event()

        async def answer(request: ChatRequest) -> Step:
            nonlocal refused
            if request.agent_id == "main":
                return await play.answer(request)
            if stage.running >= 6:
                refused += 1
                full.set()
                return Step.error("provider.rate_limit", 429)
            stage.running += 1
            try:
                async with asyncio.timeout(20):
                    await full.wait()
                await asyncio.sleep(0.05)
                return await play.answer(request)
            finally:
                stage.running -= 1

        sys.modules[MODULE].answer = answer  # type: ignore[attr-defined]
        play.main = [swarm(prompt_template="Do {{item}}", items=items), Step(text="ok")]
        session = await runtime.workspace(tmp_path / "work").create_session(model="m", profile=LEAD)
        assert (await (await session.main.submit("go")).result(60)).text == "ok"
        assert [text for _, text in outcomes(play.results[-1])] == [f"did Do {item}" for item in items]
        assert refused > 0
        assert Counter(prompt for _, prompt in play.prompts) == Counter(f"Do {item}" for item in items)
        counts = Counter([event.type async for event in session.main.events()])
        assert (counts["subagent/spawned"], counts["subagent/completed"]) == (60, 60)
        assert counts["subagent/suspended"] == refused and counts["subagent/failed"] == 0
        for agent_id in ("agent-1", "agent-40", "agent-60"):
            told = Counter([event.type async for event in session.agent(agent_id).events()])
            assert told["prompt/submitted"] >= 1 and told["user/message"] == 1
