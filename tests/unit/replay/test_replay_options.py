"""What a replay is asked for: refused where it is said, never found out in the middle of a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import ConfigError, ToolError
from kimi_ray.events import SessionEvent
from kimi_ray.llm.script import Step
from kimi_ray.replay import ReplayOptions
from kimi_ray.settings import Workdir
from kimi_ray.store.seam import Stream
from tests.unit.replay.recorded_sessions import look, recorded, replayed


def count(path: str) -> str:
    """Count.

    Args:
        path: What.
    """
    return "3\nlines"


def test_plain_functions_and_the_forms_of_the_command_line_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ReplayOptions(tools="real", own_tools=[count, look], workdir="shared")
    assert [tool.name for tool in options.own_tools] == ["count", "look"]  # pyright: ignore
    assert options.workdir == Workdir.shared(str(tmp_path))
    assert ReplayOptions(workdir=Workdir.none()).workdir == Workdir.none()


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"own_tools": [5]}, "tool.bad_signature"),
        ({"own_tools": ["no_such_module_here:f"]}, "tool.not_importable"),
        ({"own_tools": count}, "request.bad_argument"),
        ({"own_tools": "mine:count"}, "request.bad_argument"),
        ({"workdir": "somewhere"}, "workdir.invalid"),
        ({"workdir": 5}, "request.bad_argument"),
        ({"ignore": "system"}, "request.bad_argument"),
        ({"tools": [count]}, "request.invalid"),
    ],
)
def test_what_cannot_be_is_refused_at_once(said: dict[str, Any], code: str) -> None:
    with pytest.raises((ConfigError, ToolError)) as refused:
        ReplayOptions(**said)
    assert refused.value.code == code


@pytest.mark.parametrize(
    "field",
    "system model tools tools[2] tools[2].description sampling sampling.seed extra_body extra_body.a.b "
    "tools[0].parameters.properties.x messages[2] messages[2].content[0].text stream".split(),
)
def test_fields_of_a_request_may_differ(field: str) -> None:
    assert ReplayOptions(ignore=[field]).ignore == (field,)


@pytest.mark.parametrize(
    "field",
    [
        *"sistem messages messages.content messages[x] tools.description tools[2].descripton".split(),
        *"sampling.sed system.x * Tools messages[2].id".split(),
        "",
        5,
    ],
)
def test_other_fields_are_refused(field: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        ReplayOptions(ignore=[field])
    assert refused.value.code == "request.invalid" and refused.value.details == {"ignore": str(field)}


async def test_a_plain_function_runs_and_what_was_ignored_is_counted(tmp_path: Path) -> None:
    script = [Step.call("count", {"path": "a.txt"}), "done", "again"]
    async with recorded(tmp_path, script, tools=(count,)) as session:
        await (await session.main.submit("go")).result(10)
        await (await session.main.submit("more")).result(10)
    report = await replayed(tmp_path, tools="real", own_tools=[count])
    assert report.ok and report.agents[0].tools_run == 1 and report.agents[0].ignored == {}

    def counts(path: str) -> str:
        """Another description.

        Args:
            path: What.
        """
        return "4\nlines"

    counts.__name__ = "count"
    report = await replayed(tmp_path, own_tools=[counts])
    found = report.divergence
    assert found is not None and found.field == "tools[0].description" and found.what == "the tool count"
    report = await replayed(tmp_path, own_tools=[counts], ignore=("tools",))
    assert report.ok and report.agents[0].ignored == {"tools": 2}, "in both turns"
    report = await replayed(tmp_path, tools="real", own_tools=[counts], ignore=("tools[0].description",))
    found = report.divergence
    assert found is not None and found.what == 'the result of count({"path":"a.txt"}), call_0_0_0'
    assert found.message.endswith(f"differs at messages[2].content[0].content[0].text: {found.what}")
    report = await replayed(tmp_path, tools="real", own_tools=[counts], ignore=("tools", "messages[2]"))
    assert report.ok and report.agents[0].ignored == {"tools": 2, "messages[2]": 1}


class _Seen(Exception):
    """What an observer raises."""


@pytest.mark.parametrize("kind", ["prompt/submitted", "turn/start", "llm/response", "tool/result", "turn/end"])
@pytest.mark.parametrize("error", [_Seen("seen"), ToolError("seen", code="tool.failed")])
async def test_what_an_observer_raises_ends_the_replay(tmp_path: Path, kind: str, error: Exception) -> None:
    async with recorded(tmp_path, [Step.call("look", {"what": "a"}), "done"] * 2) as session:
        await (await session.main.submit("go")).result(10)
        await (await session.main.submit("more")).result(10)
    seen: list[tuple[Stream, str]] = []

    def observe(stream: Stream, event: SessionEvent) -> None:
        seen.append((stream, event.type))
        if event.type == kind:
            raise error

    with pytest.raises(type(error)) as raised:
        await replayed(tmp_path, observe=observe)
    assert raised.value is error
    assert seen[-1][1] == kind and [one for _, one in seen].count(kind) == 1, "nothing is shown to it behind that"
    assert {stream for stream, _ in seen} == {Stream("s1", "main")}


async def test_an_observer_that_is_called_otherwise_than_it_says_is_told(tmp_path: Path) -> None:
    async with recorded(tmp_path, ["done"]) as session:
        await (await session.main.submit("go")).result(10)
    seen: list[SessionEvent] = []
    with pytest.raises(TypeError, match="exactly one argument"):
        await replayed(tmp_path, observe=seen.append)
