"""Features as a package would bring them, for the tests here and for those on Ray workers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

from dishka import Provider, provide
from pydantic import Field

from kimi_ray import AgentSlots, Feature, LifecycleScope, Profile, ToolContext, ToolOutput, TurnEnded
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.events.catalog import EventType
from kimi_ray.events.payloads import Payload
from kimi_ray.llm import ChatRequest, Step
from kimi_ray.tools import Accesses, Environment, LocalEnvironment
from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.schema import Arguments


class Place(Arguments):
    """What the tool is asked."""

    place: str = Field(description="A town.")


class Asked(Payload):
    """Somebody asked for the weather."""

    place: str


class Station:
    """App scope: what all agents of a host share."""

    def __init__(self) -> None:
        self.told: list[str] = []


class Forecast(BuiltinTool[Place]):
    """Agent scope; writes an event of its own."""

    name = "Forecast"
    description = "The weather of tomorrow."

    def __init__(self, station: Station, journal: Journal, spec: AgentSpec) -> None:
        self._station = station
        self._journal = journal
        self._agent_id = spec.stream.agent_id

    def touches(self, arguments: Place) -> Accesses:
        return Accesses.none()

    async def call(self, arguments: Place, context: ToolContext) -> ToolOutput:
        self._station.told.append(f"{self._agent_id} asked for {arguments.place}")
        self._journal.append("weather/asked", {"place": arguments.place})
        return ToolOutput(f"{arguments.place}: rain")


class Diary:
    """Agent scope, built with each agent: a handler in a slot, ended with the agent."""

    def __init__(self, slots: AgentSlots, station: Station, spec: AgentSpec) -> None:
        self._station = station
        self._agent_id = spec.stream.agent_id
        slots.turn_ended.register("diary", self._turn_ended)

    async def _turn_ended(self, event: TurnEnded) -> None:
        self._station.told.append(f"{self._agent_id} ended turn {event.turn}")


class StationProvider(Provider):
    """One station a host."""

    scope = LifecycleScope.APP

    @provide
    async def station(self) -> AsyncIterator[Station]:
        STATIONS.append(station := Station())
        yield station
        station.told.append("closed")


STATIONS: list[Station] = []
"""Every station of this process: the tests look here."""


class Weather(Feature):
    """Everything that a Feature can bring."""

    name: ClassVar[str] = "weather"
    ignorable: ClassVar[bool] = True

    def services(self) -> Sequence[Provider]:
        return [StationProvider()]

    def on_agent(self) -> Sequence[type]:
        return [Diary]

    def tools(self) -> dict[str, type]:
        return {"Forecast": Forecast}

    def profiles(self) -> Sequence[Profile]:
        return [Profile(name="weatherman", tools=("Forecast",))]

    def event_types(self) -> Sequence[EventType]:
        return [EventType("weather/asked", Asked, ignorable=self.ignorable)]

    def commands(self) -> dict[str, Any]:
        return {"forecast": forecast}


class StrictWeather(Weather):
    """Its events are not to be passed over."""

    ignorable: ClassVar[bool] = False


def forecast(place: str, json: bool = False) -> None:
    """The weather of a place, on the command line."""
    print(f"{place}: rain ({json})")


def model(request: ChatRequest) -> Step:
    """Asks for one forecast and tells it."""
    last = request.messages[-1]["content"][0]
    if last["type"] != "tool-result":
        return Step.call("Forecast", {"place": "Kyoto"})
    return Step(text=last["content"][0]["text"])


class Broken:
    """Agent scope: cannot be built."""

    def __init__(self, spec: AgentSpec, diary: Diary) -> None:
        raise OSError(f"no barometer for {spec.stream.agent_id}")


class BrokenStart(Weather):
    """Agents with it cannot live."""

    name: ClassVar[str] = "broken"

    def on_agent(self) -> Sequence[type]:
        return [Diary, Broken]


class ElsewhereProvider(Provider):
    """In place of kimi-ray's own environment: tools work in another directory."""

    scope = LifecycleScope.AGENT

    @provide(override=True)
    async def environment(self) -> AsyncIterator[Environment]:
        environment = LocalEnvironment(os.environ["ELSEWHERE_ROOT"])
        yield environment
        await environment.close()


class Elsewhere(Feature):
    """Replaces a service of kimi-ray."""

    name: ClassVar[str] = "elsewhere"

    def services(self) -> Sequence[Provider]:
        return [ElsewhereProvider()]


def reader(request: ChatRequest) -> Step:
    """Reads one file and tells what is in it."""
    last = request.messages[-1]["content"][0]
    if last["type"] != "tool-result":
        return Step.call("Read", {"path": "note.txt"})
    return Step(text=last["content"][0]["text"])


class Ledger:
    """Session scope; needs what needs it."""

    def __init__(self, clerk: Clerk) -> None:
        self.clerk = clerk


class Clerk:
    """Agent scope."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger


class Circular(Feature):
    """Its services do not fit together."""

    name: ClassVar[str] = "circular"

    def on_session(self) -> Sequence[type]:
        return [Ledger]

    def on_agent(self) -> Sequence[type]:
        return [Clerk]
