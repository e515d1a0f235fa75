"""Walking a log for its frames: only the events that somebody asks for are decoded, and few lines are held at once.

The store has verified the bytes; what is decoded here is taken as it is. Events are plain dicts of their envelope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from pydantic_core import from_json

from kimi_ray.errors import KimiRayError, LogError
from kimi_ray.events import event_from_data, type_key

Event = dict[str, Any]
Handler = Callable[[Event], None]

_SLICE: Final = 64
_TYPE: Final = b'"type":"'
_HINT: Final = "kimi_ray.events.payloads says what each type carries"
_MALFORMED = (KeyError, IndexError, TypeError, AttributeError, ValueError)
"""What reading a payload of another shape raises."""


class Fold(Protocol):
    """Makes rows of the events of one log."""

    def handlers(self) -> Mapping[str, Handler]:
        """Who looks at events, by type."""
        ...

    def finish(self, last_seq: int) -> None:
        """The log ends here, as far as it could be read."""
        ...


class LogFault(NamedTuple):
    """What is wrong with a log: the error, and whether what comes behind it could be read."""

    error: KimiRayError
    ends: bool


def read_log(runs: Iterable[tuple[bytes, ...]], folds: Iterable[Fold], fault: Callable[[LogFault], None]) -> int:
    """Show a log to folds.

    An event that has not the payload of its type is passed over, a log that is damaged ends there, and what its events
    make no sense of together has no row; ``fault`` is told of each and may raise.

    Args:
        runs: The log's lines.
        folds: Who looks at it.
        fault: Told of what is wrong.

    Returns:
        How many events were read.
    """
    known = list(folds)
    wanted = _by_key(known)
    seq, lines = 0, iter(runs)
    while True:
        try:
            run = next(lines, None)
        except KimiRayError as error:
            fault(LogFault(error, ends=True))
            break
        if run is None:
            break
        _show(run, seq, wanted, fault)
        seq += len(run)
    for fold in known:
        try:
            fold.finish(seq - 1)
        except _MALFORMED as error:
            fault(LogFault(_bad_end(seq - 1, error), ends=False))
    return seq


def _by_key(folds: Iterable[Fold]) -> dict[bytes, list[Handler]]:
    wanted: dict[bytes, list[Handler]] = {}
    for fold in folds:
        for name, handler in fold.handlers().items():
            wanted.setdefault(type_key(name), []).append(handler)
    return wanted


def _show(
    lines: tuple[bytes, ...], seq: int, wanted: Mapping[bytes, list[Handler]], fault: Callable[[LogFault], None]
) -> None:
    picked: list[bytes] = []
    whose: list[list[Handler]] = []
    first = seq
    for line in lines:
        if not line:  # a packed chunk
            continue
        parts = line.split(b",", 3)
        key = parts[2] if len(parts) > 3 else b""
        handlers = wanted.get(key)
        if handlers is None and not key.startswith(_TYPE):
            odd = _decoded(line, first, fault)  # another spelling, in an archive that somebody else wrote
            handlers = None if odd is None else wanted.get(type_key(str(odd["type"])))
        if handlers is None:
            continue
        picked.append(line)
        whose.append(handlers)
        if len(picked) == _SLICE:
            _apply(picked, whose, first, fault)
            picked.clear()
            whose.clear()
    _apply(picked, whose, first, fault)


def _apply(lines: list[bytes], whose: list[list[Handler]], near: int, fault: Callable[[LogFault], None]) -> None:
    if not lines:
        return
    try:
        events: list[Any] = from_json(b"[%s]" % b",".join(lines), cache_strings="keys")
    except ValueError:
        events = []
    if len(events) != len(lines):
        events = [_decoded(line, near, fault) for line in lines]
    for event, handlers in zip(events, whose, strict=True):
        if event is None:
            continue
        try:
            for handler in handlers:
                handler(event)
        except _MALFORMED as error:
            fault(LogFault(_bad_payload(event, error), ends=False))


def _decoded(line: bytes, near: int, fault: Callable[[LogFault], None]) -> Event | None:
    """One line by itself, to say which of a slice is wrong."""
    try:
        return event_from_data(from_json(line)).to_data()
    except (LogError, ValueError) as error:
        found = LogError(
            f"an event behind seq {near} cannot be read: {error}", code="log.not_json", details={"after_seq": near}
        )
        fault(LogFault(found, ends=False))
        return None


def _bad_payload(event: Event, error: Exception) -> LogError:
    seq = event.get("seq")
    return LogError(
        f"event {seq} ({event.get('type')}) does not have the payload of its type:"
        f" {error.__class__.__name__}: {str(error)[:200]}",
        code="log.bad_payload",
        hint=_HINT,
        details={"seq": seq},
    )


def _bad_end(last_seq: int, error: Exception) -> LogError:
    return LogError(
        f"what the events up to {last_seq} say does not go together: {error.__class__.__name__}: {str(error)[:200]}",
        code="log.bad_payload",
        hint=_HINT,
        details={"last_seq": last_seq},
    )
