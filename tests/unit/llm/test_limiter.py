"""The limit by itself, under a clock of our own, and against a simulated server."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.llm.limiter import HOLD_S, PROBE_S, START_PLACES, AdaptiveLimit, Tally


def went_well(limit: AdaptiveLimit, now: float = 0.0) -> int:
    """A whole round of requests is served, and more were wanted."""
    limit.take(Tally(served=limit.limit), now, in_use=limit.limit, wanted=limit.limit + 5)
    return limit.limit


def refused(
    limit: AdaptiveLimit, count: int, now: float = 0.0, *, in_use: int | None = None, cuts: int | None = None
) -> int:
    seen = limit.cuts if cuts is None else cuts
    limit.take(Tally(refused={seen: count}), now, in_use=limit.limit - count if in_use is None else in_use, wanted=99)
    return limit.limit


def test_it_doubles_while_it_is_used_and_nobody_refuses() -> None:
    limit = AdaptiveLimit()
    assert limit.limit == START_PLACES
    assert [went_well(limit) for _ in range(3)] == [40, 80, 160]


def test_it_does_not_grow_while_it_is_not_used() -> None:
    limit = AdaptiveLimit(start=10)
    for _ in range(20):
        assert limit.take(Tally(served=10), 0.0, in_use=4, wanted=9) == []
    assert limit.limit == 10


def test_it_takes_a_round_of_requests_to_grow() -> None:
    limit = AdaptiveLimit(start=10)
    limit.take(Tally(served=9), 0.0, in_use=10, wanted=20)
    assert limit.limit == 10
    limit.take(Tally(served=1), 0.0, in_use=10, wanted=20)
    assert limit.limit == 20


def test_max_places_is_never_exceeded() -> None:
    limit = AdaptiveLimit(33)
    assert [went_well(limit) for _ in range(3)] == [33, 33, 33]
    assert AdaptiveLimit(3).limit == 3


def test_refusals_cut_to_what_was_served() -> None:
    limit = AdaptiveLimit(start=20)
    assert refused(limit, 12) == 8
    assert limit.cuts == 1


def test_late_refusals_of_the_same_burst_make_no_second_cut() -> None:
    limit = AdaptiveLimit(start=20)
    assert refused(limit, 6, in_use=14) == 14
    # began before the cut, told after it
    assert refused(limit, 6, in_use=8, cuts=0) == 8
    assert limit.cuts == 1
    limit.cuts += 5
    assert refused(limit, 3, cuts=1) == 8, "of a burst long gone"


def test_a_single_refusal_cuts_a_tenth_and_all_refused_a_quarter_stays() -> None:
    assert refused(AdaptiveLimit(start=100), 1) == 90
    assert refused(AdaptiveLimit(start=100), 100, in_use=0) == 25


def test_a_refusal_far_below_the_limit_cuts_a_tenth() -> None:
    limit = AdaptiveLimit(start=40)
    assert refused(limit, 1, in_use=3) == 36
    assert went_well(limit) == 38, "it comes back below what it was"


def test_the_floor_is_one() -> None:
    limit = AdaptiveLimit(start=2)
    for _ in range(10):
        refused(limit, 2, in_use=0)
    assert limit.limit == 1


def test_it_comes_back_below_the_wall_and_then_tries_one_more_ever_more_seldom() -> None:
    limit = AdaptiveLimit(start=20)
    refused(limit, 1)  # 20 was too much: the wall
    assert limit.limit == 18
    assert went_well(limit) == 19
    now = 0.0
    assert went_well(limit, now) == 19, "no try before its time"
    waits: list[float] = []
    for _ in range(4):
        began = now
        while went_well(limit, now) < 20:
            now += 0.5
        waits.append(now - began)
        refused(limit, 1, now)
        while went_well(limit, now) < 19:
            pass
    assert waits[0] >= PROBE_S
    assert waits == sorted(waits)
    assert waits[-1] >= 4 * waits[0] > 0


def test_a_wall_that_has_gone_is_left_behind_quickly() -> None:
    limit = AdaptiveLimit(start=20)
    refused(limit, 1)
    now, rounds = 0.0, 0
    while limit.limit < 200:
        went_well(limit, now)
        now, rounds = now + 1.0, rounds + 1
        assert rounds < 40


def test_retry_after_stops_all_and_makes_tries_rare() -> None:
    limit = AdaptiveLimit(start=20)
    changes = limit.take(Tally(refused={0: 2}, retry_after_s=10.0), 100.0, in_use=18, wanted=30)
    assert [change.reason for change in changes] == ["pause", "cut"]
    assert changes[0].pause_s == 10.0
    assert limit.paused_until == 110.0
    while went_well(limit, 111.0) < 18:
        pass
    assert went_well(limit, 219.0) == 18, "a try may cost ten seconds: not every five"
    assert went_well(limit, 221.0) == 19
    # a shorter one does not shorten it
    limit.take(Tally(retry_after_s=30.0), 400.0, in_use=1, wanted=1)
    limit.take(Tally(retry_after_s=1.0), 401.0, in_use=1, wanted=1)
    assert limit.paused_until == 430.0


def test_while_nothing_is_served_there_is_no_second_cut_and_all_wait_longer_each_time() -> None:
    limit = AdaptiveLimit(start=16)
    assert refused(limit, 16, 100.0, in_use=0) == 4
    pauses: list[float] = []
    now = 100.0
    for _ in range(8):
        assert refused(limit, 4, now, in_use=0) == 4
        pauses.append(limit.paused_until - now)
        assert refused(limit, 4, now, in_use=0) == 4, "what began before it counts for the same"
        now = limit.paused_until
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30]
    refused(limit, 1, now)
    limit.take(Tally(served=1), now + 1, in_use=1, wanted=1)
    assert limit.paused_until == 0.0, "it serves again"
    assert limit.cuts == 1


def test_failures_of_the_server_hold_it_and_cut_nothing() -> None:
    limit = AdaptiveLimit(start=20)
    changes = limit.take(Tally(served=20, faltered=1), 50.0, in_use=20, wanted=30)
    assert [(change.reason, change.limit) for change in changes] == [("hold", 20)]
    assert limit.take(Tally(faltered=3), 51.0, in_use=20, wanted=30) == [], "told once"
    assert went_well(limit, 51.0 + HOLD_S - 0.1) == 20
    assert went_well(limit, 51.0 + HOLD_S + 0.1) == 40


def test_a_limit_that_does_not_adapt_stays() -> None:
    limit = AdaptiveLimit(8, adaptive=False)
    refused(limit, 5)
    went_well(limit)
    limit.take(Tally(retry_after_s=9.0), 0.0, in_use=1, wanted=1)
    assert (limit.limit, limit.paused_until) == (8, 0.0)
    with pytest.raises(ValueError, match="max_places"):
        AdaptiveLimit(adaptive=False)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.integers(0, 30),
            st.integers(0, 3),
            st.sampled_from([0.0, 0.0, 1.0, 60.0]),
            st.integers(0, 2),
        ),
        max_size=60,
    ),
    st.none() | st.integers(1, 40),
)
def test_whatever_happens_it_stays_within_its_bounds_and_changes_are_told(
    events: list[tuple[int, int, int, float, int]], most: int | None
) -> None:
    limit = AdaptiveLimit(most)
    now, told = 0.0, limit.limit
    for served, turned_away, faltered, retry_after, late in events:
        now += 0.5
        tally = Tally(served, {max(0, limit.cuts - late): turned_away} if turned_away else {}, faltered, retry_after)
        paused = limit.paused_until
        for change in limit.take(tally, now, in_use=limit.limit, wanted=limit.limit + 3):
            told = change.limit
        assert limit.limit == told
        assert 1 <= limit.limit <= (most or 10_000_000)
        assert limit.paused_until >= paused or served, "only being served ends a pause early"


@dataclass
class Simulation:
    """Clients behind one limit, a server with a bound: no real time passes.

    ``seconds`` is how long an answer takes; a refused client waits ``backoff`` (or ``retry_after``) and asks again.
    Reports come every ``report`` seconds, and at once after a refusal, as the hosts do it.
    """

    bears: int
    clients: int = 200
    seconds: float = 1.0
    backoff: float = 0.5
    retry_after: float = 0.0
    report: float = 0.5
    per_window: int | None = None
    """Requests that are taken in each ten seconds; a ``retry_after`` then leads into the next ten."""
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def served(self, limit: AdaptiveLimit, until: float) -> int:
        events: list[tuple[float, int, str, int]] = []
        number = itertools.count()
        waiting, in_use, at_server, served, peak = self.clients, 0, 0, 0, 0
        tally, now, paused = Tally(), 0.0, 0.0
        taken: dict[int, int] = {}

        def later(seconds: float, what: str, cuts: int = 0) -> None:
            heapq.heappush(events, (now + seconds, next(number), what, cuts))

        later(0.0, "report")
        while True:
            while waiting and in_use < limit.limit and now >= paused:
                waiting, in_use = waiting - 1, in_use + 1
                window = int(now // 10)
                taken[window] = taken.get(window, 0) + 1
                if at_server >= self.bears or taken[window] > (self.per_window or 10**9):
                    later(0.01, "refused", limit.cuts)
                else:
                    at_server += 1
                    later(self.seconds * self.rng.uniform(0.7, 1.3), "served")
            peak = max(peak, in_use + waiting)
            now, _, what, cuts = heapq.heappop(events)
            if now > until:
                return served
            if what == "served":
                served, in_use, at_server, waiting = served + 1, in_use - 1, at_server - 1, waiting + 1
                tally.served += 1
                continue
            if what == "back":
                waiting += 1
                continue
            if what == "refused":
                in_use -= 1
                tally.refused[cuts] = tally.refused.get(cuts, 0) + 1
                wait = self.retry_after and (10 - now % 10 if self.per_window else self.retry_after)
                if wait:
                    tally.retry_after_s = max(wait, tally.retry_after_s)
                    paused = max(paused, now + wait)
                later(wait or self.backoff * self.rng.uniform(1, 2), "back")
            if what == "report":
                later(self.report, "report")
            limit.take(tally, now, in_use=in_use, wanted=peak)
            paused = max(paused, limit.paused_until)
            tally, peak = Tally(), in_use + waiting


@pytest.mark.parametrize(
    ("bears", "seconds", "retry_after"),
    [
        (8, 1.0, 0.0),
        (8, 1.0, 1.0),
        (8, 0.2, 0.0),
        (8, 5.0, 2.0),
        (64, 1.0, 0.0),
        (64, 1.0, 1.0),
        (2, 1.0, 0.0),
        (1, 1.0, 0.0),
    ],
)
def test_its_throughput_is_within_a_tenth_of_the_best_fixed_one(bears: int, seconds: float, retry_after: float) -> None:
    until = 200.0 * max(1.0, seconds)
    fixed = max(
        Simulation(bears, seconds=seconds, retry_after=retry_after).served(AdaptiveLimit(places, adaptive=False), until)
        for places in (1, 2, 4, bears, 16)
    )
    adaptive = Simulation(bears, seconds=seconds, retry_after=retry_after).served(AdaptiveLimit(), until)
    assert adaptive >= 0.9 * fixed, (adaptive, fixed)


@pytest.mark.parametrize(("per_window", "seconds"), [(60, 1.0), (300, 2.0), (40, 8.0)])
def test_a_server_that_counts_requests_a_minute_and_says_how_long_is_used_well_too(
    per_window: int, seconds: float
) -> None:
    def served(limit: AdaptiveLimit) -> int:
        simulation = Simulation(10**6, seconds=seconds, retry_after=1.0, per_window=per_window)
        return simulation.served(limit, 600.0)

    fixed = max(served(AdaptiveLimit(places, adaptive=False)) for places in (10, 20, 40, 80))
    adaptive = served(AdaptiveLimit())
    assert adaptive >= 0.85 * fixed, (adaptive, fixed)
