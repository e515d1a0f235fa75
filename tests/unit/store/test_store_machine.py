"""Random lives of every backend of this program, in lockstep."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.conformance.simulated_home import SimulatedHome
from tests.conformance.store_machine import MachineHome, StoreMachine
from tests.conformance.threaded_home import ThreadedHome
from tests.unit.store_sqlite.sqlite_home import SqliteHome


def sqlite_home() -> ThreadedHome:
    path = tempfile.mkdtemp(prefix="kimi-ray-store-")
    return ThreadedHome("sqlite", SqliteHome(Path(path) / "home", syncs=False), lambda: shutil.rmtree(path))


class EveryBackend(StoreMachine):
    @staticmethod
    def make_homes() -> list[MachineHome]:  # type: ignore[override]
        return [SimulatedHome("none"), SimulatedHome("zstd"), sqlite_home()]


TestEveryBackend = EveryBackend.TestCase
TestEveryBackend.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_long_lives(budget) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    for _ in budget.rounds():
        run_state_machine_as_test(
            EveryBackend,
            settings=settings(
                max_examples=5,
                stateful_step_count=60,
                deadline=None,
                database=None,
                derandomize=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
