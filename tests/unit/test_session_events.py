"""Following a whole session: new agents, lost hosts, cold agents, cursors, mistakes, the end."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import ConfigError, KimiRayError, LogError, RuntimeFault, SessionError
from kimi_ray.hosts.specs import EventPage
from kimi_ray.log_following import follow_log
from kimi_ray.session_handle import AgentEvent, Session
from kimi_ray.store.seam import Page, Stream
from tests.unit.runtime_fixtures import running
from tests.unit.test_tree_recovery import kill, logs_of, until, with_children


class Follower:
    """Follows a session in the background; what it was told by agent."""

    def __init__(self, session: Session, **options: Any) -> None:
        self.told: dict[str, list[int]] = defaultdict(list)
        self.types: dict[str, list[str]] = defaultdict(list)
        self.cursor: dict[str, int] = {}
        self.error: KimiRayError | None = None
        self.task = asyncio.create_task(self._follow(session, options))

    async def _follow(self, session: Session, options: dict[str, Any]) -> None:
        try:
            async for found in session.events(follow=True, **options):
                self.take(found)
        except KimiRayError as error:
            self.error = error

    def take(self, found: AgentEvent) -> None:
        self.told[found.agent_id].append(found.event.seq)
        self.types[found.agent_id].append(found.event.type)
        self.cursor.update(found.cursor)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_new_agents_lost_hosts_and_no_event_twice(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, stage, model):
        session = await with_children(runtime, model, tmp_path / "work", 2)
        follower = Follower(session)
        await until(lambda: len(follower.told) == 3)
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", ["x", "y"], profile="bare", parent="agent-1")
        prompt = await session.agent("agent-2").submit("one", on_interrupt="continue")
        await stage.until_running(3)
        for kinds in (("agents",), ("sessions",), ("sessions", "agents")):
            await kill(runtime, *kinds)
            await session.metadata()
            await session.agent("agent-2").wake()
            await stage.until_running(1)
        stage.gate.set()
        assert (await handle.result(30)).ok and (await prompt.result(30)).state == "completed"
        await session.close()
        logs = await logs_of(tmp_path, session.id)
        assert set(logs) == {"main", "agent-1", "agent-2", "agent-3", "agent-4"}

        def has_all() -> bool:
            if follower.error is not None:
                raise follower.error
            return all(len(follower.told[agent_id]) >= len(events) for agent_id, events in logs.items())

        try:
            await until(has_all, 45.0)  # more than two long polls
        except TimeoutError:
            pass  # what is missing is told below
        await follower.stop()
        for agent_id, events in logs.items():
            assert follower.told[agent_id] == [event.seq for event in events], agent_id
            assert follower.types[agent_id] == [event.type for event in events], agent_id
        # A new life at a seq is told as what it is.
        assert follower.types["agent-2"].count("runtime/activated") >= 3


async def test_a_cursor_goes_on_where_it_was_left(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await with_children(runtime, model, tmp_path / "work", 2)
        await session.flush()
        cursor: dict[str, int] = {}
        seen: list[tuple[str, int]] = []
        number = 0
        async for found in session.events():
            cursor.update(found.cursor)
            seen.append((found.agent_id, found.event.seq))
            number += 1
            if number == 7:
                break
        async for found in session.events(cursor):
            cursor.update(found.cursor)
            seen.append((found.agent_id, found.event.seq))
        assert len(seen) == len(set(seen))
        assert [found async for found in session.events(cursor)] == []
        await (await session.agent("agent-1").submit("more")).result(10)
        await session.flush()
        more = [found async for found in session.events(cursor, types=["prompt/completed"])]
        assert [found.agent_id for found in more] == ["agent-1"]
        logs = await logs_of(tmp_path, session.id)
        assert set(seen) <= {(agent_id, event.seq) for agent_id, events in logs.items() for event in events}


async def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        for follow in (False, True):
            with pytest.raises(ConfigError) as caught:
                async for _ in session.events(types=["turn/started"], follow=follow):
                    pass
            assert (caught.value.code, caught.value.details["value"]) == ("request.invalid", "turn/started")
            for options in ({"agents": ["agent-7"]}, {"cursor": {"agent-7": 3}}):
                with pytest.raises(KimiRayError) as unknown:
                    async for _ in session.events(follow=follow, **options):  # type: ignore[arg-type]
                        pass
                assert unknown.value.code == "agent.not_found"


async def test_leaving_the_loop_leaves_no_task(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await with_children(runtime, model, tmp_path / "work", 3)
        await session.flush()
        before = {task.get_name() for task in asyncio.all_tasks()}
        async for _ in session.events(follow=True):
            break

        def none_left() -> bool:
            names = {task.get_name() for task in asyncio.all_tasks()} - before
            return not [name for name in names if name.startswith(("events of", "agents of"))]

        try:
            await until(none_left)
        except TimeoutError:
            pytest.fail(str([repr(task) for task in asyncio.all_tasks()]))


async def test_a_deleted_session_ends_the_follow_and_is_not_brought_back(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await with_children(runtime, model, tmp_path / "work", 2)
        follower = Follower(session)
        await until(lambda: len(follower.told) == 3)
        await session.close()
        await asyncio.sleep(0.2)
        assert await runtime.connection.registry.call("find_session", session.id, timeout_s=5, group="control") is None
        assert follower.error is None
        await session._services.courier.store.remove(session.id)
        await until(lambda: follower.error is not None)
        assert follower.error is not None and follower.error.code == "session.not_found"
        with pytest.raises(SessionError):
            [event async for event in session.events()]


async def test_a_log_that_lost_what_was_told_says_so() -> None:
    class Rewound:
        """A store that forgets the last events, as after a power cut."""

        def __init__(self) -> None:
            self.lines = [b'{"seq":%d,"time":1,"type":"note/added","data":{"text":"x"}}' % n for n in range(5)]
            self.store = self.registry = self

        async def find_session(self, _session_id: str) -> None:
            return None

        async def read_from(self, _stream: Stream, seq: int, _limit: int, _bytes: int) -> Page:
            page = Page(seq, tuple(self.lines[seq:]), len(self.lines))
            self.lines = self.lines[:3]
            return page

    seen: list[int] = []
    with pytest.raises(LogError) as caught:
        courier: Any = Rewound()
        async for event in follow_log(courier, Stream("s", "main"), 0, follow=True, cold_pause_s=lambda: 0.0):
            seen.append(event.seq)  # noqa: PERF401  what came before the error counts
    assert seen == [0, 1, 2, 3, 4]
    assert (caught.value.code, caught.value.details["end"]) == ("log.rewound", 3)


async def test_a_session_that_is_deleted_while_it_is_read_is_not_found(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await with_children(runtime, model, tmp_path / "work", 2)
        await session.close()
        with pytest.raises(SessionError) as caught:
            async for _event in session.events():
                await session._services.courier.store.remove(session.id)
        assert caught.value.code == "session.not_found"


async def test_many_who_look_for_one_session_ask_once() -> None:
    from kimi_ray.log_following import SessionPlace

    asked = 0

    class Registry:
        async def find_session(self, _session_id: str) -> str:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.01)
            return "host"

    class Asks:
        registry = Registry()

    place = SessionPlace(Asks(), "s1")  # type: ignore[arg-type]
    assert await asyncio.gather(*(place.name() for _ in range(100))) == ["host"] * 100
    assert asked == 1


class Cluster:
    """A registry, a session host and an agent host that answer what a test says, and a store that has nothing."""

    def __init__(self) -> None:
        self.store = self.registry = self.cluster = self
        self.calls: list[str] = []

    async def find_session(self, _session_id: str) -> str | None:
        return "sessions"

    async def read_from(self, _stream: Stream, seq: int, _limit: int, _bytes: int) -> Page:
        return Page(seq, (), seq)

    def peer(self, name: str) -> Any:
        self.name = name
        return self

    async def call(self, method: str, *args: Any, **_options: Any) -> Any:
        self.calls.append(method)
        return await self.answer(method, *args)

    async def answer(self, method: str, *args: Any) -> Any:
        raise NotImplementedError


NOTED = (b'{"seq":0,"time":1,"type":"note/added","data":{"text":"x"}}',)


async def first_of(cluster: Any, from_seq: int = 0) -> int:
    events = follow_log(cluster, Stream("s", "main"), from_seq, follow=True, cold_pause_s=lambda: 0.01)
    try:
        async with asyncio.timeout(5):
            return (await anext(events)).seq
    finally:
        await events.aclose()


@pytest.mark.parametrize("closing", [True, False], ids=["it is being closed there", "the session does not know yet"])
async def test_a_host_where_the_agent_lives_no_more_is_not_asked_in_a_circle(closing: bool) -> None:
    class Stale(Cluster):
        async def answer(self, method: str, *_args: Any) -> Any:
            if method == "find_agent":
                return "agents"
            if came.is_set():
                return EventPage(0, NOTED, 1, 1, 1)
            return EventPage(0, (), 0, 0, 1 if closing else None)

    came, cluster = asyncio.Event(), Stale()
    following = asyncio.create_task(first_of(cluster))
    await asyncio.sleep(0.5)
    assert cluster.calls.count("read_events") < 12
    came.set()
    assert await following == 0


async def test_a_follower_waits_while_there_is_no_room_for_its_calls() -> None:
    class Full(Cluster):
        refused = 0

        def refuse(self, what: str, times: int = 2) -> None:
            if self.calls.count(what) <= times:
                self.refused += 1
                raise RuntimeFault("too many calls", code="infra.pending_limit", retryable=True)

        async def find_session(self, _session_id: str) -> str:
            self.calls.append("find_session")
            self.refuse("find_session")
            return "sessions"

        async def read_from(self, _stream: Stream, seq: int, _limit: int, _bytes: int) -> Page:
            self.calls.append("read_from")
            self.refuse("read_from")
            return Page(seq, (), seq)

        async def answer(self, method: str, *_args: Any) -> Any:
            self.refuse(method)
            if method == "find_agent":
                return "agents"
            cold = self.calls.count("read_from") < 3
            return EventPage(0, (), 0, 0, None) if cold else EventPage(0, NOTED, 1, 1, 1)

    cluster = Full()
    assert await first_of(cluster) == 0
    assert cluster.refused == 8


async def test_who_only_reads_is_told_that_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Cluster):
        async def find_session(self, _session_id: str) -> None:
            raise RuntimeFault("too many calls", code="infra.pending_limit", retryable=True)

    monkeypatch.setattr("kimi_ray.log_following._FOLLOW_S", 0.1)
    cluster: Any = Full()
    with pytest.raises(RuntimeFault) as refused:
        async with asyncio.timeout(5):
            async for _ in follow_log(cluster, Stream("s", "main"), 0, follow=False):
                pass
    assert refused.value.code == "infra.pending_limit"
