"""The log in memory: the one writer's view of a stream, and the only way an event comes to be.

``append`` is synchronous: check, freeze, encode; surface and order may veto; then the event is in the log (the commit
point); then observers are told. What an observer raises is kept in ``observer_errors`` and stops nobody.

A stored log comes back through ``read_back``, a page at a time: only what is on its surface stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from kimi_ray.errors import LogError
from kimi_ray.events import (
    CORE,
    SURFACE_TYPES,
    Catalog,
    LogHeader,
    SessionEvent,
    SurfaceOp,
    make_event,
    parse_event,
    read_stored,
    type_key,
)
from kimi_ray.log.messages import Message, derive
from kimi_ray.log.order import FOLLOWED, Order
from kimi_ray.log.surface import Surface
from kimi_ray.wall_clock import epoch_ms

MAX_EVENT_BYTES = 16 << 20
_KEPT_ERRORS: Final = 100
_READ: Final = SURFACE_TYPES | FOLLOWED
"""The types that the log itself looks at when it is read back."""

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

    Attributes:
        first_live_seq: The seq of the first event that was appended here; what is below was read back.
        last_end_seed: The seq of the newest ``log/end-seed``, or None.
        replaced: While observers are told: the nodes that the event took off the surface.
        observer_errors: The newest errors of observers, with the seq of the event.
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
        self.observer_errors: deque[tuple[int, BaseException]] = deque(maxlen=_KEPT_ERRORS)
        self.last_end_seed: int | None = None
        self.replaced: tuple[SessionEvent, ...] = ()
        self._catalog = catalog
        self._clock = clock
        self._max_event_bytes = max_event_bytes
        self._name = f"{header.session_id}/{header.agent_id}"
        self._next_seq = 0
        self._last: SessionEvent | None = None
        self._observers: tuple[tuple[object, Observer], ...] = ()
        self._vetoes: tuple[tuple[object, Observer], ...] = ()
        self._appending = False
        self._refusal: LogError | None = None
        self._messages: list[Message] = []
        self._messages_from = 0

    @classmethod
    def restore(
        cls, header: LogHeader, events: Iterable[SessionEvent], *, seed: bool = False, **options: Any
    ) -> EventLog:
        """A log from its stored events, in order from seq 0. Nothing is told to anybody.

        Args:
            header: The log's header.
            events: All of its events; none is an explicit empty seed.
            seed: The events were not written by this life of the log: they end in one ``log/end-seed``, which is
                appended unless it is there already.
            options: As for the constructor.

        Raises:
            LogError: ``log.bad_envelope`` (a gap), ``log.unknown_type``, ``log.bad_surface``.
        """
        log = cls(header, **options)
        for event in events:
            log.adopt(event)
        if seed:
            log.end_seed()
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

        It may look at this log, whose properties copy nothing, but may not append to it from inside its call. One that
        is ended while an event is told still hears of that event.
        """
        mark = object()
        self._observers = (*self._observers, (mark, observer))

        def end() -> None:
            self._observers = tuple(pair for pair in self._observers if pair[0] is not mark)

        return end

    def veto_with(self, check: Observer) -> Callable[[], None]:
        """Call ``check`` with every event before its commit; what it raises refuses the event. Returns what ends it."""
        mark = object()
        self._vetoes = (*self._vetoes, (mark, check))

        def end() -> None:
            self._vetoes = tuple(pair for pair in self._vetoes if pair[0] is not mark)

        return end

    def reserve(self) -> None:
        """No events before ``publish``: the log is read, its agent is not there yet."""
        self._refusal = LogError(
            f"{self._name} is reserved for an agent that is not there yet",
            code="log.reserved",
            hint="wait until the agent lives",
            retryable=True,
        )

    def publish(self) -> None:
        """The log is its agent's: events may come."""
        self._refusal = None

    def detach(self) -> None:
        """No more events: the log is somebody else's now. An append in progress is told to the end. Idempotent."""
        self._refusal = LogError(
            f"{self._name} was given back; nothing can be appended to it any more",
            code="log.detached",
            hint="open the log again",
        )
        if not self._appending:
            self._observers = ()

    def successor(self) -> EventLog:
        """The same log for its next writer, as if read back: with its surface, its order and nobody who observes.

        This one is detached.
        """
        self.detach()
        log = EventLog(self.header, catalog=self._catalog, clock=self._clock, max_event_bytes=self._max_event_bytes)
        log.order, log.surface, log.last_end_seed = self.order, self.surface, self.last_end_seed
        log.first_live_seq = log._next_seq = self._next_seq
        log._last = self._last
        for event in log.surface:
            event.unload()
        return log

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
            LogError: ``log.reentrant``, ``log.reserved``, ``log.detached``, ``log.not_json``, ``log.unknown_type``,
                ``log.event_too_large``, ``log.bad_payload``, ``log.bad_surface``, ``log.out_of_order``, or what a veto
                raised. The log is then unchanged.
        """
        if self._appending:
            raise LogError("an observer may not append to the log it observes", code="log.reentrant")
        if self._refusal is not None:
            raise self._refusal
        entry = self._catalog.get(type)
        if entry is None:
            raise LogError(f"the event type {type!r} is not in the catalogue", code="log.unknown_type")
        self._appending = True
        try:
            cited = None if sources is None else tuple(sources)
            event = make_event(self._next_seq, self._clock(), type, data, surface, cited, entry.ignorable)
            if len(event.line) > self._max_event_bytes:
                raise LogError(
                    f"{type} has {len(event.line)} bytes, an event may have {self._max_event_bytes}",
                    code="log.event_too_large",
                    hint="keep large content in a blob",
                    details={"bytes": len(event.line), "max_event_bytes": self._max_event_bytes},
                )
            try:
                plan = self.surface.check(event)
                self.order.check(event)
            except _MALFORMED as error:
                raise _bad_payload(event, error) from error
            for _, veto in self._vetoes:
                veto(event)
            self._next_seq += 1
            self._last = event
            if type in FOLLOWED:
                self.order.apply(event)
                if type == "log/end-seed":
                    self.last_end_seed = event.seq
            if plan is not None:
                self.replaced = self.surface.apply(plan)
                if self.replaced:
                    self._forget_messages()
            for _, observer in self._observers:
                try:
                    observer(event)
                except Exception as error:  # noqa: BLE001  an observer never fails an append; kept for whoever looks
                    self.observer_errors.append((event.seq, error))
            return event
        finally:
            self.replaced = ()
            self._appending = False
            if self._refusal is not None:
                self._observers = ()

    def messages(self) -> list[Message]:
        """What the surface says to the model now: a fresh list of shared, frozen messages."""
        for index in range(self._messages_from, len(self.surface)):
            message = derive(self.surface[index])
            if message is not None:
                self._messages.append(message)
        self._messages_from = len(self.surface)
        return list(self._messages)

    def _forget_messages(self) -> None:
        # At once, not at the next look: what a replace took off the surface leaves the memory.
        self._messages = []
        self._messages_from = 0

    def end_seed(self) -> SessionEvent | None:
        """Mark the end of a seed (``log/end-seed``) unless the log already ends in the mark."""
        if self._last is not None and self._last.type == "log/end-seed":
            return None
        return self.append("log/end-seed", {})

    # -- reading back ------------------------------------------------------------------------------------------------

    def adopt(self, event: SessionEvent) -> None:
        """Take the next stored event. Nobody is told; its order was judged when it was written.

        Raises:
            LogError: ``log.bad_envelope`` (a gap, or an event was appended before), ``log.unknown_type``,
                ``log.bad_payload``, ``log.bad_surface``.
        """
        self._check_place(event.seq)
        self._take(event)

    def read_back(
        self, lines: Sequence[bytes], *, follow: Observer | None = None, types: frozenset[str] = frozenset()
    ) -> None:
        """Take the next stored lines: ``adopt`` for many, without what nobody looks at.

        Lines of known types that neither this log nor ``follow`` reads are told by their first bytes and not parsed;
        all others are held to the JSON rule. Events on the surface keep their line only, and are parsed again when
        somebody looks at them.

        Args:
            lines: Canonical lines without newline, from ``next_seq`` on.
            follow: Called with each event of ``types``; it may keep parts of the data, which it must not change.
            types: What ``follow`` wants to see.

        Raises:
            LogError: ``log.not_json``, and as ``adopt``.
        """
        if not lines:
            return
        read = _READ | types
        known = {type_key(entry.name): entry.name for entry in self._catalog}
        passed = frozenset(key for key, name in known.items() if name not in read)
        self._check_place(self._next_seq)
        end = self._next_seq + len(lines)
        for event in read_stored(lines, self._next_seq, known, passed):
            self._take(event)
            if follow is not None and event.type in types:
                try:
                    follow(event)
                except _MALFORMED as error:
                    raise _bad_payload(event, error) from error
            if event.surface is not None or event.seq == end - 1:
                event.unload()
        if self._next_seq < end:
            self._last = parse_event(lines[-1], at=end - 1)
            self._next_seq = self.first_live_seq = end

    def _take(self, event: SessionEvent) -> None:
        # A known type is read whatever the event says of itself: that is for readers who do not know it.
        kind = event.type
        if not event.ignorable and kind not in self._catalog:
            raise LogError(
                f"{self._name}: event {event.seq} has the unknown type {kind!r}",
                code="log.unknown_type",
                hint="upgrade kimi-ray, or install the Feature that wrote it",
                details={"seq": event.seq, "type": kind},
            )
        try:
            plan = self.surface.check(event)
            if kind in FOLLOWED:
                self.order.apply(event)
        except _MALFORMED as error:
            raise _bad_payload(event, error) from error
        self._next_seq = self.first_live_seq = event.seq + 1
        self._last = event
        if kind == "log/end-seed":
            self.last_end_seed = event.seq
        if plan is not None and self.surface.apply(plan):
            self._forget_messages()

    def _check_place(self, seq: int) -> None:
        if seq != self._next_seq or self.first_live_seq != self._next_seq:
            raise LogError(
                f"{self._name}: event {seq} stands where {self._next_seq} belongs",
                code="log.bad_envelope",
                hint="a log is read back whole, before anything is appended to it",
                details={"seq": seq, "expected": self._next_seq},
            )


_MALFORMED: Final = (KeyError, IndexError, TypeError, AttributeError)
"""What reading a payload of another shape raises."""


def _bad_payload(event: SessionEvent, error: Exception) -> LogError:
    return LogError(
        f"event {event.seq} ({event.type}) does not have the payload of its type: {error.__class__.__name__}: {error}",
        code="log.bad_payload",
        hint="kimi_ray.events.payloads says what each type carries",
        details={"seq": event.seq, "type": event.type},
    )
