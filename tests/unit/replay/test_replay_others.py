"""What others had a say in is replayed from the log: hooks, permissions, background tasks, rollout functions."""

from __future__ import annotations

from pathlib import Path

from kimi_ray import RolloutContext
from kimi_ray.hosts.agent_services import workdirs_base
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.settings import Profile, Workdir
from tests.unit.replay.recorded_sessions import (
    Scenes,
    assert_as_recorded,
    recorded,
    recorded_in,
    replayed,
    scripted,
)

WORKER = Profile(name="worker", system_prompt="s " * 2000, tools=("Read", "Write", "Bash", "TaskOutput", "WaitFor"))


def hook(event: str, command: str) -> dict[str, str]:
    return {"event": event, "command": command}


async def test_hooks_are_not_run_again_and_what_they_said_is_there(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    hooks = [
        hook("UserPromptSubmit", f"echo told before; echo x >> {ran}"),
        hook("PreToolUse", "echo not this one >&2; exit 2"),
        hook("Stop", f"test -e {tmp_path / 'stopped'} || (touch {tmp_path / 'stopped'}; echo go on >&2; exit 2)"),
    ]
    scenes = Scenes()
    scenes.steps["go"] = [Step.call("Bash", {"command": "echo hello"}), "almost", "done"]
    place = Workdir.shared(str(tmp_path / "work"))
    async with recorded(tmp_path, scenes.answer, tools=(), profile=WORKER, workdir=place, hooks=hooks) as session:
        result = await (await session.main.submit("go")).result(20)
        assert result.steps == 3, "a hook made it go on"
    before = ran.read_text()
    await assert_as_recorded(tmp_path, scenes)
    report = await replayed(tmp_path, tools="real", workdir=place)
    assert report.ok and report.agents[0].tools_run == 0
    assert ran.read_text() == before


async def test_denied_calls_and_background_tasks(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [
        Step.call("Bash", {"command": "rm -rf /nowhere"}),
        Step.call("Bash", {"command": "echo in the background", "run_in_background": True, "description": "d"}),
        Step(tool_calls=(ToolCall("WaitFor", '{"timeout": 20}'),)),
        "done",
    ]
    place = Workdir.shared(str(tmp_path / "work"))
    rules = [{"tool": "Bash(rm *)", "decision": "deny"}]
    how = {"tools": (), "profile": WORKER, "workdir": place, "permissions": rules}
    async with recorded(tmp_path, scenes.answer, **how) as session:
        await (await session.main.submit("go")).result(20)
        await (await session.main.submit("later")).result(20)
    await assert_as_recorded(tmp_path, scenes)
    report = await replayed(tmp_path, tools="real", workdir=place)
    assert report.ok and report.agents[0].tools_run == 0, report.divergence


async def rollout(ctx: RolloutContext) -> str:
    """Two turns for an item."""
    await ctx.agent.ask(f"first {ctx.item}")
    return (await ctx.agent.ask(f"second of {ctx.item}")).text


async def test_rollout_functions_with_seeds(tmp_path: Path) -> None:
    scenes = Scenes()
    async with recorded_in(tmp_path, scenes.answer) as (_, session):
        model = scripted(scenes.answer)
        report = await session.swarm(None, ["a", "b"], rollout=rollout, seed=7, profile="bare", model=model, repeats=2)
        assert [(row.status, row.error) for row in report.rows] == [("completed", None)] * 4
    told = await assert_as_recorded(tmp_path)
    assert told.requests == len(scenes.requests) == 8
    assert len({request.sampling.seed for request in scenes.requests}) == 4


async def test_commands_and_files_of_today(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [
        Step.call("Write", {"path": "a.txt", "content": "one"}),
        Step(
            tool_calls=(ToolCall("Bash", '{"command": "cat a.txt given.txt"}'), ToolCall("Read", '{"path": "a.txt"}'))
        ),
        "done",
    ]
    place = Workdir.shared(str(tmp_path / "work"), writes=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "given.txt").write_text("given")
    async with recorded(tmp_path, scenes.answer, tools=(), profile=WORKER, workdir=place) as session:
        await (await session.main.submit("go")).result(20)
    (tmp_path / "work" / "a.txt").unlink()
    left = {path.name for path in Path(workdirs_base("x")).parents[1].glob("replay-*")}
    again = Workdir.copy(str(tmp_path / "work"))
    report = await replayed(tmp_path, tools="real", workdir=again)
    assert report.ok and report.agents[0].tools_run == 3, report.divergence
    assert not (tmp_path / "work" / "a.txt").exists(), "the copy was written to"
    (tmp_path / "work" / "given.txt").write_text("taken")
    found = (await replayed(tmp_path, tools="real", workdir=again)).divergence
    assert found is not None and found.request == 2
    assert {path.name for path in Path(workdirs_base("x")).parents[1].glob("replay-*")} <= left
    assert "onegiven" in found.recorded and "onetaken" in found.replayed
