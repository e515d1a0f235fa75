"""App-scope services: what is above single sessions in one home.

Here live the listing of sessions and workspaces, as clients of the store that keeps them, the check of a workspace's
path, and the catalogue of models. What may enter: reads over many sessions, and what settings say for all. What may
not: a live session's own state (``kimi_ray.session``), placement (``kimi_ray.hosts``).
"""

from kimi_ray.app.listing import IndexStatus, SessionList, SessionPage, SessionQuery, SessionSummary, summary_of
from kimi_ray.app.models import ModelCatalogue
from kimi_ray.app.workspaces import WorkspaceList, checked_workspace
from kimi_ray.store.workspace_registry import WorkspaceEntry

__all__ = [
    "IndexStatus",
    "ModelCatalogue",
    "SessionList",
    "SessionPage",
    "SessionQuery",
    "SessionSummary",
    "WorkspaceEntry",
    "WorkspaceList",
    "checked_workspace",
    "summary_of",
]
