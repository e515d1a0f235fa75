"""Commands in the background: Bash with run_in_background, how they are stopped, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import AgentError, ToolError
from kimi_ray.features.tasks import processes
from kimi_ray.features.tasks.bash import TaskBash
from kimi_ray.tools.builtin import Bash
from kimi_ray.tools.contract import ToolOutput
from tests.unit.features.task_desk import Desk, Work


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncGenerator[Desk]:
    found = Desk(tmp_path, limit=3)
    yield found
    await found.tasks.close()
    await found.environment.close()


async def bash(desk: Desk, command: str, **arguments: Any) -> ToolOutput:
    tool = TaskBash(desk.tasks)
    return await tool.run(tool.check({"command": command, **arguments}), desk.context)


async def begin(desk: Desk, command: str, **arguments: Any) -> str:
    output = await bash(desk, command, run_in_background=True, description="a test", **arguments)
    assert not output.is_error and output.meta is not None
    return output.meta["task_id"]


async def until(condition: Any, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return fields[0] not in (b"Z", b"X")


def pids_in(place: Path, count: int) -> list[int]:
    found = [int(text) for name in ("a", "b") if (place / name).exists() and (text := (place / name).read_text())]
    return found if len(found) == count else []


async def test_it_goes_on_while_the_agent_does_and_ends_with_its_output(desk: Desk, tmp_path: Path) -> None:
    output = await bash(
        desk, "echo one; until [ -e go ]; do sleep 0.02; done; echo two >&2; exit 3",
        run_in_background=True, description="wait for go",
    )  # fmt: skip
    task_id = str((output.meta or {})["task_id"])
    assert task_id.startswith("bash-") and len(task_id) == 13
    assert f"task_id: {task_id}" in str(output.content) and "at most 600 s" in str(output.content)
    await until(lambda: "one" in desk.tasks.output(desk.tasks.get(task_id), 100))
    assert desk.tasks.get(task_id).status == "running"
    (tmp_path / "go").touch()
    ended = await desk.ended(task_id)
    assert ended == {
        "task_id": task_id, "status": "failed", "exit_code": 3, "output_tail": "one\ntwo\n", "output_bytes": 8
    }  # fmt: skip
    [text] = desk.say()
    assert "Background command failed" in text and f"wait for go ({task_id}) failed with exit code 3" in text


async def test_stopping_asks_first(desk: Desk, tmp_path: Path) -> None:
    task_id = await begin(desk, "trap 'echo tidied; exit 0' TERM; touch up; while :; do sleep 0.02; done")
    await until((tmp_path / "up").exists)
    record = await desk.tasks.stop(task_id)
    assert record.status == "killed" and desk.tasks.output(desk.tasks.get(task_id), 100).endswith("tidied\n")


async def test_stopping_kills_what_will_not_end_and_all_it_started(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    task_id = await begin(
        desk,
        "trap '' TERM; (trap '' TERM; echo $BASHPID > a; exec sleep 60) & "
        "setsid bash -c 'trap \"\" TERM; echo $$ > b; exec sleep 60' & while :; do sleep 0.05; done",
    )
    await until(lambda: pids_in(tmp_path, 2))
    pids = pids_in(tmp_path, 2)
    assert all(map(alive, pids))
    began = time.monotonic()
    assert (await desk.tasks.stop(task_id)).status == "killed"
    assert 0.2 <= time.monotonic() - began < 4
    assert not any(map(alive, pids))


@pytest.mark.parametrize("way", ["tasks", "environment", "early"])
async def test_an_agent_that_ends_leaves_no_process(desk: Desk, tmp_path: Path, way: str) -> None:
    task_id = await begin(desk, "echo $$ > a; exec sleep 60")
    if way == "early":  # in the very moment it was begun
        await desk.tasks.close()
    else:
        await until(lambda: pids_in(tmp_path, 1))
        await (desk.tasks.close() if way == "tasks" else desk.environment.close())
    await desk.ended(task_id)
    assert not any(map(alive, pids_in(tmp_path, 1)))
    assert not desk.environment._started


async def test_a_deadline(desk: Desk, tmp_path: Path) -> None:
    task_id = await begin(desk, "echo $$ > a; echo before; exec sleep 60", timeout=0.4)
    ended = await desk.ended(task_id)
    assert ended["status"] == "timed_out" and ended["output_tail"] == "before\n"
    assert not any(map(alive, pids_in(tmp_path, 1)))


async def test_without_a_timeout(desk: Desk) -> None:
    task_id = await begin(desk, "exec sleep 60", disable_timeout=True)
    assert desk.of("task/started")[0]["timeout_s"] == 0
    assert (await desk.tasks.stop(task_id)).status == "killed"


async def test_a_flood_is_ended(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_OUTPUT_BYTES", 300_000)
    task_id = await begin(desk, "yes")
    ended = await desk.ended(task_id)
    assert ended["status"] == "failed" and "MiB and was ended" in ended["reason"]
    assert ended["output_bytes"] == 300_000 and len(ended["output_tail"]) <= 4096


async def test_characters_torn_between_reads_are_whole(desk: Desk) -> None:
    task_id = await begin(desk, r"printf '\xe2\x82'; sleep 0.1; printf '\xac|\xff|\xe2'")
    assert (await desk.ended(task_id))["output_tail"] == "€|\ufffd|\ufffd"


async def test_what_cannot_start_is_no_task(desk: Desk) -> None:
    with pytest.raises(ToolError) as caught:
        await bash(desk, "true", run_in_background=True, description="x", cwd="nowhere")
    assert caught.value.code == "environment.not_found"
    with pytest.raises(ToolError) as caught:
        await bash(desk, "true", run_in_background=True, description="x", cwd="../..")
    assert caught.value.code == "environment.outside_workdir"
    for _ in range(3):
        desk.tasks.start("agent", "x", Work())
    with pytest.raises(AgentError) as limit:
        await bash(desk, "true", run_in_background=True, description="x")
    assert limit.value.code == "task.limit_exceeded"
    assert not desk.environment._started and len(desk.of("task/started")) == 3


async def test_an_environment_without_background_says_so(desk: Desk) -> None:
    class Plain:
        pass

    desk.context.environment = Plain()  # type: ignore[assignment]
    with pytest.raises(ToolError) as caught:
        await bash(desk, "true", run_in_background=True, description="x")
    assert caught.value.code == "environment.no_background"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"run_in_background": True}, "needs a description"),
        ({"run_in_background": True, "description": "  "}, "needs a description"),
        ({"disable_timeout": True}, "for run_in_background only"),
        ({"timeout": 301}, "at most 300 unless"),
        ({"run_in_background": True, "description": "x", "timeout": 86_401}, "`timeout`"),
        ({"timeout": 0}, "`timeout`"),
    ],
)
async def test_bad_arguments(desk: Desk, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ToolError) as caught:
        TaskBash(desk.tasks).check({"command": "true", **arguments})
    assert caught.value.code == "tool.bad_arguments" and told in caught.value.message


async def test_in_the_foreground_it_is_bash(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for command, more in (("echo hi; pwd", {"cwd": "sub"}), ("exit 4", {}), ("sleep 9", {"timeout": 0.2})):
        mine, plain = TaskBash(desk.tasks), Bash()
        one = await mine.run(mine.check({"command": command, **more}), desk.context)
        other = await plain.run(plain.check({"command": command, **more}), desk.context)
        assert (one.content, one.error_code, one.exit_code) == (other.content, other.error_code, other.exit_code)
    assert desk.of("task/started") == []


async def test_who_cannot_follow_tasks_has_plain_bash(tmp_path: Path) -> None:
    plain = TaskBash(Desk(tmp_path, tools=("Bash", "TaskList", "TaskOutput")).tasks)
    assert plain.parameters == Bash.parameters and plain.description == Bash.description
    with pytest.raises(ToolError):
        plain.check({"command": "true", "run_in_background": True, "description": "x"})
    assert (await plain.run(plain.check({"command": "echo hi"}), Desk(tmp_path).context)).content == "hi"
    assert TaskBash(Desk(tmp_path, tools=("*",)).tasks).parameters != Bash.parameters


async def test_a_command_has_nothing_secret_in_the_background_either(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("OPENAI_API_KEY", "KIMI_RAY_HOME", "RAY_ADDRESS", "MY_SECRET", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY")
    for name in names:
        monkeypatch.setenv(name, "hush-hush")
    task_id = await begin(desk, "env; tr '\\0' '\\n' < /proc/self/environ; tr '\\0' '\\n' < /proc/$PPID/environ")
    await desk.ended(task_id)
    output = desk.tasks.output(desk.tasks.get(task_id), 1 << 20)
    assert "PATH=" in output and "hush-hush" not in output
    assert os.environ["OPENAI_API_KEY"] == "hush-hush"
