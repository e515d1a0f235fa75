"""When which task of a swarm may start: a short ramp, and a careful phase once the provider has said that it is enough.

Rules and nothing else: it knows no clock (every call says what time it is, in milliseconds), no agents and no waiting.

The *ramp*: the first ``INITIAL_LAUNCHES`` at once, then one each ``LAUNCH_INTERVAL_MS``, as long as fewer run than the
user's cap. The *limited phase* begins with the first task that the provider refused for its rate, and does not end: a
capacity, one launch at a time, and a wait between launches that grows while new ones are refused at once.
"""

from __future__ import annotations

from collections import deque

# K 8.6 (agentRunBatch.ts)
INITIAL_LAUNCHES = 5
LAUNCH_INTERVAL_MS = 700
RETRY_BASE_MS = 3_000
RETRY_FACTOR = 2
SHRINK_INTERVAL_MS = 2_000
RECOVERY_INTERVAL_MS = 3 * 60_000

RETRY_LIMIT_MS = 60 * 60_000
"""A task that would have to wait longer than this for its next attempt is given up (rule 9 of the design: every wait
is bounded); it is the twelfth refusal in a row."""


class LaunchPlan:
    """The order and the times of a swarm's launches.

    A task is in exactly one place: waiting, running or finished. ``due`` moves it from the first to the second,
    ``finished`` and ``limited`` from there on.

    Args:
        count: Tasks, numbered from 0; they wait in that order.
        max_concurrency: Most of them at once, in both phases; None is no cap.
    """

    def __init__(self, count: int, *, max_concurrency: int | None = None) -> None:
        self._cap = max_concurrency
        self._waiting = deque(range(count))
        self._running: set[int] = set()
        self._ready: set[int] = set()
        self._unfinished = count
        self._refusals: dict[int, int] = {}
        self._retry_at: dict[int, int] = {}
        self._launches = 0
        self._next_launch_at: int | None = None
        self._began_well = 0
        self._capacity: int | None = None
        self._interval = RETRY_BASE_MS
        self._limited_launch_at = 0
        self._refused_at = 0
        self._shrunk_at = 0
        self._recovered_at = 0

    @property
    def unfinished(self) -> int:
        """Tasks that wait or run."""
        return self._unfinished

    @property
    def running(self) -> int:
        """Tasks that run."""
        return len(self._running)

    @property
    def capacity(self) -> int | None:
        """How many may run at once now; None is no bound."""
        if self._capacity is None:
            return self._cap
        return self._capacity if self._cap is None else min(self._capacity, self._cap)

    def due(self, now: int) -> list[int]:
        """The tasks to start now; they count as running from here on."""
        return self._due_in_ramp(now) if self._capacity is None else self._due_when_limited(now)

    def next_look(self) -> int | None:
        """When to ask ``due`` again, should nothing else happen before; None: only then."""
        if not self._waiting:
            return None
        if self._capacity is None:
            return self._next_launch_at
        if self._is_full():
            return self._recovery_at
        return min(self._allowed_at, self._recovery_at)

    def ready(self, task: int, now: int) -> None:
        """The turn of a running task has begun."""
        if task not in self._running or task in self._ready:
            return
        self._ready.add(task)
        if self._capacity is None:
            self._began_well += 1
        else:
            self._interval = RETRY_BASE_MS
            self._limited_launch_at = now + self._interval

    def finished(self, task: int) -> None:
        """A running task has its result."""
        self._leave(task)
        self._unfinished -= 1

    def limited(self, task: int, now: int) -> bool:
        """The provider refused a running task for its rate: it waits again, before all others.

        Returns:
            False when it is not to be tried again, because it is the only one left or was refused too often; then
            nothing has changed and it is still to be ``finished``.
        """
        refusals = self._refusals.get(task, 0) + 1
        delay = RETRY_BASE_MS * RETRY_FACTOR ** (refusals - 1)
        if self._unfinished == 1 or delay > RETRY_LIMIT_MS:
            return False
        was_ready = task in self._ready
        self._leave(task)
        self._refusals[task] = refusals
        self._retry_at[task] = now + delay
        self._waiting.appendleft(task)
        self._refused_at = now
        self._shrink(now)
        wait = RETRY_BASE_MS
        if not was_ready:
            wait = self._interval = max(self._interval * 2, delay)
        self._limited_launch_at = max(self._limited_launch_at, now + wait)
        return True

    # -- inside -----------------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        capacity = self.capacity
        return capacity is not None and len(self._running) >= capacity

    def _start(self, task: int) -> int:
        self._running.add(task)
        return task

    def _leave(self, task: int) -> None:
        self._running.remove(task)
        self._ready.discard(task)

    def _due_in_ramp(self, now: int) -> list[int]:
        found: list[int] = []

        def start_next() -> None:
            found.append(self._start(self._waiting.popleft()))
            self._launches += 1

        if self._next_launch_at is not None and now >= self._next_launch_at:
            self._next_launch_at = None
            if self._waiting and not self._is_full():
                start_next()
        while self._launches < INITIAL_LAUNCHES and self._waiting and not self._is_full():
            start_next()
        if self._next_launch_at is None and self._waiting and not self._is_full():
            self._next_launch_at = now + LAUNCH_INTERVAL_MS
        return found

    def _due_when_limited(self, now: int) -> list[int]:
        if not self._waiting:
            return []
        if self._capacity is not None and now >= self._recovery_at:
            self._capacity += 1
            self._recovered_at = now
            self._limited_launch_at = min(self._limited_launch_at, now)
        if self._is_full() or now < self._allowed_at:
            return []
        task = next(task for task in self._waiting if self._retry_at.get(task, 0) <= now)
        self._waiting.remove(task)
        self._limited_launch_at = now + self._interval
        return [self._start(task)]

    @property
    def _allowed_at(self) -> int:
        return max(self._limited_launch_at, min(self._retry_at.get(task, 0) for task in self._waiting))

    @property
    def _recovery_at(self) -> int:
        return max(self._refused_at, self._recovered_at) + RECOVERY_INTERVAL_MS

    def _shrink(self, now: int) -> None:
        if self._capacity is None:
            self._capacity = max(1, self._began_well)
            self._next_launch_at = None
        elif now - self._shrunk_at < SHRINK_INTERVAL_MS:
            return
        self._capacity = max(1, self._capacity - 1)
        self._shrunk_at = now
