"""Containers by lifetime: what is built when, once, where; what is disposed, in which order, whatever fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

import pytest
from dishka import AsyncContainer, Provider, provide
from dishka.exceptions import NoChildScopesError

from kimi_ray.errors import AgentError
from kimi_ray.scopes import LifecycleScope, TaskLock, assemble, dispose, open_scope


class A:
    pass


class B:
    def __init__(self, a: A) -> None:
        self.a = a


class C:
    def __init__(self, b: B) -> None:
        self.b = b


class Tracked(Provider):
    """A, B that needs it and C that needs B, each of the scope that is said; they tell of their lives."""

    def __init__(self, *scopes: LifecycleScope, broken: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.told: list[str] = []
        self.broken = broken
        a, b, c = scopes
        self.provide(self.make_a, scope=a)
        self.provide(self.make_b, scope=b)
        self.provide(self.make_c, scope=c)

    def _end(self, name: str) -> None:
        self.told.append(f"-{name}")
        if name in self.broken:
            raise RuntimeError(f"{name} does not go")

    def make_a(self) -> Iterator[A]:
        self.told.append("+A")
        yield A()
        self._end("A")

    async def make_b(self, a: A) -> AsyncIterator[B]:
        self.told.append("+B")
        yield B(a)
        self._end("B")

    async def make_c(self, b: B) -> AsyncIterator[C]:
        self.told.append("+C")
        yield C(b)
        self._end("C")


APP, SESSION, AGENT = LifecycleScope.APP, LifecycleScope.SESSION, LifecycleScope.AGENT


async def agent_of(app: AsyncContainer) -> tuple[AsyncContainer, AsyncContainer]:
    session = await open_scope(app, {})
    return session, await open_scope(session, {})


async def test_what_was_built_a_b_c_is_disposed_c_b_a() -> None:
    tracked = Tracked(AGENT, AGENT, AGENT)
    _, agent = await agent_of(assemble([tracked], {}))
    await agent.get(C)
    assert tracked.told == ["+A", "+B", "+C"]
    assert await dispose(agent, "x") == []
    assert tracked.told == ["+A", "+B", "+C", "-C", "-B", "-A"]
    assert await dispose(agent, "x") == [], "again is nothing"
    assert len(tracked.told) == 6


async def test_inner_scopes_go_before_outer_ones_and_take_nothing_of_theirs() -> None:
    tracked = Tracked(APP, SESSION, AGENT)
    app = assemble([tracked], {})
    session, agent = await agent_of(app)
    c = await agent.get(C)
    await dispose(agent, "agent")
    assert tracked.told == ["+A", "+B", "+C", "-C"]
    again = await open_scope(session, {})
    other = await again.get(C)
    assert other is not c and other.b is c.b, "the outer services are the same"
    await dispose(again, "agent")
    await dispose(session, "session")
    await dispose(app, "app")
    assert tracked.told == ["+A", "+B", "+C", "-C", "+C", "-C", "-B", "-A"]


async def test_a_service_of_the_parent_that_a_child_asks_for_first_is_built_once_in_the_parent() -> None:
    tracked = Tracked(APP, SESSION, AGENT)
    app = assemble([tracked], {})
    session, one = await agent_of(app)
    two = await open_scope(session, {})
    first, second = await one.get(C), await two.get(C)
    assert first is not second and first.b is second.b
    assert await session.get(B) is first.b and await app.get(A) is first.b.a
    await dispose(one, "one")
    await dispose(two, "two")
    assert tracked.told == ["+A", "+B", "+C", "+C", "-C", "-C"], "B lives on with its session"


async def test_agents_that_come_at_once_share_one_service_of_their_session() -> None:
    built: list[str] = []
    gate = asyncio.Event()

    class Slow(Provider):
        scope = SESSION

        @provide
        async def made(self) -> A:
            built.append("A")
            await gate.wait()
            return A()

    session = await open_scope(assemble([Slow()], {}), {})
    agents = [await open_scope(session, {}) for _ in range(5)]
    asked = [asyncio.create_task(agent.get(A)) for agent in agents]
    await asyncio.sleep(0)
    gate.set()
    found = await asyncio.gather(*asked)
    assert built == ["A"] and len(set(map(id, found))) == 1


async def test_two_agents_never_share_an_instance() -> None:
    app = assemble([Tracked(AGENT, AGENT, AGENT)], {})
    (_, one), (_, two) = await agent_of(app), await agent_of(app)
    found = [await agent.get(kind) for agent in (one, two) for kind in (A, B, C)]
    assert len(set(map(id, found))) == 6


async def test_a_service_may_ask_its_own_container_while_it_is_built() -> None:
    class Asking(Provider):
        scope = AGENT

        @provide
        def a(self) -> A:
            return A()

        @provide
        async def b(self, container: AsyncContainer) -> B:
            return B(await container.get(A))

    _, agent = await agent_of(assemble([Asking()], {}))
    async with asyncio.timeout(5):
        assert (await agent.get(B)).a is await agent.get(A)


async def test_a_disposer_that_raises_is_logged_with_its_label_and_keeps_none_from_its_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracked = Tracked(AGENT, AGENT, AGENT, broken=("C", "A"))
    _, agent = await agent_of(assemble([tracked], {}))
    await agent.get(C)
    with caplog.at_level(logging.WARNING):
        assert await dispose(agent, "s/main") == ["Tracked.make_c", "Tracked.make_a"]
    assert tracked.told[3:] == ["-C", "-B", "-A"]
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "s/main: disposing of Tracked.make_c failed: RuntimeError('C does not go')",
        "s/main: disposing of Tracked.make_a failed: RuntimeError('A does not go')",
    ]


async def test_a_cancel_in_a_disposer_waits_until_all_had_their_turn() -> None:
    told: list[str] = []
    hanging = asyncio.Event()

    class Hanging(Provider):
        scope = AGENT

        @provide
        def a(self) -> Iterator[A]:
            yield A()
            told.append("A")

        @provide
        async def b(self, a: A) -> AsyncIterator[B]:
            yield B(a)
            hanging.set()
            await asyncio.Event().wait()
            told.append("never")

    _, agent = await agent_of(assemble([Hanging()], {}))
    await agent.get(B)
    ending = asyncio.create_task(dispose(agent, "x"))
    await asyncio.wait_for(hanging.wait(), 5)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(ending, 5)
    assert told == ["A"]


async def test_a_task_lock_is_one_task_s_however_often_it_takes_it() -> None:
    lock, order = TaskLock(), list[str]()

    async def other() -> None:
        async with lock:
            order.append("other")

    async with lock:
        waiting = asyncio.create_task(other())
        async with lock:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        order.append("mine")
    await asyncio.wait_for(waiting, 5)
    assert order == ["mine", "other"]


async def test_nothing_is_built_in_a_scope_that_was_closed_nor_from_one_inside_it() -> None:
    tracked = Tracked(APP, SESSION, AGENT)
    session, agent = await agent_of(assemble([tracked], {}))
    await agent.get(C)
    await dispose(session, "s1")
    other = await open_scope(session, {})
    for asked in (session.get(B), other.get(C)):
        with pytest.raises(AgentError) as caught:
            await asked
        assert caught.value.code == "agent.closed" and "s1" in caught.value.message
    assert tracked.told == ["+A", "+B", "+C", "-B"]


async def test_who_waits_for_the_lock_of_a_scope_that_is_closed_meanwhile_builds_nothing_in_it() -> None:
    lock, built = TaskLock(), list[str]()

    async def build() -> None:
        async with lock:
            built.append("late")

    async with lock:
        waiting = [asyncio.create_task(build()) for _ in range(2)]
        await asyncio.sleep(0)
        lock.end("s1")
    for one in waiting:
        with pytest.raises(AgentError) as caught:
            await asyncio.wait_for(one, 5)
        assert caught.value.code == "agent.closed"
    assert not built


async def test_there_is_no_scope_inside_an_agent_s() -> None:
    _, agent = await agent_of(assemble([Tracked(APP, SESSION, AGENT)], {}))
    with pytest.raises(NoChildScopesError):
        await open_scope(agent, {})
