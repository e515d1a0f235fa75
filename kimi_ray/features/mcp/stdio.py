"""A server on this node, spoken to over its stdin and stdout, under the supervisor that also watches commands.

The SDK's own transport ends a server when the session ends. This one also ends it, and all that it started, when this
process is killed: the supervisor notices. A server's stdin is a socket of its own, since the supervisor's is the life
line; lines that are no messages are passed over, and its stderr is kept up to a bound, for messages.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import anyio
import mcp_types
from mcp.shared.message import SessionMessage

from kimi_ray.errors import ToolError
from kimi_ray.tools.commands import end_supervised, exit_within, scrubbed_environment, supervised
from kimi_ray.tools.results import storable

MAX_LINE_BYTES = 32 << 20
"""Of one message. A server that sends a longer one is not listened to any more."""
STDERR_BYTES = 8 << 10
"""The end of a server's stderr that is kept."""
EXIT_S = 2.0
"""What a server has to end by itself once its stdin is closed."""

NO_MESSAGE = -32798
"""The code of an answer that was no message; no server sends it."""

_ANSWERS = re.compile(rb'"id"\s*:\s*(\d{1,15})\s*[,}]')
_CHUNK = 1 << 16
_SHOWN = 200
_TAKE_STDIN = """
import os, sys
os.dup2(int(sys.argv[1]), 0)
os.close(int(sys.argv[1]))
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    os.write(2, f"{sys.argv[2]}: {error.strerror}".encode(errors="replace"))
    os._exit(127)
"""
"""Between the supervisor and the server: gives it its stdin."""


class SupervisedStdio:
    """A transport of the SDK: entering starts the server, leaving ends it.

    Args:
        command: What to start.
        env: Variables on top of the scrubbed ones.
        cwd: Its working directory.
        on_end: Called when it says nothing any more.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str | None, on_end: Any) -> None:
        self._command = command
        self._env = scrubbed_environment(env)
        self._cwd = cwd
        self._on_end = on_end
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[Any] = []
        self._writer: asyncio.StreamWriter | None = None
        self._errors = bytearray()
        self.odd_lines = 0
        """Lines of its stdout that were no messages."""
        self._first_odd = ""

    async def __aenter__(self) -> tuple[Any, Any]:
        ours, theirs = socket.socketpair()
        try:
            fd = theirs.fileno()
            self._process = await asyncio.create_subprocess_exec(
                *supervised(sys.executable, "-S", "-E", "-I", "-c", _TAKE_STDIN, str(fd), *self._command),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                pass_fds=(fd,), cwd=self._cwd, env=self._env, start_new_session=True,
            )  # fmt: skip
            _, self._writer = await asyncio.open_connection(sock=ours)
        except (OSError, ValueError) as error:
            ours.close()
            raise ToolError(
                f"{self._command[0]} cannot be started: {error}",
                code="mcp.server_dead",
                details={"command": self._command[0]},
            ) from error
        finally:
            theirs.close()
        heard, hear = anyio.create_memory_object_stream[Any](0)
        say, said = anyio.create_memory_object_stream[Any](0)
        self._streams = [heard, hear, say, said]
        self._tasks = [
            asyncio.create_task(self._read(heard)),
            asyncio.create_task(self._write(said, heard)),
            asyncio.create_task(self._read_errors()),
        ]
        return hear, say

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # Whoever leaves may be cancelled meanwhile: the server ends all the same.
        await asyncio.shield(asyncio.ensure_future(self._leave()))

    def last_words(self) -> str:
        """The end of its stderr, and what it printed that was no message; "" for nothing."""
        errors = storable(bytes(self._errors).decode(errors="replace")).strip()
        told = [f"it wrote on stderr: {errors}"] if errors else []
        if self.odd_lines:
            told.append(f"{self.odd_lines} lines of its stdout were no messages, the first: {self._first_odd}")
        return "; ".join(told)

    async def _read(self, heard: Any) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        rest = bytearray()
        try:
            while chunk := await process.stdout.read(_CHUNK):
                rest += chunk
                while (end := rest.find(b"\n")) >= 0:
                    line = bytes(rest[:end])
                    del rest[: end + 1]
                    message = self._parse(line)
                    if message is not None:
                        await heard.send(message)
                if len(rest) > MAX_LINE_BYTES:
                    self._odd(bytes(rest[:_SHOWN]))
                    break
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass  # nobody listens any more
        finally:
            heard.close()
            self._on_end()

    def _parse(self, line: bytes) -> SessionMessage | None:
        if not line.strip():
            return None
        try:
            return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            pass
        try:
            # Python's own parser takes the halves of characters that JSON can spell and nothing else can hold.
            value: Any = json.loads(storable(json.dumps(json.loads(line), ensure_ascii=False)))
            return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_python(value, by_name=False))
        except (ValueError, RecursionError):
            self._odd(line)
        return _refusal(line)

    def _odd(self, line: bytes) -> None:
        self.odd_lines += 1
        if self.odd_lines == 1:
            self._first_odd = repr(storable(line[:_SHOWN].decode(errors="replace")))

    async def _write(self, said: Any, heard: Any) -> None:
        writer = self._writer
        assert writer is not None
        try:
            async for message in said:
                text: str = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                writer.write(text.encode() + b"\n")
                await writer.drain()
        except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
            heard.close()  # so that whoever waits for an answer hears that none will come

    async def _read_errors(self) -> None:
        process = self._process
        assert process is not None and process.stderr is not None
        while chunk := await process.stderr.read(_CHUNK):
            self._errors += chunk
            del self._errors[:-STDERR_BYTES]

    async def _leave(self) -> None:
        for stream in self._streams:
            stream.close()
        process, writer = self._process, self._writer
        if writer is not None:
            writer.close()
        if process is not None:
            await exit_within(process, EXIT_S)
            await end_supervised(process)
            # What was not read would keep the pipes open; nothing public lets go of them.
            pipes: Any = getattr(process, "_transport", None)
            if pipes is not None:
                pipes.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _refusal(line: bytes) -> SessionMessage | None:
    """For what was to be an answer and is no message: an error in its place, so that nobody waits for another."""
    found = _ANSWERS.search(line[:_SHOWN])
    if found is None:
        return None
    error = mcp_types.ErrorData(code=NO_MESSAGE, message="the answer is no message of the protocol")
    return SessionMessage(mcp_types.JSONRPCError(jsonrpc="2.0", id=int(found[1]), error=error))


def usable_directory(path: str | None) -> str | None:
    """The path if it is a directory here, else None: the directory of this process."""
    return path if path is not None and os.path.isdir(path) else None
