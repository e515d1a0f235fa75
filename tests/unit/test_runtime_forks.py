"""Forks through the public API, everything in this process: equality, points, refusals, documents, directories."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic_core import to_json

from kimi_ray.errors import KimiRayError, SessionError
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from kimi_ray.settings import Limits, Profile, Sampling, Workdir
from kimi_ray.store import open_store
from kimi_ray.store.seam import Stream
from kimi_ray.workspace_handle import Workspace
from tests.unit.runtime_fixtures import Stage, cluster_of, hosts_of, running

READER = Profile(name="reader", system_prompt="You read.", tools=("Read",))


def asked(request: ChatRequest) -> bytes:
    """What goes over the wire, but for whose request it is."""
    return to_json([request.model, request.system, request.messages, request.tools, request.sampling])


async def ask(session: Session, text: str) -> None:
    assert (await (await session.main.submit(text)).result(20)).state == "completed"


async def worked(workspace: Workspace, stage: Stage, model: str, turns: Sequence[int]) -> Session:
    """A session with turns of so many steps; all but the last step of a turn read a file."""
    Path(workspace.path, "a.txt").write_text("alpha\n")
    session = await workspace.create_session(model=model, profile=READER)
    for turn, steps in enumerate(turns):
        text = f"turn {turn}"
        stage.faults[text] = [
            Step.call("Read", {"path": "a.txt"}, text=f"look {number}") for number in range(steps - 1)
        ]
        await ask(session, text)
    return session


async def goes_on(session: Session, stage: Stage) -> ChatRequest:
    """The first request that it makes without a new message."""
    before = len(stage.requests)
    await (await session.main.continue_turn()).result(20)
    return stage.requests[before]


async def ids_in(home: Path) -> set[str]:
    return {document.session_id for document in await open_store(home).list_documents()}


async def code_of(work: Any) -> str:
    with pytest.raises(KimiRayError) as caught:
        await work
    return caught.value.code


# -- equality ---------------------------------------------------------------------------------------------------------


async def test_at_every_turn_and_step_a_fork_asks_what_its_source_asked_next(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        turns = (3, 1, 2)
        source = await worked(workspace, stage, model, turns)
        theirs = {(r.turn, r.step): r for r in stage.requests}
        whole = await source.main.messages()
        points = [f"{t}.{s}" for t, steps in enumerate(turns) for s in range(steps)]
        points += [str(t) for t in range(len(turns))] + [f"^{t}" for t in range(len(turns))]
        for point in points:
            fork = await workspace.fork(source.id, at=point)
            turn, _, step = point.removeprefix("^").partition(".")
            following = theirs.get((int(turn), int(step) + 1)) if step else None
            if following is not None:
                assert asked(await goes_on(fork, stage)) == asked(following), point
            else:
                after = int(turn) + (0 if point.startswith("^") else 1)
                expected = theirs[(after, 0)].messages[:-1] if (after, 0) in theirs else whole
                assert to_json(await fork.main.messages()) == to_json(expected), point
                if not expected:
                    continue
                went = await goes_on(fork, stage)
                assert to_json(went.messages) == to_json(expected) and went.system == "You read.", point
            assert stage.requests[-1].turn == (int(turn) if point.startswith("^") else int(turn) + 1), point
            await fork.close()
        assert await source.main.messages() == whole


async def test_prefixes_are_byte_equal_and_the_marks_follow(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (2, 1))
        forks = await runtime.forks.publish(source.id, 3, at="0.0")
        store = open_store(tmp_path / "home")
        theirs = (await store.read_from(Stream(source.id, "main"), 0)).lines
        logs = [(await store.read_from(Stream(fork.id, "main"), 0)).lines for fork in forks]
        view = await store.inspect(Stream(forks[1].id, "main"))
        seed, header = view.header["seed_length"], view.header
        assert view.closers == () and view.next_seq == seed == len(logs[1])
        assert logs[0] == logs[1] == logs[2]
        cut = header["forked_from"]["seq"]
        assert logs[0][:cut] == theirs[:cut] and b'"step/end"' in theirs[cut - 1]
        types = [line.split(b'"type":"')[1].split(b'"')[0] for line in logs[0][cut:]]
        assert types == [b"turn/end", b"log/forked", b"log/end-seed"]
        assert header["origin"] == "fork" and header["fork_index"] == 1
        assert header["parent"] == {"session_id": source.id, "agent_id": "main"}
        assert len({(await store.inspect(Stream(f.id, "main"))).header["fork_group"] for f in forks}) == 1


async def test_a_fork_of_a_fork_and_what_stays_when_the_source_goes(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session(model=model, profile="bare")
        long = "x" * 40_000  # a blob
        await ask(source, long)
        await ask(source, "two")
        first = await workspace.fork(source.id, at="0")
        await ask(first, "own")
        second = await workspace.fork(first.id)
        third = await workspace.fork(second.id, at="0")
        assert (await second.metadata())["forked_from"]["session_id"] == first.id
        expected = await second.main.messages()
        await workspace.delete(source.id)
        await workspace.delete(first.id)
        assert await second.main.messages() == expected
        assert [stage.prompt(await goes_on(s, stage)) for s in (second, third)] == ["own", long]
        await second.close()
        again = await workspace.resume(second.id)
        assert (await again.main.messages())[: len(expected)] == expected


async def test_a_fork_counts_its_limits_from_zero_and_runs_nothing_that_was_pending(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session(model=model, profile="bare", limits=Limits(max_turns=2))
        await ask(source, "one")
        stage.gate.clear()
        running_one = await source.main.submit("two")
        waiting = await source.main.submit("three")
        await stage.until_running(1)
        fork = await workspace.fork(source.id, at="0")
        assert len(await fork.main.messages()) == 2
        stage.gate.set()
        for text in ("own 1", "own 2"):
            await ask(fork, text)
        assert (await (await fork.main.submit("own 3")).result(10)).stop == "limit:max_turns"
        await running_one.result(10)
        await waiting.result(10)
        assert stage.seen["three"] <= 1
        assert stage.seen["two"] == 1


@pytest.mark.parametrize("settings", [{"shards": 3}, {"backend": "sqlite"}, {"backend": "sqlite", "shards": 2}])
async def test_forks_over_the_shards_of_each_store(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with running(tmp_path, **settings) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1, 2))
        forks = await workspace.fork_many(source.id, 8, at="0", seeds=list(range(8)))
        went = [await goes_on(fork, stage) for fork in forks]
        assert [request.sampling.seed for request in went] == list(range(8))
        assert await ids_in(tmp_path / "home") == {source.id, *(fork.id for fork in forks)}
        assert {row.id for row in await runtime.sessions.list_recent(20, forked_from=source.id)} == {
            fork.id for fork in forks
        }
        assert await code_of(workspace.fork(source.id, new_session_id=forks[3].id)) == "session.exists"
        await workspace.delete(forks[3].id)
        assert await code_of(workspace.fork(source.id, new_session_id=forks[3].id)) == "session.exists"
        assert await code_of(workspace.fork(forks[3].id)) == "session.not_found"
        assert await code_of(runtime.forks.publish(forks[3].id)) == "session.not_found"


# -- points and refusals (K's tests 27 to 30) -------------------------------------------------------------------------


async def test_a_historical_fork_keeps_turns_through_its_point_across_a_resume(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1, 1, 1))
        await source.swarm("late {{item}}", ["x"], profile="bare")
        fork = await workspace.fork(source.id, turn_index=1)
        assert [row["agent_id"] for row in await fork.agents()] == ["main"]
        await fork.close()
        back = await workspace.resume(fork.id)
        texts = [m["content"][0]["text"] for m in await back.main.messages() if m["role"] == "user"]
        assert texts == ["turn 0", "turn 1"]
        assert (await (await back.main.submit("next")).result(10)).turn == 2
        report = await back.swarm("new {{item}}", ["y"], profile="bare")
        assert report.rows[0].agent_id == "agent-1"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"turn_index": -1}, "request.invalid"),
    ({"turn_index": True}, "request.invalid"),
    ({"at": "x"}, "request.invalid"),
    ({"at": "^0.1"}, "request.invalid"),
    ({"at": "1", "turn_index": 0}, "request.conflict"),
    ({"turn_index": 9}, "session.fork_point_not_found"),
    ({"at": "0.7"}, "session.fork_point_not_found"),
    ({"at": "^2"}, "session.fork_point_not_found"),
    ({"agent_id": "agent-4"}, "agent.not_found"),
    ({"workdir": "elsewhere"}, "request.invalid"),
    ({"workdir": Workdir.copy("/no/such/place")}, "workdir.not_found"),
    ({"new_session_id": "a/b"}, "session.bad_id"),
    ({"metadata": {"x": object()}}, "session.bad_metadata"),
]


async def test_what_cannot_be_forked_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1, 2))
        for said, code in REFUSED:
            assert await code_of(workspace.fork(source.id, **said)) == code, said
        for count in (0, -1, 1001, True, "3"):
            assert await code_of(workspace.fork_many(source.id, cast("Any", count))) == "request.invalid"
        for seeds in ([1], [1, -1], -1, [1, 2, 3], "ab", True):
            assert await code_of(workspace.fork_many(source.id, 2, seeds=cast("Any", seeds))) == "request.invalid"
        assert await ids_in(tmp_path / "home") == {source.id}
        assert not list((tmp_path / "home" / "unpublished" / "groups").glob("*"))
        await ask(source, "goes on")


async def test_refusals_come_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with running(tmp_path) as (runtime, stage, model):
        workspace, other = runtime.workspace(tmp_path / "work"), runtime.workspace(tmp_path / "other")
        source = await worked(workspace, stage, model, (1,))
        assert await code_of(workspace.fork("session_none", at="bad")) == "session.not_found"
        assert await code_of(other.fork(source.id)) == "session.not_found"
        stage.gate.clear()
        prompt = await source.main.submit("runs")
        await stage.until_running(1)
        with pytest.raises(SessionError) as caught:
            await workspace.fork(source.id, new_session_id=source.id)
        assert caught.value.code == "session.fork_active_turn" and caught.value.retryable
        assert await code_of(workspace.fork(source.id, at="7", new_session_id=source.id)) == (
            "session.fork_point_not_found"
        )
        assert await code_of(workspace.fork(source.id, at="0", new_session_id=source.id)) == "session.exists"
        assert (await (await workspace.fork(source.id, at="0")).main.messages())[-1]["role"] == "assistant"
        stage.gate.set()
        await prompt.result(10)
        await workspace.fork(source.id)


async def test_after_the_close_nothing_is_forked(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1,))
        await source.close()
        with pytest.raises(KimiRayError):
            await source.fork_agent()
        await runtime.close()
        assert await code_of(workspace.fork(source.id)) == "runtime.closed"
        assert await code_of(runtime.forks.publish(source.id)) == "runtime.closed"


async def test_a_model_that_is_not_known_here_is_told_before_anything_is_made(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        source = await worked(runtime.workspace(tmp_path / "work"), stage, model, (1,))
        await source.close()
        assert await code_of(runtime.workspace(tmp_path / "work").fork(source.id, model="nobody")) == (
            "model.not_configured"
        )
        assert await ids_in(tmp_path / "home") == {source.id}
        (fork,) = await runtime.forks.publish(source.id)
        assert fork.title == "Fork: turn 0"


# -- the source: cold, archived, elsewhere, at work -------------------------------------------------------------------


async def test_a_cold_source_is_not_opened_and_an_archived_one_is_as_good(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1, 1))
        await source.close()
        await workspace.archive(source.id)
        store = open_store(tmp_path / "home")
        before = await store.inspect(Stream(source.id, "main"))
        fork = await workspace.fork(source.id)
        other = await workspace.fork(source.id, at="0")
        assert await store.inspect(Stream(source.id, "main")) == before
        assert not await runtime.is_live(source.id)
        assert (await fork.metadata())["archived"] is False
        assert len(await fork.main.messages()) == 4 and len(await other.main.messages()) == 2
        status = await runtime.connection.registry.call("status", timeout_s=5, group="control")
        placed = [s for host in status["hosts"] for s in host["sessions"]]
        assert sorted(placed) == sorted([fork.id, other.id])


async def test_a_source_that_another_program_has_open(tmp_path: Path) -> None:
    async with running(tmp_path) as (first, stage, model):
        workspace = first.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1, 1))
        await source.flush()
        config = {"durability": "none", "write_window_ms": 5, "claim_timeout_s": 0.3}
        async with Runtime.connect(tmp_path / "home", "in-process", config=config) as second:
            other = second.workspace(tmp_path / "work")
            with pytest.raises(KimiRayError) as caught:
                await other.fork(source.id)
            assert caught.value.code == "session.in_use"
            fork = await other.fork(source.id, at="0")
            assert len(await fork.main.messages()) == 2
        await ask(source, "goes on")


async def a_prompt_comes_during_a_fork(home: Path, held_at: str, held_s: float) -> None:
    """The fork does not know the prompt, the source runs it once, and not before the fork is there."""
    async with running(home) as (runtime, stage, model):
        workspace = runtime.workspace(home / "work")
        source = await worked(workspace, stage, model, (1,))
        calls = Calls(runtime)
        hold = calls.hold(held_at)
        forking = asyncio.ensure_future(workspace.fork(source.id))
        await hold.reached.wait()
        prompt = await source.main.submit("late")
        await asyncio.sleep(held_s)
        assert stage.seen["late"] == 0
        hold.go.set()
        fork = await forking
        assert (await prompt.result(10)).text == "did late"
        assert len(await fork.main.messages()) == 2
        await asyncio.sleep(0)
        assert stage.seen["late"] == 1


async def test_a_prompt_that_comes_during_a_fork_waits_and_then_runs(tmp_path: Path) -> None:
    """W4: between the check and the copy nothing can start."""
    await a_prompt_comes_during_a_fork(tmp_path, "begin_publication", 0.05)


async def test_a_fork_that_takes_longer_than_its_lease_renews_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kimi_ray.hosts.session_forking.LEASE_S", 0.4)
    await a_prompt_comes_during_a_fork(tmp_path, "copy_session", 1.0)


async def test_a_source_that_does_not_stand_still_to_the_end_makes_no_fork(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1,))
        calls = Calls(runtime)
        hold = calls.hold("copy_session")
        forking = asyncio.ensure_future(workspace.fork(source.id))
        await hold.reached.wait()
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        hold.go.set()
        assert await code_of(forking) == "session.quiescence_lost"
        assert await ids_in(tmp_path / "home") == {source.id}
        await ask(source, "goes on")
        await workspace.fork(source.id)


async def test_a_running_swarm_is_work_too(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1,))
        stage.gate.clear()
        swarm = await source.start_swarm("do {{item}}", ["a", "b"], profile="bare")
        await stage.until_running(2)
        with pytest.raises(SessionError) as caught:
            await workspace.fork(source.id)
        assert caught.value.code == "session.fork_active_turn" and caught.value.retryable
        assert caught.value.details["runs"] == [swarm.run_id] and swarm.run_id in caught.value.message
        fork = await workspace.fork(source.id, at="0")
        assert [row["agent_id"] for row in await fork.agents()] == ["main"]
        stage.gate.set()
        await swarm.result()
        whole = await workspace.fork(source.id)
        assert [row["agent_id"] for row in await whole.agents()] == ["main", "agent-1", "agent-2"]
        for agent_id in ("agent-1", "agent-2"):
            assert await whole.agent(agent_id).messages() == await source.agent(agent_id).messages()


async def test_the_children_of_a_fork_come_back_when_addressed_and_no_number_is_used_twice(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1,))
        await source.swarm("do {{item}}", ["a"], profile=READER)
        await ask(source, "two")
        await source.swarm("do {{item}}", ["b"], profile=READER, workdir=Workdir.copy(workspace.path))
        fork = await workspace.fork(source.id, at="1")
        assert [row["agent_id"] for row in await fork.agents()] == ["main", "agent-1"]
        stage.faults["again"] = [Step.call("Read", {"path": "a.txt"})]
        assert (await (await fork.agent("agent-1").submit("again")).result(10)).text == "did again"
        assert (await (await source.agent("agent-1").submit("again")).result(10)).state == "completed"
        here = Workdir.shared(workspace.path, writes=True)  # its own went with it
        late = await workspace.fork(source.id, agent_id="agent-2", at="0", workdir=here)
        await ask(late, "alone")
        helper = await fork.fork_agent("agent-1")
        assert helper.id == "agent-2"
        spoken_of = await workspace.fork(source.id)
        await spoken_of.close()
        assert (await (await workspace.resume(spoken_of.id)).fork_agent()).id == "agent-3"


async def test_numbers_of_agents_that_were_left_out_are_not_used_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await worked(workspace, stage, model, (1,))
        stage.gate.clear()
        swarm = await source.start_swarm("do {{item}}", ["a", "b"], profile="bare")
        await stage.until_running(2)
        await source.flush()  # main has heard of them
        prompt = await source.main.submit("beside")
        await stage.until_running(3)
        stage.gate.set()
        await prompt.result(10)
        await swarm.result()
        await ask(source, "last")
        events = [event async for event in source.main.events()]
        told = [event.seq for event in events if event.type == "subagent/completed"]
        begun = next(event.seq for event in events if event.type == "turn/end" and event.data["turn"] == 1)
        fork = await workspace.fork(source.id, at="1")
        left = [row["agent_id"] for row in await fork.agents()]
        expected = ["main"] + [e.data["agent_id"] for e in events if e.seq in told and e.seq < begun]
        assert sorted(left) == sorted(expected)
        assert (await fork.fork_agent()).id == "agent-3"


# -- documents --------------------------------------------------------------------------------------------------------


async def test_what_a_fork_says_of_itself(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session(
            model=model, profile="bare", metadata={"goal": "g", "a": 1, "b": 2}, tags={"t": "1", "u": "1"}
        )
        await ask(source, "first words")
        await source.metadata()
        await ask(source, "second")
        fork = await workspace.fork(source.id, at="0", metadata={"b": 3, "goal": "no"}, tags={"u": "2"})
        value = await fork.metadata()
        theirs = await source.metadata()
        assert value["custom"] == {"a": 1, "b": 3} and value["tags"] == {"t": "1", "u": "2"}
        assert (value["title"], value["title_kind"]) == ("Fork: first words", "replaceable")
        assert value["last_prompt"] == "first words" and value["last_turn_reason"] == "completed"
        assert value["updated_at"] <= theirs["updated_at"] and value["created_at"] >= theirs["created_at"]
        assert value["forked_from"] | {"seq": 0} == {"session_id": source.id, "agent_id": "main", "at": "0", "seq": 0}
        await ask(fork, "words of its own")
        told = await fork.metadata()
        assert (told["title"], told["last_prompt"]) == ("Fork: first words", "words of its own")
        named = await workspace.fork(source.id, title="Mine")
        assert ((await named.metadata())["title"], (await named.metadata())["title_kind"]) == ("Mine", "custom")
        child = await workspace.create_child(source.id, metadata={"c": 1})
        custom = (await child.metadata())["custom"]
        assert custom == {"a": 1, "b": 2, "c": 1, "parent_session_id": source.id, "child_session_kind": "child"}
        assert (await child.metadata())["title"] == "Child: first words"
        listed = await runtime.sessions.list_recent(10)
        assert {row.id for row in listed} == {source.id, fork.id, named.id, child.id}
        assert [row.id for row in await runtime.sessions.list_recent(10, child_of=source.id)] == [child.id]
        assert theirs["custom"] == {"goal": "g", "a": 1, "b": 2}


async def test_sampling_of_a_fork_is_on_top(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session(
            model=model, profile="bare", sampling=Sampling(temperature=0.5, top_p=0.9, seed=1)
        )
        await ask(source, "one")
        fork = await workspace.fork(source.id, sampling=Sampling(temperature=1.0))
        assert (await goes_on(fork, stage)).sampling == Sampling(temperature=1.0, top_p=0.9, seed=1)
        await fork.close()
        back = await workspace.resume(fork.id)
        assert (await goes_on(back, stage)).sampling == Sampling(temperature=1.0, top_p=0.9, seed=1)


async def test_a_switched_model_lasts_over_forks_and_resumes(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        source = await workspace.create_session(model="scripted:kimi_ray.llm.scripts:echo", profile="bare")
        await ask(source, "one")
        await source.main.set_model(model)
        await ask(source, "two")
        late, early = await workspace.fork(source.id), await workspace.fork(source.id, at="0")
        assert (await (await late.main.submit("x")).result(10)).text == "did x"
        assert (await (await early.main.submit("x")).result(10)).text == "x"
        for session, text in ((source, "did y"), (late, "did y"), (early, "y")):
            await session.close()
            back = await workspace.resume(session.id)
            assert (await (await back.main.submit("y")).result(10)).text == text


async def test_a_model_that_is_gone_is_not_asked_for_when_it_was_switched(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        workspace = runtime.workspace(tmp_path / "work")
        ghost = runtime.resolve_model(model).model_copy(update={"name": "ghost"})
        source = await workspace.create_session(model=ghost, profile="bare")
        await ask(source, "one")
        await source.main.set_model(model)
        await ask(source, "two")
        await source.close()
        assert await code_of(workspace.fork(source.id, at="0")) == "model.not_configured"
        assert await ids_in(tmp_path / "home") == {source.id}
        await ask(await workspace.fork(source.id), "three")
        await ask(await workspace.resume(source.id), "three")


# -- calls ------------------------------------------------------------------------------------------------------------


class Hold:
    """A call that stops before it is made."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go = asyncio.Event()


class Calls:
    """What goes from core to core in this process, to be held or counted."""

    def __init__(self, runtime: Runtime) -> None:
        cluster: Any = cluster_of(runtime)
        self._holds: dict[str, Hold] = {}
        self._call = cluster._call
        cluster._call = self._watched

    def hold(self, method: str) -> Hold:
        hold = self._holds[method] = Hold()
        return hold

    async def _watched(self, name: str, method: str, *rest: Any) -> Any:
        hold = self._holds.pop(method, None)
        if hold is not None:
            hold.reached.set()
            await hold.go.wait()
        return await self._call(name, method, *rest)
