"""Subagents of a session in one process: made, told, gone on with, and what they have from their caller."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import AgentError, ConfigError, Limits, Workdir
from kimi_ray.agent.slots import ChildEnded, ChildStarting
from kimi_ray.agent.subagents import SubagentResult, SummaryPolicy
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.agent_subagents import FORK_NOTICE
from kimi_ray.hosts.subagent_calls import SUMMARY_PROMPT
from kimi_ray.llm.script import Step
from tests.unit.runtime_fixtures import running
from tests.unit.subagent_stage import (
    ASKS,
    LONG,
    Port,
    ask,
    begin,
    results,
    told,
    until,
)


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
        await until(lambda: len(seen) == 2)
        await subagents.run(agent_id, "more")
        assert stage.prompt(stage.requests[-1]) == "more"
        await until(lambda: len(seen) == 4)
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


async def test_what_handlers_around_a_child_do_costs_nobody_its_answer(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        session = await begin(runtime, tmp_path, model)
        subagents, slots = await Port.of(runtime, session)
        told_of, hangs = asyncio.Event(), asyncio.Event()

        async def ended(child: ChildEnded) -> None:
            told_of.set()
            if child.response == "did hang":
                await hangs.wait()
            raise ZeroDivisionError(child.response)

        async def starting(child: ChildStarting) -> None:
            if child.prompt == "odd":
                raise ZeroDivisionError("odd")

        slots.child_ended.register("t", ended)
        slots.child_starting.register("t", starting)
        agent_id = await subagents.spawn(subagents.plan())
        async with asyncio.timeout(10):
            assert (await subagents.run(agent_id, "look")).text == "did look"
            assert (await subagents.run(agent_id, "hang")).text == "did hang"
            await told_of.wait()
            odd = await subagents.run(agent_id, "odd")
        assert odd.status == "failed" and odd.error is not None and odd.error["code"] == "internal"
        hangs.set()
        await session.close()
        notes = [event.data["text"] async for event in session.main.events() if event.type == "note/added"]
        assert len(notes) == 2 and all("child_ended failed" in note for note in notes)


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


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"prompt": None}, "prompt.invalid"),
        ({"prompt": [{"type": "text", "text": "x"}]}, "prompt.invalid"),
        ({"prompt": " "}, "prompt.empty"),
        ({"labels": {"a": 1}}, "request.bad_argument"),
        ({"labels": ["a"]}, "request.bad_argument"),
        ({"timeout_s": -1}, "request.bad_argument"),
        ({"timeout_s": float("nan")}, "request.bad_argument"),
        ({"timeout_s": "5"}, "request.bad_argument"),
    ],
)
async def test_arguments_of_another_kind_are_named_before_anything_is_made(
    tmp_path: Path, said: dict[str, Any], code: str
) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model)
        with pytest.raises(KimiRayError) as caught:
            await session.start_subagent(**{"prompt": "x", **said})
        assert caught.value.code == code
        assert [row["agent_id"] for row in await session.agents()] == ["main"]
