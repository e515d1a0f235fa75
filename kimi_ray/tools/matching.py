"""Finding the lines of a file that a regular expression matches.

Also the process in which ``matcher`` does it for patterns that can take for ever; run as a script it imports nothing of
kimi_ray. Frames on its standard input are 4 bytes of length and that many bytes: first the request as JSON, then a
file each. It answers each file with a line of JSON: the first and last line number of each match.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import warnings
from typing import IO, Any, cast

MAX_SPANS = 20_000
"""Matches reported of one file."""
_MAX_PATTERN = 10_000

Spans = list[tuple[int, int]]


def compiled(pattern: str, *, ignore_case: bool, multiline: bool) -> re.Pattern[str]:
    """The pattern, ``^`` and ``$`` at lines; with ``multiline`` a dot also matches a line's end.

    Raises:
        ValueError: It is no regular expression, or far too large.
    """
    flags = re.MULTILINE | (re.IGNORECASE if ignore_case else 0) | (re.DOTALL if multiline else 0)
    if len(pattern) > _MAX_PATTERN:
        raise ValueError(f"it has more than {_MAX_PATTERN} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error


def spans_of(pattern: re.Pattern[str], data: bytes, *, multiline: bool) -> Spans:
    """First and last line number of each match in a file's bytes; without ``multiline`` none crosses a line's end."""
    text = data.decode("utf-8", errors="replace")
    found: Spans = []
    if not multiline:
        search = pattern.search
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        for number, line in enumerate(lines, 1):
            if search(line.rstrip("\r")) is not None:
                found.append((number, number))
                if len(found) >= MAX_SPANS:
                    break
        return found
    line, counted = 1, 0
    for match in pattern.finditer(text):
        start, end = match.span()
        if start == len(text) and text:
            break  # the empty match behind the last line's end
        line += text.count("\n", counted, start)
        counted = start
        found.append((line, line + text.count("\n", start, max(end - 1, start))))
        if len(found) >= MAX_SPANS:
            break
    return found


def _frame(source: IO[bytes]) -> bytes | None:
    size = source.read(4)
    return source.read(int.from_bytes(size, "big")) if len(size) == 4 else None


def main() -> int:
    """Answer files until there are no more, or the time is over."""
    request = cast("dict[str, Any]", json.loads(_frame(sys.stdin.buffer) or b"{}"))
    # the default action of the alarm ends the process, whatever it is doing
    signal.setitimer(signal.ITIMER_REAL, request["within_s"] + 0.5)
    multiline = bool(request["multiline"])
    pattern = compiled(request["pattern"], ignore_case=bool(request["ignore_case"]), multiline=multiline)
    while (data := _frame(sys.stdin.buffer)) is not None:
        sys.stdout.write(json.dumps(spans_of(pattern, data, multiline=multiline)) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
