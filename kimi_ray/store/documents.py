"""Session documents: ``state.json``, replaced atomically, with its revision inside the file."""

from __future__ import annotations

from typing import Any, cast

from pydantic_core import from_json, to_json

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import Fs, exists, io_errors, names_in, read_file, replace_file
from kimi_ray.store.layout import DOCUMENT_NAME, Layout
from kimi_ray.store.leftovers import clear_before
from kimi_ray.store.owners import io_errors_but_missing
from kimi_ray.store.refusals import document_conflict
from kimi_ray.store.reserve import Reserve
from kimi_ray.store.seam import Document

REVISION = "revision"


class Documents:
    """The documents of one home. Blocking; the caller holds the session's claim when it writes."""

    def __init__(
        self, fs: Fs, layout: Layout, directories: Directories, *, durable: bool, reserve: Reserve | None = None
    ) -> None:
        self._reserve = reserve
        self._fs = fs
        self._layout = layout
        self._directories = directories
        self._durable = durable

    def read(self, session_id: str) -> Document | None:
        """The document of a session, or None.

        Raises:
            StoreError: ``store.corrupt``.
        """
        directory = self._layout.session_dir(session_id)
        return None if directory is None else self._read(directory, session_id)

    def exists(self, session_id: str) -> bool:
        """Whether a session has a document, readable or not."""
        directory = self._layout.session_dir(session_id)
        return directory is not None and exists(self._fs, f"{directory}/{DOCUMENT_NAME}")

    def settle(self, session_id: str) -> None:
        """Make a document durable that was found; its process may have died before it did."""
        directory = self._layout.session_dir(session_id)
        if directory is not None:
            with io_errors(directory):
                self._directories.sync(directory)

    def _read(self, directory: str, session_id: str) -> Document | None:
        path = f"{directory}/{DOCUMENT_NAME}"
        try:
            with io_errors_but_missing(path):
                data = read_file(self._fs, path)
        except FileNotFoundError:
            return None
        workspace_id = directory.rsplit("/", 2)[-2]
        try:
            value: Any = from_json(data)
            facts = cast("dict[str, Any]", value)
            revision = facts.pop(REVISION)
            if not isinstance(revision, int):
                raise TypeError("its revision is not a number")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path} is damaged: {error}",
                code="store.corrupt",
                hint="restore the file from a backup; the logs beside it are not affected",
                details={"file": path, "offset": 0, "seq": -1},
            ) from error
        return Document(session_id, workspace_id, revision, facts)

    def clear_leftovers(self, session_id: str, writer: str) -> None:
        """Remove temporary files of a process that died while writing the document, or making a log beside it.

        Call it under the claim; ``writer`` as in ``leftovers.clear_before``.
        """
        directory = self._layout.session_dir(session_id)
        if directory is not None:
            with io_errors(directory):
                clear_before(self._fs, directory, writer)
                for agent in names_in(self._fs, f"{directory}/agents"):
                    clear_before(self._fs, f"{directory}/agents/{agent}", writer)

    def list(self) -> list[Document]:
        """All documents; a damaged one has ``value={"error": ...}`` and revision -1."""
        found: list[Document] = []
        for workspace_id, session_id in self._layout.all_sessions():
            directory = f"{self._layout.sessions}/{workspace_id}/{session_id}"
            try:
                document = self._read(directory, session_id)
            except KimiRayError as error:
                if isinstance(error.__cause__, NotADirectoryError):
                    continue  # a file that somebody put there
                document = Document(session_id, workspace_id, -1, {"error": error.to_data()})
            if document is not None:
                found.append(document)
        return found

    def write(self, session_id: str, value: dict[str, Any], *, revision: int) -> int:
        """Replace the document if it still has ``revision`` (0: there is none); returns the new revision.

        Raises:
            StoreError: ``store.conflict`` {revision}, ``store.not_found``, and what a file call gives.
        """
        directory = self._layout.require_session_dir(session_id)
        present = self._read(directory, session_id)
        stored = 0 if present is None else present.revision
        if stored != revision:
            raise document_conflict(session_id, stored, revision)
        self._replace(directory, value, stored + 1)
        return stored + 1

    def create(self, directory: str, value: dict[str, Any]) -> None:
        """Write the first document of a session that nobody else sees.

        Raises:
            StoreError: What a file call gives.
        """
        self._replace(directory, value, 1)

    def _replace(self, directory: str, value: dict[str, Any], revision: int) -> None:
        data = to_json({REVISION: revision, **{key: item for key, item in value.items() if key != REVISION}})
        path = f"{directory}/{DOCUMENT_NAME}"

        def replace() -> None:
            self._directories.ensure(directory)
            replace_file(self._fs, path, data + b"\n", sync=self._durable, unique=new_ulid())
            self._directories.sync(directory)

        with io_errors(path):
            if self._reserve is None:
                replace()
            else:
                self._reserve.spend(len(data), replace)
