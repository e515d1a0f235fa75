"""The examples of docs/hooks.md and docs/permissions.md do what the pages say, as they are written."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, get_args

from kimi_ray.llm.script import Step
from kimi_ray.settings import HookEvent, Profile
from tests.unit.runtime_fixtures import running

DOCS = Path(__file__).parents[3] / "docs"
WORKER = Profile(name="worker", tools=("Read", "Write", "Bash"))


def tables(page: str, key: str) -> list[list[dict[str, Any]]]:
    """The TOML blocks of a page that have this key."""
    blocks = re.findall(r"^```toml\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return [found[key] for found in map(tomllib.loads, blocks) if key in found]


def texts(request: Any) -> str:
    return "\n".join(str(message["content"]) for message in request.messages)


async def test_the_three_hooks() -> None:
    assert len(tables("hooks.md", "hooks")) == 3


async def test_the_hook_that_forbids_rm(tmp_path: Path) -> None:
    async with running(tmp_path, hooks=tables("hooks.md", "hooks")[0]) as (runtime, stage, model):
        (tmp_path / "work" / "notes.txt").touch()
        stage.faults["go"] = [
            Step.call("Bash", {"command": "rm notes.txt"}),
            Step.call("Bash", {"command": "ls; cp notes.txt form.txt"}),
        ]
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile=WORKER)
        assert (await (await session.main.submit("go")).result(20)).state == "completed"
        assert (tmp_path / "work" / "notes.txt").exists() and (tmp_path / "work" / "form.txt").exists()
        assert "move files into trash/ instead" in texts(stage.requests[1])


async def test_the_hook_that_adds_to_each_prompt(tmp_path: Path) -> None:
    async with running(tmp_path, hooks=tables("hooks.md", "hooks")[1]) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile=WORKER)
        for _ in range(2):
            assert (await (await session.main.submit("go")).result(20)).state == "completed"
        said = texts(stage.requests[1])
        assert len(re.findall(r'<hook_result hook_event="UserPromptSubmit">\\nIt is \d{4}-\d\d-\d\d, and', said)) == 2


async def test_the_hook_that_hangs(tmp_path: Path) -> None:
    async with running(tmp_path, hooks=tables("hooks.md", "hooks")[2]) as (runtime, stage, model):
        stage.faults["go"] = [Step.call("Bash", {"command": "touch ran"})]
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile=WORKER)
        assert (await (await session.main.submit("go")).result(20)).state == "completed"
        assert (tmp_path / "work" / "ran").exists()
        results = [event.data async for event in session.main.events() if event.type == "hook/result"]
        assert [result["timed_out"] for result in results] == [True]
        assert "it took too long and was killed after 1" in results[0]["error"]


def test_every_event_is_explained() -> None:
    page = (DOCS / "hooks.md").read_text()
    assert [event for event in get_args(HookEvent) if f"`{event}`" not in page] == []


async def test_the_rules(tmp_path: Path) -> None:
    [rules] = tables("permissions.md", "permissions")
    async with running(tmp_path, permissions=rules, permission_mode="manual") as (runtime, stage, model):
        work = tmp_path / "work"
        (work / "notes.txt").touch()
        stage.faults["go"] = [
            Step.call("Bash", {"command": "ls && rm notes.txt"}),
            Step.call("Write", {"path": "secrets/key", "content": "x"}),
            Step.call("Bash", {"command": "git --version"}),
        ]
        session = await runtime.workspace(work).create_session(model=model, profile=WORKER)
        assert (await (await session.main.submit("go")).result(20)).state == "completed"
        found = [event.data async for event in session.main.events() if event.type == "permission/decided"]
        assert [(one["decision"], one["rule"]) for one in found] == [
            ("deny", "Bash(rm *)"),
            ("deny", "Write(secrets/**)"),
            ("allow", "Bash(git *)"),
        ]
        assert [path.name for path in work.iterdir()] == ["notes.txt"]
