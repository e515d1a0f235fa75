"""What a path names: a session of a home, one of its agents, or what a run directory's rollouts belong to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kimi_ray.errors import ConfigError
from kimi_ray.ids import is_path_safe_id
from kimi_ray.runs.run_directory import MANIFEST, read_attempts, read_manifest, read_rows

_IDENTITY = "store.json"
_SESSIONS, _AGENTS = "sessions", "agents"
_OF_A_SESSION, _OF_AN_AGENT = 3, 5
"""Parts below the home: ``sessions/<workspace>/<session>/agents/<agent>``."""


def find_place(path: str | os.PathLike[str]) -> tuple[str, str, str | None]:
    """The home, the session and the agent (None: all) that a path names.

    Args:
        path: A session's directory, an agent's, a log file, or a run directory (its newest session).

    Raises:
        ConfigError: ``request.unknown_id`` {path}; RunError: ``run.corrupt``.
    """
    place = Path(path).expanduser().absolute()
    if (place / MANIFEST).is_file():
        config: dict[str, Any] = read_manifest(place).get("config") or {}
        rows = [*read_rows(place), *read_attempts(place)]
        ids = [str(row.session_id) for row in rows if row.session_id]
        home = config.get("home")
        if home and ids:
            return str(home), max(ids), None
    for home in place.parents:
        if (home / _IDENTITY).is_file():
            parts = place.relative_to(home).parts
            if len(parts) >= _OF_A_SESSION and parts[0] == _SESSIONS and is_path_safe_id(parts[2]) and place.exists():
                agent = parts[4] if len(parts) >= _OF_AN_AGENT and parts[3] == _AGENTS else None
                return str(home), parts[2], agent
            break
    raise ConfigError(
        f"{place} is neither a session's directory nor a run's",
        code="request.unknown_id",
        hint="name <home>/sessions/<workspace>/<session>, a log in it, a run directory, or a session by its id; "
        "a replay takes no archives",
        details={"path": str(place)},
    )


def split_name(text: str) -> tuple[str, str | None]:
    """The session and the agent (None: all) of an id or of ``SESSION/AGENT``.

    Raises:
        ConfigError: ``request.unknown_id`` for a text that can be neither.
    """
    session_id, slash, agent_id = text.partition("/")
    if not is_path_safe_id(session_id) or (slash and not is_path_safe_id(agent_id)):
        raise not_there(text)
    return session_id, agent_id or None


def not_there(text: str) -> ConfigError:
    """``request.unknown_id`` for what is neither a path that exists nor the name of a session or of an agent."""
    return ConfigError(
        f"{text[:200]!r} is neither a path that is there, nor a session's id or SESSION/AGENT of this home",
        code="request.unknown_id",
        hint="give a whole id, SESSION/AGENT, or the path of a run directory or of a session's; @last, ends of ids and "
        "RUN:ITEM are the command line's (kimi-ray sessions list shows the ids)",
        details={"path": text[:1000]},
    )
