"""Subagents of a session in one process: made, told, bound, lost and found again."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import AgentError, ConfigError, Limits, Profile, PromptHandle, Runtime, Session, Workdir
from kimi_ray.agent.slots import AgentSlots, ChildEnded, ChildStarting
from kimi_ray.agent.subagents import SubagentResult, Subagents, SummaryPolicy
from kimi_ray.hosts.agent_host import AgentHost
from kimi_ray.hosts.agent_subagents import FORK_NOTICE
from kimi_ray.hosts.subagent_calls import SUMMARY_PROMPT
from kimi_ray.hosts.subagent_words import BeginSubagent, SpawnSubagent
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.store.seam import Stream
from tests.trees import check_positions, check_prompts, stored_logs
from tests.unit.runtime_fixtures import Stage, cluster_of, hosts_of, running

ASKS = Profile(name="asks", system_prompt="You ask others.", tools=("Agent", "Read"), subagents=("coder", "asks"))
LONG = "a full account " * 20


def ask(prompt: str, **more: Any) -> Step:
    """A model's answer that starts a subagent."""
    return Step.call("Agent", {"prompt": prompt, "description": "a task", **more})


async def told(session: Session, agent_id: str = "main") -> list[tuple[str, dict[str, Any]]]:
    """What an agent's log says of its children."""
    return [
        (event.type, dict(event.data))
        async for event in session.agent(agent_id).events()
        if event.type.startswith("subagent/")
    ]


async def results(session: Session, agent_id: str = "main") -> list[str]:
    """The texts of the results of its tool calls."""
    found: list[str] = []
    async for event in session.agent(agent_id).events():
        if event.type == "tool/result":
            (part,) = event.data["message"]["content"]
            found.append("".join(block["text"] for block in part["content"]))
    return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


async def until_told(session: Session, kind: str, count: int = 1) -> dict[str, Any]:
    async with asyncio.timeout(15):
        while True:
            found = [data for type_, data in await told(session) if type_ == f"subagent/{kind}"]
            if len(found) >= count:
                return found[count - 1]
            await asyncio.sleep(0.02)


async def until_asked(session: Session, stage: Stage, prompt: str = "look") -> PromptHandle:
    """Main's model has asked for a subagent with this prompt, whose request is at the closed gate."""
    stage.faults["go"] = [ask(prompt)]
    stage.gate.clear()
    handle = await session.main.submit("go")
    await stage.until_running(1)
    stage.gate.set()
    stage.gate.clear()
    await until(lambda: stage.seen[prompt])
    return handle


async def begin(runtime: Runtime, tmp_path: Path, model: str, **more: Any) -> Session:
    return await runtime.workspace(str(tmp_path / "work")).create_session(**{"model": model, "profile": ASKS, **more})


async def test_a_program_runs_a_subagent_with_one_request(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        result = await session.run_subagent("look", description="a look", labels={"part": "one"})
        assert (result.status, result.text, result.agent_id) == ("completed", "did look", "agent-1")
        assert len(stage.requests) == 1
        (spawned, started, completed) = await told(session)
        assert spawned[1]["labels"] == {"part": "one", "parent_agent_id": "main"}
        assert (spawned[1]["profile"], spawned[1]["description"]) == ("coder", "a look")
        assert started == ("subagent/started", {"agent_id": "agent-1"})
        assert completed[1]["status"] == "completed"
        (row,) = [row for row in await session.agents() if row["agent_id"] == "agent-1"]
        assert (row["parent_agent_id"], row["delegation_depth"], row["type"]) == ("main", 1, "sub")
        events = [event async for event in session.agent("agent-1").events()]
        assert completed[1]["seq"] == events[-1].seq + 1, "the position is behind all that the child wrote"


async def test_a_child_that_fails_is_data(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["look"] = [Step.error("provider.bad_request", 400)]
        result = await session.run_subagent("look")
        assert result.status == "failed" and result.error is not None
        assert result.error["code"] == "provider.bad_request" and result.started and not result.rate_limited
        assert (await told(session))[-1][0] == "subagent/failed"


async def test_an_answer_that_was_cut_off_is_a_failure(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["look"] = [Step(text="half of", finish="max-tokens")]
        result = await session.run_subagent("look")
        assert result.error is not None and result.error["code"] == "agent.max_tokens_exceeded"
        assert result.text == "half of"


async def test_the_model_reads_the_answer_of_its_subagent(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["go"] = [ask("look")]
        stage.faults["look"] = [Step(text=LONG)]
        result = await (await session.main.submit("go")).result()
        assert result.state == "completed"
        assert await results(session) == [
            f"agent_id: agent-1\nactual_subagent_type: coder\nstatus: completed\n\n[summary]\n{LONG}"
        ]
        assert len(stage.requests) == 3
        types = [event.type async for event in session.main.events()]
        order = [types.index(f"subagent/{word}") for word in ("spawned", "started", "completed")]
        assert [types.index("tool/call"), *order, types.index("tool/result")] == sorted(
            [types.index("tool/call"), *order, types.index("tool/result")]
        )


async def test_a_short_answer_is_asked_for_once_more_and_the_longer_one_counts(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["look"] = [Step(text="short, but more than the second")]
        stage.faults[SUMMARY_PROMPT] = [Step(text="no")]
        result = await session.run_subagent("look", summary=SummaryPolicy())
        assert result.text == "short, but more than the second"
        assert len(stage.requests) == 2
        assert stage.seen[SUMMARY_PROMPT] == 1


async def test_many_calls_of_one_answer_run_side_by_side(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        calls = [ask(f"part {number}").tool_calls[0] for number in range(5)]
        stage.faults["go"] = [Step(tool_calls=tuple(calls))]
        for number in range(5):
            stage.faults[f"part {number}"] = [Step(text=f"{number} {LONG}")]
        stage.gate.clear()
        handle = await session.main.submit("go")
        await stage.until_running(1)
        stage.gate.set()
        stage.gate.clear()
        await stage.until_running(5)
        stage.gate.set()
        assert (await handle.result()).state == "completed"
        assert [f"{number} a full" in text for number, text in enumerate(await results(session))] == [True] * 5


# -- who may start whom


async def test_the_allow_list_binds_the_model(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["go"] = [ask("look", subagent_type="explore"), ask("look", subagent_type="nobody")]
        await (await session.main.submit("go")).result()
        refused, unknown = await results(session)
        assert refused.startswith(
            "subagent error: an agent of the profile asks may not start one of the profile explore"
        )
        assert unknown.startswith("subagent error: there is no profile 'nobody'")
        assert len(stage.requests) == 3 and await told(session) == []


async def test_an_agent_without_a_list_starts_nobody_and_a_star_is_anybody(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        none = Profile(name="none", tools=("Agent",))
        session = await begin(runtime, tmp_path, model, profile=none)
        stage.faults["go"] = [ask("look"), Step(text="ok")]
        await (await session.main.submit("go")).result()
        assert (await results(session))[0].endswith("(it may start none)")
        star = await begin(runtime, tmp_path, model, profile=Profile(name="star", tools=("Agent",), subagents=("*",)))
        stage.faults["go"] = [ask("look", subagent_type="bare"), Step(text="ok")]
        stage.faults["look"] = [Step(text=LONG)]
        await (await star.main.submit("go")).result()
        assert "actual_subagent_type: bare\nstatus: completed" in (await results(star))[0]


async def test_depth_is_bound_and_stays_so_after_a_resume(tmp_path: Path) -> None:
    async with running(tmp_path, max_delegation_depth=2) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        child = await session.run_subagent("one", profile=ASKS)
        grandchild = await session.run_subagent("two", profile=ASKS, agent_id=child.agent_id)
        with pytest.raises(AgentError) as refused:
            await session.run_subagent("three", agent_id=grandchild.agent_id)
        assert refused.value.code == "agent.depth_exceeded" and refused.value.details["depth"] == 3
        await session.close()
    async with running(tmp_path, max_delegation_depth=2) as (runtime, stage, model):
        session = await runtime.workspace(str(tmp_path / "work")).resume(session.id)
        with pytest.raises(AgentError) as refused:
            await session.run_subagent("three", agent_id=grandchild.agent_id)
        assert refused.value.code == "agent.depth_exceeded"
        stage.faults["go on"] = [ask("deeper"), Step(text="ok")]
        handle = await session.agent(grandchild.agent_id).submit("go on")
        await handle.result()
        assert "max_delegation_depth" in (await results(session, grandchild.agent_id))[0]


# -- what a child has from its caller


def shout(word: str) -> str:
    """Say it loudly."""
    return word.upper()


async def test_user_tools_and_the_permission_mode_are_inherited(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, tools=["Agent", shout])
        stage.faults["go"] = [ask("look")]
        stage.faults["look"] = [Step.call("shout", {"word": "hush"}), Step(text=LONG)]
        await (await session.main.submit("go")).result()
        assert (await results(session, "agent-1")) == ["HUSH"]
        tools = {spec.name for spec in stage.requests[1].tools}
        assert {"Read", "Bash", "shout"} <= tools and "Agent" not in tools


async def test_a_fork_begins_as_its_caller_is(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        await (await session.main.submit("first")).result()
        stage.faults["go"] = [ask("forked task", fork=True)]
        stage.faults[f"{FORK_NOTICE}\n\nforked task"] = [Step(text=LONG)]
        await (await session.main.submit("go")).result()
        before, child = stage.requests[1], stage.requests[2]
        assert stage.prompt(child).endswith("\n\nforked task")
        assert (child.system, child.tools, child.model) == (before.system, before.tools, before.model)
        shared = [[message["role"], message["content"]] for message in before.messages]
        assert [[m["role"], m["content"]] for m in child.messages[: len(shared)]] == shared
        (row,) = [row for row in await session.agents() if row["agent_id"] == "agent-1"]
        assert (row["delegation_depth"], row["parent_agent_id"]) == (1, "main")
        assert "actual_subagent_type: asks" in (await results(session))[0]


# -- going on with one


async def test_a_child_comes_back_from_its_log_after_a_restart(tmp_path: Path) -> None:
    """W2 and W3."""
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["go"] = [ask("look")]
        stage.faults["look"] = [Step(text=LONG)]
        await (await session.main.submit("go")).result()
        await session.run_subagent("program", labels={"swarmItem": "x"})
        await session.close()
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(str(tmp_path / "work")).resume(session.id)
        stage.faults["again"] = [ask("and now?", resume="agent-1")]
        stage.faults["and now?"] = [Step(text=f"later {LONG}")]
        await (await session.main.submit("again")).result()
        assert f"agent_id: agent-1\nactual_subagent_type: coder\nstatus: completed\n\n[summary]\nlater {LONG}" in (
            await results(session)
        )
        texts = [stage.prompt(request) for request in stage.requests]
        assert texts == ["again", "and now?", "again"]
        heard = "".join(str(message["content"]) for message in stage.requests[1].messages)
        assert "look" in heard and "a full account" in heard
        labels = {row["agent_id"]: row["labels"] for row in await session.agents()}
        assert labels["agent-2"] == {"swarmItem": "x", "parent_agent_id": "main"}
        assert (await session.run_subagent("more", resume="agent-2")).text == "did more"


async def test_who_may_be_resumed(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        child = await session.run_subagent("one", profile=ASKS)
        other = await session.run_subagent("two", agent_id=child.agent_id)
        for agent_id, code in (
            ("agent-9", "agent.not_found"),
            ("main", "agent.not_a_subagent"),
            (other.agent_id, "agent.not_owned"),
        ):
            with pytest.raises(AgentError) as refused:
                await session.run_subagent("x", resume=agent_id)
            assert refused.value.code == code
        stage.gate.clear()
        handle = await session.start_subagent("x", resume=child.agent_id)
        await stage.until_running(1)
        with pytest.raises(AgentError) as refused:
            await session.run_subagent("y", resume=child.agent_id)
        assert refused.value.code == "agent.already_running"
        stage.gate.set()
        assert (await handle.result()).status == "completed"
        with pytest.raises(ConfigError) as conflict:
            await session.run_subagent("x", resume=child.agent_id, profile="explore")
        assert conflict.value.code == "request.conflict"


# -- ends that come from outside


async def test_a_run_that_takes_too_long_is_cancelled_and_can_go_on(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.gate.clear()
        result = await session.run_subagent("slow", timeout_s=0.3)
        assert result.status == "timed_out" and result.error is not None
        assert result.error["code"] == "agent.timed_out"
        assert "(timeout_s of the call" in result.error["hint"]
        stage.gate.set()
        assert (await session.run_subagent("now", resume=result.agent_id)).status == "completed"
        words = [kind for kind, _ in await told(session)]
        assert words == [f"subagent/{word}" for word in ("spawned", "started", "failed", "started", "completed")]


async def test_the_end_of_the_callers_turn_is_the_end_of_the_childs(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        handle = await until_asked(session, stage)
        await handle.cancel()
        assert (await handle.result()).state == "cancelled"
        ended = await until_told(session, "completed")
        assert ended["status"] == "cancelled"
        assert stage.running == 0
        assert (await session.agent("agent-1").messages())[-1]["role"] == "user"


async def test_cancelling_the_wait_of_a_program_cancels_the_child(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.gate.clear()
        task = asyncio.create_task(session.run_subagent("look"))
        await stage.until_running(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await until_told(session, "completed"))["status"] == "cancelled"
        stage.gate.set()
        assert (await session.run_subagent("x", resume="agent-1")).status == "completed"


async def test_a_close_in_the_middle_tells_where_the_child_stood(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        handle = await until_asked(session, stage)
        await session.close()
        assert (await handle.result()).state == "cancelled"
        stage.gate.set()
        session = await runtime.workspace(str(tmp_path / "work")).resume(session.id)
        last = (await told(session))[-1]
        assert last[0] in ("subagent/completed", "subagent/suspended") and last[1]["seq"] > 0
        assert stage.seen["go"] == 1, "the caller made no further request"
        assert (await session.run_subagent("x", resume="agent-1")).status == "completed"


async def test_a_lost_host_of_the_child_is_only_an_interruption(tmp_path: Path) -> None:
    async with running(tmp_path, agents_per_host=1) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.gate.clear()
        handle = await session.start_subagent("look")
        await stage.until_running(1)
        main_host = session._link.main_host
        (childs,) = [name for name in await holders(runtime, session.id, "agent-1") if name != main_host]
        cluster_of(runtime).kill_host(childs)
        await stage.until_running(1)
        stage.gate.set()
        result = await handle.result()
        assert (result.status, result.text) == ("completed", "did look")
        assert stage.seen["look"] == 2


async def holders(runtime: Runtime, session_id: str, agent_id: str) -> list[str]:
    """The hosts on which an agent lives."""
    found: list[str] = []
    for name in await hosts_of(runtime, "agents"):
        ping = await cluster_of(runtime).peer(name).call("ping", timeout_s=5.0, group="control")
        if (session_id, agent_id) in [tuple(stream) for stream in ping["streams"]]:
            found.append(name)
    return found


async def test_a_lost_host_of_the_session_does_not_end_the_wait(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["look"] = [Step(text=LONG)]
        handle = await until_asked(session, stage)
        (host,) = await hosts_of(runtime, "sessions")
        cluster_of(runtime).kill_host(host)
        stage.gate.set()
        result = await handle.result()  # its driver asks main's host and never hears of the session's
        assert result.state == "completed"
        assert "status: completed" in (await results(session))[0]
        words = [kind for kind, _ in await told(session)]
        assert words.count("subagent/spawned") == 1 and words[-1] == "subagent/completed"


async def test_a_lost_host_of_the_caller_ends_its_children(tmp_path: Path) -> None:
    async with running(tmp_path, agents_per_host=1) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        handle = await until_asked(session, stage)
        assert session._link.main_host is not None
        cluster_of(runtime).kill_host(session._link.main_host)
        assert (await handle.result()).state == "failed"
        ended = await until_told(session, "completed")
        assert ended["status"] == "cancelled" and ended["seq"] > 0
        stage.gate.set()
        assert (await session.run_subagent("x", resume="agent-1")).status == "completed"


# -- bounds


async def test_the_limits_of_the_session_bind_its_tree(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, limits=Limits(max_steps=3))
        assert (await session.run_subagent("one")).status == "completed"
        assert (await session.run_subagent("two", resume="agent-1")).status == "completed"
        stage.faults["three"] = [Step.call("Glob", {"pattern": "*"}), Step(text="never")]
        result = await session.run_subagent("three")
        assert result.error is not None and result.error["code"] == "limit.max_steps"
        with pytest.raises(AgentError) as refused:
            await session.run_subagent("four")
        assert refused.value.code == "limit.max_steps"
        assert len(stage.requests) == 3
        main = await (await session.main.submit("mine")).result()
        assert main.stop == "limit:max_steps" and len(stage.requests) == 3


async def test_children_side_by_side_do_not_each_use_what_is_left(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, limits=Limits(max_steps=40))
        for number in range(4):
            stage.faults[f"w{number}"] = [Step.call("Glob", {"pattern": "*"})] * 60
        await asyncio.gather(*(session.run_subagent(f"w{number}") for number in range(4)))
        assert len(stage.requests) < 100


# -- the session that they belong to


async def test_a_fork_of_the_session_takes_them_along(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        child = await session.run_subagent("one", profile=ASKS)
        await session.run_subagent("two", agent_id=child.agent_id)
        (fork,) = await runtime.workspace(str(tmp_path / "work")).fork_many(session.id, 1)
        rows = {row["agent_id"]: row for row in await fork.agents()}
        assert set(rows) == {"main", "agent-1", "agent-2"}
        assert rows["agent-2"]["parent_agent_id"] == "agent-1"
        again = await fork.run_subagent("three", resume="agent-1")
        assert again.status == "completed"
        heard = "".join(str(message["content"]) for message in stage.requests[-1].messages)
        assert "did one" in heard


async def test_a_hundred_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        found = await asyncio.gather(*(session.run_subagent(f"p{number}") for number in range(100)))
        assert [result.text for result in found] == [f"did p{number}" for number in range(100)]
        assert len({result.agent_id for result in found}) == 100
        words = [kind for kind, _ in await told(session)]
        assert {word: words.count(word) for word in set(words)} == {
            "subagent/spawned": 100,
            "subagent/started": 100,
            "subagent/completed": 100,
        }


async def test_a_rollout_may_have_subagents_if_it_is_given_the_tool(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        for item in ("a", "b"):
            stage.faults[f"do {item}"] = [ask(f"part of {item}")]
            stage.faults[f"part of {item}"] = [Step(text=f"{item}: {LONG}")]
        report = await session.swarm(
            "do {{item}}", ["a", "b"], profile=ASKS, tools=["Agent"], workdir=Workdir.none(), limits=Limits(max_steps=5)
        )
        assert [row.status for row in report.rows] == ["completed", "completed"]
        rows = [row for row in await session.agents() if row["delegation_depth"] == 2]
        assert sorted(row["parent_agent_id"] for row in rows) == ["agent-1", "agent-2"]


def test_results_are_plain_data() -> None:
    import pickle

    result = SubagentResult("agent-1", "coder", "completed", "x")
    assert pickle.loads(pickle.dumps(result)) == result


# -- by the port, as AgentSwarm and hooks use it


class Port:
    """An agent's ``Subagents`` and slots, taken from its host's scope."""

    @classmethod
    async def of(cls, runtime: Runtime, session: Session) -> tuple[Subagents, AgentSlots]:
        (name,) = await holders(runtime, session.id, "main")
        host = cluster_of(runtime)._held[name].core
        assert isinstance(host, AgentHost)
        scope = host._scopes._scopes[Stream(session.id, "main")]
        return await scope.get(Subagents), await scope.get(AgentSlots)


async def test_a_limited_child_goes_on_without_a_new_message(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        subagents, _ = await Port.of(runtime, session)
        agent_id = await subagents.spawn(subagents.plan(), labels={"swarmItem": "x"}, call_id="c")
        assert await subagents.labels_of(agent_id) == {"swarmItem": "x", "parent_agent_id": "main"}
        limited = Step.error("provider.rate_limit", 429, 1)
        stage.faults["look"] = [limited] * 50
        begun: list[bool] = []
        result = await subagents.run(agent_id, "look", will_retry=True, on_started=lambda: begun.append(True))
        assert (result.status, result.rate_limited, result.started, begun) == ("failed", True, True, [True])
        stage.faults["look"].clear()
        again = await subagents.run(agent_id, None, will_retry=True)
        assert (again.status, again.text) == ("completed", "did look")
        words = [kind for kind, _ in await told(session)]
        assert words == [f"subagent/{w}" for w in ("spawned", "started", "suspended", "started", "completed")]
        users = [m for m in stage.requests[-1].messages if m["role"] == "user"]
        assert len(users) == 1, "the task is there once"


async def test_slots_around_a_child(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        subagents, slots = await Port.of(runtime, session)
        seen: list[Any] = []

        async def starting(child: ChildStarting) -> None:
            seen.append((child.agent_id, child.profile, child.prompt, child.first))
            if child.first:
                child.before.append("mind the gap")

        async def ended(child: ChildEnded) -> None:
            seen.append((child.agent_id, child.response))

        slots.child_starting.register("t", starting)
        slots.child_ended.register("t", ended)
        agent_id = await subagents.spawn(subagents.plan())
        await subagents.run(agent_id, "look")
        assert stage.prompt(stage.requests[-1]) == "mind the gap\n\nlook"
        await subagents.run(agent_id, "more")
        assert stage.prompt(stage.requests[-1]) == "more"
        assert seen == [
            (agent_id, "coder", "look", True),
            (agent_id, "did mind the gap\n\nlook"),
            (agent_id, "coder", "more", False),
            (agent_id, "did more"),
        ]

        async def failing(child: ChildStarting) -> None:
            raise AgentError("not now", code="prompt.blocked")

        slots.child_starting.register("t", failing)
        result = await subagents.run(agent_id, "third")
        assert result.status == "failed" and result.error is not None and result.error["code"] == "prompt.blocked"
        assert not result.started and len(stage.requests) == 2


async def test_cancel_and_signal_end_a_run(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        subagents, _ = await Port.of(runtime, session)
        first, second = [await subagents.spawn(subagents.plan()) for _ in range(2)]
        stage.gate.clear()
        signal = asyncio.Event()
        runs = [
            asyncio.create_task(subagents.run(first, "a")),
            asyncio.create_task(subagents.run(second, "b", signal=signal)),
        ]
        await stage.until_running(2)
        with pytest.raises(AgentError) as refused:
            await subagents.run(first, "c")
        assert refused.value.code == "agent.already_running"
        await subagents.cancel(first)
        signal.set()
        assert [result.status for result in await asyncio.gather(*runs)] == ["cancelled", "cancelled"]
        await subagents.cancel(first)  # nothing to do


async def test_children_that_rest_sleep_and_wake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_ray.hosts.subagent_watch._IDLE_KEPT", 2)
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        for number in range(4):
            await session.run_subagent(f"p{number}")

        async with asyncio.timeout(10):
            while {row["agent_id"] for row in await session.agents() if row["live"]} != {"main", "agent-3", "agent-4"}:
                await asyncio.sleep(0.02)
        result = await session.run_subagent("more", resume="agent-1")
        assert result.text == "did more"
        heard = "".join(str(message["content"]) for message in stage.requests[-1].messages)
        assert "did p0" in heard


async def test_a_background_child_tells_when_it_has_ended(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, profile="agent")
        stage.faults["go"] = [ask("look", run_in_background=True)]
        stage.faults["look"] = [Step(text=LONG)]
        assert (await (await session.main.submit("go")).result()).state == "completed"
        assert "automatic_notification: true" in (await results(session))[0]

        async def notified() -> bool:
            return any("task.completed" in str(m["content"]) for m in await session.main.messages())

        async with asyncio.timeout(10):
            while not await notified():
                await asyncio.sleep(0.02)
        assert (await told(session))[0][1]["background"] is True
        assert (await told(session))[-1][0] == "subagent/completed"


@pytest.mark.parametrize("by_agent", [False, True])
async def test_whoever_is_gone_leaves_no_child_at_work_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_agent: bool
) -> None:
    monkeypatch.setattr("kimi_ray.hosts.subagent_watch._QUIET_MS", 100)
    monkeypatch.setattr("kimi_ray.hosts.subagent_watch._LOOK_S", 0.05)
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        await session.run_subagent("look")
        gone = BeginSubagent("main", "agent-1", "msg_of_a_program_that_is_gone", by_agent=by_agent)
        await session._link.call("begin_subagent", session.id, gone)
        await (await session.agent("agent-1").submit("its task", prompt_id=gone.run_id)).result()
        ended = await until_told(session, "completed", 2)
        assert ended["status"] == "completed"
        assert (await session.run_subagent("more", resume="agent-1")).text == "did more"
        assert stage.seen["its task"] == 1


async def test_a_model_may_name_configured_models_only(tmp_path: Path) -> None:
    models = {"other": {"provider": "scripted", "script": "kimi_ray_test_models:answer"}}
    async with running(tmp_path, models=models) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["go"] = [ask("look", model="scripted:os:getcwd"), ask("look", model="other"), Step(text="ok")]
        stage.faults["look"] = [Step(text=LONG)]
        await (await session.main.submit("go")).result()
        refused, done = await results(session)
        assert refused.startswith("subagent error: no model 'scripted:os:getcwd' is configured")
        assert "status: completed" in done
        assert [data["model"] for kind, data in await told(session) if kind == "subagent/spawned"] == ["other"]


async def test_a_switched_model_is_the_childs_too(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        sys.modules["kimi_ray_test_models"].answer2 = stage.answer  # type: ignore[attr-defined]
        await session.main.set_model("scripted:kimi_ray_test_models:answer2")
        stage.faults["go"] = [ask("look")]
        stage.faults["look"] = [Step(text=LONG)]
        await (await session.main.submit("go")).result()
        assert [data["model"] for kind, data in await told(session) if kind == "subagent/spawned"] == [
            "scripted:kimi_ray_test_models:answer2"
        ]


async def test_a_closed_session_is_not_brought_back_by_its_agents(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        holds = asyncio.Event()

        async def answer(request: ChatRequest) -> Step:
            step = await stage.answer(request)
            if stage.prompt(request) == "look":
                await holds.wait()
            return step

        sys.modules["kimi_ray_test_models"].answer = answer  # type: ignore[attr-defined]
        session = await begin(runtime, tmp_path, model, profile="agent")
        stage.faults["go"] = [ask("look", run_in_background=True)]
        await (await session.main.submit("go")).result()
        await until(lambda: stage.seen["look"])
        await session.close()
        assert stage.seen["look"] == 1
        (host,) = await hosts_of(runtime, "sessions")
        for _ in range(20):
            await asyncio.sleep(0.02)
            ping = await cluster_of(runtime).peer(host).call("ping", timeout_s=5.0, group="control")
            assert ping["sessions"] == []


@pytest.mark.parametrize("kinds", [("agents",), ("sessions",), ("sessions", "agents")], ids="+".join)
async def test_whatever_is_lost_the_logs_agree(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    async with running(tmp_path, agents_per_host=1) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        await session.run_subagent("before", profile=ASKS)
        handle = await until_asked(session, stage)
        for kind in kinds:
            for host in await hosts_of(runtime, kind):
                cluster_of(runtime).kill_host(host)
        stage.gate.set()
        result = await handle.result()
        assert result.state == ("completed" if kinds == ("sessions",) else "failed")
        again = await session.run_subagent("after", resume="agent-2")
        assert again.status == "completed"
        assert (await session.run_subagent("beside", resume="agent-1")).status == "completed"
        await session.close()
    logs = await stored_logs(tmp_path / "home", session.id)
    check_prompts(logs)
    check_positions(logs)
    assert set(logs) == {"main", "agent-1", "agent-2"}


@pytest.mark.parametrize("fork", [False, True])
async def test_a_call_whose_answer_was_lost_makes_no_second_child(tmp_path: Path, fork: bool) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        profile = runtime.features.profile("coder")
        spec = SpawnSubagent("main", "nonce1", profile, None, fork=fork)
        spawn = partial(session._link.call, "spawn_subagent", session.id)
        first = await asyncio.gather(*(spawn(spec) for _ in range(3)))
        assert {child.agent_id for child in first} == {"agent-1"}
        (host,) = await hosts_of(runtime, "sessions")
        cluster_of(runtime).kill_host(host)
        assert (await spawn(spec)).agent_id == "agent-1"
        assert (await spawn(replace(spec, nonce="nonce2"))).agent_id == "agent-2"
        assert (await session.run_subagent("x", resume="agent-1")).status == "completed"


async def test_a_child_works_in_its_callers_directory_which_stays_the_callers(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("one")
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, workdir=Workdir.copy(str(source)))
        stage.faults["go"] = [ask("write")]
        stage.faults["write"] = [Step.call("Write", {"path": "b.txt", "content": "two"}), Step(text=LONG)]
        await (await session.main.submit("go")).result()
        stage.faults["read"] = [Step.call("Read", {"path": "b.txt"}), Step(text="ok")]
        await session.run_subagent("read")
        assert "two" in (await results(session, "agent-2"))[0]
        assert not (source / "b.txt").exists()
        bound: dict[str, Any] = {}
        for agent_id in ("main", "agent-1", "agent-2"):
            async for event in session.agent(agent_id).events():
                if event.type == "profile/bind":
                    bound.setdefault(agent_id, event.data["workdir"])
        own = Path(bound["main"]["prepared"])
        assert own != source and (own / "b.txt").read_text() == "two"
        for agent_id in ("agent-1", "agent-2"):
            assert bound[agent_id]["kind"] == "shared" and Path(bound[agent_id]["prepared"]) == own
            assert not bound[agent_id]["created"], "it is not the child's to remove"
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(str(tmp_path / "work")).resume(session.id)
        stage.faults["read"] = [Step.call("Read", {"path": "b.txt"}), Step(text="ok")]
        await session.run_subagent("read", resume="agent-1")
        assert "two" in (await results(session, "agent-1"))[-1]


# -- limits above that are not the session's

ROLLOUT: dict[str, Any] = {"profile": ASKS, "tools": ["Agent"], "workdir": Workdir.none()}


async def test_a_rollouts_limits_bind_what_is_below_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["do a"] = [ask("part"), Step(text="never")]
        stage.faults["part"] = [Step.call("TodoList", {}), Step(text=LONG)]
        report = await session.swarm("do {{item}}", ["a"], **ROLLOUT, limits=Limits(max_steps=3))
        (row,) = report.rows
        assert (row.status, row.stop) == ("limit", "limit:max_steps")
        assert len(stage.requests) == 3


async def test_a_child_ends_when_a_limit_above_is_reached_in_its_middle(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["do a"] = [ask("part"), Step(text="never")]
        stage.faults["part"] = [Step.call("TodoList", {})] * 60
        report = await session.swarm("do {{item}}", ["a"], **ROLLOUT, limits=Limits(max_steps=6))
        assert report.rows[0].status == "limit"
        assert len(stage.requests) == 6
        assert "limit max_steps" in (await results(session, "agent-1"))[0]


async def test_the_limits_of_a_run_count_what_is_below_its_rollouts(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        for item in ("a", "b", "c"):
            stage.faults[f"do {item}"] = [ask(f"part {item}"), Step(text="done")]
            stage.faults[f"part {item}"] = [Step(text=LONG)]
        report = await session.swarm(
            "do {{item}}", ["a", "b", "c"], **ROLLOUT, total_limits=Limits(max_steps=6), max_concurrency=1
        )
        assert [row.status for row in report.rows] == ["completed", "completed", "not_started"]
        assert len(stage.requests) == 6


async def test_the_session_counts_what_is_below_a_rollout_once(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, limits=Limits(max_steps=7))
        for item in ("a", "b"):
            stage.faults[f"do {item}"] = [ask(f"part {item}"), Step(text="done")]
            stage.faults[f"part {item}"] = [Step(text=LONG)]
        report = await session.swarm("do {{item}}", ["a", "b"], **ROLLOUT, max_concurrency=1)
        assert [row.status for row in report.rows] == ["completed", "completed"]
        assert (await (await session.main.submit("one more")).result()).state == "completed"
        assert (await (await session.main.submit("two more")).result()).stop == "limit:max_steps"
        assert len(stage.requests) == 7


async def test_a_profiles_limits_bind_the_children_of_its_agents(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        bound = ASKS.model_copy(update={"limits": Limits(max_steps=2)})
        stage.faults["go"] = [ask("part"), Step(text="never")]
        stage.faults["part"] = [Step(text=LONG)]
        result = await session.run_subagent("go", profile=bound)
        assert result.error is not None and result.error["code"] == "limit.max_steps"
        assert len(stage.requests) == 2
