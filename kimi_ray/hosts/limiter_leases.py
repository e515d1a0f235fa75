"""A host's part of the places at model servers: taken and given back without a call, told of twice a second.

The registry counts for the whole runtime (``limiter_ledger``); this host has a portion of each model's places until it
asks again. It asks while there is traffic, all models in one call, and at once when somebody waits and it has no place
at all, or when the server refused. Without traffic it gives its portions back and says nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kimi_ray.errors import KimiRayError, ProviderError
from kimi_ray.hosts.boundary import noted
from kimi_ray.hosts.limiter_words import PlacesWanted, Portion
from kimi_ray.hosts.ports import Cluster, registry_name
from kimi_ray.ids import new_ulid
from kimi_ray.llm.faults import STALE
from kimi_ray.llm.limiter import Tally
from kimi_ray.llm.models import ResolvedModel

REPORT_S = 0.5
SOON_S = 0.05
"""Between two reports at least, however urgent."""
CALL_S = 10.0
UNREACHABLE_S = 60.0
"""Whoever waits for a place fails when the registry was silent for so long."""

_FALTERING = frozenset({"provider.server", "provider.overloaded", "provider.timeout", "provider.connection"})


class LeasedPlace:
    """One request's place. See ``llm.slots.Place``."""

    __slots__ = ("_cuts", "_slots")

    def __init__(self, slots: LeasedSlots, cuts: int) -> None:
        self._slots = slots
        self._cuts = cuts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.give_back(self._cuts, error)


class LeasedSlots:
    """The places of this host at one server (``llm.slots.Slots``), first come first served.

    Args:
        key: ``ResolvedModel.limiter_key``.
        model: The model that is asked there.
        urge: Called when the registry should hear of it soon.
        clock: Seconds that never go back.
    """

    def __init__(self, key: str, model: ResolvedModel, urge: Callable[[], None], clock: Callable[[], float]) -> None:
        self.key = key
        self._model = model
        self._urge = urge
        self._clock = clock
        self._places = self._limit = self._cuts = 0
        self._in_use = self._peak = self._told = 0
        self._tally = Tally()
        self._queue: deque[asyncio.Future[LeasedPlace]] = deque()
        self._paused_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return len(self._queue)

    @property
    def is_starving(self) -> bool:
        """Whether somebody waits and this host has no place at all."""
        return bool(self._queue) and not self._places

    @property
    def has_news(self) -> bool:
        """Whether there is anything that the registry must hear."""
        return bool(self._places or self._in_use or self._peak or self._queue or self._tally)

    def take_now(self) -> LeasedPlace | None:
        """A place that is free at this moment, or None."""
        if self._queue or not self._is_open():
            return None
        return self._taken()

    async def take(self) -> LeasedPlace:
        """A place, in the order of asking.

        Raises:
            KimiRayError: why the registry could not be asked for a minute.
        """
        waiter: asyncio.Future[LeasedPlace] = asyncio.get_running_loop().create_future()
        self._queue.append(waiter)
        self._peak = max(self._peak, self._in_use + len(self._queue))
        self._serve()
        if not waiter.done() and (not self._places or self._told <= self._places < self._limit):
            self._urge()  # there was enough when the registry heard last
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give_back(self._cuts, asyncio.CancelledError())
            else:
                waiter.cancel()
                self._drop_gone()
            raise

    def give_back(self, cuts: int, error: BaseException | None) -> None:
        """A place is free again. ``cuts``: what was known when its request began; ``error``: how that ended."""
        over = self._in_use > self._places
        self._in_use -= 1
        if error is None:
            self._tally.served += 1
        elif isinstance(error, ProviderError):
            self._failed(error, cuts)
        if over:
            self._urge()  # another host may be waiting for this one
        self._serve()

    def report(self) -> PlacesWanted:
        """What the registry is to hear; the tally begins anew. Without traffic since the last one all is given up."""
        tally, self._tally = self._tally, Tally()
        now = self._in_use + len(self._queue)
        wanted = max(self._peak, now)
        self._peak, self._told = now, wanted
        if not wanted:
            self._places = 0
        settings = self._model.settings
        return PlacesWanted(
            self.key,
            self._model.name,
            settings.max_connections,
            settings.adaptive_connections,
            portion=self._places,
            in_use=self._in_use,
            wanted=wanted,
            limit=self._limit,
            tally=tally,
        )

    def accept(self, portion: Portion) -> None:
        """Go on with what the registry gave; refusals that it has not heard of yet still count."""
        self._places = max(0, portion.places - sum(self._tally.refused.values()))
        self._limit = portion.limit
        self._cuts = portion.cuts
        known = self._clock() + portion.pause_s
        self._paused_until = max(known, self._paused_until) if self._tally.retry_after_s else known
        self._serve()

    def take_back(self, unheard: PlacesWanted) -> None:
        """A report that did not arrive is part of the next one."""
        tally, lost = self._tally, unheard.tally
        tally.served += lost.served
        tally.faltered += lost.faltered
        tally.level = max(tally.level, lost.level)
        tally.retry_after_s = max(tally.retry_after_s, lost.retry_after_s)
        for cuts, count in lost.refused.items():
            tally.refused[cuts] = tally.refused.get(cuts, 0) + count
        self._peak = max(self._peak, unheard.wanted)

    def fail(self, error: BaseException) -> None:
        """Nobody gives places any more: all who wait hear why."""
        while self._queue:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_exception(error)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _failed(self, error: ProviderError, cuts: int) -> None:
        tally = self._tally
        if error.code == "provider.rate_limit":
            tally.refused[cuts] = tally.refused.get(cuts, 0) + 1
            tally.level = max(tally.level, self._in_use + 1)
            self._places = max(0, self._places - 1)
            self._urge()
        elif error.code in _FALTERING:
            tally.faltered += error.details.get("kind") != STALE
        else:
            tally.served += 1  # it answered: that the request was bad has nothing to do with its limit
            return
        wait_ms = error.retry_after_ms
        if wait_ms and self._model.settings.adaptive_connections:
            pause_s = min(wait_ms / 1000, self._model.settings.retry_after_cap_s)
            tally.retry_after_s = max(tally.retry_after_s, pause_s)
            self._pause(pause_s)

    def _pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    def _is_open(self) -> bool:
        return self._in_use < self._places and self._clock() >= self._paused_until

    def _taken(self) -> LeasedPlace:
        self._in_use += 1
        self._peak = max(self._peak, self._in_use + len(self._queue))
        return LeasedPlace(self, self._cuts)

    def _serve(self) -> None:
        """Give free places to those who have waited longest."""
        while self._queue and self._is_open():
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(self._taken())
        left = self._paused_until - self._clock()
        if self._queue and left > 0 and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(left, self._pause_over)

    def _pause_over(self) -> None:
        self._timer = None
        self._serve()

    def _drop_gone(self) -> None:
        if any(waiter.done() for waiter in self._queue):
            self._queue = deque(waiter for waiter in self._queue if not waiter.done())


class LimiterLeases:
    """The places of this process at all servers whose requests are counted.

    Args:
        cluster: Where the registry is.
        clock: Seconds that never go back; None takes the loop's.
    """

    def __init__(self, cluster: Cluster, clock: Callable[[], float] | None = None) -> None:
        self._cluster = cluster
        self._clock = clock
        self._name = f"{cluster.node_id}/{new_ulid()}"
        self._slots: dict[str, LeasedSlots] = {}
        self._urgent = asyncio.Event()
        self._reporter: asyncio.Task[None] | None = None
        self._closed = False

    def slots(self, model: ResolvedModel) -> LeasedSlots | None:
        """The places for a model, or None where nobody counts its requests."""
        key = model.limiter_key()
        if key is None:
            return None
        found = self._slots.get(key)
        if found is None:
            clock = self._clock or asyncio.get_running_loop().time
            found = self._slots[key] = LeasedSlots(key, model, self._urge, clock)
        return found

    async def close(self) -> None:
        """Give everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)
        for slots in self._slots.values():
            slots.close()
        if any(slots.has_news for slots in self._slots.values()):
            try:
                await self._call("leave_places", timeout_s=1.0)
            except KimiRayError:
                return  # what it does not hear it finds out by itself: the portions run out

    def _urge(self) -> None:
        self._urgent.set()
        if (self._reporter is None or self._reporter.done()) and not self._closed:
            self._reporter = asyncio.get_running_loop().create_task(self._report(), name="limiter.leases")

    async def _report(self) -> None:
        """Tell the registry while there is something to tell."""
        loop = asyncio.get_running_loop()
        silent_since: float | None = None
        while telling := [slots for slots in self._slots.values() if slots.has_news]:
            self._urgent.clear()
            reports = [slots.report() for slots in telling]
            try:
                portions: list[Portion] = await self._call("share_places", reports, timeout_s=CALL_S)
                silent_since = None
                for slots, portion in zip(telling, portions, strict=True):
                    slots.accept(portion)
            except Exception as failure:  # noqa: BLE001  told to who waits for a place when it lasts
                error = noted(failure, "sharing places")
                for slots, report in zip(telling, reports, strict=True):
                    slots.take_back(report)
                silent_since = silent_since or loop.time()
                if loop.time() - silent_since >= UNREACHABLE_S:
                    for slots in telling:
                        slots.fail(error)
            await asyncio.sleep(SOON_S if silent_since is None else REPORT_S)
            starving = any(slots.is_starving for slots in telling)
            try:
                async with asyncio.timeout(SOON_S if starving else REPORT_S - SOON_S):
                    await self._urgent.wait()
            except TimeoutError:
                pass

    async def _call(self, method: str, *args: object, timeout_s: float) -> list[Portion]:
        registry = self._cluster.peer(registry_name(self._cluster.home_id))
        return await registry.call(method, self._name, *args, timeout_s=timeout_s, group="control")
