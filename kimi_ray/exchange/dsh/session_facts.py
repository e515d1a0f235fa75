"""What a session's header and events say about it: our header, its document, and how to go on with it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, cast

from pydantic import ValidationError

from kimi_ray.events import LogHeader, ParentRef, SessionEvent, WriterRef
from kimi_ray.exchange.dsh.lossless import within_rule
from kimi_ray.exchange.dsh.model import JsonObject
from kimi_ray.ids import MAIN, workspace_id
from kimi_ray.session import new_document
from kimi_ray.session.document_value import (
    MAX_TITLE_CHARS,
    Activity,
    AgentEntry,
    TurnReasonKind,
    with_activity,
    with_agents,
)
from kimi_ray.session.prompt_text import last_prompt
from kimi_ray.settings import Profile, Sampling, Workdir
from kimi_ray.store.layout import NO_WORKSPACE
from kimi_ray.version import __version__

FORMAT: Final = "dsh"
_BUILTIN: Final = {"read": "Read", "write": "Write", "edit": "Edit", "glob": "Glob", "grep": "Grep", "bash": "Bash"}
_PROFILE_NAME_CHARS: Final = 64


@dataclass(slots=True)
class SessionFacts:
    """Folded over the converted events of one session."""

    title: str | None = None
    prompt: str | None = None
    turn_reason: TurnReasonKind | None = None
    last_time: int = 0
    request: JsonObject = field(default_factory=dict[str, Any])
    """The last request header."""

    def follow(self, event: SessionEvent) -> None:
        """Take one more event."""
        kind, data = event.type, event.data
        self.last_time = event.time
        if kind == "user/message" and data["source"].get("kind") == "user" and event.replaced is None:
            self.prompt = last_prompt([block for block in data["content"] if block["type"] != "dsh/block"])
        elif kind == "turn/end":
            self.turn_reason = _REASONS.get(data["reason"]["kind"], "failed")
        elif kind == "request/header":
            self.request = data["header"]
        elif kind == "dsh/session/title" and type(data.get("title")) is str:
            self.title = data["title"]


_REASONS: Final[dict[str, TurnReasonKind]] = {
    "completed": "completed",
    "truncated": "completed",
    "cancelled": "cancelled",
}


def log_header(
    session_id: str, header: JsonObject, facts: SessionFacts, parent_id: str | None, counts: Counter[str]
) -> JsonObject:
    """The header of our log, with the original's beside it and how the agent is to be bound when it goes on."""
    own = cast("JsonObject", within_rule(header, counts))
    parent = None if parent_id is None else ParentRef(session_id=parent_id, agent_id=MAIN)
    subagent = own.get("origin") == "subagent"
    labels = {"imported_from": FORMAT}
    if own["id"] != session_id:
        labels["dsh_id"] = own["id"]
    made = LogHeader(
        session_id=session_id,
        agent_id=MAIN,
        created_at=int(own["createdAt"]),
        cwd=own.get("cwd"),
        parent=parent,
        seed_length=own.get("seedLength"),
        origin="subagent" if subagent else "fork" if parent is not None else "main",
        delegation_depth=own.get("delegationDepth", 0),
        profile=own.get("agentPreset"),
        labels=labels,
        writer=WriterRef(name="kimi-ray", version=__version__),
    )
    return made.to_data() | {"imported": {"format": FORMAT, "header": own}, "bind": _bind(own, facts, counts)}


def _bind(header: JsonObject, facts: SessionFacts, counts: Counter[str]) -> JsonObject:
    """As ``profile/bind`` would say it: what the last request was made with."""
    request = cast("JsonObject", within_rule(facts.request, counts))
    system = request.get("system")
    tools: Any = request.get("tools")
    named = [tool.get("name") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    profile = Profile(
        name=(header.get("agentPreset") or "imported")[:_PROFILE_NAME_CHARS],
        description="As an imported session was run",
        system_prompt=system if type(system) is str else None,
        tools=tuple(ours for theirs, ours in _BUILTIN.items() if theirs in named),
    )
    bind: JsonObject = {"profile": profile.said(), "model": request.get("model")}
    try:
        sampling = Sampling.model_validate(request.get("sampling") or {}).said()
    except ValidationError:
        sampling = {}  # a setting that no server of ours takes; the log has it
    if sampling:
        bind["sampling"] = sampling
    cwd = header.get("cwd")
    if type(cwd) is str and os.path.isdir(cwd):
        bind["workdir"] = Workdir.shared(cwd, writes=True).said()
    return bind


def document(
    session_id: str, header: JsonObject, facts: SessionFacts, origin: JsonObject, forked_from: str | None
) -> JsonObject:
    """The first document of the imported session.

    Args:
        session_id: Our id.
        header: Our header.
        facts: Of its events.
        origin: What is kept about the import, in the caller's metadata under ``dsh``.
        forked_from: Our id of the session it was forked from.
    """
    cwd = header.get("cwd")
    value = new_document(
        session_id,
        workspace_id=workspace_of(cwd),
        cwd=cwd,
        now=header["created_at"],
        title=facts.title[:MAX_TITLE_CHARS] if facts.title else None,
        metadata={FORMAT: origin},
        forked_from=forked_from,
    )
    with_agents(value, [AgentEntry(MAIN, type="main", parent_agent_id=None)])
    with_activity(value, Activity(session_id, facts.last_time, facts.prompt, facts.turn_reason))
    return value


def workspace_of(cwd: str | None) -> str:
    """The workspace of a session that was run in a directory."""
    return NO_WORKSPACE if cwd is None else workspace_id(cwd)
