"""Which models subagents may speak to: the tables are a program's, and hosts have none, as on Ray."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kimi_ray import ConfigError, Profile, Runtime, Session, Workdir
from kimi_ray.hosts.agent_host import AgentHost
from kimi_ray.llm.script import Step
from kimi_ray.scopes import Feature
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running
from tests.unit.subagent_stage import LONG, ask, begin, results, told, until_asked, until_told

MODELS = {
    "other": {"provider": "scripted", "script": "kimi_ray_test_models:answer"},
    "far": {"base_url": "https://models.invalid/v1", "api_key_env": "KIMI_RAY_TEST_NO_SUCH_KEY"},
}
ROOT = Profile(name="root", tools=("Agent",), subagents=("*",))


class Specialists(Feature):
    """Kinds of agents with models of their own."""

    name = "specialists"

    def profiles(self) -> Sequence[Profile]:
        """The model of a table, one without its key, one on the wire of the server that the environment names."""
        return [Profile(name=name, model=name) for name in ("other", "far", "on-the-wire")]


def agents_of(runtime: Runtime) -> list[Any]:
    """All agents that live."""
    cores = [held.core for held in cluster_of(runtime)._held.values()]
    return [agent for core in cores if isinstance(core, AgentHost) for agent in core._agents.values()]


def holds(runtime: Runtime, host: str, agent: Any) -> bool:
    core = cluster_of(runtime)._held[host].core
    return isinstance(core, AgentHost) and agent in core._agents.values()


async def models_told(session: Session, agent_id: str = "main") -> list[str]:
    return [data["model"] for kind, data in await told(session, agent_id) if kind == "subagent/spawned"]


async def test_hosts_have_no_tables(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS, default_model="other") as (runtime, _, _):
        held = [held.core for held in cluster_of(runtime)._held.values()]
        configs: list[Any] = [core._config for core in held if hasattr(core, "_config")]
        assert configs and all(config.models == {} and config.default_model is None for config in configs)
        assert runtime.resolve_model().name == "other"


async def test_a_model_without_a_key_is_told_as_that(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model)
        stage.faults["go"] = [ask("look", model="far"), Step(text="ok")]
        await (await session.main.submit("go")).result()
        (refused,) = await results(session)
        assert refused.startswith("subagent error: the model 'far' needs a key, and the variable KIMI_RAY_TEST_NO")


async def test_children_that_may_delegate_have_the_models_and_others_have_not(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, profile="bare")
        await session.run_subagent("idle", profile="bare")
        stage.faults["deep"] = [ask("look", subagent_type="bare", model="other"), Step(text="ok")]
        stage.faults["look"] = [Step(text=LONG)]
        await session.run_subagent("deep", profile=ROOT)
        assert await models_told(session, "agent-2") == ["other"]
        known = {agent.stream.agent_id: agent.spec.models.tables for agent in agents_of(runtime)}
        assert known == {"main": (), "agent-1": (), "agent-2": ("far", "other"), "agent-3": ()}


async def test_they_are_there_after_the_loss_of_any_host(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, profile=ROOT)
        for lost in (("sessions",), ("agents",), ("sessions", "agents")):
            for kind in lost:
                for name in await hosts_of(runtime, kind):
                    cluster_of(runtime).kill_host(name)
            stage.faults["go"] = [ask("look", subagent_type="bare", model="other"), Step(text="ok")]
            stage.faults["look"] = [Step(text=LONG)]
            await (await session.main.submit("go")).result(30)
        assert await models_told(session) == ["other"] * 3


async def test_main_brings_them_along_when_it_brings_its_session_back(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, profile=ROOT)
        sys.modules["kimi_ray_test_models"].answer2 = stage.answer  # type: ignore[attr-defined]
        await session.main.set_model("scripted:kimi_ray_test_models:answer2")
        stage.faults["go"] = [
            ask("look", subagent_type="bare"),
            ask("look", subagent_type="bare", model="other"),
            ask("look", subagent_type="bare", model=model),
            Step(text="ok"),
        ]
        stage.faults["look"] = [Step(text=LONG)] * 3
        stage.gate.clear()
        handle = await session.main.submit("go")
        await stage.until_running(1)
        for name in await hosts_of(runtime, "sessions"):
            cluster_of(runtime).kill_host(name)
        stage.gate.set()
        await handle.result(30)
        assert await models_told(session) == ["scripted:kimi_ray_test_models:answer2", "other", model]


async def test_the_tables_of_the_program_that_resumes_count(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, profile=ROOT)
        await (await session.main.submit("hello")).result()
        session_id = session.id
    newer = {"newer": MODELS["other"]}
    async with running(tmp_path, models=newer) as (runtime, stage, _):
        session = await runtime.workspace(tmp_path / "work").resume(session_id)
        names = ["other", "newer"]
        stage.faults["go"] = [*(ask("look", subagent_type="bare", model=name) for name in names), Step(text="ok")]
        stage.faults["look"] = [Step(text=LONG)]
        await (await session.main.submit("go")).result()
        refused, done = await results(session)
        assert "no model 'other' is configured" in refused and "configured are newer" in refused
        assert "status: completed" in done


async def test_rollouts_that_delegate_have_the_models(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, profile="bare")
        stage.faults["do it"] = [ask("look", subagent_type="bare", model="other"), Step(text="ok")]
        stage.faults["look"] = [Step(text=LONG)]
        report = await session.swarm(
            "do {{item}}", ["it", "that"], profile=ROOT, tools=("Agent",), workdir=Workdir.none()
        )
        assert report.totals["completed"] == 2
        below = [agent["agent_id"] for agent in await session.agents() if agent["agent_id"] != "main"]
        assert sorted([await models_told(session, agent_id) for agent_id in below]) == [[], [], ["other"]]


async def test_a_running_child_comes_back_with_a_model_that_only_its_caller_was_told(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS, agents_per_host=1) as (runtime, stage, model):
        session = await begin(runtime, tmp_path, model, profile=ROOT)
        await session.main.set_model(runtime.resolve_model("other").model_copy(update={"name": "of no table"}))
        handle = await until_asked(session, stage)
        await until_told(session, "started")
        await session.main.set_model(model)  # from its next turn on; the new session host knows of this one alone
        childs = next(agent for agent in agents_of(runtime) if agent.stream.agent_id == "agent-1")
        (host,) = [name for name in await hosts_of(runtime, "agents") if holds(runtime, name, childs)]
        for name in [*await hosts_of(runtime, "sessions"), host]:
            cluster_of(runtime).kill_host(name)
        stage.faults["look"] = [Step(text=LONG)]
        stage.gate.set()
        assert (await handle.result(40)).state == "completed"
        assert await models_told(session) == ["of no table"]
        assert [kind for kind, _ in await told(session)][-1] == "subagent/completed"


async def test_a_profile_names_the_model_and_the_program_says_how_to_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = ["tests.unit.test_runtime_subagent_models:Specialists"]
    async with running(tmp_path, models=MODELS, features=features) as (runtime, stage, model):
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        session = await begin(runtime, tmp_path, model, profile=ROOT)
        monkeypatch.delenv("OPENAI_BASE_URL")  # a host on another node has not this one either
        stage.faults["go"] = [*(ask("look", subagent_type=name) for name in ("other", "far")), Step(text="ok")]
        stage.faults["look"] = [Step(text=LONG)]
        await (await session.main.submit("go")).result()
        done, refused = await results(session)
        assert "status: completed" in done and "the variable KIMI_RAY_TEST_NO_SUCH_KEY is not set" in refused
        assert await models_told(session) == ["other"]
        (main,) = [agent for agent in agents_of(runtime) if agent.stream.agent_id == "main"]
        assert main.spec.models.models["on-the-wire"].base_urls == ("http://127.0.0.1:9/v1",)
        with pytest.raises(ConfigError, match="no model 'on-the-wire' is configured"):
            main.spec.models.configured("on-the-wire")
