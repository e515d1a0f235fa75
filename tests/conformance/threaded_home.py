"""A home on real files and threads, under the state machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kimi_ray.store.seam import Store
from tests.conformance.store_contract import Home

R = TypeVar("R")
_PATIENCE_S = 20.0


class ThreadedHome:
    """Runs any ``Home`` of the contract; its machine cannot lose power."""

    def __init__(self, name: str, home: Home, close: Callable[[], object]) -> None:
        self.name = name
        self._home = home
        self._close = close
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run to the end, within a bound."""
        return self._loop.run_until_complete(asyncio.wait_for(work, _PATIENCE_S))

    async def open(self, **options: Any) -> Store:
        """A store process."""
        return await self._home.open(**options)

    async def kill(self, store: Store) -> None:
        """SIGKILL."""
        await self._home.kill(store)

    def power_cut(self, seed: int) -> bool:
        """Not here."""
        return False

    def close(self) -> None:
        """Give threads and files back."""
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._close()
