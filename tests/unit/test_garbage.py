"""A host's process looks for garbage seldom, but it does."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from kimi_ray.garbage import YOUNG_OBJECTS, collect_seldom

class Ring:
    def __init__(self):
        self.me = self

before = Ring()
collect_seldom()
assert gc.get_freeze_count() > 1000
looks = []
gc.callbacks.append(lambda phase, info: looks.append(info["generation"]) if phase == "stop" else None)
kept = [[] for _ in range(YOUNG_OBJECTS // 2)]
assert not looks, looks
rings = [weakref.ref(Ring()) for _ in range(3 * YOUNG_OBJECTS)]
assert 2 <= len(looks) <= 10, looks
assert sum(ring() is None for ring in rings) > YOUNG_OBJECTS, "garbage is found without being asked for"
# What was there before is garbage that stays: nothing that ends with an agent may be among it.
old = weakref.ref(before)
del before
gc.collect()
assert old() is not None
"""


def test_garbage_is_found_seldom() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
