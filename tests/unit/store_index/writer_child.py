"""A store process for tests to kill: writes documents as fast as it can and says each one that was acknowledged."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from kimi_ray.store.session_index import IndexPace
from tests.unit.store_index.index_home import Home


async def write(path: str, name: str, seed: int, count: int) -> None:
    choose = random.Random(seed)
    home = Home(Path(path), IndexPace(reconcile_s=3600.0, again_s=0.02, window_s=choose.choice([0.001, 0.05])))
    for number in range(count):
        session_id = f"{name}-{choose.randrange(8)}"
        await home.write(session_id, at=number + 1, title=f"{name} {number}")
        print(session_id, number + 1, flush=True)
    await home.ready()
    await home.service.close()
    print("closed", flush=True)


if __name__ == "__main__":
    asyncio.run(write(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
