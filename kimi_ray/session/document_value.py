"""The fields of a session's document (``state.json``, version 1) and how each kind of change touches them.

Pure functions over a JSON object. The log wins for agents, the last prompt, the last turn's reason and
``updated_at``; the document wins for title, archived, caller metadata (``custom``) and tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, cast

from kimi_ray.errors import LogError, SessionError
from kimi_ray.events import encode, freeze, thaw
from kimi_ray.session.prompt_text import title_from_prompt

DOCUMENT_VERSION = 1
LISTED_AGENTS = 1000
"""How many agents the document names one by one; ``agent_count`` says how many there are, their headers who."""

TurnReasonKind = Literal["completed", "cancelled", "failed"]
TitleKind = Literal["replaceable", "generated", "custom"]
"""Whose a title is: ``replaceable`` came from a prompt, ``generated`` from a model, ``custom`` from the caller."""

Value = dict[str, Any]

MAX_METADATA_BYTES = 1 << 20
MAX_TITLE_CHARS = 1000
CHILD_KIND = "child"
_CALLER_KEYS = frozenset({"title", "title_kind", "force", "metadata", "tags", "archived", "updated_at"})
_NEW_TITLES = ("", "New Session")
_TITLE_KINDS = ("replaceable", "generated", "custom")
_TURN_REASONS = ("completed", "cancelled", "failed")


@dataclass(frozen=True, slots=True)
class Activity:
    """What a session's main agent did, for its document."""

    session_id: str
    at: int
    """Epoch milliseconds."""
    last_prompt: str | None = None
    last_turn_reason: TurnReasonKind | None = None
    first_prompt: str | None = None
    """Where this tells of several prompts: the first of them, which may give a new session its title."""


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


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a session comes from, as its document tells.

    ``forked_from`` is ``{session_id, agent_id, at}``, of older and imported documents ``{session_id}``;
    ``parent_session_id`` is set for a child (``ws.create_child``).
    """

    forked_from: Value | None = None
    fork_group: str | None = None
    fork_index: int | None = None
    parent_session_id: str | None = None


def lineage_of(value: Mapping[str, Any]) -> Lineage:
    """The lineage in a document; fields of another shape than expected count as absent."""
    source: Any = value.get("forked_from")
    custom: Any = value.get("custom")
    group, index = value.get("fork_group"), value.get("fork_index")
    parent: Any = None
    if isinstance(custom, Mapping) and cast("Value", custom).get("child_session_kind") == CHILD_KIND:
        parent = cast("Value", custom).get("parent_session_id")
    return Lineage(
        {"session_id": source} if isinstance(source, str) else dict(cast("Value", source)) if _is_map(source) else None,
        group if isinstance(group, str) else None,
        index if type(index) is int else None,
        parent if isinstance(parent, str) else None,
    )


def new_document(
    session_id: str,
    *,
    workspace_id: str,
    cwd: str | None,
    now: int,
    title: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    forked_from: str | Mapping[str, Any] | None = None,
) -> Value:
    """The first document of a session. An explicit title is the caller's (``custom``) and no prompt replaces it.

    ``forked_from`` is ``{session_id, agent_id, at}`` of the source, or its session's id alone.
    """
    value: Value = {
        "id": session_id,
        "version": DOCUMENT_VERSION,
        "created_at": now,
        "updated_at": now,
        "archived": False,
        "workspace_id": workspace_id,
        "agents": {},
        "agent_count": 0,
        "custom": checked_metadata(metadata),
        "tags": checked_tags(tags),
    }
    if title is not None:
        value["title"] = title
        value["title_kind"] = "custom"
    if cwd is not None:
        value["cwd"] = cwd
    if forked_from is not None:
        value["forked_from"] = forked_from if isinstance(forked_from, str) else dict(forked_from)
    return value


def loaded_document(session_id: str, stored: Mapping[str, Any]) -> Value:
    """A stored document with everything that this version expects in place; equal to ``stored`` if nothing was amiss.

    Fields of the wrong kind are put right where their meaning is plain (an ISO time) and dropped where it is not;
    fields that this version does not know stay.

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
    _normalise_times(value)
    for key in ("agents", "custom", "tags"):
        if not isinstance(value.get(key), dict):
            value[key] = {}
    value["agents"] = {name: entry for name, entry in value["agents"].items() if _is_map(entry)}
    value["tags"] = {name: text for name, text in value["tags"].items() if isinstance(text, str)}
    if type(value.get("agent_count")) is not int or value["agent_count"] < len(value["agents"]):
        value["agent_count"] = len(value["agents"])
    for key in ("title", "cwd", "last_prompt", "workspace_id"):
        if key in value and not isinstance(value[key], str):
            del value[key]
    if value.get("last_turn_reason", "completed") not in _TURN_REASONS:
        del value["last_turn_reason"]
    if "title" not in value:
        value.pop("title_kind", None)
    elif value.get("title_kind") not in _TITLE_KINDS:
        value["title_kind"] = "replaceable"
    return value


def _normalise_times(value: Value) -> None:
    times = {key: _epoch_ms(value.get(key)) for key in ("created_at", "updated_at", "archived_at")}
    known = [at for key, at in times.items() if at is not None and key != "archived_at"]
    value["created_at"] = times["created_at"] if times["created_at"] is not None else min(known, default=0)
    value["updated_at"] = times["updated_at"] if times["updated_at"] is not None else value["created_at"]
    if value["archived"] and times["archived_at"] is not None:
        value["archived_at"] = times["archived_at"]
    else:
        value.pop("archived_at", None)


def _epoch_ms(value: object) -> int | None:
    """A time as epoch milliseconds: a number, or ISO 8601 (without a zone it is UTC); None if it is neither."""
    if isinstance(value, bool):
        return None
    try:
        if isinstance(value, int | float):
            return int(value)
        if isinstance(value, str):
            at = datetime.fromisoformat(value)
            return int((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        return None
    return None


def _is_map(value: object) -> bool:
    return isinstance(value, Mapping)


def with_agents(value: Value, entries: list[AgentEntry]) -> bool:
    """Register agents. What is known of one is kept: labels are merged, type and parent stay as they were first told.

    An entry that adds nothing is no change. ``updated_at`` stays.
    """
    agents = cast("dict[str, Value]", value["agents"])
    changed = False
    for entry in entries:
        data = entry.to_data()
        known = agents.get(entry.agent_id)
        if known is not None:
            merged = {**data, **{key: item for key, item in known.items() if item is not None}}
            if "labels" in data:
                merged["labels"] = {**cast("Value", known.get("labels") or {}), **data["labels"]}
            if merged != known:
                changed = True
                agents[entry.agent_id] = merged
            continue
        changed = True
        value["agent_count"] = int(value["agent_count"]) + 1
        if len(agents) < LISTED_AGENTS:
            agents[entry.agent_id] = data
    return changed


def with_logged_agents(value: Value, entries: list[AgentEntry]) -> bool:
    """All agents that have logs, as their headers tell: those win; labels of both sides are kept."""
    agents = cast("dict[str, Value]", value["agents"])
    before = (dict(agents), value["agent_count"])
    for entry in entries:
        data = entry.to_data()
        known = agents.get(entry.agent_id)
        if known is None and len(agents) >= LISTED_AGENTS:
            continue
        merged = {**(known or {}), **data}
        labels = {**cast("Value", (known or {}).get("labels") or {}), **cast("Value", data.get("labels") or {})}
        agents[entry.agent_id] = {**merged, "labels": labels} if labels else merged
    value["agent_count"] = len({*agents, *(entry.agent_id for entry in entries)})
    return (agents, value["agent_count"]) != before


def entry_of_log(agent_id: str, header: Mapping[str, Any]) -> AgentEntry:
    """An agent as the header of its log tells of it."""
    labels = _labels_of(header)
    if agent_id == "main":
        return AgentEntry(agent_id, "main", None, labels)
    return AgentEntry(agent_id, "sub", parent_of_log(header), labels)


def parent_of_log(header: Mapping[str, Any]) -> str:
    """The agent to which a subagent belongs. A copy of a tree has its source as parent, and its own in the labels."""
    labeled: Any = _labels_of(header).get("parent_agent_id")
    parent: Value = header.get("parent") or {}
    if labeled is None and parent.get("session_id") == header.get("session_id"):
        labeled = parent.get("agent_id")
    return str(labeled or "main")


def _labels_of(header: Mapping[str, Any]) -> dict[str, str]:
    labels: Value = header.get("labels") or {}
    return {key: str(text) for key, text in labels.items()}


def turn_reason(stop: str | None) -> TurnReasonKind:
    """How the document tells the end of a turn: ``stop`` is its kind, or a result's ``stop``."""
    if stop in ("completed", "truncated", "repeated"):
        return "completed"
    return "cancelled" if stop == "cancelled" else "failed"


def with_activity(value: Value, activity: Activity) -> bool:
    """What the main agent did."""
    value["updated_at"] = max(activity.at, int(value["updated_at"]))
    if activity.last_turn_reason is not None:
        value["last_turn_reason"] = activity.last_turn_reason
    if activity.last_prompt is not None:
        value["last_prompt"] = activity.last_prompt
        title = title_from_prompt(activity.first_prompt or activity.last_prompt)
        new = str(value.get("title") or "").strip() in _NEW_TITLES
        if title is not None and value.get("title_kind") != "custom" and new:
            value["title"] = title
            value["title_kind"] = "replaceable"
    return True


def with_patch(value: Value, patch: Mapping[str, Any], *, now: int) -> bool:
    """A caller's change: ``title``, ``metadata`` and ``tags`` (merged key by key, None removes), ``archived``.

    Title and archived keep ``updated_at``; metadata and tags touch it; an explicit ``updated_at`` (epoch
    milliseconds) wins. With ``title_kind: "generated"`` the title is a program's: it touches ``updated_at``, and is
    dropped when the caller has given one (``force`` true overrides that).

    Raises:
        SessionError: ``session.bad_update`` naming the key, ``session.bad_metadata``. The value is then unchanged.
    """
    unknown = sorted(patch.keys() - _CALLER_KEYS)
    if unknown:
        raise SessionError(
            f"a session's document has no field {unknown[0]!r} that a caller may change",
            code="session.bad_update",
            hint=f"fields are {', '.join(sorted(_CALLER_KEYS))}",
            details={"key": unknown[0]},
        )
    metadata = checked_metadata(patch.get("metadata"))
    tags: Any = patch.get("tags")
    if isinstance(tags, Mapping):
        checked_tags({key: text for key, text in cast("Value", tags).items() if text is not None})
    changes = {
        "custom": metadata,
        "tags": cast("Value", tags or {}) if isinstance(tags, Mapping) else checked_tags(tags),
    }
    merged = {name: merged_metadata(value[name], change) for name, change in changes.items() if change}
    title = checked_title(patch.get("title"))
    kind = _checked_kind(patch.get("title_kind", "custom"))
    updated_at = _checked_time(patch.get("updated_at"))
    before = dict(value)
    touched = False
    refused = kind == "generated" and value.get("title_kind") == "custom" and not patch.get("force")
    if title is not None and not refused:
        value["title"] = title
        value["title_kind"] = kind
        touched = kind == "generated"
    if "archived" in patch and bool(patch["archived"]) != value["archived"]:
        value["archived"] = bool(patch["archived"])
        if value["archived"]:
            value["archived_at"] = now
        else:
            value.pop("archived_at", None)
    if merged:
        value.update(merged)
        touched = True
    if updated_at is not None:
        value["updated_at"] = updated_at
    elif touched:
        value["updated_at"] = max(now, int(value["updated_at"]))
    return value != before


def _checked_kind(kind: object) -> TitleKind:
    if kind in ("generated", "custom"):
        return cast("TitleKind", kind)
    raise SessionError(
        f"a title cannot be given as {kind!r}",
        code="session.bad_update",
        hint="title_kind is custom or generated",
        details={"key": "title_kind"},
    )


def _checked_time(at: object) -> int | None:
    if at is None or (type(at) is int and at >= 0):
        return at
    raise SessionError(
        f"updated_at {at!r} is no time",
        code="session.bad_update",
        hint="give epoch milliseconds",
        details={"key": "updated_at"},
    )


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


def checked_metadata(metadata: Mapping[str, Any] | None) -> Value:
    """A copy of caller metadata under the JSON rule, of at most ``MAX_METADATA_BYTES``.

    Raises:
        SessionError: ``session.bad_metadata``.
    """
    return _storable("metadata", metadata, "metadata is plain JSON: a mapping of text")


def checked_tags(tags: Mapping[str, Any] | None) -> dict[str, str]:
    """A copy of tags: text to text, together at most ``MAX_METADATA_BYTES``.

    Raises:
        SessionError: ``session.bad_metadata``.
    """
    for key, text in tags.items() if isinstance(tags, Mapping) else ():
        if type(key) is not str or type(text) is not str:
            raise SessionError(
                f"the tag {key!r} is not text", code="session.bad_metadata", hint="tags map text to text"
            )
    return _storable("tags", tags, "tags map text to text")


def merged_metadata(before: Mapping[str, Any], change: Mapping[str, Any]) -> Value:
    """Caller metadata, or tags, with a change on top; None removes a key.

    Raises:
        SessionError: ``session.bad_metadata`` when it grows beyond ``MAX_METADATA_BYTES`` by that.
    """
    merged = {key: item for key, item in {**before, **change}.items() if item is not None}
    size = len(encode(merged))
    if size > MAX_METADATA_BYTES and size > len(encode(dict(before))):
        raise _too_large("metadata, with what is there already,")
    return merged


def _storable(name: str, given: object, hint: str) -> Value:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise SessionError(
            f"{name} cannot be a {type(given).__name__}", code="session.bad_metadata", hint=hint, details={"key": name}
        )
    try:
        checked = cast("Value", thaw(freeze(dict(cast("Value", given)))))
        size = len(encode(checked))
    except LogError as error:
        why = error.message.encode(errors="backslashreplace").decode()  # it names keys as they are
        raise SessionError(f"{name}: {why}", code="session.bad_metadata", hint=hint) from None
    if size > MAX_METADATA_BYTES:
        raise _too_large(name)
    return checked


def _too_large(name: str) -> SessionError:
    return SessionError(
        f"{name} of more than {MAX_METADATA_BYTES} bytes",
        code="session.bad_metadata",
        hint="it is read with every listing: keep large data in a file and its path here",
    )
