"""A workspace is a directory; its id is made of its path."""

from __future__ import annotations

import os

from kimi_ray.errors import SessionError


def checked_workspace(path: str | os.PathLike[str]) -> str:
    """The absolute path of a workspace; links are not followed.

    Raises:
        SessionError: ``workspace.not_found``.
    """
    text: str = os.path.abspath(os.path.expanduser(str(os.fspath(path))))
    if not os.path.isdir(text):
        what = "is not a directory" if os.path.exists(text) else "does not exist"
        raise SessionError(
            f"the workspace {text} {what}",
            code="workspace.not_found",
            hint="give a directory that exists",
            details={"path": text},
        )
    return text
