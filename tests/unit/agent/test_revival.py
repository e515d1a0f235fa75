"""Agents that come back: whatever prefix of a log was durable, the revived agent is well-formed and goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.agent.revival import LOST
from kimi_ray.events import SessionEvent
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.log import interrupted_turn_closers
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe

SCRIPT = [Step(tool_calls=(ToolCall("Probe", "{}", "c1"), ToolCall("Probe", "{}", "c2"))), "after tools", "second"]


async def _whole_log(on_interrupt: str) -> list[SessionEvent]:
    bench = AgentBench(SCRIPT, tools=(Probe(),))
    bench.submit("one", "two", on_interrupt=on_interrupt)
    await bench.result("p1")
    return bench.events


async def _settled(bench: AgentBench) -> None:
    async with asyncio.timeout(10):
        while bench.agent.busy:
            await asyncio.sleep(0.001)


def _model(request: Any) -> str:
    ids = [message["id"] for message in request.messages]
    assert len(ids) == len(set(ids)), "a message stands twice in the request"
    calls = [b["id"] for m in request.messages if m["role"] == "assistant" for b in m["content"] if "arguments" in b]
    results = [m["source"]["call_id"] for m in request.messages if m.get("source", {}).get("kind") == "tool"]
    assert calls == results, "every call is answered exactly once, in order"
    return "revived"


@pytest.mark.parametrize("on_interrupt", ["fail", "continue"])
async def test_every_durable_prefix_revives_to_a_closed_log_with_every_prompt_ended(on_interrupt: str) -> None:
    events = await _whole_log(on_interrupt)
    for cut in range(1, len(events) + 1):
        bench = AgentBench(_model, tools=(Probe(),), events=events[:cut])
        bench.agent.revive()
        await _settled(bench)
        assert bench.log.order.open_turn is None, cut
        assert [event.line for event in bench.events[:cut]] == [event.line for event in events[:cut]]
        submitted = {data["prompt_id"] for data in bench.of("prompt/submitted")}
        ended = [data["prompt_id"] for data in bench.of("prompt/completed")]
        assert sorted(ended) == sorted(submitted), (cut, ended)
        if on_interrupt == "continue":
            assert all(data["state"] == "completed" for data in bench.of("prompt/completed")), cut
        turns = [data["turn"] for data in bench.of("turn/start")]
        assert turns == list(range(len(turns)))


async def test_reviving_twice_adds_nothing_the_second_time() -> None:
    events = (await _whole_log("fail"))[:9]
    first = AgentBench(_model, tools=(Probe(),), events=events)
    first.agent.revive()
    await _settled(first)
    second = AgentBench(_model, tools=(Probe(),), events=first.events)
    second.agent.revive()
    await _settled(second)
    assert second.events == first.events


async def test_started_and_unstarted_calls_are_told_apart() -> None:
    events = await _whole_log("fail")
    cut = next(index for index, event in enumerate(events) if event.type == "tool/call") + 1
    closers = interrupted_turn_closers(events[:cut], recovered_at=5)
    assert [closer["data"].get("error", {}).get("code") for closer in closers] == [
        "tool.outcome_unknown",
        "tool.not_started",
        None,
        None,
    ]
    assert closers[-1]["data"]["reason"] == {"kind": "interrupted", "recovered_at": 5}
    assert [closer["seq"] for closer in closers] == list(range(cut, cut + 4))
    assert closers[0]["sources"] == [cut - 1]


async def test_an_interrupted_prompt_fails_with_turn_interrupted() -> None:
    events = (await _whole_log("fail"))[:8]
    bench = AgentBench(_model, tools=(Probe(),), events=events)
    bench.agent.revive()
    await _settled(bench)
    outcome = bench.agent.outcome("p0")
    assert outcome is not None and outcome.result.state == "failed"
    assert outcome.result.error is not None and outcome.result.error["code"] == "turn.interrupted"


async def test_a_prompt_that_is_interrupted_again_and_again_is_given_up() -> None:
    bench = AgentBench(SCRIPT, tools=(Probe(),))
    bench.submit("one", on_interrupt="continue")
    await bench.until("assistant/message")
    events = bench.events
    for life in range(10):
        again = AgentBench(_model, tools=(Probe(),), events=events)
        again.agent.journal.append("runtime/activated", {"epoch": life + 2, "host": f"h{life}", "pid": life})
        again.agent.revive()
        if not again.agent.busy:
            break
        await again.until("step/start", count=again.types.count("step/start") + 1)
        events = again.events
        cut = max(index for index, event in enumerate(events) if event.type == "step/start") + 1
        events = events[:cut]
    else:
        pytest.fail("it was continued without end")
    await bench.agent.close()
    await _settled(again)
    outcome = again.agent.outcome("p0")
    assert outcome is not None and outcome.result.state == "failed"
    error = outcome.result.error
    assert error is not None and error["code"] == "agent.revivals_exhausted"
    assert (error["details"]["host"], life) == ("h2", 3)
    assert again.types.count("prompt/completed") == 1


async def test_a_finished_turn_lets_an_agent_be_revived_again() -> None:
    bench = AgentBench(SCRIPT, tools=(Probe(),))
    bench.submit("one", on_interrupt="continue")
    await bench.until("assistant/message")
    events = bench.events
    for life in range(3):
        again = AgentBench(_model, tools=(Probe(),), events=events)
        again.agent.journal.append("runtime/activated", {"epoch": life + 2})
        again.agent.revive()
        await again.until("step/start", count=again.types.count("step/start") + 1)
        assert again.agent.journal.fold.revivals == life + 1
        if life < 2:
            events = again.events
    await again.until("prompt/completed")
    assert again.agent.journal.fold.revivals == 0
    await bench.agent.close()


async def test_a_continued_turn_that_had_ended_before_the_next_crash_is_not_run_again() -> None:
    bench = AgentBench(SCRIPT, tools=(Probe(),))
    bench.submit("one", on_interrupt="continue")
    await bench.until("tool/call", count=2)
    bench.submit("joins it", steer_if_active=True, on_interrupt="continue")
    await bench.result()
    heard = next(n for n, event in enumerate(bench.events) if event.type == "user/message" and event.data["id"] == "p1")
    first = AgentBench(_model, tools=(Probe(),), events=bench.events[: heard + 1])
    first.agent.revive()
    await _settled(first)
    assert [data.get("continuation") for data in first.of("turn/start")] == [None, "recovery"]
    cut = max(n for n, event in enumerate(first.events) if event.type == "turn/end") + 1
    for lost_behind in (cut, cut + 1):
        second = AgentBench(_model, tools=(Probe(),), events=first.events[:lost_behind])
        second.agent.revive()
        await _settled(second)
        assert len(second.of("turn/start")) == 2, "the model was asked again for what it had answered"
        ended = {data["prompt_id"]: (data["state"], data["turn"]) for data in second.of("prompt/completed")}
        assert ended == {"p0": ("completed", 1), "p1": ("completed", 1)}
        if lost_behind == cut:
            assert (await second.result("p0")).result.text == "revived"


async def test_questions_and_hooks_of_a_lost_life_are_closed_once_and_before_the_turn() -> None:
    probe = Probe()
    probe.release.clear()
    before = AgentBench([Step(tool_calls=(ToolCall("Probe", "{}", "c1"),))], tools=(probe,))
    hook = {"event": "PreToolUse", "command": "guard", "about": "c1"}
    told = before.journal.append("hook/invoked", {**hook, "about": "c0"})
    before.journal.append("hook/result", {**hook, "about": "c0", "invoked": told.seq, "blocked": False})
    for call_id in ("c0", "c1"):
        before.journal.append(
            "permission/asked", {"call_id": call_id, "name": "Probe", "about": "x", "by": "mode", "wait_s": 9.0}
        )
    before.journal.append("permission/decided", {"call_id": "c0", "decision": "allow", "by": "user"})
    before.submit("go")
    await probe.started.wait()
    open_hook = before.journal.append("hook/invoked", hook)
    lost = before.events
    await before.agent.close()

    bench = AgentBench(["on"], tools=(Probe(),), events=lost)
    bench.agent.revive()
    await _settled(bench)
    new = [event.type for event in bench.events[len(lost) :]]
    assert new[:3] == ["permission/decided", "hook/result", "tool/result"] and new.count("turn/end") == 1
    assert bench.of("permission/decided")[-1] == {"call_id": "c1", "decision": "cancelled", "by": "host"}
    assert bench.of("hook/result")[-1] == {**hook, "invoked": open_hook.seq, "blocked": False, "error": LOST}

    again = AgentBench([], tools=(Probe(),), events=bench.events)
    again.agent.revive()
    await _settled(again)
    assert len(again.events) == len(bench.events)


async def test_what_was_open_before_the_first_life_of_a_log_stays_as_it_is() -> None:
    before = AgentBench([])
    before.journal.append("hook/invoked", {"event": "Stop", "command": "elsewhere"})
    before.journal.append(
        "permission/asked", {"call_id": "c1", "name": "Probe", "about": "x", "by": "mode", "wait_s": 9.0}
    )
    before.journal.append("runtime/activated", {"host": "h", "epoch": 1})
    bench = AgentBench([], events=before.events)
    bench.agent.revive()
    assert len(bench.events) == len(before.events)
