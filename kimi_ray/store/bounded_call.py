"""A call to the store that always ends, in its answer, its error or its time-out; and the pause after a lost one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kimi_ray.errors import KimiRayError, RuntimeFault, as_error
from kimi_ray.store.clock import Alarm, Clock

T = TypeVar("T")

_TRY_AGAIN = frozenset({"store.unavailable", "store.busy"})


DISK_ERRORS = frozenset({"store.disk_full", "store.io_failed", "store.permission_denied", "store.poisoned"})
"""A disk that refuses is not a store that is away: who waits hears of it after one more try."""


def can_be_sent_again(error: KimiRayError) -> bool:
    """Whether the same call may succeed later without a change: the store was away, busy, or too slow."""
    return error.retryable or error.code.startswith("infra.") or error.code in _TRY_AGAIN


class BoundedCall(Generic[T]):
    """Runs one call as a task and reports its outcome exactly once; what comes after that is ignored.

    Args:
        make: Starts the call.
        timeout_s: Seconds after which it is given up as ``infra.timeout``.
        clock: The clock of the time-out.
        on_done: Gets the answer.
        on_failed: Gets the error.
    """

    __slots__ = ("_alarm", "_make", "_on_done", "_on_failed", "_settled", "_timeout_s", "task")

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        *,
        timeout_s: float,
        clock: Clock,
        on_done: Callable[[T], None],
        on_failed: Callable[[KimiRayError], None],
    ) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._on_done = on_done
        self._on_failed = on_failed
        self._settled = False
        self._alarm: Alarm | None = clock.call_later(timeout_s, self._expire)
        self.task = asyncio.get_running_loop().create_task(self._run())

    def abandon(self) -> None:
        """Report nothing any more and cancel the call."""
        self._settle()
        self.task.cancel()

    async def _run(self) -> None:
        try:
            answer = await self._make()
        except asyncio.CancelledError:
            self._fail(RuntimeFault("a call to the store was cancelled", code="infra.cancelled", retryable=True))
            raise
        except TimeoutError as error:
            self._fail(RuntimeFault(f"the store did not answer: {error}", code="infra.timeout", retryable=True))
        except Exception as error:  # noqa: BLE001  handed to the owner, which gives it to every flush that waits
            self._fail(as_error(error))
        else:
            if self._settle():
                self._on_done(answer)

    def _expire(self) -> None:
        self._alarm = None
        text = f"the store did not answer within {self._timeout_s:g} s"
        self._fail(RuntimeFault(text, code="infra.timeout", retryable=True))
        self.task.cancel()

    def _fail(self, error: KimiRayError) -> None:
        if self._settle():
            self._on_failed(error)

    def _settle(self) -> bool:
        """Whether this outcome is the first."""
        first = not self._settled
        self._settled = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        return first


class Backoff:
    """Growing pauses between attempts, with jitter.

    Args:
        clock: Counts the pause.
        initial_s: The first pause, in seconds; each further one doubles it.
        max_s: The longest.
        resume: Called when a pause is over.
        jitter: Gives numbers in [0, 1).
    """

    __slots__ = ("_alarm", "_attempts", "_clock", "_initial_s", "_jitter", "_max_s", "_resume")

    def __init__(
        self,
        clock: Clock,
        initial_s: float,
        max_s: float,
        resume: Callable[[], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._initial_s = initial_s
        self._max_s = max_s
        self._resume = resume
        self._jitter = jitter
        self._attempts = 0
        self._alarm: Alarm | None = None

    @property
    def pausing(self) -> bool:
        """Whether a pause is running."""
        return self._alarm is not None

    def pause(self) -> None:
        """Begin the next pause; a running one is left alone."""
        if self._alarm is not None:
            return
        delay = min(self._initial_s * 2 ** min(self._attempts, 32), self._max_s)
        self._attempts += 1
        self._alarm = self._clock.call_later(delay * (0.8 + 0.4 * self._jitter()), self._over)

    def succeeded(self) -> None:
        """An attempt succeeded: the next pause is a short one again."""
        self._attempts = 0

    def stop(self) -> None:
        """End the pause without resuming."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _over(self) -> None:
        self._alarm = None
        self._resume()
