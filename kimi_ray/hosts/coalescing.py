"""Coalescing: what many ask for in one pass of the event loop travels in one call."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from kimi_ray.errors import RuntimeFault


class Coalesced:
    """Gathers requests to a shard into one call.

    Args:
        call: Makes the call: the shard and what was asked, one answer for each in order. A raised error is everybody's.
    """

    def __init__(self, call: Callable[[int, list[Any]], Awaitable[list[Any]]]) -> None:
        self._call = call
        self._asked: dict[int, list[tuple[Any, asyncio.Future[Any]]]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()

    async def add(self, shard: int, what: Any) -> Any:
        """Ask, and wait for one's own answer."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        asked = self._asked[shard]
        asked.append((what, future))
        if len(asked) == 1:
            task = asyncio.get_running_loop().create_task(self._send(shard))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _send(self, shard: int) -> None:
        await asyncio.sleep(0)
        asked = self._asked.pop(shard)
        try:
            answers = await self._call(shard, [what for what, _ in asked])
            found = list(zip(asked, answers, strict=True))
        except BaseException as error:
            # Whatever it is, all who wait hear of it: nobody else would ever answer them.
            for _, future in asked:
                if not future.done():
                    future.set_exception(_told(error))
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), answer in found:
            if not future.done():
                future.set_result(answer)


def _told(error: BaseException) -> BaseException:
    """A call that was ended did not answer; its end is not that of those who wait."""
    if isinstance(error, asyncio.CancelledError):
        return RuntimeFault("the call was ended before it was answered", code="runtime.closed")
    return error
