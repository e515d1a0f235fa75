"""Sessions that are being made, stopped at every file call: there whole, or not at all and nothing left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.publication_crashes import MAKINGS, Making, Makings
from tests.conformance.simulated_loop import SimulatedLoop, simulated_loop

EVERY = pytest.mark.parametrize("making", MAKINGS, ids=lambda making: making.name)


@pytest.fixture(scope="module")
def loop() -> Iterator[SimulatedLoop]:
    with simulated_loop() as loop:
        yield loop


@EVERY
def test_all_or_none_after_every_cut(loop: SimulatedLoop, making: Making) -> None:
    makings = Makings(loop, making, "none")
    calls = makings.calls()
    assert calls > 10
    for left in range(0, calls + 1, 2 + calls // 60):
        makings.try_cut(left, None if left % 4 else left)
        makings.try_cut(left + 1, left)


@EVERY
def test_a_rollback_that_is_cut_short_is_finished_by_the_next(loop: SimulatedLoop, making: Making) -> None:
    makings = Makings(loop, making, "zstd")
    calls = makings.calls()
    for left in (calls // 2, calls - 2):
        recovery = 0
        while makings.try_cut(left, None, recovery, (None, left + recovery)[recovery % 2]):
            recovery += 1 + len(making.ids)
        makings.try_cut(left, 7, left % 11, 8)


def test_what_a_dead_process_had_begun_to_remove_does_not_come_back(loop: SimulatedLoop) -> None:
    """Its last unlinks were page cache; the next process finds nothing to remove, and then the power is cut."""
    makings = Makings(loop, next(making for making in MAKINGS if making.name == "give up"), "zstd")
    calls = makings.calls()
    for left in range(calls - 6, calls + 1):
        for recovery in (9, 12, 15):
            makings.try_cut(left, None, recovery, 315801951)


@EVERY
def test_a_maker_that_meets_a_failing_call_takes_everything_back(loop: SimulatedLoop, making: Making) -> None:
    makings = Makings(loop, making, "none")
    calls = makings.calls()
    for call in range(0, calls + 1, 2 + calls // 40):
        makings.try_failure(call, (None, call)[call % 2])


@EVERY
def test_a_maker_that_meets_a_full_disk_takes_everything_back(loop: SimulatedLoop, making: Making) -> None:
    makings = Makings(loop, making, "none")
    for room in range(0, 2600, 370):
        makings.try_failure(room, None, full=True)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_more_of_them(loop: SimulatedLoop, compression: str, budget) -> None:
    known: dict[str, tuple[Makings, int]] = {}
    for dice in budget.rounds():
        making = MAKINGS[budget.round % len(MAKINGS)]
        if making.name not in known:
            makings = Makings(loop, making, compression)
            known[making.name] = (makings, makings.calls())
        makings, calls = known[making.name]
        left = dice.randrange(calls + 1)
        makings.try_cut(left, dice.getrandbits(30))
        recovery = 0
        while makings.try_cut(left, dice.choice((None, dice.getrandbits(30))), recovery, dice.getrandbits(30)):
            recovery += dice.randint(1, 3)
        makings.try_failure(left, dice.choice((None, dice.getrandbits(30))))
        makings.try_failure(dice.randrange(3000), None, full=True)
