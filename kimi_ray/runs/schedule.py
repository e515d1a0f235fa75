"""Which rollout is started next: a pure state machine with a clock handed in. It starts nothing itself.

Its user asks ``next_start`` while it returns something, runs what it says, and reports with ``spent`` (while a rollout
runs) and ``finished`` (when an attempt ended). Retries, total limits, ``fail_on`` and the stop of a run are decided
here, and every key is accounted for: running, to come, or done.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from kimi_ray.errors import ErrorClass, RunError
from kimi_ray.runs.items import RolloutKey
from kimi_ray.runs.outcomes import RowError, RowStatus
from kimi_ray.runs.seeds import RunSeed
from kimi_ray.settings import Limits

DEFAULT_RETRY_ON: tuple[ErrorClass, ...] = ("infra", "provider", "rate_limit", "store")
_RETRY_WAIT_S = 1.0
_RETRY_WAIT_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class Start:
    """One attempt to be started now. ``attempt`` counts from 1."""

    key: RolloutKey
    attempt: int
    seed: int
    send_seed: bool


class Spent(NamedTuple):
    """What an attempt has used so far, or in all."""

    turns: int = 0
    steps: int = 0
    tool_calls: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    cost_usd: float = 0.0
    working_s: float = 0.0

    def plus(self, other: Spent) -> Spent:
        """The sum."""
        return Spent(
            self.turns + other.turns,
            self.steps + other.steps,
            self.tool_calls + other.tool_calls,
            self.output_tokens + other.output_tokens,
            self.total_tokens + other.total_tokens,
            self.cost_usd + other.cost_usd,
            self.working_s + other.working_s,
        )

    def minus(self, other: Spent) -> Spent:
        """The difference."""
        return Spent(
            self.turns - other.turns,
            self.steps - other.steps,
            self.tool_calls - other.tool_calls,
            self.output_tokens - other.output_tokens,
            self.total_tokens - other.total_tokens,
            self.cost_usd - other.cost_usd,
            self.working_s - other.working_s,
        )


@dataclass(frozen=True, slots=True)
class LimitHit:
    """A total limit that was reached, as ``turn/end`` and rows tell it."""

    name: str
    value: float
    used: float

    @property
    def stop(self) -> str:
        """The ``stop`` of the rows that it ended."""
        return f"limit:{self.name}"


@dataclass(frozen=True, slots=True)
class FailOn:
    """How many failed rollouts end a run: a number, or a share of all rollouts."""

    count: int | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> FailOn:
        """Read ``N`` or ``P%``.

        Raises:
            RunError: ``swarm.bad_fail_on``.
        """
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
        if found and found[2] and 0 < float(found[1]) <= 100:
            return cls(percent=float(found[1]))
        if found and not found[2] and found[1].isdigit() and int(found[1]) >= 1:
            return cls(count=int(found[1]))
        raise RunError(
            f"{text!r} is neither a number of failures nor a percentage",
            code="swarm.bad_fail_on",
            hint="give 5 or 10%",
            details={"value": text},
        )

    def threshold(self, total: int) -> int:
        """The number of failed rollouts, of ``total``, at which the run ends."""
        if self.count is not None:
            return self.count
        return max(1, math.ceil(total * (self.percent or 100.0) / 100 - 1e-9))


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands. ``queued`` includes keys that wait for a retry (``retrying``)."""

    total: int
    queued: int
    running: int
    retrying: int
    retries: int
    done: dict[RowStatus, int]
    spent: Spent
    stopped: str | None


class Schedule:
    """The order and the end of a run.

    Args:
        keys: All rollouts to run, in order.
        seed: The run's seed.
        max_concurrency: Most attempts running at once.
        retries: Further attempts after a failure whose class is in ``retry_on``.
        retry_on: Error classes that are tried again.
        fail_on: When to end the run early.
        total_limits: Bounds of the run as a whole; None in it is unbounded.
        attempts_before: Attempts that an earlier command made of a key: numbers go on from there.
        clock: Seconds of a monotonic clock.

    Raises:
        RunError: ``swarm.bad_concurrency``, ``swarm.bad_retries``, ``swarm.bad_retry_class``.
    """

    def __init__(
        self,
        keys: Sequence[RolloutKey],
        *,
        seed: RunSeed,
        clock: Callable[[], float],
        max_concurrency: int = 32,
        retries: int = 0,
        retry_on: Sequence[str] = DEFAULT_RETRY_ON,
        fail_on: FailOn | None = None,
        total_limits: Limits | None = None,
        attempts_before: Mapping[RolloutKey, int] | None = None,
    ) -> None:
        if type(max_concurrency) is not int or max_concurrency < 1:
            raise RunError(
                f"the concurrency {max_concurrency!r} is not 1 or more",
                code="swarm.bad_concurrency",
                hint="give 1 or more",
            )
        if type(retries) is not int or retries < 0:
            raise RunError(
                f"the number of retries {retries!r} is not 0 or more", code="swarm.bad_retries", hint="give 0 or more"
            )
        self._seed = seed
        self._clock = clock
        self._max = max_concurrency
        self._retries = retries
        self._retry_on = checked_classes(retry_on)
        self._limits = total_limits or Limits()
        self._threshold = fail_on.threshold(len(keys)) if fail_on else None
        self._before = dict(attempts_before or {})
        self._total = len(keys)
        self._fresh = deque(keys)
        self._waiting: list[tuple[float, int, RolloutKey, int]] = []
        self._running: dict[RolloutKey, Spent] = {}
        self._attempt: dict[RolloutKey, int] = {}
        self._sum = Spent()
        self._done: dict[RowStatus, int] = dict.fromkeys(get_args(RowStatus), 0)
        self._retried = 0
        self._stopped: str | None = None
        self._began = clock()

    @property
    def stopped(self) -> str | None:
        """Why nothing new starts (``cancelled``, ``fail_on``, ``limit:<name>``), or None."""
        return self._stopped

    @property
    def finished_all(self) -> bool:
        """Whether nothing runs and nothing is to come."""
        return not self._running and (self._stopped is not None or not (self._fresh or self._waiting))

    def next_start(self) -> Start | None:
        """The attempt to start now, or None: at the concurrency, nothing ready, stopped, or at a total limit.

        A retry whose wait is over goes before a key that was never tried.
        """
        self.check_limits()
        if self._stopped is not None or len(self._running) >= self._max:
            return None
        if self._waiting and self._waiting[0][0] <= self._clock():
            _, _, key, attempt = heapq.heappop(self._waiting)
        elif self._fresh:
            key = self._fresh.popleft()
            attempt = self._before.get(key, 0) + 1
        else:
            return None
        self._running[key] = Spent()
        self._attempt[key] = attempt
        return Start(key, attempt, self._seed.of(key.item_id, key.repeat, attempt), self._seed.sent)

    def wait_s(self) -> float | None:
        """Seconds until ``next_start`` or ``check_limits`` may say something new by time alone; None: never."""
        now = self._clock()
        times: list[float] = []
        if self._stopped is None:
            if self._waiting and len(self._running) < self._max:
                times.append(self._waiting[0][0])
            if self._limits.time_s is not None:
                times.append(self._began + self._limits.time_s)
        return max(0.0, min(times) - now) if times else None

    def spent(self, key: RolloutKey, spent: Spent) -> LimitHit | None:
        """Report what a running attempt has used so far; returns the total limit that is now reached, if any.

        After a hit nothing starts any more, and the caller ends the running attempts with ``limit``.
        """
        if key in self._running:
            self._sum = self._sum.plus(spent.minus(self._running[key]))
            self._running[key] = spent
        return self.check_limits()

    def begins_again(self, key: RolloutKey, spent: Spent | None) -> None:
        """The running attempt of a key was interrupted, and another one follows that is no retry.

        Args:
            key: A key that is running.
            spent: What the interrupted one used in all; None takes the last report.
        """
        last = self._running[key]
        if spent is not None:
            self._sum = self._sum.plus(spent.minus(last))
        self._running[key] = Spent()

    def finished(self, key: RolloutKey, status: RowStatus, error: RowError | None, spent: Spent | None = None) -> bool:
        """Report the end of an attempt.

        Args:
            key: A key that is running.
            status: How the attempt ended.
            error: Its error; the class decides whether it is tried again.
            spent: What it used in all; None takes the last report.

        Returns:
            True when the rollout is done, False when another attempt of it will come from ``next_start``.
        """
        last = self._running.pop(key)
        if spent is not None:
            self._sum = self._sum.plus(spent.minus(last))
        attempt = self._attempt.pop(key)
        made = attempt - self._before.get(key, 0)
        again = status == "failed" and error is not None and error.error_class in self._retry_on
        if again and made <= self._retries and self.check_limits() is None and self._stopped is None:
            self._retried += 1
            heapq.heappush(self._waiting, (self._clock() + self._backoff_s(key, made), self._retried, key, attempt + 1))
            return False
        self._done[status] += 1
        if self._threshold is not None and self._done["failed"] >= self._threshold:
            self.stop("fail_on")
        return True

    def stop(self, reason: str) -> None:
        """Nothing new starts from now on; the first reason stays."""
        if self._stopped is None:
            self._stopped = reason

    def not_started(self) -> tuple[tuple[RolloutKey, int], ...]:
        """After a stop: the keys that will not run (again), each with the number of attempts made in all.

        A key that was waiting for a retry has attempts of this run: its row is that of its last attempt.
        """
        waiting = [(key, attempt - 1) for _, _, key, attempt in sorted(self._waiting)]
        return (*waiting, *((key, self._before.get(key, 0)) for key in self._fresh))

    @property
    def running(self) -> tuple[RolloutKey, ...]:
        """The keys whose attempts run now."""
        return tuple(self._running)

    @property
    def spent_by_ended(self) -> Spent:
        """What the attempts that have ended used."""
        total = self._sum
        for spent in self._running.values():
            total = total.minus(spent)
        return total

    def progress(self) -> Progress:
        """Where the run stands now."""
        return Progress(
            total=self._total,
            queued=len(self._fresh) + len(self._waiting),
            running=len(self._running),
            retrying=len(self._waiting),
            retries=self._retried,
            done=dict(self._done),
            spent=self._sum,
            stopped=self._stopped,
        )

    def check_limits(self) -> LimitHit | None:
        """The first total limit that is reached; it stops the run."""
        limits = self._limits
        if limits == Limits():
            return None
        sum_ = self._sum
        used: tuple[tuple[str, float | None, float], ...] = (
            ("max_turns", limits.max_turns, sum_.turns),
            ("max_steps", limits.max_steps, sum_.steps),
            ("max_tool_calls", limits.max_tool_calls, sum_.tool_calls),
            ("max_output_tokens", limits.max_output_tokens, sum_.output_tokens),
            ("max_total_tokens", limits.max_total_tokens, sum_.total_tokens),
            ("max_cost_usd", limits.max_cost_usd, sum_.cost_usd),
            ("time_s", limits.time_s, self._clock() - self._began),
            ("working_time_s", limits.working_time_s, sum_.working_s),
        )
        for name, value, amount in used:
            if value is not None and amount > 0 and amount >= value:
                hit = LimitHit(name, value, amount)
                self.stop(hit.stop)
                return hit
        return None

    def _backoff_s(self, key: RolloutKey, made: int) -> float:
        """1, 2, 4 ... seconds up to a minute, spread by up to a quarter so that a lost host is not hit all at once."""
        full = min(_RETRY_WAIT_MAX_S, _RETRY_WAIT_S * 2 ** (made - 1))
        return full * (1 - 0.25 * self._seed.of(key.item_id, key.repeat, made) / 2**31)


def checked_classes(classes: Sequence[str]) -> frozenset[ErrorClass]:
    """Error classes from the user.

    Raises:
        RunError: ``swarm.bad_retry_class`` naming the classes that there are.
    """
    known = get_args(ErrorClass)
    for name in classes:
        if name not in known:
            raise RunError(
                f"there is no error class {name!r}",
                code="swarm.bad_retry_class",
                hint=f"classes are {', '.join(known)}",
                details={"class": name},
            )
    return frozenset(name for name in known if name in classes)
