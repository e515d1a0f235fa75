"""What a plan copies, what it leaves out and says so, and what it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.errors import AgentError, SessionError, StoreError
from kimi_ray.events import LogHeader, ParentRef, decode, encode
from kimi_ray.log import EventLog
from kimi_ray.session import ForkPlan, parent_of_log, parse_fork_point, plan_agent_fork, plan_fork
from kimi_ray.settings import Sampling
from kimi_ray.store.seam import ListedLog, Stream
from tests.unit.session.trees import NOW, WRITER, MemoryHome, Tree, check_fork

TURN = (("turn", 0), ("answer", 1), ("step", 0), ("answer", 0), ("end", 0))


def act(tree: Tree, who: int, *acts: tuple[str, int]) -> None:
    for what, number in acts:
        tree.act(who, what, number)


def family() -> Tree:
    """main with agent-1 and agent-2, agent-3 below agent-1; all have worked, and all is recorded."""
    tree = Tree(MemoryHome())
    act(tree, 0, ("spawn", 0), ("spawn", 0))
    act(tree, 1, ("spawn", 0), *TURN)
    act(tree, 2, *TURN)
    act(tree, 3, *TURN)
    act(tree, 1, ("record", 3))
    record(tree, "main", "agent-1")
    record(tree, "main", "agent-2")
    act(tree, 0, *TURN)
    return tree


def record(tree: Tree, parent: str, child: str, **more: Any) -> None:
    life = tree.lives[child]
    data = {"agent_id": child, "seq": life.log.next_seq, "epoch": life.epoch} | more
    tree.lives[parent].log.append("subagent/completed", data)


async def plan(tree: Tree, at: str | None = None, agent_id: str = "main", **more: Any) -> ForkPlan:
    return await plan_fork(tree.home, tree.stream(agent_id), parse_fork_point(at), now=NOW, **more)


def agents(made: ForkPlan) -> list[str]:
    return [log.agent_id for log in made.logs]


# -- who comes along -------------------------------------------------------------------------------------------------


async def test_a_tree_and_a_branch_of_it() -> None:
    tree = family()
    made = await plan(tree, "0")
    assert agents(made) == ["main", "agent-1", "agent-2", "agent-3"]
    assert [log.parent for log in made.logs] == [None, "main", "main", "agent-1"]
    assert made.highest_agent == 3 and made.left_out == ()
    branch = await plan(tree, None, "agent-1")
    assert agents(branch) == ["main", "agent-3"], "siblings stay behind"
    assert branch.main.source == tree.stream("agent-1")
    assert [log.header["delegation_depth"] for log in branch.logs] == [0, 1]
    check_fork(tree.home, branch, "branch", branch.main.cut)
    twig = await plan_fork(tree.home, Stream("branch", "agent-3"), None, now=NOW)
    assert agents(twig) == ["main"] and twig.main.header["delegation_depth"] == 0


async def test_no_agent_of_a_fork_will_have_the_name_of_one_that_its_log_speaks_of() -> None:
    tree = family()
    act(tree, 0, *[("spawn", 0)] * 3)
    made = await plan(tree)
    assert {one.agent_id for one in made.left_out} == {"agent-4", "agent-5", "agent-6"}
    assert made.highest_agent == 6 == made.for_target("t")[0].header["highest_agent"]
    assert "highest_agent" not in made.for_target("t")[1].header
    alone = await plan(tree, "0", "agent-2")
    assert alone.highest_agent == 0 and "highest_agent" not in alone.for_target("t")[0].header


async def test_what_a_child_speaks_of_counts_for_the_names_too() -> None:
    tree = family()
    tree.lives["agent-1"].log.append("subagent/spawned", {"agent_id": "agent-41"})
    record(tree, "main", "agent-1")
    made = await plan(tree)
    assert made.highest_agent == 41 and [one.agent_id for one in made.left_out] == ["agent-41"]


@pytest.mark.parametrize("agent_id", ["main", "agent-1", "agent-2"])
async def test_a_log_that_claims_its_own_parents_as_children(agent_id: str) -> None:
    tree = family()
    claim = {"agent_id": agent_id, "seq": 3, "epoch": 1}
    tree.lives["agent-3"].log.append("subagent/spawned", claim)
    record(tree, "agent-1", "agent-3")
    record(tree, "main", "agent-1")
    assert agents(await plan(tree)) == ["main", "agent-1", "agent-2", "agent-3"]
    branch = await plan(tree, None, "agent-1")
    assert agents(branch) == ["main", "agent-3", "agent-2"][: 3 if agent_id == "agent-2" else 2]


async def test_headers_entries_and_lineage() -> None:
    tree = family()
    tree.home.headers[tree.stream("agent-1")] |= {"item_id": "x", "repeat": 2, "attempt": 3, "run_id": "r", "mine": 1}
    made = await plan(tree, "0.1")
    main, child = [copy.header for copy in made.for_target("new", group="g", index=5)[:2]]
    assert main["session_id"] == child["session_id"] == "new"
    assert (main["origin"], child["origin"]) == ("fork", "subagent")
    assert main["parent"] == {"session_id": "source", "agent_id": "main"}
    assert child["parent"] == {"session_id": "new", "agent_id": "main"}
    assert child["forked_from"] == {"session_id": "source", "agent_id": "agent-1", "seq": made.logs[1].cut}
    assert [child[key] for key in ("item_id", "repeat", "attempt", "run_id", "mine")] == ["x", 2, 3, "r", 1]
    assert (main["fork_group"], main["fork_index"], main["created_at"]) == ("g", 5, NOW)
    assert main["labels"] == {"of": "main"} and main["bind"]["model"] == "m0"
    assert made.forked_from == {"session_id": "source", "agent_id": "main", "at": "0.1", "seq": made.main.cut}
    entries = {entry.agent_id: entry.to_data() for entry in made.agents}
    assert entries["main"] == {
        "type": "main", "parent_agent_id": None, "labels": {"of": "main"}, "forked_from": "main",
    }  # fmt: skip
    assert entries["agent-3"]["parent_agent_id"] == "agent-1"
    told = decode(made.main.tail[-2])
    assert told["data"] == {
        "source": {"session_id": "source", "agent_id": "main", "seq": made.main.cut, "epoch": 1}, "at": "0.1",
    }  # fmt: skip


async def test_a_label_that_names_the_parent_names_the_one_in_the_fork() -> None:
    tree = family()
    for agent_id, parent in (("agent-1", "main"), ("agent-3", "agent-1")):
        tree.home.headers[tree.stream(agent_id)]["labels"] = {"item": "x", "parent_agent_id": parent}

    def labels(made: ForkPlan) -> list[Any]:
        return [parent_of_log(copy.header) for copy in made.for_target("t")]

    assert labels(await plan(tree)) == ["main", "main", "main", "agent-1"]
    branch = await plan(tree, None, "agent-1")
    assert labels(branch) == ["main", "main"]
    assert branch.main.header["labels"] == {"item": "x"}
    heir = await plan_agent_fork(tree.home, tree.stream("agent-3"), agent_id="agent-9", now=NOW)
    assert parent_of_log(heir.header) == "agent-3"


async def test_n_targets_differ_in_ids_seeds_and_directories_only() -> None:
    tree = family()
    made = await plan(tree, "0")
    bind = {"kind": "copy", "path": "/w", "prepared": "/w1", "created": True}
    one = made.for_target("t0", group="g", index=0, seed=7, workdirs={"main": bind}, sampling=Sampling(temperature=1))
    two = made.for_target("t1", group="g", index=1, seed=8)
    assert [(copy.source, copy.cut, copy.tail) for copy in one] == [(copy.source, copy.cut, copy.tail) for copy in two]
    assert one[0].header["bind"]["sampling"] == {"seed": 7, "temperature": 1.0}
    assert two[0].header["bind"]["sampling"] == {"seed": 8}
    assert one[0].header["bind"]["workdir"] == bind and "workdir" not in two[0].header["bind"]
    for ours, theirs in zip(one[1:], two[1:], strict=True):
        assert ours.header | {"session_id": "", "parent": 0, "fork_index": 0} == theirs.header | {
            "session_id": "", "parent": 0, "fork_index": 0,
        }  # fmt: skip
    assert made.main.bind == {"profile": {"name": "agent"}, "model": "m0", "sampling": {"seed": 1}}, "never changed"


async def test_what_a_child_was_asked_behind_its_record_is_not_in_the_fork() -> None:
    tree = family()
    act(tree, 1, *TURN)
    made = await plan(tree)
    check_fork(tree.home, made, "t", made.main.cut)
    assert made.logs[1].cut < tree.lives["agent-1"].log.next_seq


async def test_a_child_that_was_in_a_turn_is_closed_as_interrupted() -> None:
    tree = family()
    act(tree, 1, ("turn", 0), ("answer", 6))
    record(tree, "main", "agent-1")
    made = await plan(tree)
    assert [log.interrupted for log in made.logs] == [False, True, False, False]
    check_fork(tree.home, made, "t", made.main.cut)
    codes = [decode(line)["data"].get("error", {}).get("code") for line in made.logs[1].tail]
    assert codes[:2] == ["tool.outcome_unknown", "tool.not_started"]


async def test_a_slice_keeps_all_that_is_in_it_and_nothing_of_later() -> None:
    """K's tests 26 and 27: other records of a turn stay, subagents of later turns do not come along."""
    tree = Tree(MemoryHome())
    act(tree, 0, ("turn", 0), ("note", 0), ("spawn", 0))
    act(tree, 1, *TURN)
    record(tree, "main", "agent-1")
    main = tree.lives["main"].log
    main.append("task/started", {"task_id": "cron-1", "kind": "cron"})
    act(tree, 0, ("answer", 0), ("end", 0), ("turn", 0), ("spawn", 0))
    act(tree, 2, *TURN)
    record(tree, "main", "agent-2")
    act(tree, 0, ("answer", 0), ("end", 0))
    early, late = await plan(tree, "0"), await plan(tree, "1")
    assert (agents(early), agents(late)) == (["main", "agent-1"], ["main", "agent-1", "agent-2"])
    tree.home.publish(early.for_target("early"))
    kinds = [event.type for event in tree.home.events(Stream("early", "main"))]
    assert "task/started" in kinds and "note/added" in kinds and kinds.count("turn/start") == 1
    assert tree.home.log(Stream("early", "main")).order.next_turn == 1, "the next turn's number goes on"


# -- who does not ----------------------------------------------------------------------------------------------------


async def left_out(tree: Tree, at: str | None = None) -> list[tuple[str, str, str]]:
    made = await plan(tree, at)
    told = made.left_out_data()
    assert (told is None) == (not made.left_out)
    if told is not None:
        assert told["count"] == len(made.left_out) == len(told["agents"])
    assert not {one.agent_id for one in made.left_out} & set(agents(made))
    return [(one.agent_id, one.parent, one.reason) for one in made.left_out]


async def test_left_out() -> None:
    tree = family()
    act(tree, 0, ("spawn", 0))  # agent-4, never recorded
    assert await left_out(tree) == [("agent-4", "main", "no_position")]
    record(tree, "main", "agent-4", seq=0)
    assert await left_out(tree) == [("agent-4", "main", "later")]
    tree.lives["main"].log.append("subagent/completed", {"agent_id": "agent-9", "seq": 3, "epoch": 1})
    assert await left_out(tree) == [("agent-4", "main", "later"), ("agent-9", "main", "not_spawned")]
    del tree.home.headers[tree.stream("agent-1")]
    found = await left_out(tree)
    assert ("agent-1", "main", "log_missing") in found
    assert "agent-3" not in agents(await plan(tree)), "who is below one that is left out is left out with it"


async def test_a_damaged_child_is_left_out_and_says_why() -> None:
    tree = family()
    error = StoreError("rotten", code="store.corrupt", details={"file": "f"})
    tree.home.broken[tree.stream("agent-2")] = error
    made = await plan(tree)
    assert [(one.agent_id, one.reason, one.error) for one in made.left_out] == [
        ("agent-2", "log_damaged", error.to_data())
    ]
    listed = tree.home.list_logs

    async def without_header(session_id: str) -> list[ListedLog]:
        return [
            ListedLog(log.stream, None, error={"code": "store.corrupt", "message": "x"})
            if log.stream.agent_id == "agent-1"
            else log
            for log in await listed(session_id)
        ]

    tree.home.list_logs = without_header  # type: ignore[method-assign]
    made = await plan(tree)
    assert {one.agent_id: one.reason for one in made.left_out} == {"agent-1": "log_damaged", "agent-2": "log_damaged"}
    with pytest.raises(Exception, match="x"):
        await plan(tree, None, "agent-1")


async def test_a_store_that_does_not_answer_is_no_damage() -> None:
    tree = family()
    tree.home.broken[tree.stream("agent-2")] = StoreError("busy", code="store.unavailable", retryable=True)
    with pytest.raises(StoreError) as caught:
        await plan(tree)
    assert caught.value.code == "store.unavailable"


async def test_a_child_that_was_salvaged_with_losses_has_other_seqs() -> None:
    tree = family()
    lines = tree.home.lines[tree.stream("agent-2")]
    for lost, reason in (([], None), ([{"after_seq": 1}], "log_salvaged")):
        lines[2] = encode({"seq": 2, "time": 1, "type": "log/salvaged", "data": {"source": {}, "lost": lost}})
        found = await left_out(tree)
        assert found == ([] if reason is None else [("agent-2", "main", reason)])


# -- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [{"epoch": 2}, {"seq": 10_000}, {"seq": 10_000, "epoch": 7}, {"seq": 1, "epoch": 5}])
async def test_a_record_that_the_childs_log_does_not_bear_out(told: dict[str, int]) -> None:
    tree = family()
    tree.lives["agent-2"].epoch = 5
    act(tree, 2, ("crash", 0), ("note", 0))
    record(tree, "main", "agent-2", **told)
    with pytest.raises(SessionError) as caught:
        await plan(tree)
    assert caught.value.code == "session.fork_inconsistent"
    details = caught.value.details
    assert details["agent_id"] == "agent-2" and details["epoch"] == told.get("epoch", 6)
    assert ("stored" in details) == (told.get("seq", 0) > 1000)
    assert agents(await plan(tree, None, "agent-1")) == ["main", "agent-3"], "others are not barred"
    assert "agent-2" in agents(await plan(tree, "0")), "nor is an earlier point"


async def test_each_epoch_of_a_child_fits_where_it_wrote() -> None:
    tree = family()
    act(tree, 2, ("crash", 0), *TURN, ("crash", 1), ("note", 0))
    record(tree, "main", "agent-2")
    assert "agent-2" in agents(await plan(tree))
    stream = Stream("fork", "main")
    tree.home.publish((await plan(tree)).for_target("fork"))
    assert "agent-2" in agents(await plan_fork(tree.home, stream, None, now=NOW)), "nor in a fork of the fork"


async def test_who_is_not_there() -> None:
    tree = family()
    with pytest.raises(SessionError) as no_session:
        await plan_fork(tree.home, Stream("nobody", "main"), None, now=NOW)
    with pytest.raises(AgentError) as no_agent:
        await plan(tree, None, "agent-77")
    assert (no_session.value.code, no_agent.value.code) == ("session.not_found", "agent.not_found")


@pytest.mark.parametrize(
    ("at", "turns", "steps", "hint"),
    [
        ("1", 1, None, "0 to 0"),
        ("^1", 1, None, "0 to 0"),
        ("0.2", 1, 2, "the steps 0 to 1"),
        ("5.0", 1, None, "0 to 0"),
    ],
)
async def test_points_out_of_range_tell_what_there_is(at: str, turns: int, steps: int | None, hint: str) -> None:
    with pytest.raises(SessionError) as caught:
        await plan(family(), at)
    assert caught.value.code == "session.fork_point_not_found"
    assert caught.value.details == {"at": at, "turns": turns, "steps": steps}
    assert hint in str(caught.value)


async def test_an_open_turn_of_a_living_source_and_of_a_dead_one() -> None:
    tree = family()
    act(tree, 0, ("turn", 0), ("answer", 1), ("step", 0), ("answer", 2))
    done = await plan(tree, "1.0")
    check_fork(tree.home, done, "done", done.main.cut)
    assert done.main.interrupted
    for at in ("1", "1.1"):
        with pytest.raises(SessionError, match="not ended yet"):
            await plan(tree, at)
        dead = await plan(tree, at, ended=True)
        check_fork(tree.home, dead, f"dead-{at}", tree.lives["main"].log.next_seq)
    with pytest.raises(SessionError):
        await plan(tree, "1.2", ended=True)
    with pytest.raises(SessionError):
        await plan(tree, "2", ended=True)


# -- imported logs ---------------------------------------------------------------------------------------------------


def imported(home: MemoryHome, agent_id: str, parent: str | None, times: list[int]) -> None:
    header = LogHeader(
        session_id="kimi",
        agent_id=agent_id,
        created_at=1,
        parent=None if parent is None else ParentRef(session_id="kimi", agent_id=parent),
        origin="main" if parent is None else "subagent",
        writer=WRITER,
    )
    header = LogHeader.model_validate(header.to_data() | {"imported": {"format": "kimi"}})
    lines = home.add(header)
    clock = iter(times)
    log = EventLog(header, clock=lambda: next(clock))
    log.observe(lambda event: lines.append(event.line))
    for turn in range(len(times) // 2):
        log.append("turn/start", {"turn": turn})
        log.append("turn/end", {"turn": turn, "reason": {"kind": "completed"}})


async def test_imported_children_are_cut_by_time() -> None:
    """K 4.8: up to the first event that is later than all that is kept; nothing left is nobody."""
    home = MemoryHome()
    imported(home, "main", None, [10, 20, 30, 40, 50, 60])
    imported(home, "agent-0", "main", [11, 12, 35, 36])
    imported(home, "agent-1", "main", [25, 26])
    imported(home, "agent-2", "agent-0", [12, 13, 61, 62])
    source = Stream("kimi", "main")

    async def cuts(at: str | None) -> dict[str, int]:
        made = await plan_fork(home, source, parse_fork_point(at), now=NOW)
        assert {one.reason for one in made.left_out} <= {"later"}
        return {log.agent_id: log.cut for log in made.logs}

    assert await cuts("0") == {"main": 2, "agent-0": 2, "agent-2": 2}
    assert await cuts("1") == {"main": 4, "agent-0": 4, "agent-1": 2, "agent-2": 2}
    assert await cuts(None) == {"main": 6, "agent-0": 4, "agent-1": 2, "agent-2": 4}


async def test_other_logs_are_never_cut_by_time() -> None:
    tree = family()
    act(tree, 0, ("spawn", 0))
    act(tree, 0, *TURN)
    assert ("agent-4", "main", "no_position") in await left_out(tree, "1")


# -- bindings --------------------------------------------------------------------------------------------------------


async def test_the_binding_at_the_point() -> None:
    tree = Tree(MemoryHome())
    act(tree, 0, *TURN, ("model", 7), *TURN)
    main = tree.lives["main"].log
    workdir = {"kind": "copy", "path": "/w", "prepared": "/p", "created": True}
    main.append("profile/bind", {"profile": {"name": "other"}, "model": "m9", "workdir": workdir})
    act(tree, 0, *TURN)
    found = [(await plan(tree, at)).main.bind for at in ("^0", "0", "^1", "2")]
    assert [bind["model"] for bind in found if bind] == ["m0", "m0", "m7", "m9"]
    last = found[-1]
    assert last is not None and last["workdir"] == {**workdir, "created": False}, "the directory is the source's"


async def test_the_binding_of_a_fork_of_a_fork_is_the_forks() -> None:
    tree = Tree(MemoryHome())
    act(tree, 0, *TURN, ("model", 7), *TURN)
    tree.home.publish((await plan(tree, "1")).for_target("f", seed=99))
    stream = Stream("f", "main")
    for at in (None, "0", "1"):
        made = await plan_fork(tree.home, stream, parse_fork_point(at), now=NOW)
        assert made.main.bind is not None
        assert (made.main.bind["sampling"], made.main.bind["model"]) == ({"seed": 99}, "m7")
    log = tree.home.log(stream)
    tree.home.lines[stream].append(log.append("profile/model", {"model": "m8"}).line)
    made = await plan_fork(tree.home, stream, None, now=NOW)
    assert made.main.bind is not None and made.main.bind["model"] == "m8"


async def test_the_last_prompt_and_reason_are_those_of_the_slice() -> None:
    tree = Tree(MemoryHome())
    act(tree, 0, *TURN, ("queue", 0), *TURN, ("turn", 4))
    first, second, third = [(await plan(tree, at)).main for at in ("0", "1", "2")]
    assert (first.prompt, first.reason) == ("text of p1", "completed")
    assert second.prompt != first.prompt and second.reason == "completed"
    assert third.reason == "cancelled" and third.prompt == second.prompt, "what was never said is no last prompt"
    none = (await plan(tree, "^0")).main
    assert (none.prompt, none.reason) == (None, None)


# -- an agent that inherits a history --------------------------------------------------------------------------------


async def test_an_inherited_history_is_closed_without_a_verdict() -> None:
    """K 4.9: open calls get results that are no errors, in call order; answered ones stay."""
    tree = Tree(MemoryHome())
    act(tree, 0, *TURN, ("turn", 0), ("answer", 7))
    life = tree.lives["main"]
    calls = list(life.log.order.pending_calls)
    assert len(calls) == 3
    tree._answer_one(life, calls[1])
    copy = await plan_agent_fork(tree.home, tree.stream(), agent_id="agent-5", now=NOW)
    before = tree.home.messages(tree.stream())
    tree.home.publish([copy])
    made = Stream("source", "agent-5")
    after = tree.home.messages(made)
    assert after[: len(before)] == before
    closers = after[len(before) :]
    assert [message["content"][0]["tool_call_id"] for message in closers] == [calls[0], calls[2]]
    for message in closers:
        block = message["content"][0]
        assert block["is_error"] is False
        text = block["content"][0]["text"]
        assert all(word in text for word in ("still running", "not part of this context", "do not wait"))
    log = tree.home.log(made)
    assert log.order.open_turn is None and log.last is not None and log.last.type == "log/end-seed"
    assert copy.header["parent"] == {"session_id": "source", "agent_id": "main"}
    assert (copy.header["origin"], copy.header["delegation_depth"], copy.header["session_id"]) == ("fork", 1, "source")


async def test_children_of_an_inherited_history_are_not_the_heirs() -> None:
    tree = family()
    copy = await plan_agent_fork(tree.home, tree.stream(), agent_id="agent-8", now=NOW)
    tree.home.publish([copy])
    made = await plan(tree, None, "agent-8")
    assert agents(made) == ["main"] and made.left_out == ()
    assert made.highest_agent == 2, "but its log speaks of them"
    tree.home.publish(made.for_target("heir"))
    again = await plan_fork(tree.home, Stream("heir", "main"), None, now=NOW)
    assert [log.agent_id for log in again.logs] == ["main"], "nor in a fork of it"
    lines = tree.home.lines[tree.stream("agent-8")]
    for kind, data in (("spawned", {}), ("completed", {"seq": 5, "epoch": 1})):
        event = {"seq": len(lines), "time": 1, "type": f"subagent/{kind}", "data": {"agent_id": "agent-2"} | data}
        lines.append(encode(event))
    assert agents(await plan(tree, None, "agent-8")) == ["main", "agent-2"], "its own are"


async def test_an_heir_that_never_lived_comes_along() -> None:
    """Its position was recorded by who made the copy, under a grant that no event of the log tells of."""
    tree = family()
    copy = await plan_agent_fork(tree.home, tree.stream(), agent_id="agent-8", now=NOW)
    tree.home.publish([copy])
    at = {"agent_id": "agent-8", "seq": copy.header["seed_length"], "epoch": 17}
    tree.lives["main"].log.append("subagent/spawned", at)
    made = await plan(tree)
    assert agents(made) == ["main", "agent-1", "agent-2", "agent-8", "agent-3"]
    tree.home.publish(made.for_target("both"))
    assert tree.home.messages(Stream("both", "agent-8")) == tree.home.messages(tree.stream("agent-8"))
    assert tree.home.headers[Stream("both", "agent-8")]["inherited"] == copy.header["seed_length"]


async def test_a_history_without_anything_open_is_inherited_as_it_is() -> None:
    tree = Tree(MemoryHome())
    for acts in ((), TURN):
        act(tree, 0, *acts)
        copy = await plan_agent_fork(tree.home, tree.stream(), agent_id=f"agent-{len(acts)}", now=NOW)
        assert [decode(line)["type"] for line in copy.tail] == ["log/forked", "log/end-seed"]
        assert "highest_agent" not in copy.header


# -- many ------------------------------------------------------------------------------------------------------------


async def test_a_thousand_children_are_read_a_few_at_a_time() -> None:
    home = MemoryHome()
    tree = Tree(home)
    main = tree.lives["main"].log
    for number in range(1, 1001):
        stream = tree.stream(f"agent-{number}")
        home.headers[stream] = home.headers[tree.stream()] | {"agent_id": stream.agent_id, "delegation_depth": 1}
        home.lines[stream] = home.lines[tree.stream()][:2]
        main.append("subagent/spawned", {"agent_id": stream.agent_id})
        main.append("subagent/completed", {"agent_id": stream.agent_id, "seq": 2, "epoch": 1})
    reading = most = 0
    read = home.read_from

    async def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0)
        reading -= 1
        return await read(*args, **kwargs)

    home.read_from = counted  # type: ignore[method-assign]
    made = await plan(tree)
    assert len(made.logs) == 1001 and made.highest_agent == 1000
    assert [log.agent_id for log in made.logs[1:]] == [f"agent-{number}" for number in range(1, 1001)]
    assert 1 < most <= 16
    assert len(made.for_target("t")) == 1001
