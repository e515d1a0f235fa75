"""Making and unmaking sessions as files: what ``publications`` asks of the JSONL backend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from kimi_ray.errors import StoreError
from kimi_ray.store.documents import Documents
from kimi_ray.store.forking import copy_log
from kimi_ray.store.fs import exists, io_errors, names_in
from kimi_ray.store.layout import DOCUMENT_NAME, Layout
from kimi_ray.store.log_files import LogSource
from kimi_ray.store.recovery import check_not_removed
from kimi_ray.store.refusals import session_exists
from kimi_ray.store.removal import remove_tree
from kimi_ray.store.seam import LogCopy, SessionCopy, Stream
from kimi_ray.store.stream_log import LogTools

_TRIES = 3
Opener = Callable[[Stream], Callable[[], AbstractContextManager[LogSource]]]
"""What opens a log for reading, as far as it is written."""


class SessionFiles:
    """See ``publications.Maker``."""

    def __init__(
        self,
        tools: LogTools,
        layout: Layout,
        documents: Documents,
        run: Callable[..., Awaitable[Any]],
        opener: Opener,
        prune: Callable[[set[str]], None],
    ) -> None:
        """
        Args:
            tools: What writes logs.
            layout: The home.
            documents: What writes documents.
            run: Runs blocking work in a thread of the store.
            opener: Finds the sources of copies.
            prune: Removes directories of workspaces that are empty.
        """
        self._prune = prune
        self._tools = tools
        self._layout = layout
        self._documents = documents
        self._run = run
        self._opener = opener
        self._made: set[str] = set()
        """Directories of sessions that were copied here: another process may have taken them back since."""

    def check_new(self, session_id: str, workspace_id: str) -> None:
        """See ``Maker.check_new``."""
        check_not_removed(self._layout, session_id)
        found = self._layout.session_dir(session_id)
        with io_errors(self._layout.sessions):
            if found is not None and self._holds_something(found):
                raise session_exists(session_id)
        self._layout.place(session_id, workspace_id)

    def _holds_something(self, directory: str) -> bool:
        """Whether there is a document or a log; a directory alone is what a process left that died too early."""
        fs, name = self._layout.fs, self._tools.framing.log_name
        agents = f"{directory}/agents"
        return exists(fs, f"{directory}/{DOCUMENT_NAME}") or any(
            exists(fs, f"{agents}/{agent}/{name}") for agent in names_in(fs, agents)
        )

    def forget(self, session_id: str) -> None:
        """See ``Maker.forget``."""
        found = self._layout.session_dir(session_id)
        if found is None or not exists(self._layout.fs, found):
            self._layout.forget(session_id, removed=True)

    def has_document(self, session_id: str) -> bool:
        """See ``Maker.has_document``."""
        with io_errors(self._layout.sessions):
            return self._documents.exists(session_id)

    async def make(self, copy: SessionCopy) -> None:
        """See ``Maker.make``."""
        directory = await self._run(self._layout.place, copy.session_id, copy.workspace_id)
        self._made.add(directory)
        try:
            made = await asyncio.gather(
                *(self._run(self._copy, copy.session_id, log, directory) for log in copy.logs), return_exceptions=True
            )
            for error in made:
                if isinstance(error, BaseException):
                    raise error
            await self._run(self._documents.create, directory, copy.document)
        finally:
            self._layout.forget(copy.session_id)

    def _copy(self, session_id: str, log: LogCopy, directory: str) -> None:
        target = Stream(session_id, str(log.header.get("agent_id", "")))
        self._layout.check_new_agent(target, directory)
        path = f"{directory}/agents/{target.agent_id}"
        for tries in range(_TRIES):
            try:
                with self._opener(log.source)() as source:
                    copy_log(self._tools, source, log.cut, target, log.header, path, log.tail)
                return
            except StoreError as error:
                # Beside a writer in another process that takes back half a write: as ``JsonlReader.steady``.
                if error.code != "store.corrupt" or tries == _TRIES - 1:
                    raise

    async def unmake(self, sessions: dict[str, str], *, shown: bool = False) -> None:
        """See ``Maker.unmake``."""
        await self._run(self._delete, sessions, shown)

    def _delete(self, sessions: dict[str, str], shown: bool) -> None:
        fs, directories = self._tools.fs, self._tools.directories
        home = self._layout.sessions
        with io_errors(home):
            for session_id, workspace_id in sessions.items():
                place = f"{home}/{workspace_id}/{session_id}"
                if place in self._made:
                    self._made.discard(place)
                    directories.forget(place)
                self._layout.forget(session_id, removed=True)
                directory = self._layout.session_dir(session_id)
                if directory is None or exists(fs, self._layout.tombstone(session_id)):
                    continue
                if shown:
                    with contextlib.suppress(FileNotFoundError):
                        fs.unlink(f"{directory}/{DOCUMENT_NAME}")
                        directories.sync(directory)
                remove_tree(fs, directory)
                directories.forget(directory)
                self._layout.forget(session_id, removed=True)
            self._tools.reservations.drop_sessions(set(sessions))
            names = set(sessions.values())
            # What an earlier try removed may not be durable yet, so they are synced in any case.
            touched = {f"{home}/{name}" for name in (self._layout.workspaces() if "" in names else names)}
            touched = {path for path in touched if exists(fs, path)}
            for path in touched:
                directories.sync(path)
        if touched:
            self._prune(touched)

    async def settle(self, session_id: str) -> None:
        """See ``Maker.settle``."""
        await self._run(self._documents.settle, session_id)
