"""The wall clock can be set wrong, for tests of nodes whose clocks do not agree."""

from __future__ import annotations

import subprocess
import sys
import time

SHOW = "from kimi_ray.log import epoch_ms; from kimi_ray.ids import new_ulid; print(epoch_ms(), new_ulid())"


def test_an_offset_moves_event_times_and_new_ids(monkeypatch) -> None:
    from ulid import ULID

    monkeypatch.setenv("KIMI_RAY_CLOCK_OFFSET_MS", "-3600000")
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, timeout=60)
    now, made = shown.stdout.split()
    an_hour_ago = time.time() - 3600
    assert abs(int(now) / 1000 - an_hour_ago) < 60
    assert abs(ULID.from_str(made).timestamp - an_hour_ago) < 60
