"""Random trees of agents, forked at every turn and every step: each fork is what the source was then."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.errors import SessionError
from kimi_ray.session import parse_fork_point, plan_fork
from kimi_ray.store.seam import Stream
from tests.unit.session.trees import NOW, SCRIPTS, MemoryHome, Script, Tree, check_fork, grown, places

_numbers = itertools.count()


def _target() -> str:
    return f"fork-{next(_numbers)}"


async def _check_every_point(home: MemoryHome, source: Stream) -> None:
    for at, cut in places(home, source).items():
        plan = await plan_fork(home, source, parse_fork_point(at), now=NOW)
        assert plan.main.cut == cut, at
        check_fork(home, plan, _target(), cut)
    plan = await plan_fork(home, source, None, now=NOW)
    check_fork(home, plan, _target(), len(home.lines[source]))


@settings(max_examples=30, deadline=None)
@given(SCRIPTS)
async def test_every_point_of_main(script: Script) -> None:
    tree = grown(script)
    await _check_every_point(tree.home, tree.stream())


@settings(max_examples=30, deadline=None)
@given(SCRIPTS, st.integers(0, 11))
async def test_every_point_of_any_agent(script: Script, who: int) -> None:
    tree = grown(script)
    await _check_every_point(tree.home, tree.stream(list(tree.lives)[who % len(tree.lives)]))


@settings(max_examples=30, deadline=None)
@given(SCRIPTS)
async def test_before_a_turn_the_messages_are_those_that_the_model_had(script: Script) -> None:
    tree = grown(script)
    for turn, messages in tree.lives["main"].before.items():
        plan = await plan_fork(tree.home, tree.stream(), parse_fork_point(f"^{turn}"), now=NOW)
        target = _target()
        check_fork(tree.home, plan, target, plan.main.cut)
        assert tree.home.messages(Stream(target, "main")) == messages
        assert plan.main.tail[0].find(b"log/forked") > 0, "nothing is open there"


@settings(max_examples=15, deadline=None)
@given(SCRIPTS, st.integers(0, 1000), st.integers(0, 1000))
async def test_a_fork_of_a_fork(script: Script, one: int, other: int) -> None:
    tree = grown(script)
    found = list(places(tree.home, tree.stream())) or [None]
    plan = await plan_fork(tree.home, tree.stream(), parse_fork_point(found[one % len(found)]), now=NOW)
    first = _target()
    tree.home.publish(plan.for_target(first))
    agents = [stream for stream in tree.home.headers if stream.session_id == first]
    await _check_every_point(tree.home, agents[other % len(agents)])


@settings(max_examples=15, deadline=None)
@given(SCRIPTS, st.integers(1, 9))
async def test_pages_of_any_size_give_the_same_plan(script: Script, size: int) -> None:
    tree = grown(script)
    for at in [None, *places(tree.home, tree.stream())]:
        tree.home.page_events = 1 << 30
        whole = await plan_fork(tree.home, tree.stream(), parse_fork_point(at), now=NOW)
        tree.home.page_events = size
        assert await plan_fork(tree.home, tree.stream(), parse_fork_point(at), now=NOW) == whole


@settings(max_examples=15, deadline=None)
@given(SCRIPTS)
async def test_a_prefix_of_a_growing_log_is_always_the_same(script: Script) -> None:
    """What a point means does not change when more is written."""
    half = grown(script[: len(script) // 2])
    tree = grown(script)
    for at in places(half.home, half.stream()):
        point = parse_fork_point(at)
        early, late = [await plan_fork(one.home, one.stream(), point, now=NOW) for one in (half, tree)]
        if at.isdigit() and early.main.cut == len(half.home.lines[half.stream()]):
            continue  # its prompts may be settled behind it
        assert early == late


@settings(max_examples=40, deadline=None)
@given(SCRIPTS)
async def test_points_that_are_not_there(script: Script) -> None:
    tree = grown(script)
    source = tree.stream()
    there = places(tree.home, source)
    turns = tree.lives["main"].log.order.next_turn
    for at in [
        *(f"{turn}" for turn in range(turns + 2)),
        *(f"{turn}.{step}" for turn in range(turns + 1) for step in range(3)),
    ]:
        if at in there:
            continue
        with pytest.raises(SessionError) as caught:
            await plan_fork(tree.home, source, parse_fork_point(at), now=NOW)
        assert caught.value.code == "session.fork_point_not_found"
        assert caught.value.details["turns"] == turns and caught.value.details["at"] == at


async def test_three_levels_thirty_turns_twenty_subagents_and_clocks_minutes_apart() -> None:
    """Every turn, and every step of one of them; agents below work on while main goes on."""
    tree = Tree(MemoryHome(), most=21)
    for turn in range(30):
        tree.act(0, "turn", 0)
        for step in range(12 if turn == 17 else 2):
            tree.act(0, "answer", step + 6)
            for who in range(1, len(tree.lives)):
                if (turn + who + step) % 3 == 0:
                    tree.act(who, ("turn", "answer", "step", "end")[(turn + step) % 4], 3 * step + who)
                if tree.lives[f"agent-{who}"].children:
                    tree.act(who, "record", who + turn)
            tree.act(turn % 5 if len(tree.lives) > 5 else 0, "spawn", 0)
            for number in range(len(tree.lives["main"].children)):
                tree.act(0, "record", number)
            tree.act(0, "step", 0)
        tree.act(0, "end", 0)
    assert len(tree.lives) == 21 and {life.depth for life in tree.lives.values()} >= {1, 2}
    main = tree.stream()
    known = places(tree.home, main)
    wanted = [at for at in known if "." not in at or at.startswith("17.")]
    assert len(wanted) >= 30 + 12
    deepest = 0
    for at in wanted:
        plan = await plan_fork(tree.home, main, parse_fork_point(at), now=NOW)
        check_fork(tree.home, plan, _target(), known[at])
        deepest = max(deepest, len(plan.logs))
    assert deepest == 21
