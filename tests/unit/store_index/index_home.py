"""A store process over a home in a directory, its sessions, and an answer that does not come from the index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kimi_ray.session import new_document
from kimi_ray.store.persistence import PersistenceService
from kimi_ray.store.seam import Document, StoreOptions
from kimi_ray.store.session_index import IndexPace, SessionIndex
from kimi_ray.store.session_index_query import SessionQuery

QUICK = IndexPace(reconcile_s=3600.0, again_s=0.02, window_s=0.001)
"""As fast as it goes; compares with the documents only when told."""
EVERYTHING = SessionQuery(archived=None, limit=100_000)


class Home:
    """One store process."""

    def __init__(self, path: Path, pace: IndexPace = QUICK, backend: str = "jsonl") -> None:
        self.path = path
        options = StoreOptions(backend=backend, durability="os")
        self.service = PersistenceService(str(path), options, index_pace=pace)
        self._grants: dict[str, tuple[int, int]] = {}

    async def index(self) -> SessionIndex:
        return await self.service.index()

    async def write(self, session_id: str, at: int = 1, workspace_id: str = "w", **changes: Any) -> None:
        """The next document of a session."""
        grant, revision = self._grants.get(session_id, (0, 0))
        if not grant:
            claim = await self.service.open_session(session_id, f"n-{id(self)}", workspace_id)
            grant, revision = claim.grant, claim.revision
        value = new_document(session_id, workspace_id=workspace_id, cwd="/x", now=at) | changes
        written = await self.service.write_document(session_id, value, grant, f"n-{id(self)}", revision)
        self._grants[session_id] = (grant, written)

    async def remove(self, session_id: str) -> None:
        await self.service.remove(session_id)
        self._grants.pop(session_id, None)

    async def ids(self, **filters: Any) -> list[str]:
        """Who is listed."""
        page = await self.service.query_sessions(
            SessionQuery.model_validate({"archived": None, "limit": 100_000} | filters)
        )
        return [item.id for item in page.items]

    async def ready(self) -> SessionIndex:
        """The index, ready, with everything in it."""
        index = await self.index()
        await until(lambda: self._is_ready(index))
        return index

    def _is_ready(self, index: SessionIndex) -> bool:
        index.start()
        return index.state == "ready" and not index.pending()

    async def scanned(self) -> list[str]:
        """Who should be listed, newest first, by a rule of its own."""
        documents = await (await self.service.store()).list_documents()
        return [one.session_id for one in sorted(documents, key=place, reverse=True)]


def place(document: Document) -> tuple[int, str]:
    return (document.value.get("updated_at", 0), document.session_id)


@asynccontextmanager
async def opened(path: Path, pace: IndexPace = QUICK, backend: str = "jsonl") -> AsyncGenerator[Home]:
    home = Home(path, pace, backend)
    try:
        yield home
    finally:
        await home.service.close()


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.002)


def state_file(home: Path, session_id: str) -> Path:
    (found,) = home.glob(f"sessions/*/{session_id}/state.json")
    return found
