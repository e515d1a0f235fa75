"""Logs that end anywhere, that a crash cut and a repair mended, that cannot be read; and what today does otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.config import load_config
from kimi_ray.errors import KimiRayError
from kimi_ray.events import event_from_data, make_event, parse_event
from kimi_ray.hosts.features import load_features
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.log import Order, closing_events
from kimi_ray.replay import HomeSource, ReplayOptions, ReplayReport, rebuild_session, replay_session
from kimi_ray.runtime import Runtime
from kimi_ray.store.seam import ListedLog, Page, Stream
from kimi_ray.tools import tool
from tests.unit.replay.recorded_sessions import (
    FAST,
    Facts,
    Scenes,
    assert_as_recorded,
    look,
    recorded,
    replayed,
    scripted,
    source_of,
)

CHECKED = 3
"""The turn of ``eventful`` whose prompt has a schema."""

MAIN = Stream("s1", "main")


class Lines:
    """A log of these lines, beside the blobs of a home."""

    def __init__(self, home: HomeSource, header: dict[str, Any], lines: list[bytes]) -> None:
        self._home = home
        self._header = header
        self.lines = lines

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        return Page(seq, tuple(self.lines[seq : seq + limit]), len(self.lines))

    async def list_logs(self, session_id: str) -> list[ListedLog]:
        return [ListedLog(MAIN, self._header)]

    async def read_blob(self, session_id: str, digest: str) -> bytes:
        return await self._home.read_blob(session_id, digest)


async def whole_log(tmp_path: Path) -> Lines:
    """The main agent's log of the session that was recorded."""
    home = source_of(tmp_path)
    [log] = await home.list_logs("s1")
    page = await home.read_from(MAIN, 0, 100_000, 1 << 30)
    assert log.header is not None
    return Lines(home, log.header, list(page.lines))


async def _replay(tmp_path: Path, source: Lines, **options: Any) -> ReplayReport:
    config = load_config(tmp_path / "home")
    return await replay_session(source, "s1", options=ReplayOptions(own_tools=(look,), **options), config=config)


async def eventful(tmp_path: Path) -> None:
    """A session with a bit of everything."""
    scenes = Scenes()
    two = (ToolCall("look", '{"what": "a"}', "c"), ToolCall("look", '{"what": "b"}', "c"))
    scenes.steps["go"] = [Step(tool_calls=two), Step.error("provider.overloaded"), Step.call("no_such_tool"), "done"]
    scenes.steps["stopped"] = [Step.call("look", {"what": "c"}), "wait"]
    scenes.steps["joined"] = ["wait", Step.call("look", {"what": "d"})]
    scenes.steps["checked"] = ["no", '{"n": 1}']
    models = {"m": {"provider": "scripted", "script": scripted(scenes.answer).partition(":")[2], "retry_base_s": 0.0}}
    async with recorded(tmp_path, scenes.answer, models=models) as session:
        main = session.main
        await main.set_model("m")
        await (await main.submit("go")).result(10)
        stopped = await main.submit("stopped")
        await scenes.until_waiting()
        await stopped.cancel()
        await stopped.result(10)
        scenes.waiting.clear()
        first = await main.submit("joined")
        await scenes.until_waiting()
        second = await main.submit("and this", steer_if_active=True)
        scenes.go_on.set()
        await first.result(10)
        await second.result(10)
        await (await main.submit("checked", output_schema={"type": "object", "required": ["n"]})).result(10)
        await main.undo(1)
        await (await main.submit("last")).result(10)


async def test_a_log_that_ends_anywhere_is_replayed_to_its_end(tmp_path: Path) -> None:
    await eventful(tmp_path)
    await assert_as_recorded(tmp_path)
    whole = await whole_log(tmp_path)
    lines = list(whole.lines)
    config = load_config(tmp_path / "home")
    features = load_features(config)
    options = ReplayOptions(own_tools=(look,))
    for end in range(len(lines), 0, -1):
        whole.lines = lines[:end]
        report = await replay_session(whole, "s1", options=options, config=config, features=features)
        assert report.ok, (end, parse_event(lines[end - 1]), report.divergence, report.agents[0].error)
        assert report.requests == report.agents[0].recorded_requests, end


async def test_a_log_that_was_mended_anywhere_is_replayed_with_what_came_after(tmp_path: Path) -> None:
    await eventful(tmp_path)
    whole = await whole_log(tmp_path)
    lines = list(whole.lines)
    order = Order()
    for end, line in enumerate(lines, 1):
        order.apply(parse_event(line))
        if order.open_turn is None or order.open_turn >= CHECKED:
            continue  # from there on another turn would have a header of its own: see the crash below
        mended = list(lines[:end])
        for closer in closing_events(order, next_seq=end, recovered_at=1):
            mended.append(_line(len(mended), closer))
        turn = order.next_turn
        again: list[dict[str, Any]] = [
            {"type": "turn/start", "data": {"turn": turn, "prompts": [], "continuation": "recovery"}},
            {"type": "step/start", "data": {"turn": turn, "step": 0}},
            {"type": "llm/response", "data": {"turn": turn, "step": 0, "attempt": 1, "timing": {"total_ms": 1}}},
            {
                "type": "assistant/message",
                "data": {"turn": turn, "step": 0, "message": _said("went on"), "attempt": 1},
                "surface": "append",
            },
            {"type": "step/end", "data": {"turn": turn, "step": 0}},
            {"type": "turn/end", "data": {"turn": turn, "reason": {"kind": "completed"}}},
        ]
        for event in again:
            mended.append(_line(len(mended), event))
        whole.lines = mended
        report = await _replay(tmp_path, whole)
        assert report.ok, (end, parse_event(line), report.divergence, report.agents[0].error)


@pytest.mark.parametrize("on_interrupt", ["fail", "continue"])
async def test_a_crash_in_the_middle_of_a_turn(tmp_path: Path, on_interrupt: Any) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [Step.call("look", {"what": "a"}), "wait"]
    (tmp_path / "lost").mkdir()
    async with recorded(tmp_path / "lost", scenes.answer) as session:
        await session.main.submit("go", output_schema={"type": "object"}, on_interrupt=on_interrupt)
        await scenes.until_waiting()
        await session.flush()
        # without what is only a cache, or about to be renamed
        passing = shutil.ignore_patterns("index*", ".*", "*.tmp*")
        shutil.copytree(tmp_path / "lost" / "home", tmp_path / "home", ignore=passing)
        await session.main.cancel()
    scenes.steps["go"] = ["no", "{}"]
    async with Runtime.connect(tmp_path / "home", "in-process", config=FAST) as runtime:
        (tmp_path / "work").mkdir()
        session = await runtime.workspace(tmp_path / "work").resume("s1", tools=[look])
        await (await session.main.submit("after")).result(10)
    whole = await whole_log(tmp_path)
    assert any(b'"recovered_at"' in line for line in whole.lines)
    report = await replayed(tmp_path)
    assert report.ok, report.divergence
    assert report.requests == {"fail": 2, "continue": 4}[on_interrupt]


def _line(seq: int, event: dict[str, Any]) -> bytes:
    return make_event(seq, 1, event["type"], event["data"], event.get("surface"), event.get("sources")).line


def _said(text: str) -> dict[str, Any]:
    source = {"kind": "model", "provider": "scripted", "model": "m"}
    return {"id": f"msg_{text}", "role": "assistant", "content": [{"type": "text", "text": text}], "source": source}


async def test_a_log_that_cannot_be_read_is_told_and_the_others_are_replayed(tmp_path: Path) -> None:
    scenes = Scenes()
    async with recorded(tmp_path, scenes.answer) as session:
        await (await session.main.submit("go")).result(10)
        beside = await session.fork_agent()
        await (await beside.submit("beside")).result(10)
    [log] = (tmp_path / "home" / "sessions").glob("*/s1/agents/main/wire*")
    raw = bytearray(log.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    log.write_bytes(bytes(raw))
    report = await replayed(tmp_path)
    [main, other] = report.agents
    assert not report.ok and main.error is not None and main.error["code"] == "store.corrupt"
    assert other.requests == 1 and other.divergence is None and report.divergence is None
    rebuilt = await rebuild_session(source_of(tmp_path), "s1")
    assert list(rebuilt.agents) == ["agent-1"] and rebuilt.unreadable["main"].code == "store.corrupt"


async def test_a_blob_that_is_gone_is_named(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [Step.call("look", {"what": "y" * 30_000}), "done", "z" * 20_000]
    async with recorded(tmp_path, scenes.answer) as session:
        await (await session.main.submit("go")).result(10)
        await (await session.main.submit("x" * 40_000)).result(10)
    blobs = [path for path in (tmp_path / "home" / "blobs").glob("*/*") if path.stat().st_size > 20_000]
    assert len(blobs) == 3, "arguments, result, prompt"
    for path in blobs:
        path.unlink()
    main = (await rebuild_session(source_of(tmp_path), "s1")).main
    with pytest.raises(KimiRayError) as gone:
        await main.messages()
    assert gone.value.code.startswith("store.")
    report = await replayed(tmp_path)
    found = report.divergence
    assert found is not None and not report.ok and found.kind == "failed", found
    assert found.replayed["code"] == gone.value.code


async def test_a_payload_of_another_shape_is_told(tmp_path: Path) -> None:
    scenes = Scenes()
    async with recorded(tmp_path, scenes.answer) as session:
        await (await session.main.submit("go")).result(10)
    whole = await whole_log(tmp_path)
    for at, line in enumerate(whole.lines):
        if b'"type":"llm/response"' in line or b'"type":"assistant/message"' in line:
            data = parse_event(line).to_data() | {"data": {"x": 1}}
            bad = event_from_data(data)
            lines = [*whole.lines[:at], _line(at, data | {"data": bad.data}), *whole.lines[at + 1 :]]
            report = await _replay(
                tmp_path, Lines(source_of(tmp_path), (await whole.list_logs("s1"))[0].header or {}, lines)
            )
            error = report.agents[0].error
            assert error is not None and error["code"] == "log.bad_payload", at


@tool(name="look", description="Something else now")
def look_again(what: str) -> str:
    """Look."""
    return f"{what} is {Facts.value}"


async def test_what_a_header_says_otherwise_today(tmp_path: Path) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [Step.call("look", {"what": "a"}), "done"]
    async with recorded(tmp_path, scenes.answer) as session:
        await (await session.main.submit("go")).result(10)
    report = await replayed(tmp_path, own_tools=(look_again,))
    found = report.divergence
    assert found is not None
    assert (found.request, found.field) == (0, "tools[0].description")
    assert (found.recorded, found.replayed) == ("Look something up.", "Something else now")
    for ignored in ("tools", "tools[0].description", "tools[0].description,tools[0].parameters"):
        again = await replayed(tmp_path, own_tools=(look_again,), ignore=tuple(ignored.split(",")))
        left = again.divergence
        assert left is None or left.field.startswith("tools[0].parameters"), left
    model = scripted(scenes.answer)
    table = {"provider": "scripted", "model": "another name", "extra_body": {"top_k": 3}}
    config = load_config(tmp_path / "home", {"models": {model: table}})
    named = await replay_session(source_of(tmp_path), "s1", options=ReplayOptions(own_tools=(look,)), config=config)
    assert named.divergence is not None
    assert (named.divergence.field, named.divergence.replayed) == ("model", "another name")
    options = ReplayOptions(own_tools=(look,), ignore=("model",))
    extra = await replay_session(source_of(tmp_path), "s1", options=options, config=config)
    assert extra.divergence is not None
    assert (extra.divergence.field, extra.divergence.replayed) == ("extra_body", {"top_k": 3})


@pytest.mark.parametrize(("then", "today", "kind"), [(True, False, "extra"), (False, True, "missing")])
async def test_a_loop_that_asks_once_more_or_once_less(tmp_path: Path, then: bool, today: bool, kind: str) -> None:
    scenes = Scenes()
    scenes.steps["go"] = [Step.call("look", {"what": "a"})] * 13
    async with recorded(tmp_path, scenes.answer, repeat_guard=then) as session:
        await (await session.main.submit("go")).result(10)
    config = load_config(tmp_path / "home", {"repeat_guard": today})
    options = ReplayOptions(own_tools=(look,))
    report = await replay_session(source_of(tmp_path), "s1", options=options, config=config)
    found = report.divergence
    assert found is not None and found.kind == f"{kind}_request" and found.request == 12, found
    same = await replay_session(
        source_of(tmp_path), "s1", options=options, config=load_config(tmp_path / "home", {"repeat_guard": then})
    )
    assert same.ok, same.divergence
