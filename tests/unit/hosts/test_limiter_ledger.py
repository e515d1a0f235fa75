"""Portions: never more than the limit, everybody gets a part, what a lost host had comes back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.hosts.limiter_ledger import COMEBACK_S, KEPT_CHANGES, LEASE_S, ROUND_S, LimiterLedger
from kimi_ray.hosts.limiter_words import PlacesWanted, Portion
from kimi_ray.llm.limiter import Tally


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Host:
    """A host as the ledger sees it."""

    def __init__(self, ledger: LimiterLedger, name: str, **said: object) -> None:
        self.ledger, self.name = ledger, name
        self.said = {"max_places": 8, "adaptive": False, **said}
        self.portion = Portion("k", 0, 0, 0)
        self.asked = ledger._clock()

    def ask(self, wanted: int, in_use: int | None = None, tally: Tally | None = None) -> int:
        self.portion = self.ledger.exchange(self.name, [self.wish(wanted, in_use, tally)])[0]
        self.asked = self.ledger._clock()
        return self.portion.places

    def wish(self, wanted: int, in_use: int | None = None, tally: Tally | None = None) -> PlacesWanted:
        held = self.portion.places
        used = min(wanted, held) if in_use is None else in_use
        return PlacesWanted(
            "k",
            "m",
            self.said["max_places"],
            self.said["adaptive"],
            held,
            used,
            wanted,
            self.portion.limit,
            tally or Tally(),  # type: ignore[arg-type]
        )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> LimiterLedger:
    return LimiterLedger(clock, clock)


def test_one_host_gets_what_it_wants_and_something_to_spare(ledger: LimiterLedger) -> None:
    one = Host(ledger, "one")
    assert 1 < one.ask(1) <= 8
    assert one.ask(30) == 8
    assert one.ask(0) == 0, "without traffic all goes back"


def test_two_hungry_hosts_come_to_share(ledger: LimiterLedger) -> None:
    one, two = Host(ledger, "one"), Host(ledger, "two")
    assert one.ask(30) == 8
    assert two.ask(30) == 0, "there is nothing yet"
    assert one.ask(30, in_use=8) == 4
    assert two.ask(30) == 0, "what is under way is still in use"
    assert one.ask(30, in_use=4) == 4
    assert two.ask(30) == 4


def test_who_wants_less_than_its_share_leaves_the_rest_to_others(ledger: LimiterLedger) -> None:
    small, large = Host(ledger, "small"), Host(ledger, "large")
    small.ask(2)
    large.ask(30)
    small.ask(2)
    assert large.ask(30) == 6


def test_fewer_places_than_hosts_go_round(ledger: LimiterLedger, clock: Clock) -> None:
    hosts = [Host(ledger, f"h{number}", max_places=1) for number in range(3)]
    had = dict.fromkeys([host.name for host in hosts], 0)
    for _ in range(60):
        clock.now += ROUND_S / 2
        for host in hosts:
            had[host.name] += host.ask(5, in_use=0)
        assert sum(host.portion.places for host in hosts) <= 1
    assert min(had.values()) >= 10, had


def test_a_lost_hosts_portion_comes_back(ledger: LimiterLedger, clock: Clock) -> None:
    one, two = Host(ledger, "one"), Host(ledger, "two")
    assert one.ask(30) == 8
    clock.now += LEASE_S - 1
    assert two.ask(30) == 0
    clock.now += 1
    assert two.ask(30) == 8
    ledger.leave("two")
    assert Host(ledger, "three").ask(30) == 8


def test_refusals_of_two_hosts_are_one_cut(ledger: LimiterLedger) -> None:
    said = {"max_places": None, "adaptive": True}
    one, two = Host(ledger, "one", **said), Host(ledger, "two", **said)
    for _ in range(3):
        one.ask(10)
        two.ask(10)
    assert (one.portion.places, two.portion.places) == (10, 10)
    one.ask(10, in_use=4, tally=Tally(refused={0: 6}))
    two.ask(10, in_use=4, tally=Tally(refused={0: 6}))
    assert two.portion.limit == 8
    assert two.portion.cuts == 1
    one.ask(10, in_use=4)
    assert one.portion.places + two.portion.places <= 8
    assert [change["reason"] for change in ledger.changes(0)[1]] == ["start", "cut", "cut"]


def test_retry_after_is_told_to_every_host(ledger: LimiterLedger, clock: Clock) -> None:
    said = {"max_places": None, "adaptive": True}
    one, two = Host(ledger, "one", **said), Host(ledger, "two", **said)
    one.ask(5)
    one.ask(5, in_use=4, tally=Tally(refused={0: 1}, retry_after_s=7.0))
    clock.now += 3
    two.ask(5)
    assert two.portion.pause_s == 4.0


def test_a_new_ledger_goes_on_where_the_old_one_was(ledger: LimiterLedger, clock: Clock) -> None:
    said = {"max_places": None, "adaptive": True}
    one, two = Host(ledger, "one", **said), Host(ledger, "two", **said)
    one.ask(10)
    two.ask(10)
    one.ask(50, tally=Tally(served=20))
    two.ask(50)
    assert one.portion.limit == 40
    before = (one.portion.places, two.portion.places)
    again = LimiterLedger(clock, clock)
    for host, held in ((one, before[0]), (two, before[1])):
        host.ledger = again
        assert host.ask(50) == held, "nobody gets more before all have told what they have"
    assert one.portion.limit == 40
    clock.now += COMEBACK_S
    assert two.ask(50) >= before[1]


def test_changes_are_kept_within_a_bound_and_read_from_a_number_on(ledger: LimiterLedger, clock: Clock) -> None:
    for number in range(KEPT_CHANGES + 10):
        ledger.exchange("h", [PlacesWanted(f"k{number}", f"m{number}", 3, False, 0, 0, 1, 0)])
    told, kept = ledger.changes(0)
    assert told == KEPT_CHANGES + 10
    assert len(kept) == KEPT_CHANGES
    assert kept[0]["model"] == "m10"
    assert ledger.changes(told) == (told, [])
    assert [change["model"] for change in ledger.changes(told - 2)[1]] == [f"m{told - 2}", f"m{told - 1}"]
    assert set(kept[0]) == {"key", "time", "model", "reason", "limit", "in_use"}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 6))
def test_the_cap_holds_over_all_hosts_at_every_moment(seed: int, cap: int, count: int) -> None:
    clock, rng = Clock(), random.Random(seed)
    ledger = LimiterLedger(clock, clock)
    hosts = [Host(ledger, f"h{number}", max_places=cap, adaptive=True) for number in range(count)]
    in_use = dict.fromkeys(hosts, 0)
    for _ in range(200):
        clock.now += rng.uniform(0, 0.5)
        silent = [host for host in hosts if clock.now - host.asked > LEASE_S / 2]  # living ones ask in time
        host = rng.choice(silent or hosts)
        what = 1.0 if silent else rng.random()
        if what < 0.4 and in_use[host] < host.portion.places:
            in_use[host] += 1
        elif what < 0.7 and in_use[host]:
            in_use[host] -= 1
        else:
            tally = Tally(served=rng.randrange(30), refused={host.portion.cuts: 1} if rng.random() < 0.1 else {})
            host.ask(max(in_use[host], rng.randrange(40)), in_use=in_use[host], tally=tally)
        assert sum(in_use.values()) <= cap


def test_the_report_tells_limit_use_and_who_waits_and_forgets_lost_hosts() -> None:
    clock = Clock()
    ledger = LimiterLedger(clock)
    one, two = Host(ledger, "a"), Host(ledger, "b")
    one.ask(6)
    two.ask(6, in_use=2)
    (told,) = ledger.report()
    assert told == {"model": "m", "limit": 8, "in_use": told["in_use"], "wanted": 12, "hosts": 2, "cuts": 0,
                    "paused_s": 0.0}  # fmt: skip
    clock.now += LEASE_S / 2
    one.ask(3, in_use=3)
    clock.now += LEASE_S / 2 + 1
    (told,) = ledger.report()
    assert (told["in_use"], told["wanted"], told["hosts"]) == (3, 3, 1)
