"""Text that a stream may have cut through the middle of a character.

JSON may spell one character as two escapes (a surrogate pair), and a server may send the halves in two chunks. Halves
that meet are joined; a half that stays alone becomes U+FFFD, because no log and no wire can carry it.
"""

from __future__ import annotations

_HIGH_FIRST, _HIGH_LAST = "\ud800", "\udbff"
_LOW_FIRST, _LOW_LAST = "\udc00", "\udfff"


def whole(text: str) -> str:
    """``text`` with surrogate pairs joined and lone halves replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        pieces: list[str] = []
        pending = ""
        for char in text:
            if _LOW_FIRST <= char <= _LOW_LAST:
                pieces.append(_pair(pending, char) if pending else "\ufffd")
                pending = ""
                continue
            if pending:
                pieces.append("\ufffd")
                pending = ""
            if _HIGH_FIRST <= char <= _HIGH_LAST:
                pending = char
            else:
                pieces.append(char)
        if pending:
            pieces.append("\ufffd")
        return "".join(pieces)
    return text


class Joiner:
    """Makes the fragments of one streamed text whole, one by one: a high half at the end waits for the next."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = ""

    def feed(self, text: str) -> str:
        """The next fragment, whole; empty when only half a character has come so far."""
        if not self._pending and text.isascii():
            return text
        text = self._pending + text
        self._pending = ""
        if text and _HIGH_FIRST <= text[-1] <= _HIGH_LAST:
            self._pending, text = text[-1], text[:-1]
        return whole(text)

    def end(self) -> str:
        """What was still waiting: U+FFFD for a half that never met the other, else nothing."""
        rest = "\ufffd" if self._pending else ""
        self._pending = ""
        return rest


def _pair(high: str, low: str) -> str:
    return chr(0x10000 + ((ord(high) - 0xD800) << 10) + (ord(low) - 0xDC00))
