"""A workspace is a directory; its id is made of its path. The home remembers those that were worked in."""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

from kimi_ray.errors import KimiRayError, SessionError
from kimi_ray.store.workspace_registry import WorkspaceEntry

_AGAIN_S = 10.0
_CLOSE_S = 2.0


def checked_workspace(path: str | os.PathLike[str]) -> str:
    """The absolute path of a workspace; links are not followed.

    Raises:
        SessionError: ``workspace.not_found``.
    """
    text: str = os.path.abspath(os.path.expanduser(str(os.fspath(path))))
    if not os.path.isdir(text):
        what = "is not a directory" if os.path.exists(text) else "does not exist"
        raise SessionError(
            f"the workspace {text} {what}",
            code="workspace.not_found",
            hint="give a directory that exists",
            details={"path": text},
        )
    return text


class WorkspaceCalls(Protocol):
    """What a ``WorkspaceList`` asks: the store's first process (``hosts.StoreCalls``)."""

    async def list_workspaces(self) -> list[WorkspaceEntry]:
        """All, the one opened last first."""
        ...

    async def touch_workspace(self, root: str, name: str | None = None) -> WorkspaceEntry:
        """One is worked in now."""
        ...

    async def update_workspace(self, workspace_id: str, name: str) -> WorkspaceEntry:
        """Another name."""
        ...

    async def delete_workspace(self, workspace_id: str) -> None:
        """Forget one."""
        ...


class WorkspaceList:
    """The directories that a home's sessions were worked in."""

    def __init__(self, store: WorkspaceCalls) -> None:
        """``store`` keeps the registry."""
        self._store = store
        self._touches: dict[str, asyncio.Task[None]] = {}
        self._touched_at: dict[str, float] = {}
        self.last_error: KimiRayError | None = None
        """Why the last ``touch`` failed, if it did: a session does not fail because of it."""

    async def list(self) -> list[WorkspaceEntry]:
        """All workspaces, the one opened last first. Spellings of one directory are one, with its ``alias_ids``.

        Raises:
            StoreError: why the home cannot be read.
        """
        return await self._store.list_workspaces()

    async def get(self, workspace_id: str) -> WorkspaceEntry | None:
        """A workspace by its id or the id of an alias, or None."""
        found = await self.list()
        return next((one for one in found if workspace_id in (one.id, *one.alias_ids)), None)

    async def rename(self, workspace_id: str, name: str) -> WorkspaceEntry:
        """Give a workspace another name than its directory's.

        Raises:
            SessionError: ``workspace.unknown``.
        """
        return await self._store.update_workspace(workspace_id, name)

    async def forget(self, workspace_id: str) -> None:
        """Leave a workspace out of the list, under all its ids, until somebody works in it again. Its sessions stay.

        Raises:
            SessionError: ``workspace.unknown``.
        """
        await self._store.delete_workspace(workspace_id)

    def touch(self, path: str) -> None:
        """Note that a directory is worked in now. Returns at once; a directory is noted every ten seconds at most."""
        loop = asyncio.get_running_loop()
        last = self._touched_at.get(path)
        if path not in self._touches and (last is None or loop.time() - last >= _AGAIN_S):
            self._touched_at[path] = loop.time()
            self._touches[path] = loop.create_task(self._touch(path))

    async def _touch(self, path: str) -> None:
        try:
            await self._store.touch_workspace(path)
        except KimiRayError as error:
            self.last_error = error
            self._touched_at.pop(path, None)
        finally:
            self._touches.pop(path, None)

    async def close(self) -> None:
        """Wait for what was noted, two seconds at most."""
        if self._touches:
            _, late = await asyncio.wait(list(self._touches.values()), timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
