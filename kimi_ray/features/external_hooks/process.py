"""Running a hook's command: JSON on its stdin, bounded output, a time-out, and nothing left behind.

It runs under the tools' supervisor, so it dies with the process that started it, and so does what it left running.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

from kimi_ray.tools import supervisor

MAX_CONCURRENT = 16
"""Hooks of one process that run at once, of those that agents wait for and again of those in the background; further
ones wait for a place, and their time-outs with them."""
STREAM_BYTES = 1 << 20
"""What is kept of a hook's stdout, and of its stderr; the rest is read and dropped."""
TERM_GRACE_S = 0.1
"""From SIGTERM to SIGKILL."""
_CHUNK = 1 << 16
_LOOK_S = 0.5
_END_S = 3.0
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
                    await _exit_of(process)
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


@cache
def _shell() -> str:
    return shutil.which("bash") or "/bin/sh"


async def _start(command: str, given: BinaryIO, cwd: str, env: Mapping[str, str]) -> Process:
    fd = given.fileno()
    return await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-E", "-I", str(Path(supervisor.__file__)),
        "/bin/sh", "-c", _WITH_INPUT, _shell(), command, f"/dev/fd/{fd}",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=cwd, env=dict(env), pass_fds=(fd,), start_new_session=True,
    )  # fmt: skip


async def _read(stream: asyncio.StreamReader, head: _Head) -> None:
    while chunk := await stream.read(_CHUNK):
        head.add(chunk)


async def _exit_of(process: Process) -> None:
    # Process.wait() may wait for the end of the pipes as well, which a process that fled can hold open
    while process.returncode is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await process.wait()


async def _exit_within(process: Process, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await _exit_of(process)


async def _end(process: Process) -> None:
    """Ask what still runs to end, then cut its life line: the supervisor kills whatever is left."""
    line = process.stdin
    assert line is not None
    try:
        if process.returncode is None:
            line.write(supervisor.TERMINATE)
            await _exit_within(process, TERM_GRACE_S)
    finally:
        line.close()
        try:
            await _exit_within(process, _END_S)
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            if process.returncode is None or process.returncode < 0:
                # the supervisor itself was killed, perhaps by the hook: its session may still run
                await asyncio.get_running_loop().run_in_executor(None, supervisor.kill_session, process.pid)
