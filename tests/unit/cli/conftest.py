"""A command line run in this process: its exit code, what it printed, and a clean place to run it in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.cli.app import run_command


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


Cli = Callable[..., Result]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, with a space in its path."""
    here = tmp_path / "a place"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("KIMI_RAY_HOME", str(tmp_path / "a home"))
    return here


@pytest.fixture
def home(place: Path) -> Path:
    return place.parent / "a home"


@pytest.fixture
def cli(place: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: object) -> Result:
        capfd.readouterr()
        code = run_command([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return run
