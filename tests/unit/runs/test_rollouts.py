"""From an item and a start to a rollout: whose word counts, and what is refused."""

from __future__ import annotations

import pytest

from kimi_ray.errors import RunError
from kimi_ray.runs import RolloutKey, RunItem, Start, SwarmSettings, prepare_items
from kimi_ray.settings import Item, Limits, Profile, Sampling, Workdir

READER = Profile(name="explore", tools=("Read", "Grep"))
WRITER = Profile(name="coder", tools=("Read", "Write", "Edit", "Bash"))


def start(item: RunItem, *, sent: bool = True) -> Start:
    return Start(RolloutKey(item.id, 2), 3, 99, sent)


def test_an_items_own_settings_win() -> None:
    (item,) = prepare_items(
        [Item(data={"a": 1}, sampling=Sampling(temperature=0), limits=Limits(max_steps=1), tags={"t": "item"})]
    )
    swarm = SwarmSettings(
        profile=READER,
        sampling=Sampling(temperature=1, top_p=0.5),
        limits=Limits(max_steps=9, time_s=5),
        tags={"t": "run", "u": "run"},
    )
    made = swarm.rollout("r", "do {{a}}", item, start(item))
    assert made.prompt == "do 1"
    assert made.sampling == Sampling(temperature=0, top_p=0.5, seed=99)
    assert made.limits == Limits(max_steps=1, time_s=5)
    assert made.tags == {"t": "item", "u": "run"}
    assert (made.key, made.attempt, made.seed, made.send_seed) == (RolloutKey(item.id, 2), 3, 99, True)
    assert made.item == {"a": 1}


def test_a_seed_without_a_run_seed_is_recorded_and_not_sent() -> None:
    (item,) = prepare_items(["x"])
    made = SwarmSettings(profile=READER).rollout("r", "{{item}}", item, start(item, sent=False))
    assert (made.seed, made.sampling.seed, made.send_seed) == (99, 99, False)


def test_a_seed_that_the_user_fixed_is_sent() -> None:
    (item,) = prepare_items(["x"])
    swarm = SwarmSettings(profile=READER, sampling=Sampling(seed=5))
    made = swarm.rollout("r", "{{item}}", item, start(item, sent=False))
    assert (made.seed, made.sampling.seed, made.send_seed) == (5, 5, True)


def test_a_swarm_has_the_profiles_tools_less_those_that_write() -> None:
    assert SwarmSettings(profile=WRITER).tool_names == ("Read",)
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
