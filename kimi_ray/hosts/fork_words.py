"""The words of a fork between driver and session host: plain picklable data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kimi_ray.settings import Sampling, Workdir
from kimi_ray.store.seam import Stream

ForkWorkdir = Literal["shared", "copy", "git"] | Workdir
"""Where a fork works: in the source's directory, in a copy or a worktree of it, or where a ``Workdir`` says."""

MAX_FORKS = 1000
"""Most forks of one call."""


@dataclass(frozen=True, slots=True)
class ForkSpec:
    """Forks of one agent that appear together or not at all.

    ``group`` names them: the same fork asked twice is one fork. ``attempt`` counts from 0 how often the driver asked.
    """

    group: str
    source: Stream
    targets: tuple[str, ...]
    attempt: int = 0
    at: Any = None
    turn_index: Any = None
    workspaces: tuple[str, ...] | None = None
    """The source must be in one of these workspaces; None: in any."""
    workspace_id: str | None = None
    """Of the forks; None: the source's. So is ``cwd``."""
    cwd: str | None = None
    node_id: str | None = None
    """The driver's node: a directory whose node the log does not tell is looked for there."""
    title: str | None = None
    child: bool = False
    workdir: ForkWorkdir = "shared"
    sampling: Sampling | None = None
    seeds: tuple[int, ...] | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    tags: dict[str, str] = field(default_factory=dict[str, str])
    leave_out: tuple[str, ...] = ()
    """What a copied directory is to be without: what its agent may not read."""


@dataclass(frozen=True, slots=True)
class ForkedSession:
    """A session that a fork made, cold."""

    session_id: str
    workspace_id: str
    document: dict[str, Any]
