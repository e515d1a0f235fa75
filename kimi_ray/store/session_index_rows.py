"""What the index keeps of a session: a pure function of its document."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

from pydantic import Field, ValidationError

from kimi_ray.settings import Settings
from kimi_ray.store.seam import Document

NOT_ARCHIVED, ARCHIVED, UNREADABLE = 0, 1, 2
"""Whether a session is archived; of one whose document cannot be read nobody knows."""

_FARTHEST = 1 << 62
_BETWEEN = "\x1f"


class SessionSummary(Settings):
    """What a listing shows of a session. Times are epoch milliseconds; ``error``: its document cannot be read."""

    id: str
    workspace_id: str
    title: str | None = None
    last_prompt: str | None = None
    created_at: int = 0
    updated_at: int = 0
    archived: bool = False
    archived_at: int | None = None
    cwd: str | None = None
    parent_session_id: str | None = None
    """Of a session that was made as another's child, that one's id."""
    forked_from: str | None = None
    """The session that it was forked from."""
    fork_group: str | None = None
    """Names the forks that were made together; ``fork_index`` counts them from 0."""
    fork_index: int | None = None
    last_turn_reason: str | None = None
    agent_count: int = 0
    metadata: dict[str, Any] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def run_id(self) -> str | None:
        """The run that it belongs to, or None."""
        return run_id_of(self.metadata, self.tags)


_NAMES = frozenset(SessionSummary.model_fields) - {"id", "workspace_id", "error", "metadata", "parent_session_id"}


def summary_of(document: Document) -> SessionSummary:
    """The summary of a stored document; one that is damaged is told as such and hides nobody else."""
    value = document.value
    base: dict[str, Any] = {"id": document.session_id, "workspace_id": document.workspace_id}
    if "error" in value and "created_at" not in value:
        return SessionSummary(**base, error=value["error"])
    shown = {key: value[key] for key in _NAMES if key in value}
    forked_from: Any = shown.get("forked_from")
    if isinstance(forked_from, dict):
        shown["forked_from"] = cast("dict[str, Any]", forked_from).get("session_id")
    custom: Any = value.get("custom", {})
    if isinstance(custom, dict):
        custom = cast("dict[str, Any]", custom)
        parent: Any = custom.get("parent_session_id")
        shown["parent_session_id"] = parent if isinstance(parent, str) else None
    agents: Any = value.get("agents")
    if "agent_count" not in shown and isinstance(agents, dict):
        shown["agent_count"] = len(cast("dict[str, Any]", agents))
    try:
        return SessionSummary(**base, **shown, metadata=custom)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return SessionSummary(
            **base, error={"code": "session.bad_document", "message": f"{place}: {first['msg']}", "retryable": False}
        )


def run_id_of(*tables: Any) -> str | None:
    """The run that a session's caller metadata or tags name, or None."""
    for table in tables:
        if isinstance(table, dict) and cast("dict[str, Any]", table).get("run_id"):
            return str(cast("dict[str, Any]", table)["run_id"])
    return None


@dataclass(frozen=True, slots=True)
class IndexRow:
    """A session in the index: what it is found by, and its summary as JSON."""

    id: str
    workspace_id: str
    revision: int
    updated_at: int
    archived: int
    cwd: str | None
    child_of: str | None
    """The parent, of a session that has both markers of a child."""
    forked_from: str | None
    fork_group: str | None
    run_id: str | None
    tags: tuple[tuple[str, str], ...]
    search: str
    """Title and last prompt, folded for searching."""
    summary: bytes

    @property
    def key(self) -> tuple[int, str]:
        """Its place in a listing; the greatest comes first."""
        return (self.updated_at, self.id)

    @property
    def digest(self) -> bytes:
        """Tells whether the document was changed in anything that is shown."""
        facts = f"{self.workspace_id}/{self.revision}/".encode()
        return blake2b(facts + self.summary, digest_size=12).digest()

    def to_summary(self) -> SessionSummary:
        """The summary."""
        return SessionSummary.model_validate_json(self.summary)


def row_of(document: Document) -> IndexRow:
    """The row of a stored document."""
    summary = summary_of(document)
    child = summary.metadata.get("child_session_kind") == "child"
    unreadable = summary.error is not None
    return IndexRow(
        id=summary.id,
        workspace_id=summary.workspace_id,
        revision=bounded(document.revision),
        updated_at=bounded(summary.updated_at),
        archived=UNREADABLE if unreadable else ARCHIVED if summary.archived else NOT_ARCHIVED,
        cwd=summary.cwd,
        child_of=summary.parent_session_id if child else None,
        forked_from=summary.forked_from,
        fork_group=summary.fork_group,
        run_id=summary.run_id,
        tags=tuple(sorted(summary.tags.items())),
        search=folded(f"{summary.title or ''}{_BETWEEN}{summary.last_prompt or ''}"),
        summary=summary.model_dump_json(exclude_defaults=True).encode(),
    )


def folded(text: str) -> str:
    """Text as it is searched: without case, and without what UTF-8 cannot hold."""
    return text.encode(errors="replace").decode().casefold()


def bounded(number: int) -> int:
    """A number that the index can hold; beyond, the farthest one."""
    return max(-_FARTHEST, min(_FARTHEST, number))
