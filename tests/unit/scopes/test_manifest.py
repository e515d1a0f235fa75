"""The manifest says what the code has, all of it, and ``docs/reference.md`` is what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kimi_ray.agent.fold import AgentFold
from kimi_ray.agent.slots import AgentSlots
from kimi_ray.cli.app import app, run_command
from kimi_ray.cli.manifest import as_markdown, collect
from kimi_ray.cli.manifest_facts import type_text
from kimi_ray.config import RuntimeConfig
from kimi_ray.events import CORE
from kimi_ray.features import BUILTIN
from kimi_ray.hosts.features import Features

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def facts() -> dict[str, list[dict[str, Any]]]:
    return collect(Features([kind() for kind in BUILTIN]), own=True)


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


def test_the_reference_is_what_the_code_says(facts: dict[str, list[dict[str, Any]]]) -> None:
    stored = (ROOT / "docs" / "reference.md").read_text()
    assert stored == as_markdown(facts), "docs/reference.md is stale: kimi-ray manifest --markdown > docs/reference.md"


def test_it_says_the_same_every_time(facts: dict[str, list[dict[str, Any]]]) -> None:
    cheap = [name for name in facts if name != "tools"]
    again = collect(Features([kind() for kind in BUILTIN]), cheap, own=True)
    assert json.dumps(again) == json.dumps({name: facts[name] for name in cheap})


def test_every_event_with_its_payload(facts: dict[str, list[dict[str, Any]]]) -> None:
    features = Features([kind() for kind in BUILTIN])
    assert names(facts["events"]) == [entry.name for entry in features.catalog]
    by_name = {row["name"]: row for row in facts["events"]}
    for entry in CORE:
        assert set(names(by_name[entry.name]["fields"])) | {"imported"} >= set(entry.payload.model_fields) - {
            "imported"
        }
        assert (by_name[entry.name]["surface"], by_name[entry.name]["ignorable"]) == (entry.surface, entry.ignorable)
    submitted = {field["name"]: field for field in by_name["prompt/submitted"]["fields"]}
    assert submitted["prompt_id"]["type"] == "str" and submitted["prompt_id"]["required"]


def test_every_object_that_payloads_name(facts: dict[str, list[dict[str, Any]]]) -> None:
    parts = {row["name"]: row for row in facts["parts"]}
    assert {"kind", "error", "scope"} <= set(names(parts["TurnReason"]["fields"]))
    types = " ".join(field["type"] for row in (*facts["events"], *facts["parts"]) for field in row["fields"])
    known = {*parts, "Any", "None", "Literal"}
    assert [word for word in re.findall(r"[A-Z]\w+", re.sub(r'"[^"]*"', "", types)) if word not in known] == []


def test_every_service_by_its_scope(facts: dict[str, list[dict[str, Any]]]) -> None:
    services = {(row["where"], row["name"]): row for row in facts["services"]}
    assert services["agent host", "Journal"]["scope"] == "agent"
    assert services["agent host", "Journal"]["needs"] == ["OpenedLog", "AgentSpec", "StoreCalls"]
    assert services["agent host", "SessionView"]["scope"] == "session"
    assert services["agent host", "ModelPool"]["scope"] == "app"
    assert services["session host", "SessionDocument"]["scope"] == "session"
    assert [row["scope"] for row in facts["services"]] == sorted(
        (row["scope"] for row in facts["services"]), key=["app", "session", "agent"].index
    )


def test_every_state_key_by_its_scope(facts: dict[str, list[dict[str, Any]]]) -> None:
    by_scope = {
        scope: {row["name"] for row in facts["state"] if row["scope"] == scope} for scope in ("session", "agent")
    }
    public = {name for name in AgentFold.__dataclass_fields__ if not name.startswith("_")}
    assert by_scope["agent"] == public
    assert by_scope["session"] >= {"id", "version", "title", "custom", "tags", "agents", "in_flight", "fork_left_out"}


def test_every_tool_with_its_schema(facts: dict[str, list[dict[str, Any]]]) -> None:
    tools = {row["name"]: row for row in facts["tools"]}
    features = Features([kind() for kind in BUILTIN])
    assert set(tools) == {"Read", "Write", "Edit", "Glob", "Grep", "Bash", *features.tools}
    assert "path" in tools["Read"]["parameters"]["properties"] and tools["Read"]["description"]
    assert [name for name in ("Read", "Write", "Bash") if tools[name]["writes"]] == ["Write", "Bash"]


def test_every_slot_and_setting_and_code(facts: dict[str, list[dict[str, Any]]]) -> None:
    assert sorted(names(facts["slots"])) == sorted(AgentSlots.__slots__)
    gate = next(row for row in facts["slots"] if row["name"] == "tool")
    assert {"deny()", "allow()", "arguments"} <= set(names(gate["fields"]))
    assert [name for name in names(facts["config"]) if "[" not in name] == list(RuntimeConfig.model_fields)
    assert {"[models.X] base_url", "[[hooks]] event", "[[permissions]] tool", "[mcp_servers.X] url"} <= set(
        names(facts["config"])
    )


def test_codes_are_found_whatever_their_family_and_modules_and_files_are_none(
    facts: dict[str, list[dict[str, Any]]],
) -> None:
    codes = set(names(facts["errors"]))
    assert {"config.assembly", "context.overflow", "agent.start_failed", "dsh.error", "tool.denied"} <= codes
    assert not codes & {"config.toml", "run.json", "session.jsonl", "store.json", "agent.fold", "sessions.sqlite"}


def test_every_command_with_its_flags(facts: dict[str, list[dict[str, Any]]]) -> None:
    root: Any = get_command(app)
    commands = {row["name"]: row for row in facts["commands"]}
    for name, command in root.commands.items():
        inner: dict[str, Any] = getattr(command, "commands", {})
        for path, one in ({f"{name} {below}": one for below, one in inner.items()} or {name: command}).items():
            row = commands[f"kimi-ray {path}"]
            assert row["doc"], path
            spelled = " ".join(names(row["flags"]))
            assert [
                flag for param in one.params for flag in param.opts if flag.startswith("--") and flag not in spelled
            ] == []
    model = next(flag for flag in commands["kimi-ray run"]["flags"] if flag["name"] == "--model")
    assert model["type"] == "NAME" and "[models.NAME]" in model["doc"]


def test_what_features_bring_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KIMI_RAY_FEATURES", "tests.unit.scopes.sample_features:Weather")
    hook = {"event": "SessionStart", "command": f"touch '{tmp_path}/told'"}
    monkeypatch.setenv("KIMI_RAY_HOOKS", json.dumps([hook]))
    assert run_command(["manifest", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "told").exists(), "hooks are not told of an agent that is only asked for its tools"
    assert "weather/asked" in names(found["events"])
    assert {"Station": "app", "Forecast": "agent", "Diary": "agent"}.items() <= {
        row["name"]: row["scope"] for row in found["services"]
    }.items()
    feature = next(row for row in found["features"] if row["name"] == "weather")
    assert feature["class"] == "tests.unit.scopes.sample_features:Weather"
    assert [feature[what] for what in ("tools", "profiles", "events", "commands", "services")] == [
        ["Forecast"], ["weatherman"], ["weather/asked"], ["forecast"], ["Diary", "Station"]
    ]  # fmt: skip
    tool = next(row for row in found["tools"] if row["name"] == "Forecast")
    assert tool["parameters"]["properties"]["place"]["description"] == "A town." and tool["from"] == "a Feature"
    assert "kimi-ray forecast" in names(found["commands"])


@pytest.mark.parametrize(
    "section", ["events", "parts", "features", "services", "state", "slots", "hooks", "errors", "config", "commands"]
)
def test_one_section(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["manifest", section, "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [section]
    assert run_command(["manifest", section]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) > 5 and shown[1].startswith(("NAME", "SCOPE"))


def test_a_section_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["manifest", "evnts"]) == 2
    assert "sections are events" in capsys.readouterr().err
    assert run_command(["manifest", "--json", "--markdown"]) == 2


def test_types_are_written_as_in_the_code() -> None:
    from collections.abc import Callable
    from typing import Annotated, Literal, Union

    assert type_text(Union[int, None]) == type_text(int | None) == "int | None"  # noqa: UP007
    assert type_text(dict[str, list[int]]) == "dict[str, list[int]]"
    assert type_text(Literal["a", 1]) == '"a" | 1'
    assert type_text(Annotated[tuple[str, ...], 3]) == "tuple[str, ...]"
    assert type_text(Callable[[int], str]) == "Callable[[int], str]"
