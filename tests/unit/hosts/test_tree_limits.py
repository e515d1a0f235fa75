"""The account of a session's tree: what is left of a bound, and when there is nothing."""

from __future__ import annotations

import pytest

from kimi_ray.agent.specs import AgentTotals
from kimi_ray.errors import AgentError
from kimi_ray.hosts.swarm_events import limits_left
from kimi_ray.hosts.tree_limits import TreeLimits
from kimi_ray.runs.schedule import Spent
from kimi_ray.settings import Limits, Usage


def test_what_is_left_is_the_smaller_of_the_swarms_own_and_the_trees_rest() -> None:
    tree = TreeLimits(Limits(max_steps=10, max_output_tokens=100))
    assert tree.spend("a", Spent(steps=3, output_tokens=20)) is None
    main = AgentTotals(steps=2, usage=Usage(output=30))
    left = tree.left(Limits(max_steps=4), main)
    assert left is not None and (left.max_steps, left.max_output_tokens) == (4, 50)
    assert tree.elsewhere().steps == 3


def test_nothing_left_is_an_error_of_the_session() -> None:
    tree = TreeLimits(Limits(max_steps=5))
    hit = tree.spend("a", Spent(steps=5))
    assert hit is not None and (hit.name, hit.used) == ("max_steps", 5)
    with pytest.raises(AgentError) as refused:
        tree.left(None, AgentTotals())
    assert refused.value.code == "limit.max_steps" and refused.value.details["scope"] == "session"


def test_a_swarm_told_twice_is_counted_once() -> None:
    tree = TreeLimits(Limits(max_steps=5))
    tree.spend("a", Spent(steps=2))
    tree.spend("a", Spent(steps=3))
    assert tree.children.steps == 3


def test_a_swarm_that_is_settled_twice_is_counted_once() -> None:
    tree = TreeLimits(Limits(max_steps=9))
    tree.spend("a", Spent(steps=5))
    for _ in range(2):
        tree.settle("a", Spent(steps=3))
        assert tree.children.steps == 3
    tree.spend("a", Spent(steps=4))
    assert tree.children.steps == 7


def test_a_bound_of_no_tool_calls_reaches_each_rollout() -> None:
    assert TreeLimits(Limits(max_tool_calls=0)).left(None, AgentTotals()) == Limits(max_tool_calls=0)
    assert limits_left(None, Limits(max_tool_calls=0), Spent(), 0.0) == Limits(max_tool_calls=0)
    assert limits_left(None, Limits(max_tool_calls=3), Spent(tool_calls=3), 0.0) == Limits(max_tool_calls=0)


def test_without_a_bound_nothing_is_counted_against_anybody() -> None:
    tree = TreeLimits(Limits(time_s=5))
    assert not tree.bound
    assert tree.left(Limits(max_steps=1), AgentTotals(steps=99)) == Limits(max_steps=1)
