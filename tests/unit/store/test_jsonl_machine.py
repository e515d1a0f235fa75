"""Random lives of the plain JSONL backend."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings

from tests.conformance.store_machine import StoreMachine
from tests.unit.store.test_jsonl_contract import JsonlHome


class JsonlMachine(StoreMachine):
    @staticmethod
    def make_home() -> JsonlHome:  # type: ignore[override]
        return JsonlHome(Path(tempfile.mkdtemp(prefix="kimi-ray-store-")) / "home", syncs=False)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.home.path.parent)


TestJsonlMachine = JsonlMachine.TestCase
TestJsonlMachine.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
