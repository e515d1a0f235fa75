"""Containers of an agent host come and go with its agents: whole, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar

import pytest
from dishka import Provider, provide

from kimi_ray.errors import AgentError, ToolError
from kimi_ray.hosts.agent_services import SessionServices, SessionView
from kimi_ray.hosts.features import Features
from kimi_ray.hosts.host_scopes import HostScopes
from kimi_ray.scopes import Feature, LifecycleScope, assemble
from kimi_ray.store.seam import Stream

ONE, TWO, ELSEWHERE = Stream("s1", "main"), Stream("s1", "agent-1"), Stream("s2", "main")


class Shared:
    pass


class First:
    pass


class Second:
    def __init__(self, first: First) -> None:
        self.first = first


class Lazy:
    pass


class Agent:
    def __init__(self, view: SessionView, second: Second) -> None:
        self.session_id = view.session_id
        self.second = second


class Lives(Provider):
    """Every service tells of its life; a test may let one fail."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.failing: dict[str, Exception] = {}

    def life(self, name: str, made: Any) -> Iterator[Any]:
        if name in self.failing:
            raise self.failing[name]
        self.told.append(f"+{name}")
        yield made
        self.told.append(f"-{name}")
        if f"-{name}" in self.failing:
            raise self.failing[f"-{name}"]

    @provide(scope=LifecycleScope.SESSION)
    def shared(self) -> Iterator[Shared]:
        yield from self.life("shared", Shared())

    @provide(scope=LifecycleScope.AGENT)
    def first(self) -> Iterator[First]:
        yield from self.life("first", First())

    @provide(scope=LifecycleScope.AGENT)
    def second(self, first: First) -> Iterator[Second]:
        yield from self.life("second", Second(first))

    @provide(scope=LifecycleScope.AGENT)
    def lazy(self) -> Iterator[Lazy]:
        yield from self.life("lazy", Lazy())

    @provide(scope=LifecycleScope.AGENT)
    def agent(self, view: SessionView, second: Second) -> Iterator[Agent]:
        yield from self.life("agent", Agent(view, second))


class Eager(Feature):
    name: ClassVar[str] = "eager"

    def on_agent(self) -> Sequence[type]:
        return [Second]

    def on_session(self) -> Sequence[type]:
        return [Shared]


@pytest.fixture
def lives() -> Lives:
    return Lives()


@pytest.fixture
def host(lives: Lives) -> HostScopes:
    features = Features([Eager()])
    own = [SessionServices(), lives]
    return HostScopes(assemble([*own, *features.services(own)], {}, features.asked()), features)


async def test_a_session_has_one_scope_from_its_first_agent_to_its_last(host: HostScopes, lives: Lives) -> None:
    agents = await asyncio.gather(*(host.enter(stream, {}, Agent) for stream in (ONE, TWO, ELSEWHERE)))
    assert [agent.session_id for agent in agents] == ["s1", "s1", "s2"]
    assert host.sessions == 2 and lives.told.count("+shared") == 2
    await host.leave(ONE)
    await host.leave(ONE)
    assert host.sessions == 2
    await asyncio.gather(host.leave(TWO), host.leave(ELSEWHERE))
    assert host.sessions == 0 and lives.told.count("-shared") == 2
    await host.enter(ONE, {}, Agent)
    await host.close()
    assert host.sessions == 0 and lives.told.count("-shared") == 3


async def test_what_features_name_is_built_with_the_agent_dependencies_first_and_the_rest_at_first_use(
    host: HostScopes, lives: Lives
) -> None:
    await host.enter(ONE, {}, Agent)
    assert lives.told == ["+shared", "+first", "+second", "+agent"], "and nothing lazy"
    await host.leave(ONE)
    assert lives.told[4:] == ["-agent", "-second", "-first", "-shared"]


@pytest.mark.parametrize(
    ("failing", "built"),
    [
        ("shared", []),
        ("first", ["shared"]),
        ("second", ["shared", "first"]),
        ("agent", ["shared", "first", "second"]),
    ],
)
async def test_a_start_that_fails_takes_back_what_was_built_and_names_the_cause(
    host: HostScopes, lives: Lives, failing: str, built: list[str]
) -> None:
    lives.failing[failing] = OSError("no barometer")
    with pytest.raises(AgentError) as caught:
        await host.enter(ONE, {}, Agent)
    assert caught.value.code == "agent.start_failed"
    assert "OSError: no barometer" in caught.value.message
    assert isinstance(caught.value.__cause__, OSError)
    named = {"shared": "Shared", "first": "Second", "second": "Second", "agent": "Agent"}[failing]
    assert caught.value.details["service"] == named and named in caught.value.message
    assert lives.told == [*(f"+{name}" for name in built), *(f"-{name}" for name in reversed(built))]
    assert host.sessions == 0
    lives.failing.clear()
    lives.told.clear()
    await host.enter(ONE, {}, Agent)
    assert lives.told == ["+shared", "+first", "+second", "+agent"], "it can be tried again"
    await host.close()


async def test_an_error_of_ours_is_told_as_it_is(host: HostScopes, lives: Lives) -> None:
    lives.failing["second"] = ToolError("no", code="workdir.not_found")
    with pytest.raises(ToolError):
        await host.enter(ONE, {}, Agent)
    assert host.sessions == 0


async def test_a_failing_start_leaves_the_other_agents_of_its_session_alone(host: HostScopes, lives: Lives) -> None:
    await host.enter(ONE, {}, Agent)
    lives.failing["agent"] = OSError("no")
    with pytest.raises(AgentError):
        await host.enter(TWO, {}, Agent)
    assert host.sessions == 1 and "-shared" not in lives.told
    await host.close()
    assert lives.told[-1] == "-shared"


async def test_disposers_that_raise_keep_no_agent_from_leaving(host: HostScopes, lives: Lives) -> None:
    await host.enter(ONE, {}, Agent)
    lives.failing["-agent"] = lives.failing["-shared"] = OSError("stuck")
    await host.leave(ONE)
    assert lives.told[4:] == ["-agent", "-second", "-first", "-shared"] and host.sessions == 0


async def test_a_start_that_is_cancelled_leaves_nothing(lives: Lives) -> None:
    began = asyncio.Event()

    class Waiting(Provider):
        @provide(scope=LifecycleScope.AGENT, override=True)
        async def agent(self, second: Second) -> Agent:
            began.set()
            await asyncio.Event().wait()
            raise AssertionError

    features = Features([Eager()])
    host = HostScopes(assemble([SessionServices(), lives, Waiting()], {}, features.asked()), features)
    entering = asyncio.create_task(host.enter(ONE, {}, Agent))
    await asyncio.wait_for(began.wait(), 5)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert host.sessions == 0 and lives.told[-3:] == ["-second", "-first", "-shared"]


async def test_an_agent_that_comes_back_waits_until_it_is_gone(lives: Lives) -> None:
    leaving, may_go = asyncio.Event(), asyncio.Event()

    class Slow(Provider):
        @provide(scope=LifecycleScope.AGENT, override=True)
        async def agent(self, view: SessionView, second: Second) -> AsyncIterator[Agent]:
            lives.told.append("+agent")
            yield Agent(view, second)
            leaving.set()
            await may_go.wait()
            lives.told.append("-agent")

    features = Features([Eager()])
    host = HostScopes(assemble([SessionServices(), lives, Slow()], {}, features.asked()), features)
    await host.enter(ONE, {}, Agent)
    going = asyncio.create_task(host.leave(ONE))
    await asyncio.wait_for(leaving.wait(), 5)
    coming = asyncio.create_task(host.enter(ONE, {}, Agent))
    await host.enter(TWO, {}, Agent)
    assert not coming.done() and lives.told.count("+agent") == 2, "another agent need not wait"
    may_go.set()
    await asyncio.wait_for(asyncio.gather(going, coming), 5)
    told = lives.told
    assert told.index("-agent") < len(told) - 1 - told[::-1].index("+agent"), told
    await host.close()
    assert host.sessions == 0
