"""What forks cost, one after the other: the part that ``fork`` and ``session-fork`` have in common."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from statistics import median
from typing import Any

from kimi_ray.bench.processes import Meter, peak_rss_mb, reset_peak, rss_mb
from kimi_ray.bench.report import BenchReport


class ForkTimes:
    """Seconds of each fork, and by how much memory grew during one at most."""

    def __init__(self) -> None:
        self._walls: list[float] = []
        self._grew_mb = 0.0

    @contextmanager
    def one(self) -> Generator[None]:
        """Around a fork."""
        before_mb = rss_mb()
        reset_peak()
        began = time.perf_counter()
        yield
        self._walls.append(time.perf_counter() - began)
        self._grew_mb = max(self._grew_mb, peak_rss_mb() - before_mb)

    def report(self, bench: str, meter: Meter, floor_s: float, setting: dict[str, Any], **more: Any) -> BenchReport:
        """The median of all.

        Args:
            bench: Its name.
            meter: It was running during all forks.
            floor_s: The floor, in seconds.
            setting: What was forked, and how.
            more: Further figures.
        """
        wall_s = median(self._walls)
        repeats = len(self._walls)
        return BenchReport(
            bench=bench,
            value=wall_s,
            unit="s",
            floor=floor_s,
            ratio=wall_s / floor_s,
            wall_s=wall_s,
            cpu_s=meter.cpu_s / repeats,
            peak_pss_mb=meter.peak_pss_mb,
            figures={
                **setting,
                "repeats": repeats,
                "slowest_s": max(self._walls),
                "grew_mb": self._grew_mb,
                **more,
            },
        )
