"""Running commands: a scrubbed environment, a bounded output, a supervisor, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import time
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from kimi_ray.errors import ToolError
from kimi_ray.tools import supervisor
from kimi_ray.tools.contract import ExecResult

_PASSED = frozenset(
    {"PATH", "HOME", "LANG", "LANGUAGE", "TERM", "TMPDIR", "USER", "LOGNAME", "SHELL", "TZ", "VIRTUAL_ENV"}
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|^(KIMI_RAY|RAY|OPENAI)_", re.IGNORECASE)
_CHUNK = 1 << 16
_DRAIN_S = 1.0
_LOOK_S = 0.5
_END_S = 3.0
"""How long a supervisor may take to kill everything before it is killed itself."""


def scrubbed_environment(given: Mapping[str, str] | None = None, *, scratch: str | None = None) -> dict[str, str]:
    """The environment variables of a command: the few every program needs, and what was given on purpose.

    Nothing else of this process goes over: no keys, no tokens, nothing of Ray or of kimi_ray.

    Args:
        given: Variables named by the user; they are passed as they are and win.
        scratch: The directory for temporary files (``TMPDIR``).
    """
    found = {
        name: value
        for name, value in os.environ.items()
        if (name in _PASSED or name.startswith("LC_")) and not _SECRET.search(name)
    }
    found.setdefault("PATH", os.defpath)
    found.setdefault("LANG", "C.UTF-8")
    found.setdefault("TERM", "dumb")
    if scratch is not None:
        found["TMPDIR"] = scratch
    if given is not None:
        found.update(given)
    return found


@cache
def shell() -> str:
    """Bash, which models and users write for, else the system's shell; looked for once a process."""
    return shutil.which("bash") or "/bin/sh"


def supervised(*argv: str) -> tuple[str, ...]:
    """The command line by which ``argv``, and all that it starts, dies with this process. See ``supervisor``."""
    return (sys.executable, "-S", "-E", "-I", str(Path(supervisor.__file__)), *argv)


class _HeadAndTail:
    """The first and the last half of a stream, and how many bytes between them were let go."""

    __slots__ = ("_half", "_head", "_tail", "_tail_size", "total")

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= self._half:
                self._tail_size -= len(self._tail.popleft())

    def text(self) -> tuple[str, int]:
        """The text with the cut marked in its middle, and the number of bytes cut."""
        tail = b"".join(self._tail)[-self._half :]
        cut = self.total - len(self._head) - len(tail)
        if cut <= 0:
            return (bytes(self._head) + tail).decode(errors="replace"), 0
        # a character torn by our own cut is cut whole, so that U+FFFD stands only for what the command wrote
        head = bytes(self._head)
        for back in range(1, min(4, len(head) + 1)):
            lead = head[-back]
            if lead >= 0xC0:
                if back < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4):
                    head = head[:-back]
                break
            if lead < 0x80:
                break
        skip = 0
        while skip < min(3, len(tail)) and 0x80 <= tail[skip] < 0xC0:
            skip += 1
        tail = tail[skip:]
        cut = self.total - len(head) - len(tail)
        mark = f"\n[... {cut} bytes cut here ...]\n"
        return head.decode(errors="replace") + mark + tail.decode(errors="replace"), cut


async def run_command(
    argv: Sequence[str], *, cwd: str, env: Mapping[str, str], timeout_s: float | None, max_output_bytes: int
) -> ExecResult:
    """Run ``argv`` under a supervisor to its end.

    What the command leaves running is killed with it: when it ends, at the time-out, when this call is cancelled, and
    when this process dies.

    Args:
        timeout_s: Seconds, or None for no bound but the caller's.
        max_output_bytes: What is kept of stdout and stderr together: its first and its last half.

    Raises:
        ToolError: ``environment.failed`` when it cannot be started.
    """
    started = time.monotonic()
    output = _HeadAndTail(max_output_bytes)
    command = await start_command(argv, cwd=cwd, env=env, on_output=output.add)
    timed_out = False
    try:
        async with asyncio.timeout(timeout_s):
            await command.wait()
    except TimeoutError:
        timed_out = True
    finally:
        code = await command.end()
    text, cut = output.text()
    return ExecResult(
        exit_code=code,
        output=text,
        timed_out=timed_out,
        truncated_bytes=cut,
        duration_ms=round((time.monotonic() - started) * 1000),
    )


async def start_command(
    argv: Sequence[str], *, cwd: str, env: Mapping[str, str], on_output: Callable[[bytes], None]
) -> Command:
    """Start ``argv`` under a supervisor and leave it running.

    Args:
        on_output: Called with stdout and stderr as they come.

    Raises:
        ToolError: ``environment.failed`` when it cannot be started.
    """
    if any("\0" in part for part in argv):
        raise ToolError("a command cannot hold a NUL character", code="environment.failed", hint="remove it")
    try:
        process = await asyncio.create_subprocess_exec(
            *supervised(*argv),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            cwd=cwd, env=dict(env), start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ToolError(
            f"the command could not be started in {cwd}: {reason}",
            code="environment.failed",
            hint="put a very long command into a script file" if isinstance(error, OSError) else None,
            details={"cwd": cwd, "reason": reason},
        ) from error
    return Command(process, on_output)


class Command:
    """A command that was started: it runs until it ends or ``end`` is called, and dies with this process."""

    __slots__ = ("_process", "_reading")

    def __init__(self, process: Process, on_output: Callable[[bytes], None]) -> None:
        self._process = process
        self._reading = asyncio.create_task(_read_to_end(process, on_output))

    async def wait(self) -> int:
        """Its exit code, once it has ended; ``end`` is still to be called."""
        await exit_of(self._process)
        return self._code

    def terminate(self) -> None:
        """Ask its process group to end: a signal that it may catch (SIGTERM)."""
        if self._process.stdin is not None and self._process.returncode is None:
            self._process.stdin.write(supervisor.TERMINATE)

    async def end(self) -> int:
        """Kill what runs of it, take the rest of its output, and give its exit code. Idempotent."""
        try:
            await end_supervised(self._process)
            # all writers are dead by now, unless one fled from a supervisor that was killed
            await asyncio.wait({self._reading}, timeout=_DRAIN_S)
        finally:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        return self._code

    @property
    def _code(self) -> int:
        code = self._process.returncode if self._process.returncode is not None else -9
        return code if code >= 0 else 128 - code


async def _read_to_end(process: Process, on_output: Callable[[bytes], None]) -> None:
    assert process.stdout is not None
    while chunk := await process.stdout.read(_CHUNK):
        on_output(chunk)


async def exit_of(process: Process) -> None:
    """Return when it has ended."""
    # Process.wait() may wait for the end of the pipes as well, which a process that fled can hold open
    while process.returncode is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await process.wait()


async def exit_within(process: Process, seconds: float) -> None:
    """Return when it has ended, or after so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await exit_of(process)


async def end_supervised(process: Process) -> None:
    """Cut the life line and wait until the supervisor has killed everything; make sure of it if it does not."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await exit_within(process, _END_S)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        if process.returncode is None or process.returncode < 0:
            # the supervisor itself was killed, perhaps by what it watched: its session may still run
            await asyncio.get_running_loop().run_in_executor(None, supervisor.kill_session, process.pid)
