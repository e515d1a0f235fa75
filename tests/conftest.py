"""What all tests share: a clean environment, markers by folder, and the time budget of the long group.

With ``-n auto``, as the README has it, two processes share the files of tests while the budget is short; those on Ray
stay together in one of them, so that there is one Ray. With a long budget, where processes are killed at measured
moments, all run in one process, one after the other.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_MARK_BY_FOLDER = {"actors": "ray", "cluster": "cluster"}
_TESTS = Path(__file__).parent
_BUDGET_S = "KIMI_RAY_TEST_BUDGET_S"
_SEED = "KIMI_RAY_TEST_SEED"
_DEFAULT_BUDGET_S = 20.0
_RAY_BUDGET_S = 60.0
"""With less time the long tests on a real Ray, most of which kill, are left out; ``.ci/run`` has more."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return 2 if _budget_s() < _RAY_BUDGET_S and len(os.sched_getaffinity(0)) > 1 else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "ray" if file.startswith(tuple(f"tests/{folder}/" for folder in _MARK_BY_FOLDER)) else file

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parts = item.path.relative_to(_TESTS).parts if item.path.is_relative_to(_TESTS) else ()
        mark = _MARK_BY_FOLDER.get(parts[0]) if parts else None
        if mark is not None:
            item.add_marker(mark)
        if mark is not None and item.get_closest_marker("long") and _budget_s() < _RAY_BUDGET_S:
            item.add_marker(pytest.mark.skip(reason=f"long on Ray, up to a minute each: {_BUDGET_S}={_RAY_BUDGET_S:g}"))


def _budget_s() -> float:
    return float(os.environ.get(_BUDGET_S) or _DEFAULT_BUDGET_S)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test sees the user's home, settings or keys."""
    for name in list(os.environ):
        if name.startswith(("KIMI_RAY_", "OPENAI_")) and not name.startswith("KIMI_RAY_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KIMI_RAY_HOME", str(tmp_path_factory.mktemp("home") / "kimi-ray"))


@dataclass
class Budget:
    """The share of time that one long test may take, and its seeded randomness.

    ``rounds()`` yields a fresh ``random.Random`` a round until the time is over, at least one. A failure names the
    seed and the round; ``KIMI_RAY_TEST_SEED`` plays it again.
    """

    seconds: float
    seed: int
    round: int = field(default=-1)

    def size(self, full: int, quick: int) -> int:
        """How much of something a test makes: ``full`` with a long budget, ``quick`` with a short one."""
        return full if _budget_s() >= _RAY_BUDGET_S else quick

    def rounds(self) -> Iterator[random.Random]:
        ends = time.monotonic() + self.seconds
        while self.round < 0 or time.monotonic() < ends:
            self.round += 1
            yield random.Random(f"{self.seed}:{self.round}")


@pytest.fixture
def budget(request: pytest.FixtureRequest) -> Iterator[Budget]:
    """An equal share of ``KIMI_RAY_TEST_BUDGET_S`` (default 20 s for the whole group) for each long test."""
    long_tests = [item for item in request.session.items if "budget" in getattr(item, "fixturenames", ())]
    seconds = _budget_s() / max(1, len(long_tests))
    given = Budget(seconds, int(os.environ.get(_SEED) or random.SystemRandom().getrandbits(31)))
    request.node.add_report_section("setup", "seed", f"{_SEED}={given.seed}")
    yield given
    request.node.add_report_section("teardown", "rounds", f"{_SEED}={given.seed}, last round {given.round}")
