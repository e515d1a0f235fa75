"""The limits of all models of a runtime, and which host has which part of them. The registry's; no Ray, no waiting.

A host asks with what it has and wants; the answer is its portion until it asks again. The portions of all hosts never
exceed the limit (after a cut they may until each host has heard of it). Who has fewer places than it wants gets an
equal share of what there is; when there are fewer places than hosts, they go round. A host that was silent for
``LEASE_S`` has lost its portion.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kimi_ray.hosts.limiter_words import PlacesWanted, Portion
from kimi_ray.llm.limiter import AdaptiveLimit, Change

LEASE_S = 15.0
ROUND_S = 1.0
"""When there are fewer places than hosts that want one, they go to others after so long."""
KEPT_CHANGES = 5000
COMEBACK_S = 2.0
"""A ledger that begins anew waits so long for all hosts to tell what they have before it gives anybody more."""
FORGET_S = 3600.0
"""A model that nobody asked for so long is forgotten with its limit."""


@dataclass(slots=True)
class _Holder:
    places: int
    in_use: int
    wanted: int
    heard: float

    @property
    def held(self) -> int:
        return max(self.places, self.in_use)


@dataclass(slots=True)
class _Account:
    key: str
    model: str
    limit: AdaptiveLimit
    heard: float
    settled: float
    """From when on all portions of a former ledger are known."""
    holders: dict[str, _Holder] = field(default_factory=dict[str, _Holder])


class LimiterLedger:
    """All limits of a runtime.

    Args:
        clock: Seconds that never go back.
        wall_clock: Seconds since the epoch, for the history.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._accounts: dict[str, _Account] = {}
        self._changes: deque[dict[str, Any]] = deque(maxlen=KEPT_CHANGES)
        self._told = 0
        self._sweep_at = 0.0

    def exchange(self, host: str, wishes: list[PlacesWanted]) -> list[Portion]:
        """A host's state against its portions, one for each wish, in order."""
        now = self._clock()
        if now >= self._sweep_at:
            self._sweep_at = now + FORGET_S / 10
            self._accounts = {key: one for key, one in self._accounts.items() if now - one.heard < FORGET_S}
        return [self._portion(host, wish, now) for wish in wishes]

    def leave(self, host: str) -> None:
        """A host is gone: its portions are free. Idempotent."""
        for account in self._accounts.values():
            account.holders.pop(host, None)

    def changes(self, since: int) -> tuple[int, list[dict[str, Any]]]:
        """The changes from number ``since`` on that are still kept, and the number of the next one.

        A change is ``{key, time, model, reason, limit, in_use, pause_s?}``; ``time`` in seconds since the epoch.
        """
        first = self._told - len(self._changes)
        return self._told, list(self._changes)[max(0, since - first) :]

    def report(self) -> list[dict[str, Any]]:
        """How the limits stand, for people: ``{model, limit, in_use, wanted, hosts, cuts, paused_s}``, by model."""
        now = self._clock()
        return [
            {
                "model": account.model,
                "limit": account.limit.limit,
                "in_use": sum(holder.in_use for holder in heard),
                "wanted": sum(holder.wanted for holder in heard),
                "hosts": len(heard),
                "cuts": account.limit.cuts,
                "paused_s": max(0.0, round(account.limit.paused_until - now, 3)),
            }
            for account in sorted(self._accounts.values(), key=lambda account: (account.model, account.key))
            for heard in [[one for one in account.holders.values() if now - one.heard < LEASE_S]]
        ]

    def _portion(self, host: str, wish: PlacesWanted, now: float) -> Portion:
        account = self._accounts.get(wish.key)
        if account is None:
            limit = AdaptiveLimit(wish.max_places, adaptive=wish.adaptive)
            if wish.adaptive and wish.limit:
                limit.limit = wish.limit if wish.max_places is None else min(wish.limit, wish.max_places)
            settled = now + COMEBACK_S if wish.limit else now
            account = self._accounts[wish.key] = _Account(wish.key, wish.model, limit, now, settled)
            self._note(account, Change("start", limit.limit, wish.in_use))
        account.heard = now
        others = account.holders = {
            name: holder for name, holder in account.holders.items() if name != host and now - holder.heard < LEASE_S
        }
        elsewhere = sum(holder.in_use for holder in others.values())
        tally = replace(wish.tally, level=wish.tally.level and wish.tally.level + elsewhere)
        wanted = wish.wanted + sum(holder.wanted for holder in others.values())
        for change in account.limit.take(tally, now, in_use=wish.in_use + elsewhere, wanted=wanted):
            self._note(account, change)
        places = self._share(account, host, wish, now) if wish.wanted else 0
        if wish.wanted or wish.in_use:
            others[host] = _Holder(places, wish.in_use, wish.wanted, now)
        limit = account.limit
        return Portion(wish.key, places, limit.limit, limit.cuts, max(0.0, round(limit.paused_until - now, 3)))

    def _share(self, account: _Account, host: str, wish: PlacesWanted, now: float) -> int:
        limit, others = account.limit.limit, account.holders
        wants = {name: holder.wanted for name, holder in others.items() if holder.wanted} | {host: wish.wanted}
        spare = limit - sum(wants.values())
        if spare >= 0:
            fair = wish.wanted + spare // (len(wants) + 1)  # something is left for a host that comes
        else:
            fair = _fair_shares(wants, limit, int(now / ROUND_S))[host]
        if now < account.settled:
            fair = min(fair, wish.portion)
        free = limit - sum(holder.held for holder in others.values())
        return max(0, min(fair, free))

    def _note(self, account: _Account, change: Change) -> None:
        line: dict[str, Any] = {
            "key": account.key,
            "time": round(self._wall_clock(), 3),
            "model": account.model,
            "reason": change.reason,
            "limit": change.limit,
            "in_use": change.in_use,
        }
        if change.pause_s:
            line["pause_s"] = change.pause_s
        self._changes.append(line)
        self._told += 1


def _fair_shares(wants: dict[str, int], limit: int, turn: int) -> dict[str, int]:
    """Equal shares, none above what is wanted; what does not divide goes round with ``turn``."""
    shares: dict[str, int] = {}
    left = limit
    hungry = sorted(wants, key=lambda name: (wants[name], name))
    while hungry:
        each = left // len(hungry)
        if wants[hungry[0]] > each:
            break
        name = hungry.pop(0)
        shares[name] = wants[name]
        left -= wants[name]
    hungry.sort()
    for place, name in enumerate(hungry):
        each, more = divmod(left, len(hungry))
        shares[name] = each + ((place + turn) % len(hungry) < more)
    return shares
