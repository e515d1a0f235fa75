"""Where two sessions part: forks against their sources, and sessions that are made to differ in one thing."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings

from kimi_ray.errors import AgentError, SessionError, StoreError
from kimi_ray.events import decode, encode, thaw
from kimi_ray.session import compare_sessions, plan_fork
from kimi_ray.session.comparison import ABSENT, all_differences, first_difference
from kimi_ray.settings import Sampling
from kimi_ray.store.seam import Stream
from tests.unit.session.trees import NOW, SCRIPTS, MemoryHome, Script, Tree, check_fork, grown


def lived(home: MemoryHome, session_id: str, *acts: tuple[str, int]) -> Tree:
    tree = Tree(home, session_id)
    for what, number in acts:
        tree.act(0, what, number)
    return tree


TURN = (("turn", 0), ("answer", 1), ("step", 0), ("answer", 0), ("end", 0))


def two(*acts: tuple[str, int]) -> tuple[MemoryHome, Tree, Tree]:
    home = MemoryHome()
    return home, lived(home, "a", *acts), lived(home, "b", *acts)


@settings(max_examples=40, deadline=None)
@given(SCRIPTS)
async def test_an_idle_session_and_its_whole_fork_differ_in_what_was_left_out_alone(script: Script) -> None:
    tree = grown(script)
    for life in tree.lives.values():  # nothing is open: closers would be messages of their own
        if life.log.order.open_turn is not None:
            life.log.append("runtime/activated", {"epoch": life.epoch})
            tree._crash(life, 1)
    plan = await plan_fork(tree.home, tree.stream(), None, now=NOW)
    check_fork(tree.home, plan, "fork", plan.main.cut)
    found = await compare_sessions(tree.home, tree.stream(), Stream("fork", "main"))
    assert found.messages[0] == found.messages[1]
    assert not [one for one in found.differences if one.agents[0] == "main" and one.area != "agents"]
    missing = {one.agents[0] for one in found.differences if one.area == "agents" and one.b is ABSENT}
    assert {one.agent_id for one in plan.left_out} <= missing
    assert (await compare_sessions(tree.home, Stream("fork", "main"), Stream("fork", "main"))).equal


@settings(max_examples=40, deadline=None)
@given(SCRIPTS)
async def test_a_session_equals_itself_and_the_order_of_the_two_does_not_matter(script: Script) -> None:
    tree = grown(script)
    other = lived(tree.home, "other", *TURN)
    assert (await compare_sessions(tree.home, tree.stream(), tree.stream())).equal
    there = await compare_sessions(tree.home, tree.stream(), other.stream())
    back = await compare_sessions(tree.home, other.stream(), tree.stream())
    assert [(one.path, one.a, one.b) for one in there.differences] == [
        (one.path, one.b, one.a) for one in back.differences if one.path != ""
    ] + [(one.path, one.b, one.a) for one in back.differences if one.path == ""] or there.equal == back.equal


async def test_ids_of_messages_and_calls_and_times_are_no_differences() -> None:
    home, a, b = two(*TURN)
    b.home.lines[b.stream()] = [encode({**decode(line), "time": 77}) for line in b.home.lines[b.stream()]]
    text = b"\n".join(b.home.lines[b.stream()])
    renamed = text.replace(b'"c2"', b'"call_of_another_server"').replace(b'"rc2"', b'"another"')
    assert renamed != text
    b.home.lines[b.stream()] = renamed.split(b"\n")
    found = await compare_sessions(home, a.stream(), b.stream())
    assert found.equal, found.differences


async def test_the_first_differing_message_is_named_with_its_place_and_field() -> None:
    home, a, b = two(*TURN, *TURN)
    lines = b.home.lines[b.stream()]
    index = next(i for i, line in enumerate(lines) if b'"turn":1,"step":1' in line and b"assistant/message" in line)
    lines[index] = lines[index].replace(b'"text":"answer', b'"text":"another answer')
    found = (await compare_sessions(home, a.stream(), b.stream())).differences
    assert len(found) == 1
    only = found[0]
    assert (only.area, only.path, only.index) == ("messages", "content[0].text", 7)
    assert only.places == ((1, 1), (1, 1))
    assert only.a.startswith("answer") and only.b.startswith("another answer")
    assert only.to_data()["places"] == ["1.1", "1.1"]


async def test_a_longer_conversation_differs_where_the_shorter_one_ends() -> None:
    home, a, b = two(*TURN)
    b.act(0, "turn", 0)
    found = (await compare_sessions(home, a.stream(), b.stream())).differences
    assert [(one.index, one.path, one.a) for one in found] == [(4, "", ABSENT)]
    assert found[0].places == (None, (1, 0))
    data = found[0].to_data()
    assert "a" not in data and data["b"]["role"] == "user"


async def test_calls_that_are_answered_in_another_order_differ() -> None:
    home, a, b = two(("turn", 0), ("answer", 2))
    for call in ("c2", "c3"):
        a._answer_one(a.lives["main"], call)
    for call in ("c3", "c2"):
        b._answer_one(b.lives["main"], call)
    found = (await compare_sessions(home, a.stream(), b.stream())).differences
    assert [one.path for one in found] == ["content[0].tool_call_id"]


async def test_another_model_hides_no_difference_of_the_answers() -> None:
    home, a, b = two(*TURN, *TURN)
    lines = b.home.lines[b.stream()]
    for index, line in enumerate(lines):
        lines[index] = line.replace(b'"model":"m0"', b'"model":"m9"')
    told = [thaw(decode(line)) for line in lines]
    said = [event for event in told if event["type"] == "assistant/message"]
    for event in said:
        event["data"]["message"]["source"] = {"kind": "model", "model": "m9", "provider": "another"}
    b.home.lines[b.stream()] = [encode(event) for event in told]
    found = (await compare_sessions(home, a.stream(), b.stream())).differences
    assert not [one for one in found if one.area == "messages"], "nothing that was sent differs"
    said[-1]["data"]["message"]["content"][0]["text"] = "another answer"
    b.home.lines[b.stream()] = [encode(event) for event in told]
    found = (await compare_sessions(home, a.stream(), b.stream())).differences
    assert [one.path for one in found if one.area == "messages"] == ["content[0].text"]


@pytest.mark.parametrize(
    ("bind", "paths"),
    [
        ({"model": "m1"}, ["model"]),
        ({"sampling": {"seed": 2}}, ["sampling.seed"]),
        ({"sampling": {"seed": 1, "temperature": 0.5}}, ["sampling.temperature"]),
        ({"limits": {"max_turns": 3}}, ["limits.max_turns"]),
        ({"profile": {"name": "agent", "tools": ["Read"]}}, ["profile.tools"]),
        ({"workdir": {"kind": "none"}}, ["workdir"]),
    ],
)
async def test_settings(bind: dict[str, Any], paths: list[str]) -> None:
    home, a, b = two(*TURN)
    bound = {"profile": {"name": "agent"}, "model": "m0", "sampling": {"seed": 1}} | bind
    b.lives["main"].log.append("profile/bind", bound)
    found = (await compare_sessions(home, a.stream(), b.stream())).differences
    assert [(one.area, one.path) for one in found] == [("settings", path) for path in paths]


async def test_where_a_private_directory_lies_is_no_setting() -> None:
    home, a, b = two(*TURN)
    for tree, path in ((a, "/x"), (b, "/y")):
        workdir = {"kind": "copy", "path": "/w", "prepared": path, "created": path == "/x"}
        tree.lives["main"].log.append("profile/bind", {"profile": {"name": "agent"}, "workdir": workdir})
    assert (await compare_sessions(home, a.stream(), b.stream())).equal


async def test_a_switch_of_the_model_and_the_tools_of_the_last_request() -> None:
    home, a, b = two(("turn", 0))
    for tree, tools in ((a, [1]), (b, [2])):
        header = {"provider": "p", "model": "m", "tools": tools, "sampling": {"seed": len(tools)}}
        tree.lives["main"].log.append("request/header", {"header": header, "reason": "initial"})
    b.act(0, "model", 4)
    found = (await compare_sessions(home, a.stream(), b.stream())).differences
    assert [(one.path, one.a, one.b) for one in found] == [("model", "m0", "m4"), ("request.tools[0]", 1, 2)]


async def test_a_forks_seed_is_the_only_difference_to_its_sibling() -> None:
    home, a, _ = two(*TURN)
    plan = await plan_fork(home, a.stream(), None, now=NOW)
    home.publish(plan.for_target("f0", index=0, seed=5, sampling=Sampling(temperature=0.5)))
    home.publish(plan.for_target("f1", index=1, seed=6, sampling=Sampling(temperature=0.5)))
    found = (await compare_sessions(home, Stream("f0", "main"), Stream("f1", "main"))).differences
    assert [(one.path, one.a, one.b) for one in found] == [("sampling.seed", 5, 6)]
    found = (await compare_sessions(home, a.stream(), Stream("f1", "main"))).differences
    assert [one.path for one in found] == ["sampling.seed", "sampling.temperature"]


async def test_agents_below_are_compared_by_id_and_a_missing_one_is_told() -> None:
    home, a, b = two(("spawn", 0), ("spawn", 0), ("spawn", 0))
    b.lives["agent-1"].log.append("profile/model", {"model": "x"})
    del home.headers[b.stream("agent-2")]
    found = await compare_sessions(home, a.stream(), b.stream())
    assert found.agents == 3
    assert [(one.area, one.agents, one.path) for one in found.differences] == [
        ("agents", ("agent-2", "agent-2"), ""),
        ("settings", ("agent-1", "agent-1"), "model"),
    ]
    assert found.differences[0].b is ABSENT


async def test_agents_that_claim_each_other_end_the_comparison_all_the_same() -> None:
    home, a, b = two(("spawn", 0))
    for tree in (a, b):
        for agent_id in ("main", "agent-1"):
            tree.lives["agent-1"].log.append("subagent/spawned", {"agent_id": agent_id})
    found = await compare_sessions(home, a.stream(), b.stream())
    assert found.equal and found.agents == 2


async def test_rollouts_are_paired_by_their_items() -> None:
    home, a, b = two(("spawn", 0), ("spawn", 0))
    for tree, items in ((a, "xy"), (b, "yx")):
        for number, item in enumerate(items, 1):
            header = home.headers[tree.stream(f"agent-{number}")]
            header |= {"item_id": item, "repeat": 0}
            tree.lives[f"agent-{number}"].log.append("profile/model", {"model": item})
    assert (await compare_sessions(home, a.stream(), b.stream())).equal


async def test_a_text_in_a_blob_equals_the_same_text_inline() -> None:
    home, a, b = two(("turn", 0))
    lines = b.home.lines[b.stream()]
    index = next(i for i, line in enumerate(lines) if b"user/message" in line)
    event = thaw(decode(lines[index]))
    raw = event["data"]["content"][0]["text"].encode()
    event["data"]["content"][0] = {
        "type": "text",
        "$blob": f"sha256:{hashlib.sha256(raw).hexdigest()}",
        "bytes": len(raw),
    }
    lines[index] = encode(event)
    assert (await compare_sessions(home, a.stream(), b.stream())).equal
    event["data"]["content"][0]["$blob"] = "sha256:" + "0" * 64
    lines[index] = encode(event)
    found = (await compare_sessions(home, a.stream(), b.stream())).differences
    assert [one.path for one in found] == ["content[0].$blob"]


async def test_what_cannot_be_read() -> None:
    home, a, b = two(("spawn", 0))
    with pytest.raises(SessionError) as none:
        await compare_sessions(home, a.stream(), Stream("c", "main"))
    assert none.value.code == "session.not_found"
    with pytest.raises(AgentError) as no_agent:
        await compare_sessions(home, a.stream("agent-9"), b.stream())
    assert no_agent.value.code == "agent.not_found"
    home.broken[b.stream("agent-1")] = StoreError("broken", code="store.corrupt")
    found = (await compare_sessions(home, a.stream(), b.stream())).differences
    assert [(one.path, one.a, one.b) for one in found] == [("error", ABSENT, "store.corrupt")]
    home.broken[a.stream("agent-1")] = StoreError("broken", code="store.corrupt")
    assert (await compare_sessions(home, a.stream(), b.stream())).equal
    home.broken[b.stream()] = StoreError("broken", code="store.corrupt")
    with pytest.raises(StoreError):
        await compare_sessions(home, a.stream(), b.stream())


def test_values() -> None:
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == ("a[1].b", 2, 3)
    assert first_difference([1], [1, 2]) == ("[1]", ABSENT, 2)
    assert first_difference({}, {"x": None}) == ("x", ABSENT, None)
    assert first_difference(1, True) == ("", 1, True)
    assert first_difference(1, 1.0) is None
    assert first_difference("ab", ["a", "b"]) == ("", "ab", ["a", "b"])
    assert [path for path, _, _ in all_differences({"a": 1, "b": 2}, {"b": 3, "a": 4})] == ["a", "b"]
