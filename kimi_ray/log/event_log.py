"""The log in memory: the one writer's view of a stream, and the only way an event comes to be.

``append`` is synchronous: check, freeze, encode; surface and order may veto; then the event is in the log (the commit
point); then observers are told. What an observer raises is kept in ``observer_errors`` and stops nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kimi_ray.errors import LogError
from kimi_ray.events import CORE, Catalog, LogHeader, SessionEvent, SurfaceOp, make_event
from kimi_ray.log.messages import Message, derive
from kimi_ray.log.order import Order
from kimi_ray.log.surface import Surface
from kimi_ray.wall_clock import epoch_ms

MAX_EVENT_BYTES = 16 << 20

Observer = Callable[[SessionEvent], None]


class EventLog:
    """An append-only sequence of events with its folds.

    Memory grows with the surface, not with the age of the log: events that are not on the surface are handed to the
    observers (the write controller keeps them until they are durable) and then forgotten here.

    Args:
        header: The log's header.
        catalog: The event types this program knows.
        clock: Epoch milliseconds, for ``time``.
        max_event_bytes: Largest encoded event.
    """

    def __init__(
        self,
        header: LogHeader,
        *,
        catalog: Catalog = CORE,
        clock: Callable[[], int] = epoch_ms,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        self.header = header
        self.order = Order()
        self.surface = Surface()
        self.first_live_seq = 0
        self.observer_errors: list[tuple[int, BaseException]] = []
        self.last_end_seed: int | None = None
        self._catalog = catalog
        self._clock = clock
        self._max_event_bytes = max_event_bytes
        self._next_seq = 0
        self._last: SessionEvent | None = None
        self._observers: list[Observer] = []
        self._vetoes: list[Observer] = []
        self._appending = False
        self._messages: list[Message] = []
        self._messages_from = 0
        self._messages_generation = 0

    @classmethod
    def restore(cls, header: LogHeader, events: Iterable[SessionEvent], **options: Any) -> EventLog:
        """A log from its stored events, in order from seq 0. Nothing is appended, nobody is told.

        Raises:
            LogError: ``log.bad_envelope`` (a gap), ``log.unknown_type``, ``log.bad_surface``.
        """
        log = cls(header, **options)
        for event in events:
            log._adopt(event)
        log.first_live_seq = log._next_seq
        return log

    @property
    def next_seq(self) -> int:
        """The seq of the next event."""
        return self._next_seq

    @property
    def last(self) -> SessionEvent | None:
        """The newest event."""
        return self._last

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` with every event from now on, after its commit; returns what ends it.

        It may not append to this log from inside its call.
        """
        self._observers.append(observer)
        return lambda: self._observers.remove(observer) if observer in self._observers else None

    def veto_with(self, check: Observer) -> Callable[[], None]:
        """Call ``check`` with every event before its commit; what it raises refuses the event."""
        self._vetoes.append(check)
        return lambda: self._vetoes.remove(check) if check in self._vetoes else None

    def append(
        self,
        type: str,
        data: dict[str, Any],
        *,
        surface: SurfaceOp | None = None,
        sources: Iterable[int] | None = None,
    ) -> SessionEvent:
        """Put one event into the log.

        1. The data is checked by the JSON rule, copied and frozen; the event is encoded.
        2. Type, size, surface and order are checked; then the vetoes.
        3. The event is in the log; surface and order follow it.
        4. The observers are told, in the order they came.

        Raises:
            LogError: ``log.reentrant``, ``log.not_json``, ``log.unknown_type``, ``log.event_too_large``,
                ``log.bad_surface``, ``log.out_of_order``, or what a veto raised. The log is then unchanged.
        """
        if self._appending:
            raise LogError("an observer may not append to the log it observes", code="log.reentrant")
        entry = self._catalog.get(type)
        if entry is None:
            raise LogError(f"the event type {type!r} is not in the catalogue", code="log.unknown_type")
        self._appending = True
        try:
            cited = None if sources is None else tuple(sources)
            if cited is not None and (len(set(cited)) != len(cited) or any(not 0 <= s < self._next_seq for s in cited)):
                raise LogError(f"the sources of {type} must be distinct earlier seqs", code="log.bad_envelope")
            event = make_event(self._next_seq, self._clock(), type, data, surface, cited, entry.ignorable)
            if len(event.line) > self._max_event_bytes:
                raise LogError(
                    f"{type} has {len(event.line)} bytes, an event may have {self._max_event_bytes}",
                    code="log.event_too_large",
                    hint="keep large content in a blob",
                    details={"bytes": len(event.line), "max_event_bytes": self._max_event_bytes},
                )
            plan = self.surface.check(event)
            self.order.check(event)
            for veto in self._vetoes:
                veto(event)
            self._commit(event)
            if plan is not None:
                self.surface.apply(plan)
            for observer in tuple(self._observers):
                try:
                    observer(event)
                except Exception as error:  # noqa: BLE001  an observer never fails an append; kept for whoever looks
                    self.observer_errors.append((event.seq, error))
            return event
        finally:
            self._appending = False

    def messages(self) -> list[Message]:
        """What the surface says to the model now: a fresh list of shared, frozen messages."""
        if self._messages_generation != self.surface.generation:
            self._messages = []
            self._messages_from = 0
            self._messages_generation = self.surface.generation
        for index in range(self._messages_from, len(self.surface)):
            message = derive(self.surface[index])
            if message is not None:
                self._messages.append(message)
        self._messages_from = len(self.surface)
        return list(self._messages)

    def end_seed(self) -> SessionEvent | None:
        """Mark the end of a seed (``log/end-seed``) unless the log already ends in the mark."""
        if self._last is not None and self._last.type == "log/end-seed":
            return None
        return self.append("log/end-seed", {})

    def _adopt(self, event: SessionEvent) -> None:
        if event.seq != self._next_seq:
            raise LogError(
                f"event {event.seq} stands where {self._next_seq} belongs",
                code="log.bad_envelope",
                details={"seq": event.seq, "expected": self._next_seq},
            )
        if event.type not in self._catalog and not event.ignorable:
            raise LogError(
                f"event {event.seq} has the unknown type {event.type!r}",
                code="log.unknown_type",
                hint="upgrade kimi-ray, or install the Feature that wrote it",
                details={"seq": event.seq, "type": event.type},
            )
        plan = self.surface.check(event)
        self._commit(event)
        if plan is not None:
            self.surface.apply(plan)

    def _commit(self, event: SessionEvent) -> None:
        self._next_seq += 1
        self._last = event
        self.order.apply(event)
        if event.type == "log/end-seed":
            self.last_end_seed = event.seq
