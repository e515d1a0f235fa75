"""When to ask again: a pure rule of the error, the number of the attempt, and a random number."""

from __future__ import annotations

import random

from pydantic import Field

from kimi_ray.errors import KimiRayError, ProviderError
from kimi_ray.llm.faults import STALE
from kimi_ray.settings import Settings

STALE_MS = 10
"""Between an attempt on a connection that had been closed and the next."""


class RetryPolicy(Settings):
    """How many attempts a step has, and how long it waits between them.

    A server that says how long to wait (``Retry-After``) is waited for exactly that long; one that asks for more than
    ``retry_after_cap_ms`` is given up on. Otherwise attempt n is followed by ``base_ms * 2^(n-1)``, at most
    ``max_ms``, plus up to ``jitter`` of it. A first attempt that met a closed connection is made again almost at once.
    """

    max_attempts: int = Field(default=10, ge=1)
    """Attempts, not retries: 1 never asks again."""
    base_ms: int = Field(default=500, ge=0)
    max_ms: int = Field(default=32_000, ge=0)
    jitter: float = Field(default=0.25, ge=0, le=1)
    retry_after_cap_ms: int = Field(default=120_000, ge=0)

    def delay_ms(self, attempt: int, error: KimiRayError, rng: random.Random) -> int | None:
        """Milliseconds to wait before the attempt after this one, or None to give up.

        Args:
            attempt: The number of the failed attempt, from 1.
            error: Why it failed.
            rng: Where the jitter comes from; not used when the server said how long.
        """
        if not error.retryable or attempt >= self.max_attempts:
            return None
        asked = error.retry_after_ms if isinstance(error, ProviderError) else None
        # a server that says "0" has not thought about it: our own backoff keeps the attempts apart
        if asked:
            return asked if asked <= self.retry_after_cap_ms else None
        if attempt == 1 and error.details.get("kind") == STALE:
            return min(STALE_MS, self.base_ms)
        # the exponent is bounded: 2**10000 is a number, but not one to compute
        delay = min(self.base_ms << min(attempt - 1, 32), self.max_ms)
        return round(delay * (1 + self.jitter * rng.random()))
