"""A Chat Completions server on loopback that answers as tests say, and a proxy that counts what goes by.

``ModelServer`` bears so many requests at once and answers 429 beyond. What it says, and what it does wrong, is a
function of the request's body. ``CountingProxy`` stands in front of any server and keeps the body of every request.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

Body = dict[str, Any]


@dataclass
class Reply:
    """One answer: text and tool calls, or a fault.

    ``cut`` breaks the stream in the middle: of the text, or of the first call's arguments.
    """

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and raw arguments."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    seconds: float | None = None


class _Loopback:
    """Listens until left, at ``url``; each request of each connection is served in turn."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{self._path}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while await self._serve(*await read_request(reader), writer):
                    pass
        except asyncio.CancelledError:
            pass
        finally:
            writer.close()

    async def _serve(self, line: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False when the connection is to be closed."""
        raise NotImplementedError


class ModelServer(_Loopback):
    """Serves ``answer`` until left.

    Args:
        answer: What to say to a body; called with the body and the number of times that body has come.
        bears: Requests at once; beyond it 429. None bears all.
        seconds: How long an answer takes.
        retry_after: What a 429 says, seconds.
    """

    def __init__(
        self,
        answer: Callable[[Body, int], Reply] | None = None,
        *,
        bears: int | None = None,
        seconds: float = 0.0,
        retry_after: float | None = None,
    ) -> None:
        super().__init__("/v1")
        self._answer = answer or (lambda _body, _times: Reply("done"))
        self._bears = bears
        self._seconds = seconds
        self._retry_after = retry_after
        self._came: Counter[str] = Counter()
        self.at_work = self.most = self.served = self.refused = 0

    async def _serve(self, line: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        if " /v1/models" in line:
            return await self._whole(writer, 200, {"data": [{"id": "tiny", "object": "model"}], "object": "list"})
        if self._bears is not None and self.at_work >= self._bears:
            self.refused += 1
            wait = {} if self._retry_after is None else {"retry-after": f"{self._retry_after:g}"}
            return await self._whole(writer, 429, {"error": {"message": "too many requests"}}, wait)
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        try:
            key = body.decode()
            self._came[key] += 1
            asked: Body = json.loads(body)
            reply = self._answer(asked, self._came[key])
            await asyncio.sleep(self._seconds if reply.seconds is None else reply.seconds)
            if reply.status != 200:
                return await self._whole(writer, reply.status, {"error": {"message": "no"}}, reply.headers)
            whole = await (self._stream(writer, reply) if asked.get("stream") else self._at_once(writer, reply))
            self.served += whole
            return whole
        finally:
            self.at_work -= 1

    async def _at_once(self, writer: asyncio.StreamWriter, reply: Reply) -> bool:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        if reply.calls:
            message["tool_calls"] = [_call(number, *call) for number, call in enumerate(reply.calls)]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if reply.calls else "stop"}
        return await self._whole(writer, 200, {"id": "r", "model": "tiny", "choices": [choice], "usage": _USAGE})

    async def _stream(self, writer: asyncio.StreamWriter, reply: Reply) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        events: list[dict[str, Any]] = []
        if reply.text:
            half = len(reply.text) // 2
            events += [{"content": reply.text[:half]}, {"content": reply.text[half:]}]
        for number, (name, arguments) in enumerate(reply.calls):
            half = len(arguments) // 2
            events.append({"tool_calls": [{"index": number, **_call(number, name, arguments[:half])}]})
            events.append({"tool_calls": [{"index": number, "function": {"arguments": arguments[half:]}}]})
        for number, delta in enumerate(events):
            if reply.cut and number == len(events) - 1:
                await writer.drain()
                return False
            _event(writer, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        finish = "tool_calls" if reply.calls else "stop"
        _event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        _event(writer, {"choices": [], "usage": _USAGE})
        _piece(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _whole(
        self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> bool:
        data = json.dumps(body).encode()
        lines = {"content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + data)
        await writer.drain()
        return True


class CountingProxy(_Loopback):
    """Passes requests on to ``upstream``, one connection each, and keeps their bodies in order of coming."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        super().__init__(parts.path)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self.bodies: list[Body] = []
        """Of the chat requests."""

    async def _serve(self, line: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        if "/chat/completions" in line:
            self.bodies.append(json.loads(body))
        await self._pass_on(line, headers, body, writer)
        return False

    async def _pass_on(self, line: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        upstream, to_server = await asyncio.open_connection(self._host, self._port)
        try:
            headers = headers | {"host": f"{self._host}:{self._port}", "connection": "close"}
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            to_server.write(f"{line}\r\n{head}\r\n".encode() + body)
            await to_server.drain()
            answer = (await upstream.readuntil(b"\r\n\r\n")).decode("latin-1")
            kept = [one for one in answer.split("\r\n")[:-2] if not one.lower().startswith("connection:")]
            writer.write("\r\n".join([*kept, "connection: close", "", ""]).encode("latin-1"))
            length = next((int(one.split(":")[1]) for one in kept if one.lower().startswith("content-length:")), None)
            sent = 0
            while (length is None or sent < length) and (data := await upstream.read(65536)):
                writer.write(data)
                sent += len(data)
                await writer.drain()
                if length is None and data.endswith(b"0\r\n\r\n"):
                    return
        finally:
            to_server.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """The request line, the headers with small names, and the body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    return head[0], headers, await reader.readexactly(int(headers.get("content-length", "0")))


def unpaired_calls(body: Body) -> list[str]:
    """What is wrong with the tool calls of a request: a call without its result behind it, or the other way round."""
    wrong: list[str] = []
    open_calls: dict[str, str] = {}
    for message in [*body["messages"], {"role": "end"}]:
        if message["role"] == "tool":
            if open_calls.pop(message["tool_call_id"], None) is None:
                wrong.append(f"a result of {message['tool_call_id']} without its call")
            continue
        wrong += [f"the call {call_id} of {name} has no result" for call_id, name in open_calls.items()]
        calls = message.get("tool_calls") or ()
        open_calls = {call["id"]: call["function"]["name"] for call in calls}
        if len(open_calls) != len(calls):
            wrong.append("two calls of one answer have one id")
    return wrong


_USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def _call(number: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _event(writer: asyncio.StreamWriter, data: dict[str, Any]) -> None:
    _piece(writer, b"data: " + json.dumps({"id": "r", "model": "tiny", **data}).encode() + b"\n\n")


def _piece(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
