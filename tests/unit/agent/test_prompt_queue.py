"""The queue of prompts: in order, steered all or none, given back where they stood, one final state each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.agent.slots import StepStarting
from kimi_ray.agent.specs import PromptSpec, PromptStatus
from kimi_ray.errors import AgentError
from kimi_ray.llm.script import Step
from tests.unit.agent.bench import AgentBench
from tests.unit.agent.test_turns import Probe


async def running(script: Any, *queued: str) -> tuple[AgentBench, Probe]:
    """An agent in the tool of its first turn (prompt p0), with prompts p1, p2, ... behind it."""
    probe = Probe()
    probe.release.clear()
    bench = AgentBench(script, tools=(probe,))
    bench.submit("zero", *queued)
    async with asyncio.timeout(5):
        await probe.started.wait()
    return bench, probe


def said(bench: AgentBench) -> list[str]:
    """The texts of the users' prompts on the surface, in order."""
    return [m["content"][0]["text"] for m in bench.log.messages() if m.get("source", {}).get("kind") == "user"]


def final(bench: AgentBench) -> dict[str, str]:
    states: dict[str, str] = {}
    for data in bench.of("prompt/completed"):
        assert data["prompt_id"] not in states, "a prompt has one final state"
        states[data["prompt_id"]] = data["state"]
    return states


async def test_prompts_run_in_order_without_overlap_and_only_those_that_wait_are_told_as_queued() -> None:
    running_now = most = 0

    async def model(_request: Any) -> str:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.001)
        running_now -= 1
        return "ok"

    bench = AgentBench(model)
    bench.submit("a")
    bench.submit("b", "c")
    await bench.result("p2")
    bench.submit("d")
    await bench.result("p3")
    assert most == 1
    assert said(bench) == ["a", "b", "c", "d"]
    assert [data["prompts"] for data in bench.of("turn/start")] == [["p0"], ["p1"], ["p2"], ["p3"]]
    assert [(data["prompt_id"], data["queue_length"]) for data in bench.of("prompt/queued")] == [("p1", 2), ("p2", 3)]


async def test_steering_takes_the_order_of_the_queue_whatever_the_order_of_the_ids() -> None:
    bench, probe = await running([Step.call("Probe"), "done", "rest"], "one", "two", "three")
    bench.agent.prompts.steer(["p3", "p1"])
    probe.release.set()
    assert (await bench.result("p3")).result.turn == 0
    assert (await bench.result("p2")).result.turn == 1
    assert said(bench) == ["zero", "one", "three", "two"]
    [steered] = bench.of("prompt/steered")
    assert steered == {"prompt_ids": ["p1", "p3"], "active_prompt_id": "p0", "turn": 0}


@pytest.mark.parametrize("ids", [[], ["p1", "p1"], ["p1", "nope"], ["p0"], ["p1", "p0"]])
async def test_a_steer_that_is_wrong_in_one_part_changes_nothing(ids: list[str]) -> None:
    bench, probe = await running([Step.call("Probe"), "done", "one", "two"], "one", "two")
    before = bench.types
    with pytest.raises(AgentError) as refused:
        bench.agent.prompts.steer(ids)
    assert refused.value.code == "prompt.not_found"
    assert bench.types == before
    probe.release.set()
    await bench.result("p2")
    assert said(bench) == ["zero", "one", "two"]
    assert [(await bench.result(f"p{n}")).result.turn for n in range(3)] == [0, 1, 2]


async def test_a_prompt_is_steered_once() -> None:
    bench, probe = await running([Step.call("Probe"), "done"], "one")
    bench.agent.prompts.steer(["p1"])
    with pytest.raises(AgentError) as refused:
        bench.agent.prompts.steer(["p1"])
    assert refused.value.code == "prompt.not_found"
    probe.release.set()
    await bench.result("p1")
    assert said(bench) == ["zero", "one"]


async def test_nothing_can_be_steered_without_a_turn() -> None:
    bench = AgentBench(["x"])
    bench.agent.hold("test")
    bench.submit("one")
    with pytest.raises(AgentError) as refused:
        bench.agent.prompts.steer(["p0"])
    assert refused.value.code == "prompt.not_found"
    assert [data["queue_length"] for data in bench.of("prompt/queued")] == [1], "it waits, and that is told"
    bench.agent.release("test")
    assert (await bench.result()).result.state == "completed"


async def test_a_steered_prompt_keeps_a_turn_alive_that_would_have_ended() -> None:
    bench = AgentBench(["first", "second"])

    async def steer(event: StepStarting) -> None:
        if event.step == 0:
            bench.agent.submit((PromptSpec("p1", "one", steer_if_active=True),))

    bench.slots.step.register("steer", steer)
    bench.submit("zero")
    first, second = (await bench.result("p0")).result, (await bench.result("p1")).result
    assert (first.turn, second.turn) == (0, 0)
    assert (first.steps, first.text) == (2, "second")
    start = [index for index, name in enumerate(bench.types) if name == "step/start"][1]
    assert bench.types[start + 1] == "user/message", "it is said at the boundary, inside of the step that it joins"


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_prompts_that_could_not_join_stand_again_where_they_stood(end: str) -> None:
    last = Step.error("provider.auth", 401) if end == "failed" else Step("never", latency_s=60)

    def model(request: Any) -> Step:
        return Step("ok") if request.turn > 0 else last if request.step > 0 else Step.call("Probe")

    bench, probe = await running(model, "one", "two", "three", "four")

    async def steer(event: StepStarting) -> None:
        if (event.turn, event.step) == (0, 1):
            bench.agent.prompts.steer(["p4", "p2"])

    bench.slots.step.register("steer", steer)
    probe.release.set()
    if end == "cancelled":
        await bench.until("prompt/steered")
        assert bench.agent.cancel("p0", "user") == ["p0"]
    await bench.result("p4")
    assert said(bench) == ["zero", "one", "two", "three", "four"]
    assert final(bench) == {"p0": end, **{f"p{n}": "completed" for n in range(1, 5)}}
    back = [(data["prompt_id"], data["queue_length"]) for data in bench.of("prompt/queued")][4:]
    assert back == [("p2", 4), ("p4", 4)]


async def test_a_steered_prompt_can_be_cancelled_before_it_joins() -> None:
    bench, probe = await running([Step.call("Probe"), "done", "two"], "one", "two")
    bench.agent.prompts.steer(["p1", "p2"])
    assert bench.agent.cancel("p1", "user") == ["p1"]
    probe.release.set()
    outcome = await bench.result("p1")
    assert (outcome.result.state, outcome.result.turn, outcome.result.text) == ("cancelled", None, "")
    assert (await bench.result("p2")).result.turn == 0
    assert said(bench) == ["zero", "two"]


async def test_cancelling_all_hits_those_that_were_to_join() -> None:
    bench, probe = await running([Step.call("Probe"), "never"], "one", "two")
    bench.agent.prompts.steer(["p2"])
    assert bench.agent.cancel(None, "user") == ["p2", "p1", "p0"]
    probe.release.set()
    await bench.result("p0")
    assert final(bench) == {"p0": "cancelled", "p1": "cancelled", "p2": "cancelled"}
    assert said(bench) == ["zero"]


async def test_cancelling_what_joined_cancels_the_turn_of_all() -> None:
    script = [Step.call("Probe"), Step.call("Probe"), "never"]
    bench, probe = await running(script, "one")
    bench.agent.prompts.steer(["p1"])
    probe.release.set()
    probe.release = asyncio.Event()
    await bench.until("tool/call", count=2)
    assert bench.agent.cancel("p1", "user") == ["p0", "p1"]
    probe.release.set()
    await bench.result("p1")
    assert final(bench) == {"p0": "cancelled", "p1": "cancelled"}


async def test_a_queued_prompt_that_is_cancelled_is_never_said() -> None:
    bench, probe = await running([Step.call("Probe"), "done", "two"], "one", "two")
    assert bench.agent.cancel("p1", "user") == ["p1"]
    assert bench.agent.cancel("p1", "user") == []
    assert bench.agent.cancel("nobody", "user") == []
    probe.release.set()
    await bench.result("p2")
    assert said(bench) == ["zero", "two"]
    assert not [m for m in bench.log.messages() if m.get("source", {}).get("kind") == "interruption"]


async def test_a_prompt_id_stays_taken_in_the_next_life() -> None:
    bench = AgentBench(["x"])
    bench.submit("one")
    await bench.result()
    again = AgentBench(["y"], events=bench.events)
    again.agent.revive()
    again.agent.submit((PromptSpec("p0", "one"),))  # the same prompt, sent again
    for _ in range(5):
        await asyncio.sleep(0)
    assert not again.agent.busy and again.types == bench.types
    with pytest.raises(AgentError) as refused:
        again.agent.submit((PromptSpec("p0", "other"),))
    assert refused.value.code == "prompt.id_conflict"


@pytest.mark.parametrize("on_interrupt", ["fail", "continue"])
async def test_every_durable_prefix_with_steered_prompts_gives_each_one_end_and_none_is_lost(on_interrupt: str) -> None:
    probe = Probe()
    probe.release.clear()
    bench = AgentBench([Step.call("Probe"), "done", "three"], tools=(probe,))
    bench.submit("zero", "one", "two", "three", on_interrupt=on_interrupt)
    async with asyncio.timeout(5):
        await probe.started.wait()
    bench.agent.prompts.steer(["p1", "p2"])
    probe.release.set()
    await bench.result("p3")
    events = bench.events
    for cut in range(1, len(events) + 1):
        again = AgentBench(lambda _request: "revived", tools=(Probe(),), events=events[:cut])
        again.agent.revive()
        async with asyncio.timeout(5):
            while again.agent.busy:
                await asyncio.sleep(0)
        types = [event.type for event in events[:cut]]
        states = final(again)
        assert sorted(states) == sorted(data["prompt_id"] for data in again.of("prompt/submitted")), cut
        heard = said(again)
        assert len(heard) == len(set(heard)), cut
        if "prompt/steered" in types and types.count("user/message") < 2:
            # steered, and the process died before they were said: they waited, and then ran
            assert states["p1"] == states["p2"] == "completed", cut
            assert heard[-3:] == ["one", "two", "three"], cut
        if on_interrupt == "continue":
            assert set(states.values()) == {"completed"}, cut


async def test_a_prompt_that_never_ran_is_not_called_running_until_its_end_is_durable() -> None:
    bench = AgentBench(["slow"], chunk_chars=1, tokens_per_s=20, checkpoint="none")
    bench.submit("one", "two")
    await bench.until("step/start")
    bench.store.disk.clear()
    bench.agent.cancel("p1", "user")
    assert bench.agent.status("p1") == PromptStatus("pending", None)
    assert bench.agent.status("p0") == PromptStatus("running", 0)
    bench.agent.cancel("p0", "user")
    await bench.until("prompt/completed", count=2)
    assert bench.agent.status("p0") == PromptStatus("running", 0)
    bench.store.disk.set()
    assert (await bench.result("p1")).result.state == "cancelled"
    assert bench.agent.status("p1") == PromptStatus("cancelled", None)
