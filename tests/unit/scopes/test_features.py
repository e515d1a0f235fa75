"""Features are checked against each other, and what they bring is there wherever it is asked for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from dishka import Provider, provide

from kimi_ray import AgentSlots, ConfigError, Feature, KimiRayError, LifecycleScope, Profile, Runtime, ToolError
from kimi_ray.agent.journal import Journal
from kimi_ray.cli.app import run_command
from kimi_ray.config import RuntimeConfig
from kimi_ray.events.catalog import EventType
from kimi_ray.events.payloads import Payload
from kimi_ray.hosts import features as features_module
from kimi_ray.hosts.agent_container import host_container
from kimi_ray.hosts.features import Features, load_features
from tests.unit.scopes import sample_features
from tests.unit.scopes.sample_features import STATIONS, Station, StationProvider, Weather

SAMPLE = "tests.unit.scopes.sample_features"
MODEL = f"scripted:{SAMPLE}:model"
FAST = {"durability": "none", "write_window_ms": 5, "hosts_per_node": 1}


class Plain(Feature):
    """A Feature of which a test makes what it wants."""

    name: ClassVar[str] = "plain"

    def __init__(self, **brings: Any) -> None:
        for what, value in brings.items():
            setattr(self, what, value if what == "name" else lambda value=value: value)


class Other(Plain):
    name: ClassVar[str] = "other"


def refused(*features: Feature) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loaded = Features(features)
        host_container(loaded, {})
    return caught.value


class OnlyStation(Provider):
    scope = LifecycleScope.SESSION

    @provide
    def mine(self) -> Station:
        return Station()


@pytest.mark.parametrize(
    ("kind", "name", "brings"),
    [
        ("tool", "Forecast", {"tools": {"Forecast": sample_features.Forecast}}),
        ("profile", "weatherman", {"profiles": [Profile(name="weatherman")]}),
        ("event type", "weather/asked", {"event_types": [EventType("weather/asked", Payload)]}),
        ("command", "forecast", {"commands": {"forecast": sample_features.forecast}}),
        ("service", "Station", {"services": [OnlyStation()]}),
        ("feature", "weather", {"name": "weather"}),
    ],
)
def test_two_features_that_bring_one_thing_are_refused_and_named(kind: str, name: str, brings: dict[str, Any]) -> None:
    error = refused(Weather(), Plain(**brings))
    assert error.code == "config.feature"
    assert f"the {kind} {name!r}" in error.message
    assert "test_features:Plain" in error.message and "sample_features:Weather" in error.message


@pytest.mark.parametrize(
    ("kind", "brings"),
    [
        ("profile", {"profiles": [Profile(name="agent")]}),
        ("event type", {"event_types": [EventType("turn/start", Payload)]}),
    ],
)
def test_what_kimi_ray_has_itself_is_refused(kind: str, brings: dict[str, Any]) -> None:
    error = refused(Plain(**brings))
    assert error.code == "config.feature" and "that of kimi-ray itself" in error.message


@pytest.mark.parametrize(
    "brings",
    [
        {"name": ""},
        {"event_types": [EventType("weather/on-surface", Payload, surface=True)]},
        {"event_types": [EventType("weather", Payload)]},
    ],
)
def test_a_feature_that_cannot_be_one(brings: dict[str, Any]) -> None:
    assert refused(Plain(**brings)).code == "config.feature"


def test_a_tool_that_agents_would_share_is_refused() -> None:
    shared = Provider(scope=LifecycleScope.APP)
    shared.provide(Station)
    error = refused(Plain(services=[shared], tools={"S": Station}))
    assert error.code == "config.feature" and "would have agents share its tool S" in error.message


def test_a_feature_that_raises_is_named() -> None:
    class Raising(Feature):
        name: ClassVar[str] = "raising"

        def profiles(self) -> Sequence[Profile]:
            raise OSError("no disk")

    error = refused(Raising())
    assert "Raising cannot say what it brings: no disk" in error.message


def test_one_feature_that_brings_a_service_twice() -> None:
    error = refused(Plain(services=[StationProvider(), OnlyStation()]))
    assert error.code == "config.assembly" and "Station" in error.message


class MyJournal(Provider):
    scope = LifecycleScope.AGENT

    def __init__(self, *, override: bool) -> None:
        super().__init__()
        self.provide(self.journal, override=override)

    def journal(self) -> Journal:
        raise AssertionError


def test_a_service_of_kimi_ray_is_replaced_only_on_purpose() -> None:
    error = refused(Plain(services=[MyJournal(override=False)]))
    assert error.code == "config.assembly"
    assert "Journal is provided twice" in error.message and "override=True" in (error.hint or "")
    loaded = Features([Plain(services=[MyJournal(override=True)])])
    host_container(loaded, {})
    both = refused(Plain(services=[MyJournal(override=True)]), Other(services=[MyJournal(override=True)]))
    assert both.code == "config.feature" and "Journal" in both.message


async def test_a_replacement_is_what_agents_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "note.txt").write_text("here")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "note.txt").write_text("elsewhere")
    monkeypatch.setenv("ELSEWHERE_ROOT", str(elsewhere))
    for features, found in ((), "here"), ((f"{SAMPLE}:Elsewhere",), "elsewhere"):
        home = tmp_path / f"home {found}"
        async with Runtime.connect(home, "in-process", config={**FAST, "features": features}) as runtime:
            session = await runtime.workspace(tmp_path).create_session(
                profile="bare", tools=["Read"], model=f"scripted:{SAMPLE}:reader"
            )
            assert (await (await session.main.submit("?")).result()).text.split()[-1] == found


def test_classes_that_a_feature_names_need_no_provider() -> None:
    class Thing:
        def __init__(self, journal: Journal) -> None: ...

    loaded = Features([Plain(on_agent=[Thing], on_session=[Station], tools={"T": Thing})])
    host_container(loaded, {})


def test_a_session_service_that_needs_an_agent_s_is_refused() -> None:
    class Early:
        def __init__(self, journal: Journal) -> None: ...

    error = refused(Plain(on_session=[Early]))
    assert error.code == "config.assembly" and error.message.endswith("Early -> Journal")
    assert "Early of the SESSION scope cannot have Journal of the AGENT scope" in error.message


def test_a_constructor_that_says_too_little() -> None:
    class Silent:
        def __init__(self, thing) -> None: ...  # type: ignore[no-untyped-def]

    assert "Silent has a constructor that says too little" in refused(Plain(on_agent=[Silent])).message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no.such.module:Thing", "cannot be imported: no module 'no.such.module' in "),
        (f"{SAMPLE}:Nothing", "has no Nothing"),
        (f"{SAMPLE}:Station", "is no subclass of kimi_ray.Feature"),
        (SAMPLE, "cannot be imported"),
        ("tests.unit.scopes.test_features:Unbuildable", "cannot be built: not today"),
        (f"{SAMPLE}:Circular", "in a circle: Ledger -> Clerk -> Ledger"),
    ],
)
async def test_a_feature_that_cannot_be_loaded_is_told_at_the_connect(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        async with Runtime.connect(tmp_path / "home", "in-process", features=(name,)):
            pass
    assert caught.value.code in ("config.feature", "config.assembly") and words in caught.value.message
    assert not (tmp_path / "home").exists(), "nothing was started"


class Unbuildable(Feature):
    name: ClassVar[str] = "unbuildable"

    def __init__(self) -> None:
        raise OSError("not today")


async def test_all_that_a_feature_brings_is_there(tmp_path: Path) -> None:
    STATIONS.clear()
    settings = {**FAST, "features": (f"{SAMPLE}:Weather",)}
    async with Runtime.connect(tmp_path / "home", "in-process", config=settings) as runtime:
        session = await runtime.workspace(tmp_path).create_session(profile="weatherman", model=MODEL)
        result = (await (await session.main.submit("Kyoto?")).result()).raise_for_state()
        assert result.text == "Kyoto: rain"
        told = [found.event.data async for found in session.events(types=["weather/asked"])]
        assert told == [{"place": "Kyoto"}]
        with pytest.raises(ConfigError) as caught:
            [found async for found in session.events(types=["weather/never"])]
        assert "weather/asked" in (caught.value.hint or "")
        swarm = await session.swarm("How is {{item}}?", ["a", "b"], profile="weatherman", model=MODEL)
        assert [row.status for row in swarm.rows] == ["completed"] * 2
    (station,) = STATIONS
    assert station.told[0] == "main asked for Kyoto" and station.told[-1] == "closed"
    assert sorted(station.told[1:-1]) == sorted(
        [f"{agent} {did}" for agent in ("agent-1", "agent-2") for did in ("asked for Kyoto", "ended turn 0")]
        + ["main ended turn 0"]
    )


class Misnamed(Feature):
    name: ClassVar[str] = "misnamed"

    def tools(self) -> dict[str, type]:
        return {"Weather": sample_features.Forecast}

    def services(self) -> Sequence[Provider]:
        return [StationProvider()]


@pytest.mark.parametrize(
    ("feature", "profile", "code", "words"),
    [
        (
            f"{SAMPLE}:BrokenStart",
            "weatherman",
            "agent.start_failed",
            "Broken could not be built: OSError: no",
        ),
        ("tests.unit.scopes.test_features:Misnamed", "Weather", "config.feature", "and is called 'Forecast'"),
    ],
)
async def test_an_agent_that_cannot_start_says_why_and_leaves_nothing(
    tmp_path: Path, feature: str, profile: str, code: str, words: str
) -> None:
    STATIONS.clear()
    async with Runtime.connect(tmp_path / "home", "in-process", config={**FAST, "features": (feature,)}) as runtime:
        workspace = runtime.workspace(tmp_path)
        chosen = profile if profile == "weatherman" else Profile(name="x", tools=(profile,))
        with pytest.raises(KimiRayError) as caught:
            await workspace.create_session(profile=chosen, model=MODEL)
        assert caught.value.code == code and words in caught.value.message
        assert (await runtime.sessions.page()).items == ()
        with pytest.raises(KimiRayError):
            await workspace.create_session(profile=chosen, model=MODEL)


async def test_names_of_tools_are_known_where_they_are_said(tmp_path: Path) -> None:
    settings = {**FAST, "features": (f"{SAMPLE}:Weather",)}
    async with Runtime.connect(tmp_path / "home", "in-process", config=settings) as runtime:
        workspace = runtime.workspace(tmp_path)
        with pytest.raises(ToolError) as caught:
            await workspace.create_session(profile="bare", tools=["Forcast"], model=MODEL)
        assert caught.value.code == "tool.unknown" and "did you mean Forecast" in (caught.value.hint or "")
        session = await workspace.create_session(profile="bare", tools=["Read", "Forecast"], model=MODEL)
        assert (await (await session.main.submit("?")).result()).text == "Kyoto: rain"
        await session.close()
        again = await workspace.resume(session.id)
        assert (await (await again.main.submit("?")).result()).text == "Kyoto: rain"
    with pytest.raises(ConfigError) as unknown:
        async with Runtime.connect(tmp_path / "home", "in-process", config=FAST) as plain:
            await plain.workspace(tmp_path).create_session(profile="weatherman", model=MODEL)
    assert unknown.value.code == "profile.unknown"


@pytest.mark.parametrize("kind", ["Weather", "StrictWeather"])
async def test_a_log_is_read_without_the_feature_if_its_events_may_be_passed_over(tmp_path: Path, kind: str) -> None:
    settings = {**FAST, "features": (f"{SAMPLE}:{kind}",)}
    async with Runtime.connect(tmp_path / "home", "in-process", config=settings) as runtime:
        session = await runtime.workspace(tmp_path).create_session(profile="weatherman", model=MODEL)
        await (await session.main.submit("?")).result()
        await session.close()
        again = await runtime.workspace(tmp_path).resume(session.id)
        assert (await (await again.main.submit("?")).result()).state == "completed"

    def Forecast(place: str) -> str:  # the profile names it: without the Feature somebody else has to bring it
        return f"{place}: snow"

    async with Runtime.connect(tmp_path / "home", "in-process", config=FAST) as plain:
        workspace = plain.workspace(tmp_path)
        with pytest.raises(ToolError) as caught:
            await workspace.resume(session.id)
        assert caught.value.code == "tool.unknown"
        if kind == "Weather":
            third = await workspace.resume(session.id, tools=[Forecast])
            assert (await (await third.main.submit("?")).result()).text == "Kyoto: snow"
        else:
            with pytest.raises(KimiRayError) as refused:
                await workspace.resume(session.id, tools=[Forecast])
            assert refused.value.code == "log.unknown_type" and "install the Feature" in (refused.value.hint or "")


@pytest.mark.parametrize("known", [True, False])
async def test_commands_read_what_features_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], known: bool
) -> None:
    home, strict = tmp_path / "home", (f"{SAMPLE}:StrictWeather",)
    async with Runtime.connect(home, "in-process", config={**FAST, "features": strict}) as runtime:
        workspace = runtime.workspace(tmp_path)
        session = await workspace.create_session(profile="weatherman", model=MODEL)
        await (await session.main.submit("?")).result()
        fork = await workspace.fork(session.id)
        assert (await (await fork.main.submit("?")).result()).state == "completed"
    if known:
        monkeypatch.setenv("KIMI_RAY_FEATURES", strict[0])
    at = ("--home", str(home))

    lines = (
        ["sessions", "diff", session.id, fork.id],
        ["sessions", "tail", session.id, "--type", "weather/asked"],
        ["sessions", "tail", session.id],
        ["sessions", "verify", session.id],
        ["sessions", "show", session.id],
    )
    codes = [await asyncio.to_thread(run_command, [*line, *at]) for line in lines]
    assert codes == ([1, 0, 0, 0, 0] if known else [2, 2, 0, 0, 0]), "what only shows lines needs no Feature"
    assert "weather/asked" in capsys.readouterr().out


def test_profiles_and_tools_of_features_are_names_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KIMI_RAY_FEATURES", f"{SAMPLE}:Weather")
    assert run_command(["run", "Kyoto?", "--profile", "weatherman", "--model", MODEL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "Kyoto: rain"
    (tmp_path / "items.txt").write_text("a\nb\n")
    swarm = ["swarm", "How is {{item}}?", "--items", "items.txt", "--model", MODEL, "--in-process", "--json"]
    assert run_command([*swarm, "--profile", "bare", "--tools", "Forecast", "--out", "one"]) == 0
    assert run_command([*swarm, "--profile", "weatherman", "--out", "two"]) == 0
    capsys.readouterr()
    assert run_command([*swarm, "--profile", "weathrman"]) == 2
    assert "did you mean weatherman" in capsys.readouterr().out


def test_a_command_of_a_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIMI_RAY_FEATURES", f"{SAMPLE}:Weather")
    assert run_command(["forecast", "Kyoto", "--json"]) == 0
    assert capsys.readouterr().out == "Kyoto: rain (True)\n"
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr()
    assert "The weather of a place, on the command line." in shown.out and shown.err == ""
    assert run_command(["forecast"]) == 2
    assert run_command(["forecst", "Kyoto"]) == 2
    assert "No such command" in capsys.readouterr().err


def test_help_is_given_though_a_feature_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIMI_RAY_FEATURES", "no.such:Thing")
    assert run_command(["--help"]) == 0
    shown = capsys.readouterr()
    assert "doctor" in shown.out and "no.such:Thing cannot be imported" in shown.err
    assert run_command(["forecast", "Kyoto"]) == 2
    assert "no.such:Thing" in capsys.readouterr().err


def test_built_in_commands_load_no_feature(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def never(_config: RuntimeConfig) -> Features:
        raise AssertionError

    monkeypatch.setenv("KIMI_RAY_FEATURES", f"{SAMPLE}:Weather")
    monkeypatch.setattr(features_module, "load_features", never)
    assert run_command(["--version"]) == 0
    assert run_command(["sessions", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sessions"] == []


def test_a_command_that_there_is_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(_config: RuntimeConfig) -> Features:
        return Features([Plain(commands={"doctor": sample_features.forecast})])

    monkeypatch.setenv("KIMI_RAY_FEATURES", f"{SAMPLE}:Weather")
    monkeypatch.setattr(features_module, "load_features", taken)
    assert run_command(["nothing"]) == 2
    assert "'doctor', which kimi-ray has itself" in capsys.readouterr().err


def test_a_command_may_have_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    inner = typer.Typer()
    inner.command("today")(sample_features.forecast)
    inner.command("tomorrow")(sample_features.forecast)

    def loaded(_config: RuntimeConfig) -> Features:
        return Features([Plain(commands={"weather": inner})])

    monkeypatch.setenv("KIMI_RAY_FEATURES", f"{SAMPLE}:Weather")
    monkeypatch.setattr(features_module, "load_features", loaded)
    assert run_command(["weather", "today", "Kyoto"]) == 0
    assert capsys.readouterr().out == "Kyoto: rain (False)\n"


def test_features_come_by_entry_point_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "weather_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weather-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kimi_ray.features]\nweather = {SAMPLE}:Weather\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for named in ((), (f"{SAMPLE}:Weather",)):
        loaded = load_features(RuntimeConfig(home=str(tmp_path / "home"), features=named))
        assert [type(feature) for feature in loaded].count(Weather) == 1
    assert "weatherman" in loaded.profiles and "weather/asked" in loaded.catalog


def test_the_page_s_first_example_is_a_feature() -> None:
    page = (Path(__file__).parents[3] / "docs" / "features.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    space: dict[str, Any] = {}
    exec(code, space)
    loaded = Features([space["RulesFeature"]()])
    host_container(loaded, {})
    slots = AgentSlots()
    space["HouseRules"](slots)
    assert slots.tool.handlers == ("house rules",)


def test_the_page_names_every_slot_and_every_method() -> None:
    page = (Path(__file__).parents[3] / "docs" / "features.md").read_text()
    assert [name for name in AgentSlots.__slots__ if f"`{name}`" not in page] == []
    methods = [name for name, value in vars(Feature).items() if callable(value) and not name.startswith("_")]
    assert [name for name in methods if f"`{name}()`" not in page] == []
