"""The sessions of a home, newest first, as the index of its store gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pydantic import ValidationError

from kimi_ray.errors import ConfigError
from kimi_ray.store.session_index_query import IndexStatus, SessionPage, SessionQuery
from kimi_ray.store.session_index_rows import SessionSummary, summary_of

__all__ = ["IndexStatus", "Listing", "SessionList", "SessionPage", "SessionQuery", "SessionSummary", "summary_of"]


class Listing(Protocol):
    """What a ``SessionList`` asks: the store's processes as one object (``hosts.StoreCalls``)."""

    async def query_sessions(self, query: SessionQuery, *, aliases: bool = False) -> SessionPage:
        """The sessions that are asked for."""
        ...

    async def count_sessions(self, query: SessionQuery, *, aliases: bool = False) -> int:
        """How many there are."""
        ...

    async def get_session_summary(self, session_id: str) -> SessionSummary | None:
        """One, or None."""
        ...

    async def forget_session_summary(self, session_id: str) -> None:
        """Drop one from the index."""
        ...

    async def index_status(self) -> IndexStatus:
        """How the index is."""
        ...

    async def prepare_index(self) -> IndexStatus:
        """Make it ready."""
        ...


class SessionList:
    """All sessions of a home. What was written before a call is in its answer.

    Args:
        store: Has the index.
    """

    def __init__(self, store: Listing) -> None:
        self._store = store

    async def list_recent(
        self,
        limit: int = 20,
        *,
        workspace_id: str | None = None,
        workspace_ids: Sequence[str] | None = None,
        archived: bool | None = False,
        child_of: str | None = None,
        forked_from: str | None = None,
        fork_group: str | None = None,
        tags: Mapping[str, str] | None = None,
        run_id: str | None = None,
        text: str | None = None,
        since: int | None = None,
        before: str | None = None,
        after: str | None = None,
    ) -> list[SessionSummary]:
        """The sessions that were active last, newest first (``updated_at``, then id). Every filter must hold.

        Args:
            limit: At most so many, at least 1.
            workspace_id: Only those of one workspace, under every spelling of its directory.
            workspace_ids: Only those of these ids, as they are.
            archived: Only those that are not archived (False), that are (True), or both (None). A session whose
                document cannot be read is always there, with its ``error``.
            child_of: Only children of this session (``create_child``).
            forked_from: Only forks of this session.
            fork_group: Only forks that were made together.
            tags: Only those that have all of these.
            run_id: Only those of a run.
            text: Only those with this in their title or last prompt, in any case.
            since: Only those where something happened at or after this time, in epoch milliseconds.
            before: A session id: only newer ones, those next to it.
            after: A session id: only older ones. Of an unknown id there are none.

        Raises:
            ConfigError: ``request.invalid`` naming the argument.
            StoreError: why the home cannot be read.
        """
        page = await self.page(
            limit,
            workspace_id=workspace_id,
            workspace_ids=workspace_ids,
            archived=archived,
            child_of=child_of,
            forked_from=forked_from,
            fork_group=fork_group,
            tags=tags,
            run_id=run_id,
            text=text,
            since=since,
            before=before,
            after=after,
        )
        return list(page.items)

    async def page(self, limit: int = 20, **filters: Any) -> SessionPage:
        """As ``list_recent`` with the same arguments, and the cursor that goes on where there are more.

        Raises:
            ConfigError: ``request.invalid`` naming the argument.
            StoreError: why the home cannot be read.
        """
        query, aliases = _query(limit=limit, **filters)
        return await self._store.query_sessions(query, aliases=aliases)

    async def count(self, **filters: Any) -> int:
        """How many there are, with the filters of ``list_recent``; cursors do not count.

        Raises:
            ConfigError: ``request.invalid`` naming the argument.
            StoreError: why the home cannot be read.
        """
        query, aliases = _query(**filters)
        return await self._store.count_sessions(query, aliases=aliases)

    async def get(self, session_id: str) -> SessionSummary | None:
        """One session, archived or not, or None."""
        return await self._store.get_session_summary(session_id)

    async def remove(self, session_id: str) -> None:
        """Drop a session's row from the index; the session stays, and comes back to it by itself."""
        await self._store.forget_session_summary(session_id)

    async def status(self) -> IndexStatus:
        """How the index is; answers are right in every state."""
        return await self._store.index_status()

    async def prepare(self) -> IndexStatus:
        """Wait until the index is ready, or was tried to be; the status then."""
        while True:
            status = await self._store.prepare_index()
            if status.state != "preparing":
                return status


def _query(
    workspace_id: str | None = None, workspace_ids: Sequence[str] | None = None, **filters: Any
) -> tuple[SessionQuery, bool]:
    wanted = None if workspace_ids is None else tuple(workspace_ids)
    if workspace_id is not None:
        wanted = (workspace_id,) if wanted is None else tuple(one for one in wanted if one == workspace_id)
    given: dict[str, Any] = {name: value for name, value in filters.items() if value is not None or name == "archived"}
    if isinstance(given.get("tags"), Mapping):
        given["tags"] = dict(given["tags"])
    try:
        return SessionQuery.model_validate({"workspace_ids": wanted, **given}), workspace_id is not None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{place}: {first['msg']}",
            code="request.invalid",
            hint="SessionList.list_recent says what it takes",
            details={"key": place},
        ) from None
