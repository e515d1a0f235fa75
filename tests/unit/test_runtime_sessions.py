"""Sessions and prompts through the public API, everything in this process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kimi_ray import SessionSummary
from kimi_ray.errors import AgentError, ConfigError, KimiRayError, SessionError, ToolError
from kimi_ray.llm.script import Step
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Limits, Profile
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running


def state_of(home: Path, session_id: str) -> dict[str, object]:
    (found,) = home.glob(f"sessions/*/{session_id}/state.json")
    return json.loads(found.read_text())


async def test_submit_and_result(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        prompt = await session.main.submit("hello")
        result = (await prompt.result(10)).raise_for_state()
        assert result.text == "did hello"
        assert result.turn == 0
        assert (await prompt.result()) is result
        again = await (await session.main.continue_turn()).result(10)
        assert again.state == "completed" and again.turn == 1
        assert len(stage.requests) == 2


async def test_a_thousand_submits_that_nobody_awaits_run_in_order(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        before = runtime.agent_calls()
        handles = [session.main.submit(f"n{number}") for number in range(300)]
        last = await session.main.submit("last")
        assert (await last.result(60)).state == "completed"
        texts = [stage.prompt(request) for request in stage.requests]
        assert texts == [*(f"n{number}" for number in range(300)), "last"]
        assert runtime.agent_calls() - before < 20
        first = await handles[0]
        assert (await first.result(5)).text == "did n0"


async def test_tasks_made_of_submits_keep_their_order(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        tasks = [asyncio.create_task(session.main.submit(f"t{number}")) for number in range(20)]
        prompts = await asyncio.gather(*tasks)
        await asyncio.gather(*(prompt.result(20) for prompt in prompts))
        assert [stage.prompt(request) for request in stage.requests] == [f"t{number}" for number in range(20)]


async def test_leaving_a_result_cancels_the_prompt(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        prompt = await session.main.submit("slow")
        waiting = asyncio.create_task(prompt.result())
        await stage.until_running(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await prompt.result(10)).state == "cancelled"
        second = await session.main.submit("slower")
        with pytest.raises(AgentError) as caught:
            await second.result(0.05)
        assert caught.value.code == "prompt.timeout"
        assert (await second.result(10)).state == "cancelled"


async def test_a_failing_prompt_is_data_and_raises_only_when_asked(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.faults["bad"] = [Step.error("provider.auth", 401)]
        result = await (await session.main.submit("bad")).result(10)
        assert result.state == "failed"
        with pytest.raises(KimiRayError) as caught:
            result.raise_for_state()
        assert caught.value.code == "provider.auth"
        assert (await session.metadata())["last_turn_reason"] == "failed"


async def test_the_document_tells_what_the_session_is(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session(model=model, profile="bare", metadata={"a": 1}, tags={"k": "v"})
        await (await session.main.submit("find\n the   bug, api_key=abcdef123")).result(10)
        await session.update(metadata={"b": [2], "a": None})
        await session.flush()
        value = state_of(tmp_path / "home", session.id)
        assert value["custom"] == {"b": [2]} and value["tags"] == {"k": "v"}
        assert value["title"] == value["last_prompt"] == "find the bug, api_key=[redacted]"
        assert value["title_kind"] == "replaceable" and value["version"] == 1
        assert value["cwd"] == str(tmp_path / "work") and value["workspace_id"] == work.id
        assert value["agents"] == {"main": {"type": "main", "parent_agent_id": None}}
        (listed,) = await runtime.sessions.list_recent()
        assert listed.id == session.id and listed.last_turn_reason == "completed"
        assert await runtime.sessions.count() == 1


async def test_a_submit_tells_its_turn_and_the_document_is_named_after_prompts_but_keeps_a_title_of_the_caller(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        work = runtime.workspace(tmp_path / "work")
        named = await work.create_session(model=model, profile="bare", title="My own")
        session = await work.create_session(model=model, profile="bare")
        stage.gate.clear()
        first = await session.main.submit("first")
        await stage.until_running(1)
        second = await session.main.submit("second")
        third = await session.main.continue_turn()
        status = await first.status()
        assert (status.state, status.turn) == ("running", 0)
        for waiting in (second, third):
            status = await waiting.status()
            assert (status.state, status.turn) == ("pending", None)
        await session.main.steer([second.id])
        assert ((await second.status()).state, (await second.status()).turn) == ("steered", 0)
        stage.gate.set()
        for prompt, turn in ((first, 0), (second, 0), (third, 1)):
            before = await prompt.result(10)
            assert (before.state, before.turn) == ("completed", turn)
            status = await prompt.status()
            assert (status.state, status.turn) == ("completed", turn)
        await (await named.main.submit("words of a prompt")).result(10)
        value = await session.metadata()
        assert (value["title"], value["title_kind"], value["last_prompt"]) == ("first", "replaceable", "second")
        value = await named.metadata()
        assert (value["title"], value["title_kind"]) == ("My own", "custom")
        assert value["last_prompt"] == "words of a prompt"
        await session.update(title="Chosen later")
        await (await session.main.submit("third")).result(10)
        value = await session.metadata()
        assert (value["title"], value["title_kind"], value["last_prompt"]) == ("Chosen later", "custom", "third")
        # Another handle of the same prompt has no result and asks the agent.
        again = await session.main.submit("first", prompt_id=first.id)
        assert ((await again.status()).state, (await again.status()).turn) == ("completed", 0)


async def test_the_first_of_many_prompts_gives_a_session_its_title(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        together = await work.create_session(model=model, profile="bare")
        apart = await work.create_session(model=model, profile="bare")
        await together.main.submit_many(["one", "two"])
        for text in ("one", "two"):
            await apart.main.submit(text)
        for session in (together, apart):
            value = await session.metadata()
            assert (value["title"], value["last_prompt"]) == ("one", "two")


async def test_resume_in_another_runtime_goes_on_with_the_next_turn(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=model, profile=Profile(name="own", system_prompt="be brief"), limits=Limits(max_turns=50)
        )
        await (await session.main.submit("one")).result(10)
        session_id = session.id
    before = state_of(tmp_path / "home", session_id)
    async with running(tmp_path) as (runtime, stage, _):
        work = runtime.workspace(tmp_path / "work")
        first, second = await asyncio.gather(work.resume(session_id), work.resume(session_id))
        assert first is second
        result = await (await first.main.submit("two")).result(10)
        assert result.turn == 1
        assert stage.requests[0].system == "be brief"
        assert [stage.prompt(request) for request in stage.requests] == ["two"]
        assert len(await first.main.messages()) == 4
        assert before["last_prompt"] == "one"
        with pytest.raises(SessionError) as caught:
            await work.resume("session_nobody")
        assert caught.value.code == "session.not_found"
    assert state_of(tmp_path / "home", session_id)["last_prompt"] == "two"


async def test_what_cannot_be_created_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        kept = await work.create_session("mine", model=model, profile="bare")
        for wanted, arguments in (
            ("session.exists", {"session_id": "mine"}),
            ("session.bad_id", {"session_id": "../up"}),
            ("session.bad_metadata", {"metadata": {"x": {1, 2}}}),
        ):
            with pytest.raises(SessionError) as refused:
                await work.create_session(**{"model": model, "profile": "bare", **arguments})  # type: ignore[arg-type]
            assert refused.value.code == wanted
        with pytest.raises(ConfigError) as unknown:
            await work.create_session(profile="nobody", model=model)
        assert unknown.value.code == "profile.unknown"
        with pytest.raises(ConfigError) as no_model:
            await work.create_session(model="nothing-here")
        assert no_model.value.code == "model.not_configured"
        with pytest.raises(ToolError) as no_tool:
            await work.create_session(model=model, tools=["Hammer"])
        assert no_tool.value.code == "tool.unknown"
        with pytest.raises(SessionError) as no_place:
            runtime.workspace(tmp_path / "nowhere")
        assert no_place.value.code == "workspace.not_found"
        assert [row.id for row in await runtime.sessions.list_recent()] == [kept.id]
        assert len(list((tmp_path / "home").glob("sessions/*/*"))) == 1


async def test_main_that_does_not_come_to_life_leaves_nothing(tmp_path: Path) -> None:
    from kimi_ray.settings import Workdir

    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        with pytest.raises(ToolError) as caught:
            await work.create_session("broken", model=model, workdir=Workdir.copy(str(tmp_path / "nothing")))
        assert caught.value.code.startswith("workdir.")
        assert await runtime.sessions.count() == 0
        assert not list((tmp_path / "home").glob("sessions/*/broken"))
        assert await runtime.connection.registry.call("find_session", "broken", timeout_s=5, group="control") is None
        session = await work.create_session("broken", model=model)
        assert session.id == "broken"


async def test_a_lost_agent_host_fails_the_turn_and_the_session_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await (await session.main.submit("one")).result(10)
        stage.gate.clear()
        prompt = await session.main.submit("two")
        queued = await session.main.submit("three")
        waiting = asyncio.create_task(prompt.result(20))
        await stage.until_running(1)
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        stage.gate.set()
        lost = await waiting
        assert lost.state == "failed" and lost.error is not None and lost.error["code"] == "turn.interrupted"
        assert (await queued.result(20)).text == "did three"
        assert (await (await session.main.submit("four")).result(20)).text == "did four"


async def test_a_prompt_submitted_to_continue_survives_its_host(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        stage.gate.clear()
        prompt = await session.main.submit("two", on_interrupt="continue")
        waiting = asyncio.create_task(prompt.result(20))
        await stage.until_running(1)
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        stage.gate.set()
        assert (await waiting).text == "did two"


async def test_a_lost_session_host_is_found_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await (await session.main.submit("one")).result(10)
        await session.flush()
        for host in await hosts_of(runtime, "sessions"):
            cluster_of(runtime).kill_host(host)
        assert (await session.metadata())["last_prompt"] == "one"
        assert (await (await session.main.submit("two")).result(20)).turn == 1


async def test_set_model_lasts_over_a_lost_host(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(
            model="scripted:kimi_ray.llm.scripts:echo", profile="bare"
        )
        assert (await (await session.main.submit("a")).result(10)).text == "a"
        await session.main.set_model(model)
        assert (await (await session.main.submit("b")).result(10)).text == "did b"
        for host in await hosts_of(runtime, "agents"):
            cluster_of(runtime).kill_host(host)
        assert (await (await session.main.submit("c")).result(20)).text == "did c"
        assert len(stage.requests) == 2


async def test_events_live_and_followed(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        seen: list[str] = []

        async def follow() -> None:
            async for event in session.main.events(follow=True):
                seen.append(event.type)
                if event.type == "prompt/completed":
                    return

        following = asyncio.create_task(follow())
        await (await session.main.submit("one")).result(10)
        await asyncio.wait_for(following, 10)
        stored = [event async for event in session.main.events()]
        assert [event.seq for event in stored] == list(range(len(stored)))
        assert [event.type for event in stored][: len(seen)] == seen
        one_type = [found async for found in session.events(types=["prompt/submitted"])]
        assert [(found.agent_id, found.event.type) for found in one_type] == [("main", "prompt/submitted")]
        await session.close()
        assert [event.seq async for event in session.main.events(3)][:2] == [3, 4]


async def test_close_cancels_what_runs_and_lets_the_id_go(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare")
        stage.gate.clear()
        running_one = await session.main.submit("runs")
        await session.main.submit("waits")
        await stage.until_running(1)
        waiting = asyncio.create_task(running_one.result())
        await asyncio.sleep(0)
        await session.close()
        await session.close()
        with pytest.raises(KimiRayError):
            await asyncio.wait_for(session.main.submit("late"), 10)
        outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
        assert getattr(outcome, "state", None) == "cancelled" or getattr(outcome, "code", None) == "session.closed"
        stage.gate.set()
        stage.requests.clear()
        again = await work.resume("s1")
        assert again is not session
        assert (await (await again.main.submit("more")).result(10)).text == "did more"
        assert [stage.prompt(request) for request in stage.requests] == ["more"]


async def test_a_closed_runtime_says_so(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await runtime.close()
        await runtime.close()
        with pytest.raises(KimiRayError):
            await session.main.submit("late")
        with pytest.raises(KimiRayError) as caught:
            await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        assert caught.value.code == "runtime.closed"


async def test_user_tools_and_denied_home(tmp_path: Path) -> None:
    def lookup(word: str) -> str:
        """Say what a word means."""
        return f"{word} means fish"

    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, tools=[lookup, "Read"])
        secret = tmp_path / "home" / "store.json"
        stage.faults["go"] = [Step.call("lookup", {"word": "ika"}), Step.call("Read", {"path": str(secret)})]
        result = await (await session.main.submit("go")).result(20)
        assert result.state == "completed" and result.tool_calls == 2
        results = [m for m in await session.main.messages() if m.get("source", {}).get("kind") == "tool"]
        shown = [json.dumps(message["content"]) for message in results]
        assert "ika means fish" in shown[0]
        assert '"is_error": true' in shown[1] and "home_id" not in shown[1]


def test_run_sync_keeps_one_loop(tmp_path: Path) -> None:
    from kimi_ray.runtime import Connecting
    from kimi_ray.sync import run_sync

    (tmp_path / "work").mkdir()

    async def use() -> str:
        return "fine"

    assert run_sync(use()) == "fine"
    connecting = Runtime.connect(tmp_path / "home", "in-process")
    assert isinstance(connecting, Connecting)
    runtime = run_sync(connecting)
    try:
        session = run_sync(
            runtime.workspace(tmp_path / "work").create_session(
                model="scripted:kimi_ray.llm.scripts:echo", profile="bare"
            )
        )
        prompt = run_sync(session.main.submit("from a script"), 20)
        assert run_sync(prompt.result(), 20).text == "from a script"
    finally:
        run_sync(runtime.close())


async def test_run_sync_inside_a_running_loop_and_its_timeout() -> None:
    from kimi_ray.sync import run_sync

    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(KimiRayError) as caught:
        run_sync(forever(), 0.05)
    assert caught.value.code == "runtime.timeout"

    async def nested() -> None:
        run_sync(forever())

    with pytest.raises(KimiRayError) as nested_error:
        run_sync(nested())
    assert nested_error.value.code == "runtime.wrong_loop"


async def test_large_and_impossible_prompts(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        text = "word " * (1 << 20)
        large = await (await session.main.submit(text)).result(30)
        assert large.state == "completed" and stage.prompt(stage.requests[0]) == text
        assert len((await session.metadata())["last_prompt"]) <= 4000
        refused = [("", "prompt.empty"), ([], "prompt.empty"), ("bad \ud800", "log.not_json")]
        for prompt, code in refused:
            with pytest.raises(KimiRayError) as caught:
                await session.main.submit(prompt)  # type: ignore[arg-type]
            assert caught.value.code == code
        assert (await (await session.main.submit("after")).result(10)).text == "did after"
        report = await session.swarm("{{item}}", [text, "small"], profile="bare")
        assert report.ok and len(report.rows[0].item) == len(text)


async def test_resume_needs_the_users_own_tools_again(tmp_path: Path) -> None:
    def lookup(word: str) -> str:
        """Say what a word means."""
        return f"{word} means fish"

    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s", model=model, tools=["Read", lookup])
        assert await work.resume("s") is session
        await session.close()
        with pytest.raises(ToolError) as caught:
            await work.resume("s")
        assert caught.value.code == "tool.unknown" and "tools=" in (caught.value.hint or "")
        again = await work.resume("s", tools=[lookup])
        assert (await (await again.main.submit("x")).result(10)).text == "did x"


async def test_a_session_archives_and_deletes_itself(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s", model=model, profile="bare")
        await (await session.main.submit("one")).result(10)
        summary = await session.archive()
        assert isinstance(summary, SessionSummary) and (summary.id, summary.archived) == ("s", True)
        with pytest.raises(KimiRayError):
            await session.main.submit("two")
        assert (await session.archive()).archived
        again = await work.resume("s")
        assert (await (await again.main.submit("two")).result(10)).text == "did two"
        await again.delete()
        assert await runtime.sessions.get("s") is None
        with pytest.raises(SessionError) as caught:
            await again.delete()
        assert caught.value.code == "session.not_found"


async def test_a_prompt_that_is_refused_leaves_nothing_in_the_document(tmp_path: Path) -> None:
    async with running(tmp_path) as (runtime, _, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await (await session.main.submit("the first", prompt_id="p1")).result(10)
        before = await session.metadata()
        with pytest.raises(KimiRayError) as caught:
            await session.main.submit("something else", prompt_id="p1")
        assert caught.value.code == "prompt.id_conflict"
        after = await session.metadata()
        assert after["last_prompt"] == before["last_prompt"] == "the first"
        assert after["updated_at"] == before["updated_at"]
        handles = await session.main.submit_many(["second", "third"])
        await handles[-1].result(10)
        value = await session.metadata()
        assert (value["title"], value["last_prompt"]) == ("the first", "third")


def test_run_sync_passes_on_a_time_out_of_what_it_runs() -> None:
    from kimi_ray.sync import run_sync

    async def own() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        run_sync(own())
    with pytest.raises(TimeoutError, match="mine"):
        run_sync(own(), 5)
