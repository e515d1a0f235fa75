"""How many requests a model's server gets at once: a number that follows what the server bears.

The rule, additive increase and multiplicative decrease with a memory:

* it begins at ``START_PLACES`` and doubles while it is all used and a whole round of requests (as many as the limit)
  went well;
* a 429 cuts it to what was served at that moment, by a tenth at least and to a quarter at most. All 429s of requests
  that began before the cut count for the same cut. The level that was refused is remembered as the *wall*. With less
  than half of the limit under way the server must count something else (requests a minute, say): a tenth is cut;
* while nothing is served there is no second cut: all wait, longer each time;
* below the wall it comes back in halves of the distance. At the wall it only tries one more, and the longer between
  two tries the more often that was refused; behind a wall that has gone it grows by 1, 2, 4 ...;
* ``Retry-After`` stops all new requests for that long;
* failures of the server (5xx, time-outs, broken connections) stop its growth for a while, and cut nothing;
* it never leaves 1 to ``max_places``.

Pure: the time is an argument. Who asks for places, and on which machine, is not this module's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

START_PLACES = 20
HOLD_S = 5.0
"""No growth for so long after a failure of the server."""
PROBE_S = 5.0
"""Between two tries of one more at the wall; doubled by each that is refused."""
MAX_PROBE_S = 120.0
PROBE_PER_PAUSE = 25.0
"""So many times the ``Retry-After`` of the last refusal lie between two tries at least, up to ``MAX_PROBE_S``."""
FIRST_DROUGHT_S, MAX_DROUGHT_S = 0.5, 30.0
"""How long all wait when a server refuses and serves nothing, doubled each time."""
MIN_CUT, MAX_CUT = 0.9, 0.25

Reason = Literal["start", "grow", "probe", "cut", "pause", "hold"]


@dataclass(slots=True)
class Tally:
    """What became of requests since the last tally."""

    served: int = 0
    refused: dict[int, int] = field(default_factory=dict[int, int])
    """429s, by the number of cuts (``AdaptiveLimit.cuts``) that was known when the request began."""
    level: int = 0
    """The most requests that were under way when one was refused, it included; 0: not said."""
    faltered: int = 0
    """Failures of the server that say nothing about its limit."""
    retry_after_s: float = 0.0
    """The longest ``Retry-After``."""

    def __bool__(self) -> bool:
        return bool(self.served or self.refused or self.faltered or self.retry_after_s)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the limit, or a pause, and why."""

    reason: Reason
    limit: int
    in_use: int
    pause_s: float = 0.0


class AdaptiveLimit:
    """The limit of one model and key.

    Args:
        max_places: What it never exceeds; None is no bound.
        adaptive: False keeps it at ``max_places`` whatever happens.
        start: Where it begins.
    """

    def __init__(self, max_places: int | None = None, *, adaptive: bool = True, start: int = START_PLACES) -> None:
        if max_places is None and not adaptive:
            raise ValueError("a limit that does not adapt needs max_places")
        self._max = max_places
        self._adaptive = adaptive
        first = start if adaptive or max_places is None else max_places
        self.limit = max(1, first if max_places is None else min(first, max_places))
        self.cuts = 0
        """How often it was cut: the number under which requests that begin now report a refusal."""
        self._wall: int | None = None
        self._served = 0
        self._step = 1
        self._held_until = 0.0
        self._probe_s = PROBE_S
        self._next_probe = 0.0
        self._drought = False
        """Nothing was served since the last cut."""
        self._drought_s = self._drought_until = self._told_until = 0.0
        self._burst_level = 0
        self._burst_refused = 0

    @property
    def paused_until(self) -> float:
        """Nothing new begins before this time."""
        return max(self._told_until, self._drought_until)

    def take(self, tally: Tally, now: float, *, in_use: int, wanted: int) -> list[Change]:
        """Learn from a tally; gives what changed, in order.

        Args:
            tally: How requests ended.
            now: Seconds of any clock that does not go back.
            in_use: Requests under way at this moment.
            wanted: The most that were under way or waiting at once since the last tally.
        """
        if not self._adaptive:
            return []
        changes: list[Change] = []
        if tally.retry_after_s > 0 and now + tally.retry_after_s > self._told_until:
            self._told_until = now + tally.retry_after_s
            changes.append(Change("pause", self.limit, in_use, round(tally.retry_after_s, 3)))
        if tally.faltered:
            if now >= self._held_until:
                changes.append(Change("hold", self.limit, in_use))
            self._held_until = now + HOLD_S
            self._served = 0
        if tally.served:
            self._drought, self._drought_s, self._drought_until = False, 0.0, 0.0
        paused = self._drought_until
        if tally.refused and self._refused(tally, now, in_use):
            changes.append(Change("cut", self.limit, in_use))
        elif self._drought_until > paused:
            changes.append(Change("pause", self.limit, in_use, self._drought_s))
        elif tally.served and not tally.refused and now >= self._held_until and wanted >= self.limit:
            self._served += tally.served
            reason = self._grown(now) if self._served >= self.limit else None
            if reason is not None:
                changes.append(Change(reason, self.limit, in_use))
        return changes

    def _refused(self, tally: Tally, now: float, in_use: int) -> bool:
        fresh = sum(count for cut, count in tally.refused.items() if cut >= self.cuts)
        late = tally.refused.get(self.cuts - 1, 0)
        if fresh:
            level = min(self.limit, tally.level or in_use + fresh)
            if self._drought:
                self._wait_out(now)
                return False
            self._drought = True
            again = self._wall is not None and level >= self._wall - 1
            self._probe_s = min(MAX_PROBE_S, self._probe_s * 2) if again and self._step == 1 else PROBE_S
            self.cuts += 1
            self._burst_level, self._burst_refused = level, fresh
        elif late and self._burst_level:
            self._burst_refused += late
        else:
            return False
        level = self._burst_level
        if level * 2 < self.limit:
            # far below a limit that was borne before: the server counts something else than what is under way
            wanted = max(1, int(self.limit * MIN_CUT))
            self._wall = self._wall or self.limit
        else:
            served = level - self._burst_refused
            wanted = max(1, min(max(served, int(level * MAX_CUT)), int(level * MIN_CUT)))
            # when hardly anything was served, that says nothing of how much would be
            if served < level * MAX_CUT:
                self._wall = max(self._wall or 2, level)
            else:
                self._wall = max(2, min(level, wanted + 1) if self._burst_refused > 1 else level)
        self._served = 0
        self._step = 1
        self._next_probe = now + max(self._probe_s, min(MAX_PROBE_S, PROBE_PER_PAUSE * tally.retry_after_s))
        if wanted >= self.limit:
            return False
        self.limit = wanted
        return True

    def _wait_out(self, now: float) -> None:
        """It refuses and serves nothing: it is not how many at once. All wait, longer each time."""
        if now >= self._drought_until:
            self._drought_s = min(MAX_DROUGHT_S, max(FIRST_DROUGHT_S, self._drought_s * 2))
            self._drought_until = now + self._drought_s

    def _grown(self, now: float) -> Reason | None:
        limit, wall = self.limit, self._wall
        self._served = 0
        if wall is None:
            wanted, reason = limit * 2, "grow"
        elif limit < wall - 1:
            wanted, reason = limit + (wall - limit) // 2, "grow"
        elif limit < wall:
            if now < self._next_probe:
                return None
            wanted, reason = limit + 1, "probe"
        else:
            # a whole round at the level that was refused: the wall has moved
            self._probe_s = PROBE_S
            wanted, reason = limit + self._step, "grow"
            self._step *= 2
        self.limit = wanted if self._max is None else min(wanted, self._max)
        return reason if self.limit > limit else None
