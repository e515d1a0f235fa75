"""What a swarm may say about its rollouts: their tools, and directories that several may not write to."""

from __future__ import annotations

import pytest

from kimi_ray.errors import RunError
from kimi_ray.runs import SwarmSettings, prepare_items
from kimi_ray.settings import Profile, Workdir

WRITER = Profile(name="coder", tools=("Read", "Write", "Edit", "Bash"))


def test_a_swarm_has_the_profiles_tools_less_those_that_write() -> None:
    assert SwarmSettings(profile=WRITER).tool_names == ("Read",)
    following = ("Read", "TodoList", "TaskList", "TaskOutput", "TaskStop", "WaitFor")
    assert SwarmSettings(profile=Profile(name="p", tools=following)).tool_names == ("Read", "TodoList")
    assert SwarmSettings(profile=WRITER, tools=following).tool_names == following
    assert SwarmSettings(profile=WRITER, tools=("Write",)).tool_names == ("Write",)
    assert SwarmSettings(profile=WRITER, tools=()).tool_names == ()


@pytest.mark.parametrize(
    ("workdir", "tools", "rollouts", "ok"),
    [
        (Workdir.shared("/w"), ("Write",), 2, False),
        (Workdir.shared("/w"), ("Bash", "Read"), 2, False),
        (Workdir.shared("/w"), ("Read",), 2, True),
        (Workdir.shared("/w"), None, 2, True),
        (Workdir.shared("/w", writes=True), ("Write",), 2, True),
        (Workdir.copy("/w"), ("Write",), 2, True),
        (Workdir.shared("/w/{{item}}"), ("Write",), 2, True),
        (Workdir.shared("/w/{{item}}"), ("Write",), 4, False),
        (Workdir.shared("/w/{{item}}/.."), ("Write",), 2, False),
        (None, ("Write",), 2, True),
    ],
)
def test_several_writers_in_one_directory(
    workdir: Workdir | None, tools: tuple[str, ...] | None, rollouts: int, ok: bool
) -> None:
    items = prepare_items(["a", "b"])
    swarm = SwarmSettings(profile=WRITER, tools=tools, workdir=workdir)
    if ok:
        swarm.check_shared_writes(items, rollouts)
        return
    with pytest.raises(RunError) as error:
        swarm.check_shared_writes(items, rollouts)
    assert error.value.code == "swarm.shared_writes"
    assert "writes=True" in (error.value.hint or "")


def test_one_writer_may_share() -> None:
    SwarmSettings(profile=WRITER, tools=("Write",), workdir=Workdir.shared("/w")).check_shared_writes(
        prepare_items(["a"]), 1
    )
