"""App-scope services: what is above single sessions in one home.

Here live the listing of sessions from their documents and the check of workspaces. What may enter: reads over many
sessions. What may not: a live session's own state (``kimi_ray.session``), placement (``kimi_ray.hosts``).
"""

from kimi_ray.app.listing import SessionList, SessionSummary, summary_of
from kimi_ray.app.workspaces import checked_workspace

__all__ = ["SessionList", "SessionSummary", "checked_workspace", "summary_of"]
