"""What a program may do wrong with the public API: an error with a code, and nobody else suffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import AgentError, ConfigError, KimiRayError, RunError, RuntimeFault, SessionError
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from kimi_ray.settings import Item
from tests.unit.runtime_fixtures import running

BARE: dict[str, Any] = {"profile": "bare"}

BAD_PROMPTS: dict[str, Any] = {
    "a number": 5,
    "bytes": b"x",
    "nothing": None,
    "a number in a list": [1],
    "an empty block": [{}],
    "a text that is none": [{"type": "text", "text": 5}],
    "no text": [{"type": "text"}],
    "an unknown kind": [{"type": "tool-call", "id": "x"}],
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
async def test_a_bad_prompt_is_refused_and_the_one_beside_it_runs(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        with pytest.raises(AgentError) as refused:
            session.main.submit(BAD_PROMPTS[name])
        assert refused.value.code == "prompt.invalid" and refused.value.hint
        good = await session.main.submit("good")
        assert (await good.result(10)).text == "did good"
        assert len(stage.requests) == 1


@pytest.mark.parametrize(
    "prompt", ["bad \ud800", [{"type": "text", "text": "\udfff"}], [{"type": "image", "size": 10**400}]]
)
async def test_a_prompt_that_no_log_can_hold_leaves_nothing_behind(tmp_path: Path, prompt: Any) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        with pytest.raises(KimiRayError) as refused:
            await session.main.submit(prompt)
        assert refused.value.code == "log.not_json" and str(refused.value).isascii()
        assert (await session.metadata()).get("last_prompt") is None
    # the document could be written when the runtime closed


@pytest.mark.parametrize("prompt_id", [5, "", "a/b", "a\n", "x" * 129])
async def test_a_bad_prompt_id(tmp_path: Path, prompt_id: Any) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        with pytest.raises(AgentError, match="id"):
            session.main.submit("x", prompt_id=prompt_id)


async def test_an_id_is_of_one_prompt_also_after_its_end(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        first = await (await session.main.submit("one", prompt_id="mine")).result(10)
        again = await (await session.main.submit("one", prompt_id="mine")).result(10)
        assert again.text == first.text and len(stage.requests) == 1
        with pytest.raises(AgentError) as taken:
            await session.main.submit("two", prompt_id="mine")
        assert taken.value.code == "prompt.id_conflict"


async def test_a_prompt_that_is_refused_takes_none_with_it_that_was_sent_beside_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await (await session.main.submit("zero", prompt_id="zero")).result(10)  # its host is known: one call has all
        one = session.main.submit("one", prompt_id="mine")
        two = session.main.submit("two", prompt_id="mine")
        three = session.main.submit("three")
        assert (await (await one).result(10)).text == "did one"
        with pytest.raises(AgentError) as taken:
            await two
        assert taken.value.code == "prompt.id_conflict"
        assert (await (await three).result(10)).text == "did three"
        assert [stage.prompt(request) for request in stage.requests] == ["zero", "one", "three"]


async def test_an_agent_that_broke_lives_again_with_the_next_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")

        def broken(*_: object) -> Any:
            raise ZeroDivisionError("broken")

        with monkeypatch.context() as patched:
            patched.setattr("kimi_ray.agent.live_agent.TurnConfigs.of", broken)
            result = await (await session.main.submit("one")).result(10)
            assert result.state == "failed" and result.error is not None and result.error["code"] == "internal"
        assert (await (await session.main.submit("two")).result(10)).text == "did two"


@pytest.mark.parametrize("agent_id", [None, 1, "", "../main", "a" * 200])
async def test_an_agent_id_that_is_none_is_refused_at_once(tmp_path: Path, agent_id: Any) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        with pytest.raises(AgentError) as refused:
            session.agent(agent_id)
        assert refused.value.code == "agent.not_found"


@pytest.mark.parametrize("from_seq", [-1, -(10**9)])
async def test_no_log_is_called_corrupt_for_a_bad_cursor(tmp_path: Path, from_seq: int) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        with pytest.raises(AgentError) as refused:
            _ = [event async for event in session.main.events(from_seq)]
        assert refused.value.code == "request.out_of_range"


@pytest.mark.parametrize(
    "said", [{"title": "a\ud800"}, {"title": "x" * 2000}, {"title": 5}, {"metadata": {"big": "x" * (2 << 20)}}]
)
async def test_a_document_is_small_and_storable(tmp_path: Path, said: dict[str, Any]) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        with pytest.raises(SessionError) as refused:
            await runtime.workspace(tmp_path / "work").create_session(model=model, **BARE, **said)
        assert refused.value.code == "session.bad_metadata"
        assert await runtime.sessions.count() == 0


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"repeats": 1.5}, "swarm.bad_repeats"),
        ({"repeats": True}, "swarm.bad_repeats"),
        ({"repeats": 10**9}, "swarm.too_many"),
        ({"max_concurrency": "x"}, "swarm.bad_concurrency"),
        ({"retries": 0.5}, "swarm.bad_retries"),
        ({"items": None}, "items.bad_item"),
        ({"seed": "x"}, "swarm.bad_seed"),
        ({"isolation": "much"}, "swarm.bad_setting"),
        ({"tags": {"n": 5}}, "swarm.bad_setting"),
        ({"metadata": {"n": object()}}, "swarm.bad_setting"),
        ({"items": 5}, "items.bad_item"),
    ],
)
async def test_a_bad_swarm_is_refused_at_once(tmp_path: Path, said: dict[str, Any], code: str) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        with pytest.raises(RunError) as refused:
            arguments: dict[str, Any] = {"items": ["a"], **BARE, **said}
            await session.swarm("{{item}}", **arguments)
        assert refused.value.code == code and refused.value.hint


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, GeneratorExit, ValueError])
@pytest.mark.parametrize("late", [False, True])
async def test_whatever_a_prompt_function_raises_ends_the_swarm(
    tmp_path: Path, kind: Callable[[], BaseException], late: bool
) -> None:
    def prompt(item: Item) -> str:
        if not late or item.data == "c":
            raise kind()
        return str(item.data)

    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        with pytest.raises(KimiRayError) as failed:
            await asyncio.wait_for(session.swarm(prompt, list("abcd"), **BARE), 10)
        assert failed.value.code == "swarm.prompt_failed"


def test_another_loop_is_told_to_connect_itself(tmp_path: Path) -> None:
    async def begin() -> tuple[Runtime, Session]:
        (tmp_path / "work").mkdir()
        runtime = await Runtime.connect(home=tmp_path / "home", address="in-process", durability="none")
        return runtime, await runtime.workspace(tmp_path / "work").create_session(model="scripted", profile="bare")

    async def elsewhere(session: Session) -> None:
        for use in (session.flush, lambda: session.main.submit("x"), lambda: session.swarm("{{item}}", ["a"], **BARE)):
            with pytest.raises(RuntimeFault) as refused:
                await asyncio.wait_for(use(), 5)
            assert refused.value.code == "runtime.wrong_loop" and refused.value.hint

    with asyncio.Runner() as first, asyncio.Runner() as second:
        runtime, session = first.run(begin())
        second.run(elsewhere(session))
        first.run(runtime.close())


WRONG: dict[str, dict[str, Any]] = {
    "limits": {"limits": {"max_steps": 3}},
    "sampling": {"sampling": {"temperature": 0}},
    "workdir": {"workdir": "none"},
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_dict_in_place_of_a_setting_is_named(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as (runtime, _stage, model):
        workspace = runtime.workspace(tmp_path / "work")
        with pytest.raises(ConfigError) as refused:
            await workspace.create_session(model=model, **BARE, **WRONG[name])
        assert refused.value.code == "request.bad_argument" and name in refused.value.message
        session = await workspace.create_session(model=model, **BARE)
        with pytest.raises(ConfigError) as refused:
            await session.start_swarm("{{item}}", ["a"], **BARE, **WRONG[name])
        assert refused.value.code == "request.bad_argument"
        if name != "workdir":
            with pytest.raises(ConfigError) as refused:
                session.main.submit("hi", **WRONG[name])
            assert refused.value.code == "request.bad_argument"


async def test_a_run_begun_in_python_goes_on_in_python(tmp_path: Path) -> None:
    items = [f"i{n}" for n in range(6)]
    options: dict[str, Any] = {**BARE, "out": tmp_path / "run", "seed": 7, "max_concurrency": 2}
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, **BARE)
        stage.gate.clear()
        handle = await session.start_swarm("{{item}}", items, **options)
        await stage.until_running(2)
        await handle.cancel()
        stage.gate.set()
        first = await handle.result(20)
        assert first.totals["not_started"] == 4
        made = len(stage.requests)
        with pytest.raises(RunError) as refused:
            await session.start_swarm("{{item}}", items, **options)
        assert refused.value.code == "run.exists" and "resume=True" in str(refused.value.hint)
        with pytest.raises(RunError) as refused:
            await session.start_swarm("{{item}}", items[1:], **options, resume=True)
        assert refused.value.code == "run.mismatch"
        report = await (await session.start_swarm("{{item}}", items, **options, resume=True)).result(20)
        assert report.run_id == first.run_id
        assert [row.status for row in report.rows] == ["completed"] * 6
        assert len({row.key for row in report.rows}) == 6
        assert len(stage.requests) - made <= 6 - first.totals["completed"]
        with pytest.raises(ConfigError) as conflict:
            await session.start_swarm("{{item}}", items, **BARE, resume=True)
        assert conflict.value.code == "request.conflict"


async def test_arguments_of_another_kind_are_named(tmp_path: Path) -> None:
    async with Runtime.connect(tmp_path / "home", address="in-process") as runtime:
        workspace = runtime.workspace(tmp_path)
        for argument, given in (("model", 5), ("tools", 5), ("tools", "Read")):
            with pytest.raises(ConfigError) as caught:
                await workspace.create_session(**{argument: given})  # type: ignore[arg-type]
            assert (caught.value.code, caught.value.details["argument"]) == ("request.bad_argument", argument)
        with pytest.raises(ConfigError) as caught:
            await runtime.sessions.list_recent(
                tags=5  # type: ignore[arg-type]
            )
        assert caught.value.code == "request.invalid"


async def test_closed_sessions_are_forgotten(tmp_path: Path) -> None:
    async with Runtime.connect(tmp_path / "home", address="in-process") as runtime:
        workspace = runtime.workspace(tmp_path)
        for _ in range(150):
            await (await workspace.create_session(model="scripted", profile="bare")).close()
        assert len(runtime._links) <= 65 and len(runtime._sessions) == len(runtime._links)
