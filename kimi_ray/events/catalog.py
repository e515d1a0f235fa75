"""The vocabulary: every event type, whether it is on the surface and whether a reader may skip it.

An entry fixes ``ignorable``; a caller cannot choose it. A Feature adds its own types with ``Catalog.with_types``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from kimi_ray.errors import LogError
from kimi_ray.events import payloads as p


@dataclass(frozen=True, slots=True)
class EventType:
    """One type of event. ``payload`` is the model that its data follows (checked by tests and readers)."""

    name: str
    payload: type[BaseModel]
    ignorable: bool = False
    surface: bool = False
    doc: str = ""


class Catalog:
    """The event types that one program knows."""

    def __init__(self, types: Iterable[EventType]) -> None:
        self._by_name: dict[str, EventType] = {}
        for entry in types:
            if entry.name in self._by_name:
                raise LogError(f"the event type {entry.name} is declared twice", code="log.duplicate_type")
            self._by_name[entry.name] = entry

    def __iter__(self) -> Iterator[EventType]:
        return iter(self._by_name.values())

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def get(self, name: str) -> EventType | None:
        """The entry, or None for an unknown type."""
        return self._by_name.get(name)

    def with_types(self, types: Iterable[EventType]) -> Catalog:
        """A catalogue with more types (of a Feature)."""
        return Catalog([*self, *types])


SURFACE_TYPES = frozenset({"user/message", "assistant/message", "tool/result", "surface/cut"})

CORE = Catalog(
    [
        EventType("turn/start", p.TurnStart),
        EventType("turn/end", p.TurnEnd),
        EventType("step/start", p.StepStart),
        EventType("step/end", p.StepEnd),
        EventType("user/message", p.UserMessage, surface=True),
        EventType("assistant/message", p.AssistantMessage, surface=True),
        EventType("tool/result", p.ToolResult, surface=True),
        EventType("surface/cut", p.SurfaceCut, surface=True),
        EventType("assistant/chunk", p.AssistantChunk),
        EventType("tool/call", p.ToolCall),
        EventType("prompt/submitted", p.PromptSubmitted),
        EventType("prompt/queued", p.PromptQueued),
        EventType("prompt/started", p.PromptStarted),
        EventType("prompt/steered", p.PromptSteered),
        EventType("prompt/completed", p.PromptCompleted),
        EventType("request/header", p.RequestHeader),
        EventType("llm/retry", p.LlmRetry),
        EventType("llm/response", p.LlmResponse, ignorable=True),
        EventType("llm/tokens", p.LlmTokens, ignorable=True),
        EventType("profile/bind", p.ProfileBind),
        EventType("profile/model", p.ProfileModel),
        EventType("permission/mode", p.PermissionMode),
        EventType("permission/asked", p.PermissionAsked, ignorable=True),
        EventType("permission/decided", p.PermissionDecided),
        EventType("compaction/start", p.CompactionStart),
        EventType("compaction/request", p.CompactionRequest, ignorable=True),
        EventType("compaction/response", p.CompactionResponse, ignorable=True),
        EventType("compaction/summary", p.CompactionSummary),
        EventType("compaction/prune", p.CompactionPrune),
        EventType("compaction/end", p.CompactionEnd),
        EventType("log/end-seed", p.LogEndSeed),
        EventType("log/forked", p.LogForked),
        EventType("log/salvaged", p.LogSalvaged, ignorable=True),
        EventType("runtime/activated", p.RuntimeActivated, ignorable=True),
        EventType("subagent/spawned", p.SubagentSpawned),
        EventType("subagent/started", p.SubagentStarted),
        EventType("subagent/suspended", p.SubagentSuspended),
        EventType("subagent/completed", p.SubagentCompleted),
        EventType("subagent/failed", p.SubagentFailed),
        EventType("swarm/start", p.SwarmStart),
        EventType("swarm/end", p.SwarmEnd),
        EventType("run/manifest", p.RunManifest, ignorable=True),
        EventType("score/recorded", p.ScoreRecorded, ignorable=True),
        EventType("output/recorded", p.OutputRecorded, ignorable=True),
        EventType("note/added", p.NoteAdded, ignorable=True),
        EventType("task/started", p.TaskStarted),
        EventType("task/ended", p.TaskEnded),
        EventType("task/lost", p.TaskLost),
        EventType("task/reported", p.TaskReported),
        EventType("todo/write", p.TodoWrite),
        EventType("hook/invoked", p.HookInvoked),
        EventType("hook/result", p.HookResult),
    ]
)
"""The types that every reader of version 1 knows."""
