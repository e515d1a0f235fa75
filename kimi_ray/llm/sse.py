"""Server-sent events: from the bytes of a response to the data of its events."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 << 20
_BOM = b"\xef\xbb\xbf"


class EventTooLargeError(ValueError):
    """An event has more than ``MAX_EVENT_BYTES``."""


class EventParser:
    """Cuts a byte stream into events.

    Lines end with LF or CRLF; comments and fields other than ``data`` count for nothing.
    """

    __slots__ = ("_begun", "_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._begun = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that ``data`` completes.

        Raises:
            EventTooLargeError: the event under way is above the bound.
        """
        if self._rest:
            data = self._rest + data
        if not self._begun:
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._rest = data
                return []
            self._begun = True
            data = data.removeprefix(_BOM)
        lines = data.split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLargeError
        events: list[bytes] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                self._dispatch(events)
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                if len(self._data) > 1 and sum(map(len, self._data)) > MAX_EVENT_BYTES:
                    raise EventTooLargeError
        return events

    def end(self) -> list[bytes]:
        """The event that stood at the end of the stream without its blank line, if there is one."""
        events = self.feed(b"\n") if self._rest else []
        self._dispatch(events)
        return events

    def _dispatch(self, events: list[bytes]) -> None:
        if self._data:
            events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
            self._data = []
