"""A command as a background task: its output flows into the task, and stopping it is a signal, a grace, a kill."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable
from contextlib import suppress

from kimi_ray.agent.background import TaskEnd, TaskWork
from kimi_ray.errors import ToolError
from kimi_ray.features.tasks.service import GRACE_S
from kimi_ray.tools.contract import Environment, RunningCommand, StartsCommands

MAX_OUTPUT_BYTES = 16 << 20
"""A command that writes more is ended: nobody reads it, and it is not likely to stop by itself."""


class BackgroundCommand:
    """One command on its way to be a task: started first, so that what keeps it from starting is the caller's to hear.

    ``start`` it, hand ``work`` to the tasks, or ``abandon`` it.
    """

    def __init__(self, running: RunningCommand, output: _Output) -> None:
        self._running = running
        self._output = output

    @classmethod
    async def start(cls, environment: Environment, command: str, cwd: str | None) -> BackgroundCommand:
        """Start it.

        Raises:
            ToolError: ``environment.*``; ``environment.no_background`` where commands cannot run on by themselves.
        """
        if not isinstance(environment, StartsCommands):
            raise ToolError(
                "commands cannot run in the background here",
                code="environment.no_background",
                hint="run it without run_in_background",
            )
        output = _Output()
        return cls(await environment.start(command, cwd=cwd, on_output=output.take), output)

    @property
    def work(self) -> TaskWork:
        """What the task does: wait for the command's end."""
        return self._work

    async def abandon(self) -> None:
        """End it at once."""
        await self._running.end()

    async def _work(self, write: Callable[[str], None]) -> TaskEnd:
        self._output.flow_into(write)
        try:
            code = await self._until_end()
        except asyncio.CancelledError:
            self._running.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._running.wait()
            raise
        finally:
            await self._running.end()
            self._output.close()
        if code is None:
            reason = f"it wrote more than {MAX_OUTPUT_BYTES >> 20} MiB and was ended"
            return TaskEnd("failed", reason=reason)
        return TaskEnd("completed" if code == 0 else "failed", exit_code=code)

    async def _until_end(self) -> int | None:
        """The exit code, or None once there is too much output."""
        ending = asyncio.create_task(self._running.wait())
        flooding = asyncio.create_task(self._output.flooded.wait())
        try:
            await asyncio.wait([ending, flooding], return_when=asyncio.FIRST_COMPLETED)
            return ending.result() if ending.done() else None
        finally:
            ending.cancel()
            flooding.cancel()


class _Output:
    """Bytes of a command on their way into a task: held until there is one, decoded, and counted."""

    def __init__(self) -> None:
        self.flooded = asyncio.Event()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[bytes] = []
        self._write: Callable[[str], None] | None = None
        self._bytes = 0

    def take(self, data: bytes) -> None:
        if self.flooded.is_set():
            return
        self._bytes += len(data)
        if self._bytes > MAX_OUTPUT_BYTES:
            data = data[: len(data) - (self._bytes - MAX_OUTPUT_BYTES)]
            self.flooded.set()
        if self._write is None:
            self._held.append(data)
        else:
            self._write(self._decoder.decode(data))

    def flow_into(self, write: Callable[[str], None]) -> None:
        self._write = write
        write(self._decoder.decode(b"".join(self._held)))
        self._held.clear()

    def close(self) -> None:
        if self._write is not None:
            self._write(self._decoder.decode(b"", final=True))
