"""A tiny HTTP server on loopback that answers exactly the bytes a test tells it to, when it tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass
class Received:
    """One request as it came."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


@dataclass
class Reply:
    """The writing end of one exchange."""

    writer: asyncio.StreamWriter

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def full(self, status: int, body: bytes | str | dict[str, Any], **headers: str) -> None:
        kind = "text/plain"
        if isinstance(body, dict):
            body, kind = json.dumps(body), "application/json"
        data = body.encode() if isinstance(body, str) else body
        lines = {"content-type": kind, **{key.replace("_", "-"): value for key, value in headers.items()}}
        head = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
        await self.raw(f"HTTP/1.1 {status} X\r\n{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    async def start(self, kind: str = "text/event-stream", **headers: str) -> None:
        lines = {"content-type": kind, **{key.replace("_", "-"): value for key, value in headers.items()}}
        head = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
        await self.raw(f"HTTP/1.1 200 OK\r\n{head}transfer-encoding: chunked\r\n\r\n".encode())

    async def piece(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, data: dict[str, Any] | str) -> None:
        await self.piece(b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n")

    async def delta(self, finish: str | None = None, **delta: Any) -> None:
        await self.event({"id": "r", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    async def end(self, *, done: bool = True) -> None:
        if done:
            await self.event("[DONE]")
        await self.raw(b"0\r\n\r\n")

    def cut(self) -> None:
        self.writer.close()


Handler = Callable[[Received, Reply], Awaitable[None]]


class LocalServer:
    """Serves ``handler`` until left; remembers what it was asked and notices hang-ups."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.received: list[Received] = []
        self.connections = 0
        self.hung_up = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LocalServer:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                begun = b""
                while not writer.is_closing():
                    received = await self._request(begun, reader)
                    self.received.append(received)
                    begun = await self._answer(received, reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()

    async def _answer(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Run the handler, and watch for the client leaving meanwhile; gives back the next request's first byte."""
        answering = asyncio.ensure_future(self.handler(received, Reply(writer)))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and leaving.result() == b"":
                self.hung_up.set()
                raise ConnectionError
            await answering
            if writer.is_closing():
                return b""
            return await leaving
        finally:
            answering.cancel()
            leaving.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _request(self, begun: bytes, reader: asyncio.StreamReader) -> Received:
        head = (begun + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Received(head[0], headers, body)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[LocalServer]]]:
    """Start servers; they end with the test."""
    async with AsyncExitStack() as stack:

        async def start(handler: Handler) -> LocalServer:
            return await stack.enter_async_context(LocalServer(handler))

        yield start
