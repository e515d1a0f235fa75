"""Where sessions will lie that nothing is stored of yet."""

from __future__ import annotations

import threading

from kimi_ray.store.layout import check_id, not_found
from kimi_ray.store.sqlite.catalogue import case_twin


class Places:
    """Workspaces of sessions that were opened and not yet written. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workspaces: dict[str, tuple[str, str]] = {}

    def find(self, session_id: str) -> str | None:
        """The workspace that was decided for a session."""
        with self._lock:
            name, workspace_id = self._workspaces.get(session_id.lower(), ("", ""))
            return workspace_id if name == session_id else None

    def place(self, session_id: str, workspace_id: str | None) -> str:
        """Decide the workspace of a session that is not stored; the first decision stays.

        Raises:
            StoreError: ``store.not_found`` without a decision, ``store.invalid_id``.
        """
        with self._lock:
            known = self._workspaces.get(session_id.lower())
            if known is not None and known[0] != session_id:
                raise case_twin("session id", session_id, known[0])
            if known is not None:
                return known[1]
            if workspace_id is None:
                raise not_found(session_id)
            check_id(workspace_id.replace(".", "_"), "workspace id")
            self._workspaces[session_id.lower()] = (session_id, workspace_id)
            return workspace_id

    def forget(self, session_id: str) -> None:
        """Drop what was decided: it is stored, or will not be."""
        with self._lock:
            name, _ = self._workspaces.get(session_id.lower(), ("", ""))
            if name == session_id:
                del self._workspaces[session_id.lower()]
