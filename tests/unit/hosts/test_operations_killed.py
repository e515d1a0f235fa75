"""Every operation on sessions, killed before and after each call that crosses a port, and the home opened again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Budget
from tests.unit.hosts.operation_crash import OPERATIONS, Forge

STORES: dict[str, dict[str, Any]] = {
    "jsonl": {"backend": "jsonl"},
    "zstd": {"backend": "jsonl", "compression": "zstd"},
    "sqlite": {"backend": "sqlite"},
}
SIGKILL = 9


class Scene:
    """A home of each store before any operation, and the traces of the operations."""

    def __init__(self, root: Path) -> None:
        self.forge = Forge()
        self.root = root
        self.work = root / "work"
        self.work.mkdir()
        self._templates: dict[str, Path] = {}
        self._traces: dict[tuple[str, str], list[tuple[str, int]]] = {}
        self._made = 0

    def home(self, store: str) -> Path:
        """A fresh copy of the prepared home."""
        template = self._templates.get(store)
        if template is None:
            template = self._templates[store] = self.root / f"template-{store}"
            made = self.forge.job("prepare", template, work=str(self.work), store=STORES[store])
            assert made["code"] == 0, made["text"]
        self._made += 1
        home = self.root / f"home-{self._made}"
        shutil.copytree(template, home)
        return home

    def trace(self, store: str, operation: str) -> list[tuple[str, int]]:
        """The calls that an operation makes when nothing happens to it; what it leaves is checked."""
        found = self._traces.get((store, operation))
        if found is None:
            home = self.home(store)
            done = self._operate(home, store, operation, None)
            assert done["code"] == 0, done["text"]
            self._check(home, store, operation, done=True, why="it was not killed")
            found = self._traces[store, operation] = [(method, which) for method, which in done["answer"]["trace"]]
        return found

    def kill(self, store: str, operation: str, method: str, which: int, side: str) -> bool:
        """Kill it there and look at what is left; gives whether it came so far."""
        home = self.home(store)
        ended = self._operate(home, store, operation, [method, which, side])
        assert ended["signal"] == SIGKILL or ended["code"] == 0, ended["text"]
        why = f"{store}: {operation} killed {side} {method} {which}"
        self._check(home, store, operation, done=ended["code"] == 0, why=why)
        shutil.rmtree(home)
        return ended["signal"] == SIGKILL

    def _operate(self, home: Path, store: str, operation: str, at: list[Any] | None) -> dict[str, Any]:
        return self.forge.job("operate", home, work=str(self.work), store=STORES[store], operation=operation, at=at)

    def _check(self, home: Path, store: str, operation: str, *, done: bool, why: str) -> None:
        found = self.forge.job("check", home, work=str(self.work), store=STORES[store], operation=operation, done=done)
        assert found["code"] == 0, f"{why}:\n{found['text']}"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("killed"))
    yield made
    made.forge.close()


@pytest.mark.parametrize("operation", ["close busy", "restore"])
def test_an_operation_that_is_not_killed(scene: Scene, operation: str) -> None:
    assert scene.trace("jsonl", operation)


@pytest.mark.parametrize(
    ("store", "operation", "method", "which", "side"),
    [
        ("jsonl", "create", "open_session", 0, "after"),
        ("jsonl", "create", "run_many", 0, "after"),
        ("jsonl", "create", "write_documents", 0, "before"),
        ("sqlite", "create", "run_many", 0, "after"),
        ("jsonl", "archive cold", "write_documents", 0, "after"),
        ("jsonl", "delete live", "remove", 0, "before"),
        ("sqlite", "delete cold", "remove", 0, "after"),
        ("jsonl", "archive busy", "close_agents", 0, "after"),
        ("sqlite", "delete busy", "close_agents", 0, "before"),
        ("jsonl", "fork many", "publish", 0, "before"),
        ("jsonl", "fork many", "publish", 0, "after"),
        ("sqlite", "fork many", "copy_session", 1, "after"),
        ("zstd", "fork", "copy_session", 0, "after"),
    ],
)
def test_an_operation_killed_where_it_matters_most(
    scene: Scene, store: str, operation: str, method: str, which: int, side: str
) -> None:
    assert scene.kill(store, operation, method, which, side), "it was not killed there: the matrix needs another look"


@pytest.mark.long
@pytest.mark.timeout(0)
def test_the_matrix(scene: Scene, budget: Budget) -> None:
    """Random places, none twice before all of its operation were seen; there are about 1,500."""
    left: dict[tuple[str, str], list[tuple[str, int, str]]] = {}
    for random in budget.rounds():
        store, operation = random.choice(list(STORES)), random.choice(list(OPERATIONS))
        cases = left.setdefault((store, operation), [])
        if not cases:
            trace = scene.trace(store, operation)
            cases += [(method, which, side) for method, which in trace for side in ("before", "after")]
            random.shuffle(cases)
        scene.kill(store, operation, *cases.pop())
