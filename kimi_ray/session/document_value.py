"""The fields of a session's document (``state.json``, version 1) and how each kind of change touches them.

Pure functions over a JSON object. The log wins for agents, the last prompt, the last turn's reason and
``updated_at``; the document wins for title, archived, caller metadata (``custom``) and tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from kimi_ray.errors import LogError, SessionError
from kimi_ray.events import encode, freeze, thaw
from kimi_ray.session.prompt_text import title_from_prompt

DOCUMENT_VERSION = 1
LISTED_AGENTS = 1000
"""How many agents the document names one by one; ``agent_count`` says how many there are, their headers who."""

TurnReasonKind = Literal["completed", "cancelled", "failed"]
Value = dict[str, Any]

MAX_METADATA_BYTES = 1 << 20
MAX_TITLE_CHARS = 1000
_CALLER_KEYS = frozenset({"title", "metadata", "tags", "archived"})
_NEW_TITLES = (None, "", "New Session")


@dataclass(frozen=True, slots=True)
class Activity:
    """What a session's main agent did, for its document."""

    session_id: str
    at: int
    """Epoch milliseconds."""
    last_prompt: str | None = None
    last_turn_reason: TurnReasonKind | None = None


@dataclass(frozen=True, slots=True)
class AgentEntry:
    """An agent as the document registers it."""

    agent_id: str
    type: Literal["main", "sub"] = "sub"
    parent_agent_id: str | None = "main"
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    forked_from: str | None = None

    def to_data(self) -> Value:
        """The entry as JSON."""
        data: Value = {"type": self.type, "parent_agent_id": self.parent_agent_id}
        if self.labels:
            data["labels"] = dict(self.labels)
        if self.forked_from is not None:
            data["forked_from"] = self.forked_from
        return data


def new_document(
    session_id: str,
    *,
    workspace_id: str,
    cwd: str | None,
    now: int,
    title: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    forked_from: str | None = None,
) -> Value:
    """The first document of a session. An explicit title is the caller's (``custom``) and no prompt replaces it."""
    value: Value = {
        "id": session_id,
        "version": DOCUMENT_VERSION,
        "created_at": now,
        "updated_at": now,
        "archived": False,
        "workspace_id": workspace_id,
        "agents": {},
        "agent_count": 0,
        "custom": checked_metadata(metadata or {}),
        "tags": checked_tags(tags or {}),
    }
    if title is not None:
        value["title"] = title
        value["title_kind"] = "custom"
    if cwd is not None:
        value["cwd"] = cwd
    if forked_from is not None:
        value["forked_from"] = forked_from
    return value


def loaded_document(session_id: str, stored: Mapping[str, Any]) -> Value:
    """A stored document with everything that this version expects in place.

    Raises:
        SessionError: ``session.version_unsupported`` for a document of a newer version.
    """
    version = stored.get("version", DOCUMENT_VERSION)
    if type(version) is not int or version > DOCUMENT_VERSION:
        raise SessionError(
            f"the document of {session_id} has version {version!r}, this program reads {DOCUMENT_VERSION}",
            code="session.version_unsupported",
            hint="upgrade kimi-ray",
            details={"found": version, "known": DOCUMENT_VERSION},
        )
    value: Value = thaw(dict(stored))
    value["id"] = session_id
    value["version"] = DOCUMENT_VERSION
    if not isinstance(value.get("archived"), bool):
        value["archived"] = False
    for key in ("agents", "custom", "tags"):
        if not isinstance(value.get(key), dict):
            value[key] = {}
    value.setdefault("agent_count", len(value["agents"]))
    return value


def with_agents(value: Value, entries: list[AgentEntry]) -> bool:
    """Register agents; an equal entry is no change, another replaces the whole entry. ``updated_at`` stays."""
    agents = cast("dict[str, Value]", value["agents"])
    changed = False
    for entry in entries:
        data = entry.to_data()
        known = agents.get(entry.agent_id)
        if known == data:
            continue
        changed = True
        if known is not None:
            agents[entry.agent_id] = data
            continue
        value["agent_count"] = int(value["agent_count"]) + 1
        if len(agents) < LISTED_AGENTS:
            agents[entry.agent_id] = data
    return changed


def with_activity(value: Value, activity: Activity) -> bool:
    """What the main agent did."""
    value["updated_at"] = max(activity.at, int(value["updated_at"]))
    if activity.last_turn_reason is not None:
        value["last_turn_reason"] = activity.last_turn_reason
    if activity.last_prompt is not None:
        value["last_prompt"] = activity.last_prompt
        title = title_from_prompt(activity.last_prompt)
        if title is not None and value.get("title_kind") != "custom" and value.get("title") in _NEW_TITLES:
            value["title"] = title
            value["title_kind"] = "replaceable"
    return True


def with_patch(value: Value, patch: Mapping[str, Any], *, now: int) -> bool:
    """A caller's change: ``title``, ``metadata`` and ``tags`` (merged key by key, None removes), ``archived``.

    Title and archived keep ``updated_at``; metadata and tags touch it.

    Raises:
        SessionError: ``session.bad_update`` naming the key. The value is then unchanged.
    """
    unknown = sorted(patch.keys() - _CALLER_KEYS)
    if unknown:
        raise SessionError(
            f"a session's document has no field {unknown[0]!r} that a caller may change",
            code="session.bad_update",
            hint=f"fields are {', '.join(sorted(_CALLER_KEYS))}",
            details={"key": unknown[0]},
        )
    metadata = checked_metadata(patch.get("metadata") or {})
    tags = cast("Value", patch.get("tags") or {})
    checked_tags({key: text for key, text in tags.items() if text is not None})
    before = dict(value)
    if patch.get("title") is not None:
        value["title"] = str(patch["title"])
        value["title_kind"] = "custom"
    if "archived" in patch and bool(patch["archived"]) != value["archived"]:
        value["archived"] = bool(patch["archived"])
        if value["archived"]:
            value["archived_at"] = now
        else:
            value.pop("archived_at", None)
    for field_name, change in (("custom", metadata), ("tags", tags)):
        if change:
            merged = {**value[field_name], **change}
            value[field_name] = {key: item for key, item in merged.items() if item is not None}
            value["updated_at"] = max(now, int(value["updated_at"]))
    return value != before


def checked_title(title: str | None) -> str | None:
    """A title that a document can hold: text of at most ``MAX_TITLE_CHARS``.

    Raises:
        SessionError: ``session.bad_metadata``.
    """
    if title is None:
        return None
    whole = isinstance(title, str) and title.encode(errors="replace").decode() == title  # pyright: ignore[reportUnnecessaryIsInstance]
    if not whole or len(title) > MAX_TITLE_CHARS:
        raise SessionError(
            "the title is not a text that can be stored" if not whole else f"the title has {len(title)} characters",
            code="session.bad_metadata",
            hint=f"a title is text of at most {MAX_TITLE_CHARS} characters",
        )
    return title


def checked_metadata(metadata: Mapping[str, Any]) -> Value:
    """A copy of caller metadata under the JSON rule.

    Raises:
        SessionError: ``session.bad_metadata``.
    """
    try:
        checked = cast("Value", thaw(freeze(dict(metadata))))
        if len(encode(checked)) > MAX_METADATA_BYTES:
            raise SessionError(
                f"metadata of more than {MAX_METADATA_BYTES} bytes",
                code="session.bad_metadata",
                hint="it is read with every listing: keep large data in a file and its path here",
            )
        return checked
    except LogError as error:
        raise SessionError(
            f"metadata: {error.message}", code="session.bad_metadata", hint="metadata is plain JSON"
        ) from None


def checked_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """A copy of tags: text to text.

    Raises:
        SessionError: ``session.bad_metadata``.
    """
    for key, text in tags.items():
        if type(key) is not str or type(text) is not str:
            raise SessionError(
                f"the tag {key!r} is not text", code="session.bad_metadata", hint="tags map text to text"
            )
    return dict(tags)
