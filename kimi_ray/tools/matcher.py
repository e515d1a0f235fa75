"""A regular expression in a place that can be killed.

Python's matching cannot be interrupted and holds the interpreter while it runs: one catastrophic pattern would stop
every agent of a host. So a pattern that can backtrack runs in a small process of its own (``matching``), which the
kernel ends at its bound even when nobody is left to do it. A pattern that cannot (literals, classes, anchors,
alternatives of them) is matched here, where it costs no process.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from kimi_ray.tools import matching
from kimi_ray.tools.matching import Spans, compiled, spans_of

_INLINE_BYTES = 1 << 20
_INLINE_WORK = 64 << 20
"""Length of text times length of pattern that is matched here: it costs a tenth of a second at most."""
_LINEAR = re.compile(r"(?:[^\\\[\](){}*+?]|\\[dDsSwWbBtnrfv]|\\[^\w\s]|\[\^?[^\[\]\\]+\])*")
"""No repeats and no groups: matching takes at most length of text times length of pattern."""


class Matcher:
    """Matches files with one pattern, up to a moment in time.

    Args:
        pattern: A Python regular expression.
        within_s: Seconds from now, for all files together.

    Raises:
        ValueError: The pattern is none.
    """

    def __init__(self, pattern: str, *, ignore_case: bool, multiline: bool, within_s: float) -> None:
        self._compiled = compiled(pattern, ignore_case=ignore_case, multiline=multiline)
        self._multiline = multiline
        self._linear = _LINEAR.fullmatch(pattern) is not None
        self._within_s = within_s
        self._deadline = asyncio.get_running_loop().time() + within_s
        self._request: dict[str, Any] = {
            "pattern": pattern,
            "ignore_case": ignore_case,
            "multiline": multiline,
            "within_s": within_s,
        }
        self._process: asyncio.subprocess.Process | None = None

    async def spans(self, data: bytes) -> Spans:
        """See ``spans_of``.

        Raises:
            TimeoutError: The time is over; the process is dead.
        """
        work = len(data) * len(self._request["pattern"])
        if self._linear and len(data) <= _INLINE_BYTES and work <= _INLINE_WORK:
            if asyncio.get_running_loop().time() > self._deadline:
                raise TimeoutError
            return spans_of(self._compiled, data, multiline=self._multiline)
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._ask(data)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the process, if there is one. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _ask(self, data: bytes) -> Spans:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-E", "-I", str(Path(matching.__file__)),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                env={}, start_new_session=True, limit=1 << 22,
            )  # fmt: skip
            self._send(json.dumps(self._request).encode())
        self._send(data)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ConnectionError):
            await self._process.stdin.drain()
        answer = await self._process.stdout.readline()
        if not answer:
            raise TimeoutError  # it ended itself
        return [(first, last) for first, last in json.loads(answer)]

    def _send(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(len(data).to_bytes(4, "big"))
        self._process.stdin.write(data)
