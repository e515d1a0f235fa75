"""The wall clock, read in one place.

Event times, creation times and the time in new ids come from here. None of them decides anything (order is by seq,
ownership by grants), and tests show it by setting the clocks of nodes apart with ``KIMI_RAY_CLOCK_OFFSET_MS``.
"""

from __future__ import annotations

import os
import time

_OFFSET_MS = int(os.environ.get("KIMI_RAY_CLOCK_OFFSET_MS") or 0)


def epoch_ms() -> int:
    """Now, in epoch milliseconds."""
    return time.time_ns() // 1_000_000 + _OFFSET_MS
