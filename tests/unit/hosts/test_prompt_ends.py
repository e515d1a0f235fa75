"""Every prompt of a living agent has its result, however long ago it ended: from memory, or from the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.hosts import outcomes, prompt_ends
from kimi_ray.hosts.specs import Outcome, PromptSpec, RunRequest, Submit
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.llm.script import Step
from kimi_ray.store.seam import Stream
from tests.unit.hosts.test_agent_host import Place, ended, ran

PROMPTS = 12


async def talker(request: Any) -> Step:
    if request.turn == 2:
        return Step.error("provider.bad_request", 400)
    return Step(f"answer {request.turn}")


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr("kimi_ray.agent.fold.KEPT", 2)
    monkeypatch.setattr(outcomes, "KEPT_OF_AGENT", 2)
    place = Place(tmp_path / "home")
    await place.start()
    yield place
    await place.cluster.close()


async def submitted(place: Place, *prompts: PromptSpec, stream: Stream | None = None) -> None:
    submit = Submit(stream or place.stream("main"), prompts, "caller", -1)
    [ack] = await place.peer().call("submit_many", [submit], timeout_s=20)
    assert ack.error is None and not ack.refused


async def lived(place: Place) -> dict[str, Outcome]:
    """An agent with prompts and continuations, and what was said of their ends at once."""
    host, stream = place.peer(), place.stream("main")
    spec = place.spec(script=f"{__name__}:talker")
    await ran(host, RunRequest(spec, (PromptSpec("p0", "text 0"),)))
    told = {"p0": await ended(host, stream, "p0")}
    for n in range(1, PROMPTS):
        prompt = PromptSpec(f"p{n}", continuation=True) if n % 4 == 3 else PromptSpec(f"p{n}", f"text {n}")
        await submitted(place, prompt)
        told[f"p{n}"] = await ended(host, stream, f"p{n}")
    return told


def facts(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.result, outcome.totals, outcome.message_seq, outcome.epoch, outcome.served_model


async def test_the_result_of_each_prompt_is_told_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    told = await lived(place)
    assert told["p2"].result.state == "failed" and told["p5"].result.text == "answer 5"
    monkeypatch.setattr(prompt_ends, "KEPT_OF_AGENT", 4)
    for name, first in told.items():
        assert facts(await ended(place.peer(), place.stream("main"), name)) == facts(first), name
    found: dict[str, Outcome] = {}
    wanted = set(told)
    while wanted:
        waits = [(place.stream("main"), name) for name in wanted]
        answer = await place.peer().call("wait_any", waits, 10.0, timeout_s=20, group="wait")
        assert answer
        found |= {one.prompt_id: one for one in answer}
        wanted -= {one.prompt_id for one in answer}
    assert {name: facts(one) for name, one in found.items()} == {name: facts(one) for name, one in told.items()}


async def test_a_prompt_sent_again_is_the_same_and_has_the_same_result(place: Place) -> None:
    told = await lived(place)
    before = await place.lines()
    await submitted(place, PromptSpec("p1", "text 1"), PromptSpec("p3", continuation=True))
    assert len(await place.lines()) == len(before)
    for name in ("p1", "p3"):
        assert (await ended(place.peer(), place.stream("main"), name)).result == told[name].result
    status = await place.peer().call("prompt_status", place.stream("main"), "p1", timeout_s=5, group="control")
    assert (status.state, status.turn) == ("completed", 1)


async def test_who_asks_for_one_after_the_other_has_the_log_read_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await lived(place)
    monkeypatch.setattr(outcomes, "KEPT_OF_AGENT", 64)
    monkeypatch.setattr(prompt_ends, "KEPT_OF_AGENT", 64)
    reads: list[int] = []
    read_from = StoreCalls.read_from

    async def counted(self: StoreCalls, stream: Stream, seq: int, *args: Any, **options: Any) -> Any:
        reads.append(seq)
        return await read_from(self, stream, seq, *args, **options)

    monkeypatch.setattr(StoreCalls, "read_from", counted)
    for name in [name for name in told if name not in ("p3", "p7", "p11")]:  # no log names a continuation
        assert (await ended(place.peer(), place.stream("main"), name)).result == told[name].result
    assert reads == [0]


async def test_a_log_that_cannot_be_read_is_said_to_be_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    await lived(place)
    from kimi_ray.errors import StoreError

    async def broken(*_args: Any, **_options: Any) -> Any:
        raise StoreError("the disk is away", code="store.unavailable", retryable=True)

    monkeypatch.setattr(StoreCalls, "read_from", broken)
    error = (await ended(place.peer(), place.stream("main"), "p0")).result.error
    assert error is not None and error["code"] == "prompt.result_forgotten" and "the disk is away" in error["message"]
    assert error["details"]["cause"]["code"] == "store.unavailable" and error["retryable"]


async def test_the_next_life_tells_them_from_its_log(place: Place) -> None:
    told = await lived(place)
    await place.peer().call("close_agents", [place.stream("main")], False, timeout_s=20)
    spec = place.spec(script=f"{__name__}:talker", new=False)
    await ran(place.peer(), RunRequest(spec, (PromptSpec("more", "one more"),)))
    await ended(place.peer(), place.stream("main"), "more")
    for name in ("p0", "p2", "p6"):
        assert (await ended(place.peer(), place.stream("main"), name)).result == told[name].result


async def test_many_logs_are_read_in_rounds_and_whoever_asks_hears_of_each_round(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = await _forgotten_of_agents(place, 6)
    monkeypatch.setattr(prompt_ends, "_ROUND_S", 0.0)
    answers: list[int] = []
    found: set[tuple[Stream, str]] = set()
    fresh = waits
    while len(found) < len(waits):
        ends = await place.peer().call("wait_any", fresh, 5.0, "watch", len(answers), timeout_s=10, group="wait")
        assert ends and all(one.result.state == "completed" for one in ends)
        found |= {(one.stream, one.prompt_id) for one in ends}
        answers.append(len(ends))
        fresh = []
    assert found == set(waits) and answers == [1] * len(waits)


async def test_a_log_is_not_given_up_because_others_are_being_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = await _forgotten_of_agents(place, 2)
    gate, reading = asyncio.Event(), asyncio.Event()
    read_from = StoreCalls.read_from

    async def gated(self: StoreCalls, stream: Stream, *args: Any, **options: Any) -> Any:
        reading.set()
        await gate.wait()
        return await read_from(self, stream, *args, **options)

    monkeypatch.setattr(StoreCalls, "read_from", gated)
    monkeypatch.setattr(prompt_ends, "_RECALL_S", 0.2)
    ask = place.peer().call
    first = asyncio.create_task(ask("wait_any", waits[:1], 10.0, timeout_s=15, group="wait"))
    async with asyncio.timeout(10):
        await reading.wait()
    assert await ask("wait_any", waits[1:], 0.3, timeout_s=10, group="wait") == []
    gate.set()
    assert [one.result.state for one in await first] == ["completed"]
    assert (await ended(place.peer(), *waits[1])).result.state == "completed"


async def _forgotten_of_agents(place: Place, agents: int) -> list[tuple[Stream, str]]:
    """The first prompt of each of so many agents, after others."""
    waits: list[tuple[Stream, str]] = []
    for n in range(agents):
        name = f"agent_{n}" if n else "main"
        spec = place.spec(name, script=("ok",))
        await ran(place.peer(), RunRequest(spec, tuple(PromptSpec(f"p{n}-{k}", f"text {k}") for k in range(8))))
        await ended(place.peer(), spec.stream, f"p{n}-7")
        waits.append((spec.stream, f"p{n}-0"))
    return waits
