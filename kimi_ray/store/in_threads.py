"""Blocking work in a thread that is never left behind: a cancelled caller still waits until it has ended.

Locks and claims are released when the caller leaves; the work they protect must be over by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def finish_in(executor: Executor, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What ``work`` returns or raises; on cancellation, ``CancelledError`` after it has ended."""
    loop = asyncio.get_running_loop()
    run = loop.run_in_executor(executor, lambda: work(*args, **kwargs))
    try:
        return await asyncio.shield(run)
    except asyncio.CancelledError:
        await asyncio.wait([run])
        if not run.cancelled():
            run.exception()
        raise
