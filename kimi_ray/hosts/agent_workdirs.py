"""The private directories of this node, as others ask for them: made before their agents are there, and removed."""

from __future__ import annotations

import asyncio
from typing import Any

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.agent_services import SleepingWorkdirs
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.settings import Workdir
from kimi_ray.tools.workdirs import PreparedWorkdir, belongs_to, drop_sessions, prepare_workdir, sweep_sessions

_AT_ONCE = 4
"""Directories in the making: it is the disk that they wait for."""


class AgentWorkdirs:
    """Makes, drops and sweeps the private directories in ``base``."""

    def __init__(self, base: str, store: StoreCalls, sleeping: SleepingWorkdirs) -> None:
        self._base = base
        self._store = store
        self._sleeping = sleeping

    async def make(self, wishes: list[tuple[Workdir, str, list[str]]]) -> list[dict[str, Any]]:
        """Make working directories on this node before their agents are there: all, or none.

        Args:
            wishes: For each the kind, the name (``tools.workdirs.workdir_name``), and what a copy is to be without.

        Returns:
            For each ``{"path", "created"}``, as ``profile/bind`` has it in ``workdir`` (``path`` as ``prepared``).

        Raises:
            ToolError: ``workdir.*``, as ``prepare_workdir``; what was made is removed.
        """
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(wanted: Workdir, name: str, leave_out: list[str]) -> PreparedWorkdir:
            async with gate:
                return await prepare_workdir(wanted, base_dir=self._base, name=name, leave_out=leave_out)

        tasks = [asyncio.create_task(one(*wish)) for wish in wishes]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            await asyncio.shield(_undo(tasks))
            raise
        made = [task.result() for task in tasks]
        for workdir in made:
            self._sleeping.keep(workdir)
        return [{"path": workdir.path, "created": workdir.created} for workdir in made]

    async def drop(self, session_ids: list[str]) -> int:
        """See ``AgentHost.drop_workdirs``."""
        return await drop_sessions(self._base, session_ids)

    async def sweep(self) -> int:
        """Remove what sessions that are no more have left here; see ``sweep_sessions``.

        A copy of a home has the same id, and knows nothing of what was made after it was copied: it sweeps nothing.
        """
        try:
            home = await self._store.home()
        except KimiRayError:
            return 0  # what cannot be asked is left for the next
        if not await asyncio.to_thread(belongs_to, self._base, home):
            return 0
        return await sweep_sessions(self._base, self._is_there)

    async def _is_there(self, session_id: str) -> bool:
        try:
            if await self._store.read_document(session_id) is not None:
                return True
            return bool(await self._store.list_logs(session_id))
        except KimiRayError as error:
            if error.code in ("store.not_found", "store.deleted"):
                return False
            raise


async def _undo(tasks: list[asyncio.Task[PreparedWorkdir]]) -> None:
    for task in tasks:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(one.release() for one in done if isinstance(one, PreparedWorkdir)), return_exceptions=True)
