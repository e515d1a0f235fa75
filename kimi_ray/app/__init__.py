"""App-scope services: what is above single sessions in one home.

Here live the listing of sessions and workspaces, as clients of the store that keeps them, and the check of a
workspace's path. What may enter: reads over many sessions. What may not: a live session's own state
(``kimi_ray.session``), placement (``kimi_ray.hosts``).
"""

from kimi_ray.app.listing import IndexStatus, SessionList, SessionPage, SessionQuery, SessionSummary, summary_of
from kimi_ray.app.workspaces import WorkspaceList, checked_workspace
from kimi_ray.store.workspace_registry import WorkspaceEntry

__all__ = [
    "IndexStatus",
    "SessionList",
    "SessionPage",
    "SessionQuery",
    "SessionSummary",
    "WorkspaceEntry",
    "WorkspaceList",
    "checked_workspace",
    "summary_of",
]
