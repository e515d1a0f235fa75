"""The coordinator against hosts that refuse, hang, die and lie."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kimi_ray.errors import AgentError, KimiRayError, RunError, RuntimeFault, StoreError, ToolError
from kimi_ray.hosts import swarm_rows
from kimi_ray.hosts.ports import Peer
from kimi_ray.hosts.specs import Ack, AgentTotals, LogEntry, Outcome, PlaceAgent, PromptResult, RunRequest
from kimi_ray.hosts.swarm_run import SwarmRun
from kimi_ray.hosts.swarm_services import SwarmServices
from kimi_ray.hosts.swarm_words import KeyEnd, Rollout, SwarmSpec
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.runs.items import RolloutKey
from kimi_ray.runs.rows import AttemptRow
from kimi_ray.runs.schedule import DEFAULT_RETRY_ON
from kimi_ray.runs.seeds import RunSeed
from kimi_ray.settings import Limits, Profile, Usage
from kimi_ray.store.seam import Stream

Hook = Callable[[str, RunRequest], KimiRayError | None]


class World:
    """Agent hosts, a registry and a session, all pretended."""

    def __init__(self, hosts: int = 2) -> None:
        self.hosts = [f"h{number}" for number in range(hosts)]
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self.results: dict[tuple[Stream, str], Outcome] = {}
        self.held: set[str] = set()
        """Prompt texts that do not end yet."""
        self.running: dict[tuple[Stream, str], tuple[str, RunRequest]] = {}
        self.changed = asyncio.Event()
        self.on_run: Hook = lambda _host, _request: None
        self.load: Counter[str] = Counter()
        self.requests: list[tuple[str, RunRequest]] = []
        self.calls: Counter[str] = Counter()
        self.events: list[LogEntry] = []
        self.flushed = 0
        self.next_number = 1
        self.turn = 0

    def peer(self, name: str) -> Peer:
        return _Peer(self, name)  # type: ignore[return-value]

    async def place_agents(self, wishes: list[PlaceAgent]) -> list[str]:
        alive = [host for host in self.hosts if host not in self.dead]
        if not alive:
            raise RuntimeFault("nowhere", code="infra.unschedulable")
        chosen: list[str] = []
        for _ in wishes:
            host = min(alive, key=lambda name: self.load[name])
            self.load[host] += 1
            chosen.append(host)
        return chosen

    async def released(self, host: str, count: int = 1) -> None:
        self.load[host] -= count
        assert self.load[host] >= 0

    async def report_lost(self, host: str) -> bool:
        if host in self.dead:
            self.load[host] = 0
        return host in self.dead

    async def numbers(self, count: int) -> range:
        first = self.next_number
        self.next_number += count
        return range(first, self.next_number)

    async def flush_log(self) -> None:
        self.flushed += 1

    def services(self) -> SwarmServices:
        return SwarmServices(
            self, self, self.events.extend, self.flush_log, self.numbers, lambda _entries: None, lambda _error: None
        )  # type: ignore[arg-type]

    def end(self, text: str, *, state: str = "completed", error: KimiRayError | None = None) -> None:
        """Let the held prompts of this text end."""
        self.held.discard(text)
        for (stream, prompt_id), (host, request) in list(self.running.items()):
            if request.prompts[0].text == text and host not in self.dead:
                self._finish(stream, prompt_id, text, state, error)

    def kill(self, host: str) -> None:
        self.dead.add(host)
        self.changed.set()

    def start(self, host: str, request: RunRequest) -> None:
        stream, prompt = request.agent.stream, request.prompts[0]
        self.running[stream, prompt.prompt_id] = (host, request)
        if prompt.text not in self.held:
            self._finish(stream, prompt.prompt_id, prompt.text, "completed", None)

    def _finish(self, stream: Stream, prompt_id: str, text: str, state: str, error: KimiRayError | None) -> None:
        self.running.pop((stream, prompt_id), None)
        data = error.to_data() if error is not None else None
        result = PromptResult(prompt_id=prompt_id, state=state, stop=state, text=f"did {text}", error=data)  # type: ignore[arg-type]
        totals = AgentTotals(turns=1, steps=1, usage=Usage(input=1, output=2))
        self.results[stream, prompt_id] = Outcome(stream, prompt_id, result, seq=9, epoch=1, totals=totals)
        self.changed.set()
        self.changed = asyncio.Event()


class _Peer:
    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.watches: dict[str, list[tuple[Stream, str]]] = {}

    async def call(self, method: str, *args: Any, timeout_s: float, group: str = "default") -> Any:
        world = self.world
        world.calls[method] += 1
        await asyncio.sleep(0)
        if self.name in world.dead:
            raise RuntimeFault("gone", code="infra.actor_died")
        if self.name in world.silent:
            world.silent.discard(self.name)
            raise RuntimeFault("slow", code="infra.timeout")
        return await getattr(self, method)(*args)

    async def run_many(self, requests: list[RunRequest]) -> list[Ack]:
        acks: list[Ack] = []
        for request in requests:
            self.world.requests.append((self.name, request))
            error = self.world.on_run(self.name, request)
            if error is None:
                self.world.start(self.name, request)
            acks.append(Ack(request.agent.stream, error.to_data() if error is not None else None))
        return acks

    async def wait_any(
        self, named: list[tuple[Stream, str]], wait_s: float, watch: str, answers: int
    ) -> list[Outcome] | None:
        if answers and watch not in self.watches:
            return None
        keys = self.watches[watch] = [*(self.watches[watch] if answers else ()), *named]
        deadline = time.monotonic() + wait_s
        while True:
            if self.name in self.world.dead:
                raise RuntimeFault("gone", code="infra.actor_died")
            found = [self.world.results[key] for key in keys if key in self.world.results]
            left = deadline - time.monotonic()
            if found or left <= 0:
                self.watches[watch] = [key for key in keys if key not in self.world.results]
                return found
            try:
                await asyncio.wait_for(self.world.changed.wait(), left)
            except TimeoutError:
                continue

    async def cancel(
        self, stream: Stream, prompt_id: str, cause: str, limit: dict[str, Any] | None, claim: str | None = None
    ) -> list[str]:
        entry = self.world.running.get((stream, prompt_id))
        if entry is None:
            return []
        self.world._finish(stream, prompt_id, entry[1].prompts[0].text, "limit" if limit else "cancelled", None)
        return [prompt_id]

    async def close_agents(self, streams: list[Stream], force: bool, claim: str | None = None) -> list[Ack]:
        return [Ack(stream) for stream in streams]

    async def progress(self, streams: list[Stream]) -> list[Any]:
        return []


def spec_of(count: int, **changes: Any) -> tuple[SwarmSpec, list[Rollout]]:
    keys = tuple(RolloutKey(f"i{number}", 0) for number in range(count))
    spec = SwarmSpec(
        session_id="s",
        run_id="r",
        keys=keys,
        profile=Profile(name="bare"),
        model=ResolvedModel(name="m", provider="scripted", model="m"),
        seed=RunSeed(1, sent=True),
        retry_on=DEFAULT_RETRY_ON,
    )
    rollouts = [Rollout(key, number, f"p{number}", f"d{number}", None, None, None) for number, key in enumerate(keys)]
    return replace(spec, **changes), rollouts


async def rows_of(run: SwarmRun) -> tuple[dict[RolloutKey, list[AttemptRow]], list[KeyEnd]]:
    """Everything a driver would read, until the end."""
    attempts: dict[RolloutKey, list[AttemptRow]] = {}
    ends: list[KeyEnd] = []
    cursor = 0
    async with asyncio.timeout(30):
        while True:
            page = await run.read(cursor, 1000, 5.0)
            cursor = page.next_cursor
            for entry in page.entries:
                if isinstance(entry, KeyEnd):
                    ends.append(entry)
                else:
                    attempts.setdefault(entry.key, []).append(entry)
            if page.done:
                assert page.error is None, page.error
                return attempts, ends


async def test_every_key_ends_once_and_all_places_are_given_back() -> None:
    world = World(3)
    spec, rollouts = spec_of(50, max_concurrency=8)
    run = SwarmRun(spec, world.services())
    await run.feed(rollouts)
    attempts, ends = await rows_of(run)
    assert sorted(end.key for end in ends) == sorted(spec.keys) and len(attempts) == 50
    assert sum(world.load.values()) == 0
    kinds = Counter(entry.type for entry in world.events)
    assert kinds == {
        "swarm/start": 1,
        "subagent/spawned": 50,
        "subagent/started": 50,
        "subagent/completed": 50,
        "swarm/end": 1,
    }
    assert world.events[-1].type == "swarm/end" and world.flushed == 1
    await run.close()


async def test_data_that_comes_late_and_in_pieces() -> None:
    world = World()
    spec, rollouts = spec_of(20, max_concurrency=4)
    run = SwarmRun(spec, world.services())
    for rollout in reversed(rollouts):
        await run.feed([rollout])
        await asyncio.sleep(0.001)
    _, ends = await rows_of(run)
    assert len(ends) == 20


async def test_a_refused_activation_is_data_and_spares_its_siblings() -> None:
    world = World()

    def refuse(_host: str, request: RunRequest) -> KimiRayError | None:
        return ToolError("no such directory", code="workdir.failed") if request.prompts[0].text == "p3" else None

    world.on_run = refuse
    spec, rollouts = spec_of(6)
    run = SwarmRun(spec, world.services())
    await run.feed(rollouts)
    attempts, _ = await rows_of(run)
    assert [attempts[key][-1].status for key in spec.keys].count("failed") == 1
    row = attempts[RolloutKey("i3", 0)][-1]
    assert row.error is not None and row.error.code == "workdir.failed" and row.last_seq is None
    failed = [entry for entry in world.events if entry.type == "subagent/failed"]
    assert len(failed) == 1 and failed[0].data["error"]["code"] == "workdir.failed"


async def test_a_call_whose_answer_is_lost_is_made_again_as_it_was() -> None:
    world = World(1)
    world.silent.add("h0")
    spec, rollouts = spec_of(3)
    run = SwarmRun(spec, world.services())
    await run.feed(rollouts)
    attempts, _ = await rows_of(run)
    assert all(rows[-1].status == "completed" for rows in attempts.values())
    nonces = Counter(request.agent.nonce for _, request in world.requests)
    assert len(nonces) == 3


async def test_who_is_brought_back_goes_where_its_own_directory_is() -> None:
    world = World(3)
    wishes: list[PlaceAgent] = []
    place = world.place_agents

    async def noted(asked: list[PlaceAgent]) -> list[str]:
        wishes.extend(asked)
        return await place(asked)

    async def node_of(stream: Stream, _workdir: Any) -> str | None:
        return "node-7" if stream.agent_id == "agent-1" else None

    world.place_agents = noted  # type: ignore[method-assign]
    world.held = {"p0", "p1", "p2"}
    spec, rollouts = spec_of(3)
    run = SwarmRun(spec, replace(world.services(), node_of=node_of))
    await run.feed(rollouts)
    async with asyncio.timeout(5):
        while len(world.running) < 3:
            await asyncio.sleep(0.002)
    assert {wish.stream.agent_id: wish.near for wish in wishes} == dict.fromkeys(("agent-1", "agent-2", "agent-3"))
    wishes.clear()
    for (stream, _), (host, _) in list(world.running.items()):
        if stream.agent_id != "agent-3":
            world.kill(host)
        else:
            world.end("p2")  # its place is free now, and not for who wants to be elsewhere
    async with asyncio.timeout(5):
        while "agent-1" not in {wish.stream.agent_id for wish in wishes}:
            await asyncio.sleep(0.002)
    for text in ("p0", "p1"):
        world.end(text)
    await rows_of(run)
    near = {wish.stream.agent_id: wish.near for wish in wishes}
    assert near.pop("agent-1") == "node-7" and set(near.values()) <= {None}


async def test_a_host_lost_during_the_call_leaves_open_whether_the_log_exists() -> None:
    world = World(2)
    known: dict[Stream, str] = {}

    def activate(host: str, request: RunRequest) -> KimiRayError | None:
        stream, agent = request.agent.stream, request.agent
        if agent.header is not None:
            if stream in known and known[stream] != agent.nonce:
                return StoreError("there", code="store.exists")
            if stream.agent_id in ("agent-1", "agent-2"):
                known[stream] = agent.nonce
        elif stream not in known:
            return StoreError("not there", code="store.not_found")
        return None

    world.on_run = activate
    first = world.peer

    class Dying(_Peer):
        async def run_many(self, requests: list[RunRequest]) -> list[Ack]:
            await super().run_many(requests)
            self.world.running.clear()
            self.world.results.clear()
            self.world.kill(self.name)
            raise RuntimeFault("gone", code="infra.actor_died")

    world.peer = lambda name: Dying(world, name) if name == "h0" else first(name)  # type: ignore[method-assign,assignment,return-value]
    spec, rollouts = spec_of(6)
    run = SwarmRun(spec, world.services())
    await run.feed(rollouts)
    attempts, _ = await rows_of(run)
    assert all([row.status for row in rows] == ["completed"] for rows in attempts.values())
    headers = Counter(request.agent.header is None for host, request in world.requests if host == "h1")
    assert headers[True] >= 3
    assert sum(world.load.values()) == 0


async def test_an_agent_that_is_not_where_it_was_is_brought_back() -> None:
    world = World(1)
    world.held = {"p0"}
    spec, rollouts = spec_of(1)
    run = SwarmRun(spec, world.services())
    await run.feed(rollouts)
    async with asyncio.timeout(5):
        while not world.running:
            await asyncio.sleep(0.002)
    ((stream, prompt_id),) = world.running
    gone = AgentError("not here", code="agent.not_found")
    result = PromptResult(prompt_id=prompt_id, state="failed", stop="failed", error=gone.to_data())

    def revived(_host: str, _request: RunRequest) -> None:
        del world.results[stream, prompt_id]
        world.held.clear()

    world.on_run = revived
    world.results[stream, prompt_id] = Outcome(stream, prompt_id, result, seq=-1, epoch=-1, totals=AgentTotals())
    world.changed.set()
    attempts, _ = await rows_of(run)
    (row,) = attempts[spec.keys[0]]
    assert row.status == "completed" and row.interruptions == 1
    again = world.requests[1][1]
    assert again.agent.header is None and not again.release and again.agent.nonce != world.requests[0][1].agent.nonce


async def test_no_host_at_all_fails_the_rollouts_and_ends_the_swarm() -> None:
    world = World(1)
    world.kill("h0")
    spec, rollouts = spec_of(3)
    run = SwarmRun(spec, world.services())
    await run.feed(rollouts)
    attempts, ends = await rows_of(run)
    assert len(ends) == 3
    assert {rows[-1].error.error_class for rows in attempts.values() if rows[-1].error} == {"infra"}


async def test_cancel_does_not_wait_for_the_silent_beyond_its_grace() -> None:
    world = World(1)
    world.held = {f"p{number}" for number in range(4)}
    spec, rollouts = spec_of(9, max_concurrency=4)
    run = SwarmRun(spec, world.services())
    await run.feed(rollouts)
    async with asyncio.timeout(5):
        while len(world.running) < 4:
            await asyncio.sleep(0.002)
    stubborn = next(iter(world.running))
    world.running = {key: value for key, value in world.running.items() if key != stubborn}
    began = time.monotonic()
    run.cancel(0.3, "cancel")
    attempts, ends = await rows_of(run)
    assert time.monotonic() - began < 5
    assert sorted(rows[-1].status for rows in attempts.values()) == ["cancelled"] * 4
    texts = [rows[-1].text for rows in attempts.values()]
    assert texts.count(None) == 1
    assert Counter(end.stop for end in ends) == {None: 4, "cancelled": 5}
    assert world.calls["close_agents"] == 1


async def test_cancel_before_any_data_came() -> None:
    world = World()
    spec, _ = spec_of(5)
    run = SwarmRun(spec, world.services())
    await asyncio.sleep(0)
    run.cancel(1.0, "cancel")
    attempts, ends = await rows_of(run)
    assert not attempts and len(ends) == 5 and not world.requests


async def test_nobody_reads_and_nothing_more_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_rows, "MAX_UNREAD", 40)
    world = World()
    spec, rollouts = spec_of(200, max_concurrency=10)
    run = SwarmRun(spec, world.services())
    await run.feed(rollouts)
    await asyncio.sleep(0.5)
    assert len(world.requests) <= 40
    _, ends = await rows_of(run)
    assert len(ends) == 200


async def test_given_up_just_when_there_is_news_it_ends_all_the_same() -> None:
    for ticks in range(5):
        world = World(1)
        world.held = {"p0"}
        spec, rollouts = spec_of(1, total_limits=Limits(max_steps=100))  # it looks every now and then
        run = SwarmRun(spec, world.services())
        await run.feed(rollouts)
        async with asyncio.timeout(5):
            while not world.running:
                await asyncio.sleep(0.002)
        for _ in range(20):
            await asyncio.sleep(0)
        run._changed.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        run.abandon(RunError("it lives elsewhere", code="session.fenced"))
        await asyncio.wait({run._main}, timeout=2)
        assert run._main.cancelled(), f"after {ticks} turns of the loop"
        await run.close()


async def test_a_defect_of_the_coordinator_is_told_and_not_waited_for() -> None:
    world = World()

    async def broken(count: int) -> range:
        raise ZeroDivisionError

    spec, rollouts = spec_of(2)
    run = SwarmRun(spec, replace(world.services(), numbers=broken))
    await run.feed(rollouts)
    async with asyncio.timeout(5):
        cursor = 0
        while not (page := await run.read(cursor, 10, 1.0)).done:
            cursor = page.next_cursor
    assert page.error is not None and page.error["code"] == "internal"
    await run.close()


async def test_a_defect_at_the_end_of_a_swarm_is_told(caplog: pytest.LogCaptureFixture) -> None:
    world = World()

    async def flush_log() -> None:
        raise ZeroDivisionError("deep inside")

    world.flush_log = flush_log  # type: ignore[method-assign]
    spec, rollouts = spec_of(2)
    run = SwarmRun(spec, world.services())
    await run.feed(rollouts)
    async with asyncio.timeout(10):
        page = await run.read(0, 1000, 5.0)
        while not page.done:
            page = await run.read(page.next_cursor, 1000, 5.0)
    assert page.error is not None and page.error["details"]["exception"] == "ZeroDivisionError"
    assert "deep inside" in caplog.text
    await run.close()


async def test_the_cost_of_many_rollouts_is_in_proportion() -> None:
    async def seconds(count: int) -> float:
        world = World(4)
        spec, rollouts = spec_of(count, max_concurrency=256)
        began = time.process_time()
        run = SwarmRun(spec, world.services())

        async def feed() -> None:
            for at in range(0, count, 500):
                await run.feed(rollouts[at : at + 500])

        feeding = asyncio.create_task(feed())
        _, ends = await rows_of(run)
        await feeding
        assert len(ends) == count
        assert world.calls["run_many"] + world.calls["wait_any"] <= 0.2 * count
        return time.process_time() - began

    for _ in range(3):  # what else this process and its neighbours do may fall on one side alone
        small = await seconds(1000)
        large = await seconds(6000)
        if large < 6 * small * 2.5:
            break
    assert large < 6 * small * 2.5
