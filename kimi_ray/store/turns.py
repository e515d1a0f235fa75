"""Which turn is open at the end of a log, by a look at the first bytes of its rows."""

from __future__ import annotations

import re

from kimi_ray.store.batch_rows import EVENT_START, STORAGE_STARTS, split_rows

_TURN = b'"type":"turn/'
_TURN_ROW = re.compile(rb'\{"seq":\d+,"time":-?\d+,"type":"turn/(?:start|end)"')
_CHUNK_ROW = re.compile(rb'\{"seq":\d+,"time":-?\d+,"type":"assistant/chunk"')


class OpenTurn:
    """Collects the rows of the turn that is open at the end, without streamed chunks, which close nothing."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._last = b""
        self._open = False

    @property
    def rows(self) -> list[bytes]:
        """What has to be known to close the turn; the last row is always the log's last event."""
        return [*self._kept, self._last] if self._last else self._kept

    def feed(self, payload: bytes) -> None:
        """Follow rows in order; the cost is one search, unless a turn is open."""
        start = _last_turn_row(payload)
        if start >= 0:
            payload = payload[start:]
            self._open = turn_opens(payload) is True
            self._kept.clear()
            self._last = b""
        if not self._open:
            return
        for row in split_rows(payload):
            if row.startswith(STORAGE_STARTS):
                continue
            if not row.startswith(EVENT_START) or _CHUNK_ROW.match(row):
                self._last = row
            else:
                self._last = b""
                self._kept.append(row)


def turn_opens(payload: bytes) -> bool | None:
    """Whether a turn is open after these rows; None when they neither start nor end one."""
    start = _last_turn_row(payload)
    return None if start < 0 else b"turn/start" in payload[start : payload.find(_TURN, start) + 24]


def _last_turn_row(payload: bytes) -> int:
    """Where the last ``turn/start`` or ``turn/end`` row starts, or -1."""
    at = len(payload)
    while (at := payload.rfind(_TURN, 0, at)) >= 0:
        start = payload.rfind(b"\n", 0, at) + 1
        if _TURN_ROW.match(payload, start):
            return start
    return -1
