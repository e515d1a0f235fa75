"""The rule by which the harness reads a log line by line, and tells a torn tail from damage.

The first line that cannot be read, or whose seq is not the next one, freezes what is kept. If a complete record after
it is a ``turn/end``, the damage lies in what was committed and the session is refused; else everything from there on
is a tail that may go. A last line without its newline is always such a tail.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from kimi_ray.exchange.dsh.chunk_rows import expand_record
from kimi_ray.exchange.dsh.errors import Refusal, corrupt
from kimi_ray.exchange.dsh.js_json import parse_bytes, shown
from kimi_ray.exchange.dsh.model import Event

_ABSENT: Any = object()


class LineScan:
    """Scans the lines after the header.

    Attributes:
        events: The events that are kept.
        committed: Bytes up to the end of the last kept line, from the start of the text.
        scanned: Bytes that were fed, from the start of the text.
        notes: What was lost in reading the kept lines.
    """

    def __init__(self, header_bytes: int) -> None:
        self.events: list[Event] = []
        self.committed = header_bytes
        self.scanned = header_bytes
        self.notes: Counter[str] = Counter()
        self._fragment = b""
        self._line = 0
        self._issue: Refusal | None = None

    @property
    def issue(self) -> Refusal | None:
        """What froze the kept events, or None."""
        return self._issue

    def feed(self, text: bytes, **place: Any) -> None:
        """Scan more text.

        Args:
            text: The bytes behind those fed before.
            place: Where they are in the file, for refusals; the default is their byte offset.

        Raises:
            Refusal: ``corrupt``, damage in the committed region.
        """
        start = 0
        while True:
            end = text.find(b"\n", start)
            if end < 0:
                break
            line = self._fragment + text[start:end]
            begins = self.scanned + start - len(self._fragment)
            self._fragment = b""
            start = end + 1
            self._take(line, self.scanned + start, {"line": self._line + 2, **(place or {"byte": begins})})
        self._fragment += text[start:]
        self.scanned += len(text)

    def _take(self, line: bytes, end: int, at: dict[str, Any]) -> None:
        self._line += 1
        try:
            parsed = parse_bytes(line)
            found = expand_record(parsed.value)
        except ValueError:
            if self._issue is None:
                self._issue = corrupt(
                    f"corrupt session log: unparsable committed event at line {self._line}",
                    **at,
                    seq=len(self.events),
                )
            return
        if found[0] is None:
            raise corrupt(f"corrupt session log: null in place of an event at line {self._line}", **at)
        if self._issue is not None:
            if _ends_turn(found):
                raise self._issue
            return
        expected = len(self.events)
        for place, event in enumerate(found):
            seq = cast("Event", event).get("seq", _ABSENT) if isinstance(event, dict) else _ABSENT
            if type(seq) not in (int, float) or seq != expected + place:
                self._issue = corrupt(
                    f"corrupt session log: seq gap in committed region at line {self._line} "
                    f"(expected {expected + place}, got {'undefined' if seq is _ABSENT else shown(seq)})",
                    **at,
                    seq=expected + place,
                )
                if _ends_turn(found):
                    raise self._issue
                return
        self.events.extend(found)
        self.committed = end
        self.notes.update(parsed.notes)


def _ends_turn(found: list[Any]) -> bool:
    return any(isinstance(event, dict) and cast("Event", event).get("type") == "turn/end" for event in found)
