"""Who is on the way to life, and whether anybody may still set out: a session that ends leaves nobody behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager

from kimi_ray.errors import KimiRayError


class Arrivals:
    """The agents of one session that are just being brought to life.

    Args:
        refusal: What is told to whoever wants to bring one to life after ``stop``.
    """

    def __init__(self, refusal: Callable[[], KimiRayError]) -> None:
        self._refusal = refusal
        self._stopped = False
        self._coming = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def one(self) -> Generator[None]:
        """During the block an agent is brought to life, and entered where it is looked for.

        Raises:
            KimiRayError: the refusal.
        """
        if self._stopped:
            raise self._refusal()
        self._coming += 1
        self._none.clear()
        try:
            yield
        finally:
            self._coming -= 1
            if not self._coming:
                self._none.set()

    def refuse(self) -> None:
        """Nobody sets out any more. Idempotent."""
        self._stopped = True

    async def stop(self) -> None:
        """``refuse``, and wait for those who are on their way."""
        self.refuse()
        await self._none.wait()

    def go_on(self) -> None:
        """The session did not end after all."""
        self._stopped = False
