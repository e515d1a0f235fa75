"""Random lives of the SQLite backend, against the model of every store."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.conformance.store_machine import MachineHome, StoreMachine
from tests.unit.store_sqlite.sqlite_home import SqliteMachineHome


class SqliteMachine(StoreMachine):
    @staticmethod
    def make_homes() -> list[MachineHome]:  # type: ignore[override]
        return [SqliteMachineHome()]


TestSqliteMachine = SqliteMachine.TestCase
TestSqliteMachine.settings = settings(
    max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
