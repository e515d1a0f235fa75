"""Where things are below the home, and which ids may become part of a path.

::

    <home>/store.json                                        identity
    <home>/sessions/<workspace_id>/<session_id>/state.json   session document
    <home>/sessions/<workspace_id>/<session_id>/agents/<agent_id>/wire.jsonl[.zst]
    <home>/owners/<session_id>   <home>/writers/<ulid>.lock   <home>/claim.lock
    <home>/tombstones/<session_id>   <home>/blobs/<hex[:2]>/<hex>
"""

from __future__ import annotations

import threading

from kimi_ray.errors import StoreError
from kimi_ray.ids import is_path_safe_id
from kimi_ray.store.fs import Fs, exists, names_in
from kimi_ray.store.seam import Stream

LOG_NAMES = {"none": "wire.jsonl", "zstd": "wire.jsonl.zst"}
"""The name of a log file by the compression of its store."""
REDO_NAME = "wire.redo"
DOCUMENT_NAME = "state.json"
NO_WORKSPACE = "no_workspace"


def check_id(value: str, what: str) -> str:
    """The id itself when it may become part of a path.

    Raises:
        StoreError: ``store.invalid_id``.
    """
    if not is_path_safe_id(value):
        raise StoreError(
            f"{what} {value!r} cannot be stored",
            code="store.invalid_id",
            hint="use 1 to 128 characters of A-Z, a-z, 0-9, '_' and '-'",
            details={"id": value, "what": what},
        )
    return value


class Layout:
    """Paths of one home, and the memory of which workspace a session is in."""

    def __init__(self, fs: Fs, home: str) -> None:
        self.fs = fs
        self.home = home
        self.sessions = f"{home}/sessions"
        self.tombstones = f"{home}/tombstones"
        self.owners = f"{home}/owners"
        self.writers = f"{home}/writers"
        self.blobs = f"{home}/blobs"
        self._places: dict[str, str] = {}
        self._folded: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def owner_file(self, session_id: str) -> str:
        """The owner file of a session."""
        return f"{self.owners}/{check_id(session_id, 'session id')}"

    def tombstone(self, session_id: str) -> str:
        """The mark that a session was removed."""
        return f"{self.tombstones}/{check_id(session_id, 'session id')}"

    def workspaces(self) -> list[str]:
        """Workspace ids that have sessions."""
        return names_in(self.fs, self.sessions)

    def session_dir(self, session_id: str) -> str | None:
        """The directory of a session: remembered, found on disk, or None."""
        check_id(session_id, "session id")
        place = self._places.get(session_id)
        if place is not None:
            return f"{self.sessions}/{place}/{session_id}"
        for workspace in self.workspaces():
            path = f"{self.sessions}/{workspace}/{session_id}"
            if exists(self.fs, path):
                self._places[session_id] = workspace
                return path
        return None

    def require_session_dir(self, session_id: str) -> str:
        """The directory of a session.

        Raises:
            StoreError: ``store.not_found``.
        """
        path = self.session_dir(session_id)
        if path is None:
            raise not_found(session_id)
        return path

    def place(self, session_id: str, workspace_id: str) -> str:
        """Decide where a new session goes; an existing one stays where it is.

        Raises:
            StoreError: ``store.invalid_id``, also when the id differs only in case from an existing one.
        """
        found = self.session_dir(session_id)
        if found is not None:
            return found
        check_id(session_id, "session id")
        if workspace_id.startswith("."):
            check_id(workspace_id, "workspace id")
        check_id(workspace_id.replace(".", "_"), "workspace id")
        self._check_case(f"{self.sessions}/{workspace_id}", session_id, "session id")
        self._places[session_id] = workspace_id
        return f"{self.sessions}/{workspace_id}/{session_id}"

    def forget(self, session_id: str, *, removed: bool = False) -> None:
        """Drop where a session is. Its name stays taken by it, also against ids that differ only in case, unless it is
        ``removed``.
        """
        place = self._places.pop(session_id, None)
        if place is None:
            return
        with self._lock:
            self._folded.pop(f"{self.sessions}/{place}/{session_id}/agents", None)
            if removed:
                self._folded.get(f"{self.sessions}/{place}", {}).pop(session_id.lower(), None)

    def agent_dir(self, stream: Stream) -> str | None:
        """The directory of a stream, or None for an unknown session."""
        check_id(stream.agent_id, "agent id")
        session = self.session_dir(stream.session_id)
        return None if session is None else f"{session}/agents/{stream.agent_id}"

    def check_new_agent(self, stream: Stream, session_dir: str) -> None:
        """Refuse an agent id that differs only in case from an existing one.

        Raises:
            StoreError: ``store.invalid_id``.
        """
        check_id(stream.agent_id, "agent id")
        self._check_case(f"{session_dir}/agents", stream.agent_id, "agent id")

    def workspace_of(self, session_id: str) -> str:
        """The workspace id of a placed session."""
        return self.require_session_dir(session_id).rsplit("/", 2)[-2]

    def all_sessions(self) -> list[tuple[str, str]]:
        """``(workspace_id, session_id)`` of every session on disk that is not removed; other names are not ours."""
        gone = set(names_in(self.fs, self.tombstones))
        return [
            (workspace, session)
            for workspace in self.workspaces()
            for session in names_in(self.fs, f"{self.sessions}/{workspace}")
            if session not in gone and is_path_safe_id(session)
        ]

    def _check_case(self, directory: str, name: str, what: str) -> None:
        with self._lock:
            known = self._folded.get(directory)
            if known is None:
                known = {other.lower(): other for other in names_in(self.fs, directory)}
                self._folded[directory] = known
            other = known.setdefault(name.lower(), name)
        _refuse_twin(other, name, what)


def _refuse_twin(existing: str, wanted: str, what: str) -> None:
    if existing != wanted and existing.lower() == wanted.lower():
        raise StoreError(
            f"{what} {wanted!r} differs only in case from {existing!r}",
            code="store.invalid_id",
            hint="some file systems would mix the two up; choose another id",
            details={"id": wanted, "existing": existing},
        )


def not_found(what: object) -> StoreError:
    """``store.not_found`` for a session or a stream."""
    return StoreError(
        f"{what} is not in this store",
        code="store.not_found",
        hint="list the sessions of this home, or check that the home is the right one",
        details={"id": str(what)},
    )


def deleted(session_id: str) -> StoreError:
    """``store.deleted`` for a session that was removed."""
    return StoreError(
        f"session {session_id} was removed",
        code="store.deleted",
        hint="a removed session id cannot be used again; create a new session",
        details={"session_id": session_id},
    )
