"""How often a host's process looks for cyclic garbage: seldom, as almost nothing of ours is.

Python looks each time 700 objects more are alive than before. A host that holds many agents lets events live until
they are durable, so it would look all the time: a quarter of a turn's CPU, and each full look stops all agents of the
host, for longer the more they have said. What a host has when it has started stays, and is not looked at again.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""Objects more alive than at the last look that make the next one due: some megabytes of garbage may wait."""


def collect_seldom() -> None:
    """From now on: what is there already is kept for good, and garbage is looked for by ``YOUNG_OBJECTS``."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
