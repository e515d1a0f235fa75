"""A cluster of raylets for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_local_sh import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Not up yet; down at the end, whatever became of it."""
    made = Cluster(tmp_path / "cluster")
    yield made
    made.run("down")
