"""The sessions of a home, newest first, from their documents."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import Field, ValidationError

from kimi_ray.settings import Settings
from kimi_ray.store.seam import Document


class SessionSummary(Settings):
    """What a listing shows of a session. Times are epoch milliseconds; ``error``: its document cannot be read."""

    id: str
    workspace_id: str
    title: str | None = None
    last_prompt: str | None = None
    created_at: int = 0
    updated_at: int = 0
    archived: bool = False
    cwd: str | None = None
    forked_from: str | None = None
    last_turn_reason: str | None = None
    agent_count: int = 0
    metadata: dict[str, Any] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    error: dict[str, Any] | None = None


def summary_of(document: Document) -> SessionSummary:
    """The summary of a stored document; one that is damaged is told as such and hides nobody else."""
    value = document.value
    base: dict[str, Any] = {"id": document.session_id, "workspace_id": document.workspace_id}
    if "error" in value and "created_at" not in value:
        return SessionSummary(**base, error=value["error"])
    shown = {key: value[key] for key in SessionSummary.model_fields if key in value and key not in base}
    shown.pop("error", None)
    try:
        return SessionSummary(**base, **shown, metadata=value.get("custom", {}))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return SessionSummary(
            **base, error={"code": "session.bad_document", "message": f"{place}: {first['msg']}", "retryable": False}
        )


class SessionList:
    """All sessions of a home.

    Args:
        documents: Reads them all.
    """

    def __init__(self, documents: Callable[[], Awaitable[list[Document]]]) -> None:
        self._documents = documents

    async def list_recent(
        self, limit: int = 20, *, workspace_id: str | None = None, archived: bool | None = False
    ) -> list[SessionSummary]:
        """The sessions that were active last, newest first.

        Args:
            limit: At most so many, at least 1.
            workspace_id: Only those of one workspace.
            archived: Only those that are not archived (False), that are (True), or both (None).
        """
        rows = await self._all(workspace_id, archived)
        return heapq.nlargest(max(1, limit), rows, key=lambda row: (row.updated_at, row.id))

    async def count(self, *, workspace_id: str | None = None, archived: bool | None = False) -> int:
        """How many there are; see ``list_recent``."""
        return len(await self._all(workspace_id, archived))

    async def get(self, session_id: str) -> SessionSummary | None:
        """One session, or None."""
        return next((row for row in await self._all(None, None) if row.id == session_id), None)

    async def _all(self, workspace_id: str | None, archived: bool | None) -> list[SessionSummary]:
        rows = [summary_of(document) for document in await self._documents()]
        return [
            row
            for row in rows
            if (workspace_id is None or row.workspace_id == workspace_id)
            and (archived is None or row.archived == archived or row.error is not None)
        ]
