"""Watches of a host: named once, answered as often as something ends, told anew after a lost answer."""

from __future__ import annotations

import asyncio
import random

import pytest

from kimi_ray.agent.specs import AgentTotals, Outcome, PromptResult
from kimi_ray.errors import AgentError
from kimi_ray.hosts import outcome_watches
from kimi_ray.hosts.outcome_watches import OutcomeWatches
from kimi_ray.hosts.outcomes import Outcomes
from kimi_ray.store.seam import Stream


def outcome(stream: Stream, prompt_id: str) -> Outcome:
    result = PromptResult(prompt_id=prompt_id, state="completed", stop="completed")
    return Outcome(stream, prompt_id, result, seq=1, epoch=1, totals=AgentTotals())


A, B = Stream("s", "a"), Stream("s", "b")


async def test_each_answer_tells_what_ended_since_the_last_one() -> None:
    watches = OutcomeWatches()
    watch = watches.take_up("w", 0)
    assert watch is not None
    for prompt_id in ("p", "q", "r"):
        watch.add(A, prompt_id)
    watches.tell(outcome(A, "p"))
    assert [each.prompt_id for each in await watch.answer(5)] == ["p"]
    watches.put_down("w", watch)
    watches.tell(outcome(A, "q"))  # while nobody asks
    again = watches.take_up("w", 1)
    assert again is watch
    assert [each.prompt_id for each in await again.answer(5)] == ["q"]
    assert await again.answer(0) == []
    watches.tell(outcome(A, "q"))  # what was told is not waited for any more
    assert list(watches.waited_for(A)) == ["r"]
    watch.end()
    assert not list(watches.waited_for(A))


async def test_a_watch_with_nothing_left_to_wait_for_is_let_go_of() -> None:
    watches = OutcomeWatches()
    watch = watches.take_up("w", 0)
    assert watch is not None
    watch.add(A, "p")
    watches.tell(outcome(A, "p"))
    assert len(await watch.answer(5)) == 1
    watches.put_down("w", watch)
    assert watches.take_up("w", 1) is None


async def test_a_caller_that_missed_an_answer_has_to_name_all_again() -> None:
    watches = OutcomeWatches()
    watch = watches.take_up("w", 0)
    assert watch is not None
    watch.add(A, "p")
    watch.add(A, "q")
    watches.tell(outcome(A, "p"))
    await watch.answer(5)
    watches.put_down("w", watch)
    assert watches.take_up("w", 0) is not watch  # the answer was lost: the caller begins anew
    assert watches.take_up("other", 3) is None


async def test_a_watch_that_nobody_asks_about_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome_watches, "FORGOTTEN_AFTER_S", 0.01)
    watches = OutcomeWatches()
    watch = watches.take_up("w", 0)
    assert watch is not None
    watch.add(A, "p")
    watch.add(B, "p")
    watches.put_down("w", watch)
    async with asyncio.timeout(5):
        while list(watches.waited_for(A)):
            await asyncio.sleep(0.005)
    assert watches.take_up("w", 0) is not None and not list(watches.waited_for(B))


async def test_an_agent_that_goes_ends_the_waits_for_it_and_no_others() -> None:
    outcomes = Outcomes()
    watch = outcomes.watches.take_up(None, 0)
    assert watch is not None
    watch.add(A, "p")
    watch.add(A, "q")
    watch.add(B, "p")
    outcomes.drop(A, AgentError("gone", code="agent.closed"))
    told = await watch.answer(5)
    assert {each.prompt_id for each in told} == {"p", "q"} and all(each.seq == -1 for each in told)
    assert list(outcomes.watches.waited_for(B)) == ["p"]


@pytest.mark.parametrize("seed", range(20))
async def test_every_end_comes_once_to_every_watch(seed: int) -> None:
    rng = random.Random(seed)
    outcomes = Outcomes()
    prompts = [(Stream("s", f"a{n % 5}"), f"p{n}") for n in range(60)]
    ends = prompts.copy()
    rng.shuffle(ends)

    async def caller(name: str) -> list[str]:
        mine, came, answers, waiting = prompts.copy(), [], 0, set[tuple[Stream, str]]()
        while mine or waiting:
            fresh = [mine.pop() for _ in range(min(len(mine), rng.randrange(1, 20)))]
            waiting |= set(fresh)
            watch = outcomes.watches.take_up(name, answers)
            assert watch is not None
            if not answers:
                fresh = list(waiting)
            for stream, prompt_id in fresh:
                known = outcomes.get((stream, prompt_id))
                if known is None:
                    watch.add(stream, prompt_id)
                else:
                    watch.tell_now(known)
            told = await watch.answer(0.05)
            outcomes.watches.put_down(name, watch)
            if rng.random() < 0.2:
                answers = 0  # the answer was lost
                continue
            for each in told:
                waiting.discard((each.stream, each.prompt_id))
                came.append(each.prompt_id)
            answers = answers + 1 if waiting else 0
        return came

    async def ending() -> None:
        for stream, prompt_id in ends:
            outcomes.put((stream, prompt_id), outcome(stream, prompt_id))
            await asyncio.sleep(0)

    _, *all_came = await asyncio.gather(ending(), *(caller(f"w{n}") for n in range(3)))
    for came in all_came:
        assert sorted(came) == sorted(prompt_id for _, prompt_id in prompts)
