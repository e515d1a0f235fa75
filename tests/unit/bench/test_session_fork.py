"""The bench of whole session forks, small."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from kimi_ray.bench.session_fork import bench_session_fork


@pytest.mark.parametrize("backend", ["jsonl", "sqlite"])
async def test_session_fork(tmp_path: Path, backend: Literal["jsonl", "sqlite"]) -> None:
    report = (await bench_session_fork(events=200, repeats=2, backend=backend, directory=str(tmp_path))).to_data()
    assert report["bench"] == "session-fork" and report["unit"] == "s"
    assert report["value"] > 0 and report["live_s"] > 0 and report["at_turn_0_s"] > 0
    assert report["events"] >= 200
    assert not list(tmp_path.iterdir())
