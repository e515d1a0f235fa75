"""How often a host's process, and that of a command, looks for cyclic garbage: seldom, as almost nothing of ours is.

Python looks each time 700 objects more are alive than before. A host that holds many agents lets events live until
they are durable, so it would look all the time: a quarter of a turn's CPU, and each full look stops all agents of the
host, for longer the more they have said. What a host has when it has started stays, and is not looked at again.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""Objects more alive than at the last look that make the next one due: some megabytes of garbage may wait."""


def look_seldom() -> None:
    """From now on garbage is looked for by ``YOUNG_OBJECTS``."""
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def collect_seldom() -> None:
    """``look_seldom``, and what is there already is kept for good: for a process that has begun and stays."""
    gc.collect()
    gc.freeze()
    look_seldom()
