"""A Chat Completions server that streams tokens at a pace, in a process of its own, at little cost.

It writes what was encoded before: one beat of a clock writes the next token of every stream that is due, so hundreds of
streams cost no timers. What it says of itself shows whether it was what made a run slow: how late its beats were.

A request asks with ``max_tokens`` for so many tokens. A line on standard input asks for a report; its end ends
the process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

TOKEN = "token "
BEATS = 4
"""Beats of the clock between two tokens of one stream; a new stream joins the next one."""

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Clock:
    """Writes the next token of each stream when it is due.

    Args:
        tokens_per_s: Of each stream.
    """

    def __init__(self, tokens_per_s: float) -> None:
        self._beat_s = 1 / (tokens_per_s * BEATS)
        self._streams: list[list[_Stream]] = [[] for _ in range(BEATS)]
        self._next = 0
        self.late_ms: list[float] = []
        """How late each beat was that had something to write."""

    def join(self, stream: _Stream) -> None:
        """From the next beat on this one is written, too."""
        self._streams[self._next % BEATS].append(stream)

    async def run(self) -> None:
        """Beat until cancelled; what was missed is made up for."""
        began = time.perf_counter()
        while True:
            due = began + self._next * self._beat_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            place, self._next = self._next % BEATS, self._next + 1
            streams = self._streams[place]
            if streams:
                self.late_ms.append((time.perf_counter() - due) * 1000)
                self._streams[place] = [stream for stream in streams if stream.write_next()]


class _Stream:
    """One answer."""

    def __init__(self, transport: asyncio.WriteTransport, name: str, tokens: int, served: dict[str, Served]) -> None:
        self._transport = transport
        self._tokens = self._left = tokens
        self._token = _piece(name, {"choices": [{"index": 0, "delta": {"content": TOKEN}, "finish_reason": None}]})
        self._served = served[name] = Served(time.perf_counter())
        self._name = name

    def write_next(self) -> bool:
        """Write a token; False when it was the last, or nobody reads any more."""
        if self._transport.is_closing():
            return False
        first = self._left == self._tokens
        self._left -= 1
        if self._left:
            self._transport.write(_HEAD + self._token if first else self._token)
        else:
            usage = {"prompt_tokens": 1, "completion_tokens": self._tokens, "total_tokens": self._tokens + 1}
            end = _piece(self._name, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            end += _piece(self._name, {"choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            self._transport.write((_HEAD if first else b"") + self._token + end)
        if first:
            self._served.first_ms = self._served.age_ms()
        if not self._left:
            self._served.whole_ms = self._served.age_ms()
        return self._left > 0


class Served:
    """One request, in milliseconds since its last byte was here."""

    def __init__(self, came: float) -> None:
        self._came = came
        self.first_ms: float | None = None
        self.whole_ms: float | None = None

    def age_ms(self) -> float:
        """How long ago it came."""
        return (time.perf_counter() - self._came) * 1000


class Connection(asyncio.Protocol):
    """Reads requests, one after the other, and has each answered."""

    def __init__(self, clock: Clock, served: dict[str, Served]) -> None:
        self._clock = clock
        self._served = served
        self._waiting = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self._waiting += data
        head, found, rest = self._waiting.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        )
        if len(rest) < length or self._transport is None:
            return
        self._waiting = rest[length:]
        body: dict[str, Any] = json.loads(rest[:length])
        name = f"chatcmpl-{len(self._served)}"
        self._clock.join(_Stream(self._transport, name, int(body["max_tokens"]), self._served))


def _say(data: Any) -> None:
    sys.stdout.write(f"{json.dumps(data)}\n")
    sys.stdout.flush()


def _piece(name: str, data: dict[str, Any]) -> bytes:
    said = {"id": name, "object": "chat.completion.chunk", "created": 0, "model": "paced", **data}
    return _chunk(b"data: " + json.dumps(said).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(tokens_per_s: float) -> None:
    """Serve on a free port of loopback; the first line on standard output is the port, the others are reports."""
    loop = asyncio.get_running_loop()
    clock, served = Clock(tokens_per_s), dict[str, Served]()
    server = await loop.create_server(lambda: Connection(clock, served), "127.0.0.1", 0, backlog=4096)
    _say(server.sockets[0].getsockname()[1])
    beating = asyncio.create_task(clock.run())
    asked = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(asked), sys.stdin)
    while await asked.readline():
        requests = {name: [one.first_ms, one.whole_ms] for name, one in served.items() if one.whole_ms is not None}
        _say({"requests": requests, "late_ms": clock.late_ms})
        clock.late_ms = []
    beating.cancel()
    server.close()


def main(tokens_per_s: float) -> None:
    """Run until standard input ends."""
    asyncio.run(serve(tokens_per_s))
