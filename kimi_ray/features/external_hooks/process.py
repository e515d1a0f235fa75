"""Running a hook's command: JSON on its stdin, bounded output, a time-out, and nothing left behind.

It runs under the tools' supervisor, so it dies with the process that started it, and so does what it left running.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from kimi_ray.tools import supervisor
from kimi_ray.tools.commands import end_supervised, exit_of, exit_within, shell, supervised

MAX_CONCURRENT = 16
"""Hooks of one process that run at once, of those that agents wait for and again of those in the background; further
ones wait for a place, and their time-outs with them."""
STREAM_BYTES = 1 << 20
"""What is kept of a hook's stdout, and of its stderr; the rest is read and dropped."""
TERM_GRACE_S = 0.1
"""From SIGTERM to SIGKILL."""
_CHUNK = 1 << 16
_DRAIN_S = 1.0
_WITH_INPUT = 'exec "$0" -c "$1" <"$2"'


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a hook's command ended. ``exit_code`` None: it was not started, ``error`` says why."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    duration_ms: int = 0
    error: str | None = None


class HookProcesses:
    """Runs the hooks of all agents of a process, so many at a time.

    Args:
        max_concurrent: Most commands at once, of each kind.
    """

    def __init__(self, max_concurrent: int = MAX_CONCURRENT) -> None:
        # Apart, so that no guard waits behind notices that hang.
        self._asked = asyncio.Semaphore(max_concurrent)
        self._told = asyncio.Semaphore(max_concurrent)

    async def run(
        self,
        command: str,
        stdin: bytes,
        *,
        cwd: str,
        env: Mapping[str, str],
        timeout_s: float,
        background: bool = False,
    ) -> CommandEnd:
        """Run a command through the shell to its end; what it leaves running is killed. Never raises for the command.

        At the time-out, and when this call is cancelled, its process group gets SIGTERM and 100 ms later SIGKILL.

        Args:
            command: For bash, or sh where there is none.
            stdin: What it reads.
            cwd: Its directory.
            env: All of its environment.
            timeout_s: Seconds from its start.
            background: No agent waits for it.
        """
        async with self._told if background else self._asked:
            started = time.monotonic()
            try:
                with _input(stdin) as given:
                    process = await _start(command, given, cwd, env)
            except (OSError, ValueError) as error:
                return CommandEnd(None, error=f"it could not be started in {cwd}: {error}")
            out, err = _Head(STREAM_BYTES), _Head(STREAM_BYTES)
            timed_out = False
            readers = [
                asyncio.create_task(_read(stream, head))
                for stream, head in ((process.stdout, out), (process.stderr, err))
                if stream is not None
            ]
            try:
                async with asyncio.timeout(timeout_s):
                    await exit_of(process)
            except TimeoutError:
                timed_out = True
            finally:
                try:
                    await _end(process)
                    await asyncio.wait(readers, timeout=_DRAIN_S)
                finally:
                    for reader in readers:
                        reader.cancel()
                    await asyncio.gather(*readers, return_exceptions=True)
            code = process.returncode if process.returncode is not None else -9
            return CommandEnd(
                exit_code=code if code >= 0 else 128 - code,
                stdout=out.text(),
                stderr=err.text(),
                timed_out=timed_out,
                duration_ms=round((time.monotonic() - started) * 1000),
            )


class _Head:
    """The first bytes of a stream."""

    __slots__ = ("_data", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        room = self._limit - len(self._data)
        if room > 0:
            self._data += data[:room]

    def text(self) -> str:
        return self._data.decode("utf-8", errors="replace")


def _input(data: bytes) -> BinaryIO:
    """A file without a name that holds the input: a hook that reads none of it, or half, blocks nobody."""
    file: BinaryIO
    if hasattr(os, "memfd_create"):
        file = open(os.memfd_create("kimi_ray.hook"), "w+b")  # noqa: SIM115  its caller closes it
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        file.write(data)
        file.flush()
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


async def _start(command: str, given: BinaryIO, cwd: str, env: Mapping[str, str]) -> Process:
    fd = given.fileno()
    return await asyncio.create_subprocess_exec(
        *supervised("/bin/sh", "-c", _WITH_INPUT, shell(), command, f"/dev/fd/{fd}"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=cwd, env=dict(env), pass_fds=(fd,), start_new_session=True,
    )  # fmt: skip


async def _read(stream: asyncio.StreamReader, head: _Head) -> None:
    while chunk := await stream.read(_CHUNK):
        head.add(chunk)


async def _end(process: Process) -> None:
    """Ask what still runs to end, then cut its life line: the supervisor kills whatever is left."""
    try:
        if process.returncode is None and process.stdin is not None:
            process.stdin.write(supervisor.TERMINATE)
            await exit_within(process, TERM_GRACE_S)
    finally:
        await end_supervised(process)
