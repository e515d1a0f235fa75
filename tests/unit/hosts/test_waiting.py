"""Many waits, few polls: coverage, takeover, loss."""

from __future__ import annotations

import asyncio
from typing import Any

from kimi_ray.errors import KimiRayError, RuntimeFault
from kimi_ray.hosts.specs import AgentTotals, Outcome, PromptResult
from kimi_ray.hosts.waiting import MAX_POLLS, OutcomeWaiter, PromptKey
from kimi_ray.store.seam import Stream


class Host:
    """Answers ``wait_any`` as an agent host does."""

    name = "host"

    def __init__(self) -> None:
        self.final: set[PromptKey] = set()
        self.changed = asyncio.Event()
        self.watches: dict[str, list[PromptKey]] = {}
        self.polls = 0
        self.named = 0
        self.most = 0
        self.now = 0
        self.error: KimiRayError | None = None
        self.forgets = False

    def finish(self, *keys: PromptKey) -> None:
        self.final.update(keys)
        self.changed.set()

    async def call(self, method: str, *args: Any, timeout_s: float, group: str = "default") -> Any:
        assert (method, group) == ("wait_any", "wait")
        named, wait_s, watch, answers = args
        if answers and self.forgets:
            self.forgets = False
            self.polls += 1
            return None
        keys = self.watches[watch] = [*(self.watches[watch] if answers else ()), *named]
        self.named += len(named)
        self.polls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    if self.error is not None:
                        raise self.error
                    found = [key for key in keys if key in self.final]
                    if found:
                        self.watches[watch] = [key for key in keys if key not in found]
                        return [outcome(key) for key in found]
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return []
        finally:
            self.now -= 1


def key(number: int) -> PromptKey:
    return (Stream("s", f"agent-{number}"), f"p{number}")


def outcome(of: PromptKey) -> Outcome:
    result = PromptResult(prompt_id=of[1], state="completed", stop="completed")
    return Outcome(of[0], of[1], result, seq=1, epoch=1, totals=AgentTotals())


class Waiting:
    def __init__(self, host: Host) -> None:
        self.came: list[PromptKey] = []
        self.lost: list[tuple[str, list[PromptKey]]] = []
        self.waiter = OutcomeWaiter(
            host,  # type: ignore[arg-type]
            lambda outcomes: self.came.extend((o.stream, o.prompt_id) for o in outcomes),
            lambda error, keys: self.lost.append((error.code, keys)),
        )

    async def until(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.came) < count:
                await asyncio.sleep(0.002)


async def test_all_that_is_added_in_one_tick_shares_a_poll() -> None:
    host = Host()
    waiting = Waiting(host)
    for number in range(500):
        waiting.waiter.add([key(number)])
    await asyncio.sleep(0.01)
    assert host.polls == 1 and waiting.waiter.outstanding == 500
    host.finish(*(key(number) for number in range(500)))
    await waiting.until(500)
    assert sorted(waiting.came) == sorted(key(number) for number in range(500))
    assert host.polls == 1 and waiting.waiter.outstanding == 0
    await waiting.waiter.close()


async def test_a_slow_prompt_holds_up_nobody_who_came_later() -> None:
    host = Host()
    waiting = Waiting(host)
    waiting.waiter.add([key(0)])
    for number in range(1, 40):
        await asyncio.sleep(0.001)
        waiting.waiter.add([key(number)])
    assert host.most <= MAX_POLLS
    host.finish(*(key(number) for number in range(1, 40)))
    await waiting.until(39)
    assert key(0) not in waiting.came
    host.finish(key(0))
    await waiting.until(40)
    assert len(set(waiting.came)) == 40
    await waiting.waiter.close()


async def test_what_ended_before_it_was_asked_for_comes_too() -> None:
    host = Host()
    host.finish(key(1))
    waiting = Waiting(host)
    waiting.waiter.add([key(1)])
    await waiting.until(1)
    await waiting.waiter.close()


async def test_a_lost_host_gives_every_prompt_back_once() -> None:
    host = Host()
    waiting = Waiting(host)
    waiting.waiter.add([key(0), key(1)])
    await asyncio.sleep(0.01)
    waiting.waiter.add([key(2)])
    await asyncio.sleep(0.01)
    host.error = RuntimeFault("gone", code="infra.actor_died")
    host.changed.set()
    async with asyncio.timeout(5):
        while waiting.waiter.outstanding:
            await asyncio.sleep(0.002)
    assert sorted(k for _, keys in waiting.lost for k in keys) == [key(0), key(1), key(2)]
    host.error = None
    host.finish(key(0))
    waiting.waiter.add([key(0)])
    await waiting.until(1)
    await waiting.waiter.close()


async def test_a_busy_host_is_asked_again() -> None:
    host = Host()
    host.error = RuntimeFault("busy", code="infra.pending_limit")
    waiting = Waiting(host)
    waiting.waiter.add([key(0)])
    await asyncio.sleep(0.02)
    host.error = None
    host.finish(key(0))
    await waiting.until(1)
    assert not waiting.lost
    await waiting.waiter.close()


async def test_discarded_prompts_are_not_told_and_close_ends_the_polls() -> None:
    host = Host()
    waiting = Waiting(host)
    waiting.waiter.add([key(0), key(1)])
    await asyncio.sleep(0.01)
    waiting.waiter.discard(key(0))
    host.finish(key(0), key(1))
    await waiting.until(1)
    assert waiting.came == [key(1)]
    waiting.waiter.add([key(2)])
    await asyncio.sleep(0.01)
    await waiting.waiter.close()
    assert host.now == 0


async def test_trickling_results_are_gathered() -> None:
    host = Host()
    waiting = Waiting(host)
    waiting.waiter.add(key(number) for number in range(200))
    await asyncio.sleep(0.01)
    for number in range(200):
        host.finish(key(number))
        await asyncio.sleep(0.001)
    await waiting.until(200)
    assert host.polls < 60
    await waiting.waiter.close()


async def test_a_prompt_is_named_once_however_many_answers_come() -> None:
    host = Host()
    waiting = Waiting(host)
    waiting.waiter.add(key(number) for number in range(200))
    await asyncio.sleep(0.01)
    for number in range(200):
        host.finish(key(number))
        await waiting.until(number + 1)
    assert host.polls >= 20 and host.named == 200
    await waiting.waiter.close()


async def test_a_host_that_has_forgotten_the_watch_is_told_all_again() -> None:
    host = Host()
    waiting = Waiting(host)
    waiting.waiter.add([key(0), key(1), key(2)])
    await asyncio.sleep(0.01)
    host.finish(key(0))
    await waiting.until(1)
    host.forgets = True
    host.finish(key(1))
    host.finish(key(2))
    await waiting.until(3)
    assert sorted(waiting.came) == [key(0), key(1), key(2)]
    await waiting.waiter.close()


async def test_an_error_that_nobody_foresaw_is_told_to_those_who_wait() -> None:
    host = Host()
    waiting = Waiting(host)
    host.error = ValueError("odd")  # type: ignore[assignment]
    waiting.waiter.add([key(1), key(2)])
    async with asyncio.timeout(5):
        while not waiting.lost:
            await asyncio.sleep(0.001)
    assert waiting.lost == [("internal", [key(1), key(2)])] and waiting.waiter.outstanding == 0
    host.error = None
    host.finish(key(1))
    waiting.waiter.add([key(1)])
    async with asyncio.timeout(5):
        while waiting.came != [key(1)]:
            await asyncio.sleep(0.001)
    await waiting.waiter.close()
