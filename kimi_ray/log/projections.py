"""Projections: pure folds over a log, whose states can be kept and gone on from.

A unit says which events it looks at, how its state begins and what an event makes of it. States are plain JSON, so a
checkpoint is too; whatever it is gone on from, a fold over the whole log gives the same. A checkpoint knows which event
it has seen last: one of another log, or of a log that has since lost its end, is refused and not believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast
from zlib import crc32

from kimi_ray.errors import LogError
from kimi_ray.events import CORE, SessionEvent, decode, encode, freeze, read_stored, thaw, type_key
from kimi_ray.log.event_log import EventLog

Row = dict[str, Any]
"""What a checkpoint keeps of a unit: ``{"version", "seq", "crc", "state"}``; ``seq`` and ``crc`` (of its canonical
line) are those of the last event that it covers, -1 and 0 before the first."""

_NAMES: Final = {type_key(entry.name): entry.name for entry in CORE}


_PARTS: Final = ("key", "version", "types", "start", "apply", "value")


class Projection(Protocol):
    """One fold. It holds nothing itself: all it knows is in the state."""

    @property
    def key(self) -> str:
        """Its name in snapshots and checkpoints."""
        ...

    @property
    def version(self) -> int:
        """Of the state and of what it means: rows of another version are folded anew."""
        ...

    @property
    def types(self) -> frozenset[str]:
        """The types of events that it looks at; of others it is not told."""
        ...

    def start(self) -> Any:
        """The state before the first event, plain JSON."""
        ...

    def apply(self, state: Any, event: SessionEvent) -> Any:
        """The state after an event. The given one is not changed; itself means that nothing has."""
        ...

    def value(self, state: Any) -> Any:
        """What a snapshot tells of a state: the state itself, or the part of it that is of use."""
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values of all units at one place. ``as_of`` is the seq of the last event in them, -1 for none."""

    as_of: int
    values: dict[str, Any]


class Projections:
    """Some units over one log, always all at the same place.

    Args:
        units: Which.
        rows: A checkpoint to go on from, by key; a row that cannot be used counts as none. Events are then to be fed
            from ``floor`` on.

    Raises:
        LogError: ``log.duplicate_projection``; ``log.bad_projection``: an object that is none.
    """

    def __init__(self, units: Iterable[Projection], rows: Mapping[str, Any] | None = None) -> None:
        self._units: dict[str, Projection] = {}
        for unit in units:
            _check_unit(unit)
            if unit.key in self._units:
                raise LogError(f"two projections are called {unit.key!r}", code="log.duplicate_projection")
            self._units[unit.key] = unit
        self._states = {key: unit.start() for key, unit in self._units.items()}
        self._seen = dict.fromkeys(self._units, -1)
        """By unit, the last event that its state covers."""
        self._marks: dict[int, int] = {}
        """What the checkpoint says of events that will come by again: seq to checksum."""
        for key, unit in self._units.items():
            row = _usable(unit, (rows or {}).get(key))
            if row is not None:
                self._states[key], self._seen[key] = decode(encode(row["state"])), row["seq"]
                self._marks[row["seq"]] = row["crc"]
        least = min(self._seen.values(), default=-1)
        self.floor = max(least, 0)
        """The seq from which on events are to be fed: the last one that is known everywhere, to be recognised."""
        self._marks = {seq: crc for seq, crc in self._marks.items() if seq >= self.floor}
        self._next = self.floor
        self._last = b""
        self._by_type: dict[str, list[tuple[str, Projection]]] = {}
        for key, unit in self._units.items():
            for name in unit.types:
                self._by_type.setdefault(name, []).append((key, unit))

    @property
    def next_seq(self) -> int:
        """The seq of the next event that is wanted."""
        return self._next

    def apply(self, event: SessionEvent) -> None:
        """Follow the next event.

        Raises:
            LogError: ``log.bad_envelope`` for another event than the next; ``log.stale_checkpoint`` when the log is
                not the one that the checkpoint is of, or was then longer: fold it again without rows;
                ``log.projection_failed`` {key, seq}: a unit's code raised.
        """
        if event.seq != self._next:
            raise LogError(
                f"event {event.seq} stands where {self._next} belongs",
                code="log.bad_envelope",
                details={"seq": event.seq},
            )
        self._recognise(event.seq, event.line)
        for key, unit in self._by_type.get(event.type, ()):
            if event.seq > self._seen[key]:
                self._step(key, unit, event)

    def feed(self, lines: Sequence[bytes]) -> None:
        """Follow the next stored lines, canonical and without newline; those that no unit looks at are not parsed.

        Raises:
            LogError: As ``apply``; ``log.not_json``.
        """
        if not lines:
            return
        first = self._next
        passed = frozenset(key for key, name in _NAMES.items() if name not in self._by_type)
        for seq in sorted(seq for seq in self._marks if first <= seq < first + len(lines)):
            self._check(seq, lines[seq - first])
        for event in read_stored(lines, first, _NAMES, passed):
            for key, unit in self._by_type.get(event.type, ()):
                if event.seq > self._seen[key]:
                    self._step(key, unit, event)
        self._next, self._last = first + len(lines), lines[-1]

    def follow(self, log: EventLog) -> Callable[[], None]:
        """Follow what a log appends from now on; returns what ends it.

        Raises:
            LogError: ``log.bad_envelope`` unless the log stands at ``next_seq``.
        """
        if log.next_seq != self._next:
            raise LogError(
                f"the log stands at {log.next_seq}, its projections at {self._next}", code="log.bad_envelope"
            )
        return log.observe(self.apply)

    def snapshot(self) -> Snapshot:
        """The values as they are now, as copies.

        Raises:
            LogError: ``log.stale_checkpoint`` when the log ended before what the checkpoint has seen.
        """
        self._check_all_seen()
        return Snapshot(self._next - 1, {key: thaw(unit.value(self._states[key])) for key, unit in self._units.items()})

    def checkpoint(self) -> dict[str, Row]:
        """What to keep, by key: plain JSON, a copy. Keep it only when the events in it are durable.

        Raises:
            LogError: As ``snapshot``; ``log.bad_projection``: a state is not JSON.
        """
        self._check_all_seen()
        seq, crc = self._next - 1, crc32(self._last) if self._next else 0
        return {
            key: {"version": unit.version, "seq": seq, "crc": crc, "state": self._state(unit)}
            for key, unit in self._units.items()
        }

    def _step(self, key: str, unit: Projection, event: SessionEvent) -> None:
        try:
            self._states[key] = unit.apply(self._states[key], event)
        except Exception as error:
            raise LogError(
                f"the projection {key!r} failed at event {event.seq} ({event.type}): {type(error).__name__}: {error}",
                code="log.projection_failed",
                details={"key": key, "seq": event.seq},
            ) from error

    def _state(self, unit: Projection) -> Any:
        try:
            return thaw(freeze(self._states[unit.key]))
        except LogError as error:
            raise LogError(
                f"the state of the projection {unit.key!r} is not JSON: {error.message}",
                code="log.bad_projection",
                hint="keep dicts, lists, texts and numbers: no sets, tuples or objects",
                details={"key": unit.key},
            ) from error

    def _recognise(self, seq: int, line: bytes) -> None:
        if seq in self._marks:
            self._check(seq, line)
        self._next, self._last = seq + 1, line

    def _check(self, seq: int, line: bytes) -> None:
        if self._marks.pop(seq) != crc32(line):
            raise _stale(f"event {seq} is not the one that the checkpoint has seen", seq)

    def _check_all_seen(self) -> None:
        if self._marks:
            seq = max(self._marks)
            raise _stale(f"the log ends at {self._next}, the checkpoint has seen event {seq}", seq)


def _check_unit(unit: object) -> None:
    missing = [name for name in _PARTS if not hasattr(unit, name)]
    if missing:
        raise LogError(
            f"{type(unit).__name__} is no projection: it has no {', '.join(missing)}",
            code="log.bad_projection",
            hint=f"a projection has {', '.join(_PARTS)}",
            details={"missing": missing},
        )


def _usable(unit: Projection, row: Any) -> Row | None:
    """A row that this unit can go on from, or None."""
    if not isinstance(row, dict):
        return None
    found = cast("Row", row)
    seq, crc = found.get("seq"), found.get("crc")
    sound = type(seq) is int and seq >= 0 and type(crc) is int and "state" in found
    return found if sound and found.get("version") == unit.version else None


def _stale(why: str, seq: int) -> LogError:
    return LogError(
        f"the checkpoint is of another log, or of one that was longer: {why}",
        code="log.stale_checkpoint",
        hint="fold the log from its first event, without the checkpoint",
        details={"seq": seq},
    )
