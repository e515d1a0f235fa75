"""Every operation of the JSONL store stopped at every file call, on disks that keep and disks that lose.

The quick part takes some of the cuts, with two disks each. A round of the long part takes a quarter of the cuts of one
operation with a few power cuts each, and the next process cut at every call, each round with other seeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.conformance.crash_matrix import OPERATIONS, Matrix, Operation
from tests.conformance.simulated_loop import SimulatedLoop, simulated_loop

POWER_CUTS = 5
FAILING = [operation for operation in OPERATIONS if operation.survives and operation.name not in ("home", "life")]


@pytest.fixture(scope="module")
def loop() -> Iterator[SimulatedLoop]:
    with simulated_loop() as loop:
        yield loop


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_some_crashes(loop: SimulatedLoop, operation: Operation, compression: str) -> None:
    matrix = Matrix(loop, operation, compression)
    calls = matrix.calls()
    step = 2 if calls < 12 else 4 if calls < 40 else 12
    cuts = range(0 if compression == "none" else 1, calls + 1, step)
    matrix.run([1], random.Random(operation.name), clean_recoveries=False, cuts=cuts)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("operation", FAILING, ids=lambda operation: operation.name)
def test_a_call_that_fails(loop: SimulatedLoop, operation: Operation, compression: str) -> None:
    matrix = Matrix(loop, operation, compression)
    matrix.fail([2], range(0 if compression == "none" else 1, matrix.calls(), 3))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_more_crashes(loop: SimulatedLoop, compression: str, budget) -> None:
    for dice in budget.rounds():
        operation = OPERATIONS[budget.round % len(OPERATIONS)]
        matrix = Matrix(loop, operation, compression)
        cuts = range(dice.randrange(4), matrix.calls() + 1, 4)
        seeds = [dice.getrandbits(30) for _ in range(POWER_CUTS)]
        print(operation.name, compression, matrix.run(seeds, dice, clean_recoveries=True, cuts=cuts))
        if operation in FAILING:
            matrix.fail(seeds, cuts)
