"""Every operation of the JSONL store stopped at every file call, on disks that keep and disks that lose.

The quick part takes some of the cuts, with two disks each. The long part takes all of them with fifty power cuts each, as far
as its budget goes, each round with other seeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.conformance.crash_matrix import OPERATIONS, Matrix, Operation
from tests.conformance.simulated_loop import SimulatedLoop, simulated_loop

POWER_CUTS = 50


@pytest.fixture(scope="module")
def loop() -> Iterator[SimulatedLoop]:
    with simulated_loop() as loop:
        yield loop


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_some_crashes(loop: SimulatedLoop, operation: Operation, compression: str) -> None:
    matrix = Matrix(loop, operation, compression)
    calls = matrix.calls()
    step = 2 if calls < 12 else 3 if calls < 40 else 8
    cuts = range(0 if compression == "none" else 1, calls + 1, step)
    matrix.run([1], random.Random(operation.name), clean_recoveries=False, cuts=cuts)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_all_crashes(loop: SimulatedLoop, compression: str, budget) -> None:
    for dice in budget.rounds():
        operation = OPERATIONS[budget.round % len(OPERATIONS)]
        seeds = [dice.getrandbits(30) for _ in range(POWER_CUTS)]
        counts = Matrix(loop, operation, compression).run(seeds, dice, clean_recoveries=True)
        print(operation.name, compression, counts)
