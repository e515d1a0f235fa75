"""Agent hosts with a real store in one process: activation, order, crashes of host and store, twins."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.agent.profiles import BARE
from kimi_ray.config import load_config
from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.events import LogHeader, WriterRef, parse_event
from kimi_ray.hosts.local_cluster import LocalCluster
from kimi_ray.hosts.ports import Peer, store_name
from kimi_ray.hosts.specs import AgentSpec, LogEntry, Outcome, PromptSpec, RunRequest, Submit
from kimi_ray.hosts.store_host import StoreHost, store_options
from kimi_ray.ids import new_session_id, new_ulid
from kimi_ray.llm.models import ModelSettings, ResolvedModel
from kimi_ray.log import EventLog
from kimi_ray.settings import Profile, Workdir
from kimi_ray.store.fs import RealFs
from kimi_ray.store.identity import open_identity
from kimi_ray.store.seam import Stream
from kimi_ray.tools.workdirs import PreparedWorkdir


class Place:
    """A cluster of one store and as many agent hosts as a test starts."""

    def __init__(self, home: Path) -> None:
        self.config = load_config(home=home, store_timeout_s=5.0, write_window_ms=20, sync_interval_ms=100)
        self.home_id = open_identity(RealFs(), str(home), store_options(self.config)).home_id
        self.cluster = LocalCluster(self.home_id, self.config)
        self.session_id = new_session_id()

    async def start(self) -> None:
        await self.cluster.start_host("store", store_name(self.home_id, 0))
        await self.host("a")
        await self.store.call("open_session", self.session_id, "nonce", "wd_x_000000000000", timeout_s=20)

    @property
    def store(self) -> Peer:
        return self.cluster.peer(store_name(self.home_id, 0))

    async def host(self, name: str) -> Peer:
        full = f"{self.home_id}/agents-{name}"
        await self.cluster.start_host("agents", full)
        return self.cluster.peer(full)

    def peer(self, name: str = "a") -> Peer:
        return self.cluster.peer(f"{self.home_id}/agents-{name}")

    def kill(self, name: str) -> None:
        self.cluster.kill_host(f"{self.home_id}/agents-{name}")

    async def restart_store(self) -> None:
        """The store dies and another takes its place; its locks go as the kernel lets go of those of a process."""
        self.cluster.kill_host(store_name(self.home_id, 0))
        for entry in Path("/proc/self/fd").iterdir():
            if os.path.realpath(entry).startswith(f"{self.config.home}/writers/"):
                os.close(int(entry.name))
        await self.cluster.start_host("store", store_name(self.home_id, 0))

    def stream(self, agent: str) -> Stream:
        return Stream(self.session_id, agent)

    def spec(self, agent: str = "main", *, script: Any = None, new: bool = True, **options: Any) -> AgentSpec:
        settings = ModelSettings(provider="scripted", script=script or ("ok",), on_end="repeat", **options)
        header = LogHeader(
            session_id=self.session_id, agent_id=agent, created_at=1, writer=WriterRef(name="kimi-ray", version="t")
        )
        model = ResolvedModel(name="scripted", provider="scripted", model="scripted", settings=settings)
        return AgentSpec(self.stream(agent), new_ulid(), BARE, model, header=header.to_data() if new else None)

    async def lines(self, agent: str = "main") -> list[Any]:
        page = await self.store.call("read_from", self.stream(agent), 0, 100_000, timeout_s=10)
        return [parse_event(line, at=seq) for seq, line in enumerate(page.lines)]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path / "home")
    await place.start()
    yield place
    await place.cluster.close()


async def ran(host: Peer, *requests: RunRequest) -> None:
    for ack in await host.call("run_many", list(requests), timeout_s=20):
        assert ack.error is None, ack.error


async def ended(host: Peer, stream: Stream, prompt_id: str) -> Outcome:
    async with asyncio.timeout(20):
        while True:
            found = await host.call("wait_any", [(stream, prompt_id)], 10.0, timeout_s=15, group="wait")
            if found:
                return found[0]


def checked(events: list[Any]) -> list[Any]:
    """The events, folded again under all rules."""
    header = LogHeader(session_id="s", agent_id="a", created_at=1, writer=WriterRef(name="k", version="t"))
    log = EventLog(header)
    for event in events:
        log.append(event.type, event.data, surface=event.surface, sources=event.sources)
    return events


async def test_what_an_outcome_tells_is_durable(place: Place) -> None:
    await ran(place.peer(), RunRequest(place.spec(), (PromptSpec("p", "hi"),)))
    outcome = await ended(place.peer(), place.stream("main"), "p")
    place.kill("a")
    await place.restart_store()
    events = checked(await place.lines())
    assert len(events) >= outcome.seq
    assert events[outcome.seq - 1].type == "prompt/completed"


async def test_unawaited_submits_run_in_the_order_they_were_numbered(place: Place) -> None:
    await ran(place.peer(), RunRequest(place.spec(), ()))
    submits = [Submit(place.stream("main"), (PromptSpec(f"p{n}", f"say {n}"),), "me", n) for n in range(200)]
    submits = submits[100:][::-1] + submits[:100][::-1]
    acks = await asyncio.gather(*(place.peer().call("submit_many", [one], timeout_s=30) for one in submits))
    assert all(ack[0].error is None for ack in acks)
    await ended(place.peer(), place.stream("main"), "p199")
    started = [event.data["prompt_id"] for event in await place.lines() if event.type == "prompt/started"]
    assert started == [f"p{n}" for n in range(200)]


async def test_a_request_sent_twice_is_done_once(place: Place) -> None:
    request = RunRequest(place.spec(), (PromptSpec("p", "hi"),))
    await asyncio.gather(ran(place.peer(), request), ran(place.peer(), request))
    await ended(place.peer(), place.stream("main"), "p")
    types = [event.type for event in await place.lines()]
    assert types.count("turn/start") == 1
    assert types.count("runtime/activated") == 1


async def test_an_agent_of_a_killed_host_goes_on_elsewhere(place: Place) -> None:
    slow = place.spec(script=("first",), latency_s=30.0)
    await ran(place.peer(), RunRequest(slow, (PromptSpec("p", "hi", on_interrupt="continue"),)))
    place.kill("a")
    other = await place.host("b")
    again = RunRequest(place.spec(script=("second",)), (PromptSpec("p", "hi", on_interrupt="continue"),))
    await ran(other, again)
    outcome = await ended(other, place.stream("main"), "p")
    assert outcome.result.state == "completed"
    assert outcome.result.text == "second"
    assert outcome.totals.interruptions == 1
    assert outcome.epoch == 2
    kinds = [event.data["reason"]["kind"] for event in checked(await place.lines()) if event.type == "turn/end"]
    assert kinds == ["interrupted", "completed"]


async def test_a_twin_is_fenced_and_its_waiters_hear_of_it(place: Place) -> None:
    await ran(place.peer(), RunRequest(place.spec(script=("x",), latency_s=30.0), (PromptSpec("p", "hi"),)))
    waiting = asyncio.create_task(ended(place.peer(), place.stream("main"), "p"))
    other = await place.host("b")
    await ran(other, RunRequest(place.spec(new=False), ()))
    await place.peer().call("record", place.stream("main"), [LogEntry("note/added", {"text": "x"})], timeout_s=5)
    outcome = await waiting
    assert outcome.result.state == "failed"
    assert outcome.result.error is not None and outcome.result.error["code"] == "store.fenced"
    events = checked(await place.lines())
    assert not any(event.type == "note/added" for event in events)


async def test_a_store_that_is_restarted_in_the_middle_loses_nothing(place: Place) -> None:
    streams = [f"agent-{n}" for n in range(20)]
    requests = [
        RunRequest(place.spec(name), tuple(PromptSpec(f"p{n}", f"say {n}") for n in range(10))) for name in streams
    ]
    running = asyncio.create_task(ran(place.peer(), *requests))
    for _ in range(3):
        await asyncio.sleep(0)
        await place.restart_store()
    await running
    for name in streams:
        outcome = await ended(place.peer(), place.stream(name), "p9")
        assert outcome.result.state == "completed", outcome.result.error
    for name in streams:
        completed = [event for event in checked(await place.lines(name)) if event.type == "prompt/completed"]
        assert len(completed) == 10


async def test_released_agents_let_go_of_everything(place: Place) -> None:
    await ran(place.peer(), RunRequest(place.spec("agent-1"), (PromptSpec("p", "hi"),), release=True))
    await ended(place.peer(), place.stream("agent-1"), "p")
    async with asyncio.timeout(10):
        while (await place.peer().call("ping", timeout_s=5, group="control"))["agents"]:
            await asyncio.sleep(0.01)
    assert (await ended(place.peer(), place.stream("agent-1"), "p")).result.text == "ok"
    view = await place.store.call("inspect", place.stream("agent-1"), timeout_s=5)
    assert view.closers == ()


async def test_unknown_agents_and_prompts_are_named_errors(place: Place) -> None:
    outcome = await ended(place.peer(), place.stream("nobody"), "p")
    assert outcome.result.error is not None and outcome.result.error["code"] == "agent.not_found"
    await ran(place.peer(), RunRequest(place.spec(), ()))
    outcome = await ended(place.peer(), place.stream("main"), "nothing")
    assert outcome.result.error is not None and outcome.result.error["code"] == "prompt.not_found"
    [ack] = await place.peer().call("submit_many", [Submit(place.stream("nobody"), ())], timeout_s=5)
    assert ack.error is not None and ack.error["code"] == "agent.not_found"


async def test_one_failing_request_does_not_fail_its_neighbours(place: Place) -> None:
    good, bad = place.spec("agent-1"), place.spec("agent-2")
    bad = AgentSpec(bad.stream, bad.nonce, Profile(name="x", tools=("Nope",)), bad.model, header=bad.header)
    acks = await place.peer().call(
        "run_many",
        [RunRequest(good, (PromptSpec("p", "hi"),)), RunRequest(bad, (PromptSpec("p", "hi"),))],
        timeout_s=20,
    )
    assert acks[0].error is None
    assert acks[1].error is not None and acks[1].error["code"] == "tool.unknown"
    assert (await ended(place.peer(), good.stream, "p")).result.state == "completed"


async def test_events_are_followed_with_a_cursor_through_a_revival(place: Place) -> None:
    await ran(place.peer(), RunRequest(place.spec(), (PromptSpec("p", "hi"),)))
    await ended(place.peer(), place.stream("main"), "p")
    seen: list[int] = []
    cursor = 0
    while True:
        page = await place.peer().call(
            "read_events", place.stream("main"), cursor, 3, 1 << 20, 0.05, timeout_s=10, group="wait"
        )
        if not page.lines:
            break
        seen += [parse_event(line).seq for line in page.lines]
        cursor = page.first_seq + len(page.lines)
    assert seen == list(range(cursor))
    follower = asyncio.create_task(
        place.peer().call("read_events", place.stream("main"), cursor, 10, 1 << 20, 20.0, timeout_s=30, group="wait")
    )
    await asyncio.sleep(0)
    await place.peer().call("record", place.stream("main"), [LogEntry("note/added", {"text": "x"})], timeout_s=5)
    page = await follower
    assert [parse_event(line).type for line in page.lines] == ["note/added"]
    assert page.epoch == 1


async def test_a_copied_directory_goes_with_its_rollout_and_stays_with_a_sleeping_agent(
    place: Place, tmp_path: Path
) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "f.txt").write_text("x")
    base = place.spec("agent-1")
    rollout = AgentSpec(base.stream, base.nonce, BARE, base.model, base.header, workdir=Workdir.copy(str(source)))
    await ran(place.peer(), RunRequest(rollout, (PromptSpec("p", "hi"),), release=True))
    outcome = await ended(place.peer(), base.stream, "p")
    assert outcome.workdir_path is not None and outcome.workdir_path != str(source)
    async with asyncio.timeout(10):
        while Path(outcome.workdir_path).exists():
            await asyncio.sleep(0.01)
    base = place.spec("agent-2")
    sleeper = AgentSpec(base.stream, base.nonce, BARE, base.model, base.header, workdir=Workdir.copy(str(source)))
    await ran(place.peer(), RunRequest(sleeper, (PromptSpec("p", "hi"),)))
    path = (await ended(place.peer(), base.stream, "p")).workdir_path
    await place.peer().call("close_agents", [base.stream], False, timeout_s=20, group="store")
    assert path is not None and (Path(path) / "f.txt").read_text() == "x"
    (Path(path) / "f.txt").write_text("changed")
    await ran(
        place.peer(), RunRequest(AgentSpec(base.stream, new_ulid(), BARE, base.model, workdir=sleeper.workdir), ())
    )
    progress = await place.peer().call("progress", [base.stream], timeout_s=5, group="control")
    assert progress[0].phase == "idle"
    assert (Path(path) / "f.txt").read_text() == "changed"
    import shutil

    shutil.rmtree(path)
    await place.peer().call("close_agents", [base.stream], False, timeout_s=20, group="store")
    [ack] = await place.peer().call(
        "run_many",
        [RunRequest(AgentSpec(base.stream, new_ulid(), BARE, base.model, workdir=sleeper.workdir), ())],
        timeout_s=20,
    )
    assert ack.error is not None and ack.error["code"] == "workdir.lost"


async def test_a_rollout_that_has_ended_here_is_told_again_and_not_brought_to_life(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    base = place.spec("agent-1")
    rollout = AgentSpec(
        base.stream, base.nonce, BARE, base.model, base.header, workdir=Workdir.copy(str(tmp_path / "src"))
    )
    await ran(place.peer(), RunRequest(rollout, (PromptSpec("p", "hi"),), release=True))
    outcome = await ended(place.peer(), base.stream, "p")
    async with asyncio.timeout(10):
        while base.stream in [Stream(*one) for one in (await place.peer().call("ping", timeout_s=5))["streams"]]:
            await asyncio.sleep(0.01)
    again = AgentSpec(base.stream, new_ulid(), BARE, base.model, workdir=rollout.workdir)
    await ran(place.peer(), RunRequest(again, (PromptSpec("p", "hi"),)))  # its directory went with it
    assert await ended(place.peer(), base.stream, "p") == outcome
    types = [event.type for event in await place.lines("agent-1")]
    assert types.count("runtime/activated") == types.count("prompt/completed") == 1


async def test_what_an_agent_accepted_is_stored_when_it_is_adopted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever adopts looks at the logs then: a prompt that is not in one would be given again."""
    await ran(place.peer(), RunRequest(place.spec(), ()), RunRequest(place.spec("agent-1"), ()))
    appending, may_go_on = asyncio.Event(), asyncio.Event()
    real = StoreHost.append

    async def slowly(host: StoreHost, call: Any) -> Any:
        appending.set()
        await may_go_on.wait()
        return await real(host, call)

    monkeypatch.setattr(StoreHost, "append", slowly)
    stream = place.stream("agent-1")
    submit = asyncio.create_task(
        place.peer().call("submit_many", [Submit(stream, (PromptSpec("p", "hi"),))], timeout_s=20)
    )
    await appending.wait()
    adopt = asyncio.create_task(place.peer().call("adopt", place.session_id, "nonce", timeout_s=20))
    await asyncio.wait([adopt], timeout=0.2)
    assert not adopt.done()
    may_go_on.set()
    assert sorted(await adopt) == ["agent-1", "main"]
    assert "prompt/submitted" in [event.type for event in await place.lines("agent-1")]
    await submit


async def test_a_host_that_closes_waits_for_the_ends_of_its_agents(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout that was let go just before still loses its private directory."""
    (tmp_path / "src").mkdir()
    removing, may_go_on = asyncio.Event(), asyncio.Event()
    real = PreparedWorkdir.release

    async def slowly(workdir: PreparedWorkdir, keep: bool | None = None) -> None:
        removing.set()
        await may_go_on.wait()
        await real(workdir, keep)

    monkeypatch.setattr(PreparedWorkdir, "release", slowly)
    base = place.spec("agent-1")
    rollout = replace(base, workdir=Workdir.copy(str(tmp_path / "src")))
    await ran(place.peer(), RunRequest(rollout, (PromptSpec("p", "hi"),), release=True))
    path = (await ended(place.peer(), base.stream, "p")).workdir_path
    assert path is not None
    async with asyncio.timeout(10):
        await removing.wait()
    closing = asyncio.create_task(place.peer().call("close", timeout_s=20, group="control"))
    await asyncio.sleep(0)
    may_go_on.set()
    async with asyncio.timeout(10):
        await closing
    assert not Path(path).exists()


async def test_an_agent_that_cannot_end_well_is_forced_to_give_its_log_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = place.spec("agent-1")
    await ran(place.peer(), RunRequest(spec, ()))

    async def fails(_agent: LiveAgent, **_how: Any) -> None:
        raise KimiRayError("its environment cannot be left", code="tool.failed")

    with monkeypatch.context() as patch:
        patch.setattr(LiveAgent, "close", fails)
        [ack] = await place.peer().call("close_agents", [spec.stream], True, timeout_s=20, group="store")
    assert ack.error is None
    assert (await place.peer().call("stats", timeout_s=5, group="control"))["open_logs"] == 0
    await ran(place.peer(), RunRequest(replace(spec, header=None, nonce=new_ulid()), ()))


async def test_cancel_of_an_unknown_agent_is_refused(place: Place) -> None:
    with pytest.raises(KimiRayError) as refused:
        await place.peer().call("cancel", place.stream("nobody"), None, "user", timeout_s=5)
    assert refused.value.code == "agent.not_found"


async def test_a_follower_of_an_agent_that_was_fenced_is_told_at_once(place: Place) -> None:
    spec = place.spec()
    await ran(place.peer(), RunRequest(spec, (PromptSpec("p", "hi"),)))
    await ended(place.peer(), spec.stream, "p")
    core: Any = place.cluster._held[place.peer().name].core
    end = core._agents[spec.stream].journal.log.next_seq
    asked = ("read_events", spec.stream, end, 100, 1 << 20, 15.0)
    following = asyncio.create_task(place.peer().call(*asked, timeout_s=20, group="wait"))
    while spec.stream not in core._reader._tails:
        await asyncio.sleep(0.01)
    other = await place.host("b")
    await ran(other, RunRequest(replace(spec, header=None, nonce=new_ulid()), ()))
    # The old host hears of it when somebody asks there under a nonce that it does not know.
    core._fenced(spec.stream)
    async with asyncio.timeout(5):
        page = await following
    assert not page.lines and spec.stream not in core._reader._tails


@pytest.mark.parametrize("fails_with", [StoreError("full", code="store.disk_full"), OSError("no such thing")])
async def test_a_follower_of_an_agent_that_cannot_be_closed_is_told_at_once(
    place: Place, fails_with: Exception
) -> None:
    spec = place.spec()
    await ran(place.peer(), RunRequest(spec, (PromptSpec("p", "hi"),)))
    await ended(place.peer(), spec.stream, "p")
    core: Any = place.cluster._held[place.peer().name].core
    agent, give_back = core._agents[spec.stream], core._opener.give_back
    asked = ("read_events", spec.stream, agent.journal.log.next_seq, 100, 1 << 20, 15.0)
    following = asyncio.create_task(place.peer().call(*asked, timeout_s=20, group="wait"))
    while spec.stream not in core._reader._tails:
        await asyncio.sleep(0.01)

    async def fail(*_args: Any, **_options: Any) -> None:
        raise fails_with

    core._opener.give_back = fail
    await asyncio.gather(core.close_agents([spec.stream], False), return_exceptions=True)
    core._opener.give_back = give_back
    assert core._agents[spec.stream] is agent and agent.closed, "it stays until it can be closed"
    async with asyncio.timeout(5):
        assert not (await following).lines


async def test_an_agent_that_is_opened_while_its_host_closes_gives_its_log_back(place: Place) -> None:
    spec = place.spec()
    core: Any = place.cluster._held[place.peer().name].core
    entering, goes_on = asyncio.Event(), asyncio.Event()
    enter = core._scopes.enter

    async def slowly(*args: Any) -> Any:
        entering.set()
        await goes_on.wait()
        return await enter(*args)

    core._scopes.enter = slowly
    opening = asyncio.create_task(place.peer().call("run_many", [RunRequest(spec, ())], timeout_s=20))
    await entering.wait()
    closing = asyncio.create_task(core.close())
    await asyncio.sleep(0.02)
    goes_on.set()
    async with asyncio.timeout(10):
        await closing
        await asyncio.wait([opening])
    assert not core._agents and not core._opener._open
    assert not core._scopes._scopes
