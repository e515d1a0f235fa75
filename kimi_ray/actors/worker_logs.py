"""The log files that Ray keeps for a worker process: where they are, and their ends."""

from __future__ import annotations

import os
from pathlib import Path

from kimi_ray.actors.ray_environment import session_directory


def tail_own_logs(max_bytes: int) -> dict[str, str]:
    """The last ``max_bytes`` of each log file of this process, by file name (``worker-*-<pid>.out`` and the like)."""
    directory = Path(session_directory(), "logs")
    found: dict[str, str] = {}
    for path in sorted(directory.glob(f"*{os.getpid()}.*")):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            found[path.name] = file.read().decode("utf-8", "replace")
    return found
