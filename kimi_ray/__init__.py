"""kimi_ray: swarms of LLM agents on Ray, with every agent's every event kept.

These are the public names. They are loaded when they are first used: importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_ray.agent.rollout import RolloutContext
    from kimi_ray.agent.slots import (
        AgentAwake,
        AgentLeaving,
        AgentSlots,
        ChildEnded,
        ChildStarting,
        Compacted,
        Compacting,
        PromptGate,
        PromptQueued,
        RequestFailed,
        StepStarting,
        TaskChanged,
        ToolDone,
        ToolGate,
        TurnEnded,
        TurnStarted,
        TurnStopping,
    )
    from kimi_ray.agent.specs import PromptResult
    from kimi_ray.agent.subagents import SubagentResult, SummaryPolicy
    from kimi_ray.agent.summarizer import Summarizer, Summary, SummaryTask
    from kimi_ray.app import IndexStatus, SessionList, SessionPage, SessionSummary, WorkspaceEntry, WorkspaceList
    from kimi_ray.config import RuntimeConfig
    from kimi_ray.errors import (
        AgentError,
        ConfigError,
        KimiRayError,
        LogError,
        ProviderError,
        RunError,
        RuntimeFault,
        SessionError,
        StoreError,
        ToolError,
    )
    from kimi_ray.events import SessionEvent
    from kimi_ray.features.compaction import CompactionResult, UndoResult
    from kimi_ray.features.permissions import Approval
    from kimi_ray.handles import Agent, Pending, PromptHandle
    from kimi_ray.hosts.swarm_words import SwarmProgress
    from kimi_ray.llm import ResolvedModel
    from kimi_ray.log import Projection
    from kimi_ray.runs import ResultRow, SwarmReport
    from kimi_ray.runtime import Runtime
    from kimi_ray.scopes import Feature, HookSlot, LifecycleScope
    from kimi_ray.session.projected import AgentProjections
    from kimi_ray.session_handle import AgentEvent, Session
    from kimi_ray.session_lifecycle import ArchiveResult
    from kimi_ray.settings import Item, Limits, Profile, Sampling, Usage, Workdir
    from kimi_ray.store import ReadStore, Stream, open_store
    from kimi_ray.subagent_handle import SubagentHandle
    from kimi_ray.swarm_handle import SwarmHandle
    from kimi_ray.sync import run_sync
    from kimi_ray.tools import ToolContext, ToolOutput
    from kimi_ray.tools.function import tool
    from kimi_ray.version import __version__
    from kimi_ray.workspace_handle import Workspace

_HOMES = {
    "Agent": "handles",
    "AgentAwake": "agent.slots",
    "AgentError": "errors",
    "AgentEvent": "session_handle",
    "AgentLeaving": "agent.slots",
    "AgentProjections": "session.projected",
    "AgentSlots": "agent.slots",
    "Approval": "features.permissions",
    "ArchiveResult": "session_lifecycle",
    "ChildEnded": "agent.slots",
    "ChildStarting": "agent.slots",
    "Compacted": "agent.slots",
    "Compacting": "agent.slots",
    "CompactionResult": "features.compaction",
    "ConfigError": "errors",
    "Feature": "scopes",
    "HookSlot": "scopes",
    "IndexStatus": "app",
    "Item": "settings",
    "KimiRayError": "errors",
    "LifecycleScope": "scopes",
    "Limits": "settings",
    "LogError": "errors",
    "Pending": "handles",
    "Profile": "settings",
    "Projection": "log",
    "PromptGate": "agent.slots",
    "PromptHandle": "handles",
    "PromptQueued": "agent.slots",
    "PromptResult": "agent.specs",
    "ProviderError": "errors",
    "ReadStore": "store",
    "RequestFailed": "agent.slots",
    "ResolvedModel": "llm",
    "ResultRow": "runs",
    "RolloutContext": "agent.rollout",
    "RunError": "errors",
    "Runtime": "runtime",
    "RuntimeConfig": "config",
    "RuntimeFault": "errors",
    "Sampling": "settings",
    "Session": "session_handle",
    "SessionError": "errors",
    "SessionEvent": "events",
    "SessionList": "app",
    "SessionPage": "app",
    "SessionSummary": "app",
    "StepStarting": "agent.slots",
    "StoreError": "errors",
    "Stream": "store",
    "SubagentHandle": "subagent_handle",
    "SubagentResult": "agent.subagents",
    "Summarizer": "agent.summarizer",
    "Summary": "agent.summarizer",
    "SummaryPolicy": "agent.subagents",
    "SummaryTask": "agent.summarizer",
    "SwarmHandle": "swarm_handle",
    "SwarmProgress": "hosts.swarm_words",
    "SwarmReport": "runs",
    "TaskChanged": "agent.slots",
    "ToolContext": "tools",
    "ToolDone": "agent.slots",
    "ToolError": "errors",
    "ToolGate": "agent.slots",
    "ToolOutput": "tools",
    "TurnEnded": "agent.slots",
    "TurnStarted": "agent.slots",
    "TurnStopping": "agent.slots",
    "UndoResult": "features.compaction",
    "Usage": "settings",
    "Workdir": "settings",
    "Workspace": "workspace_handle",
    "WorkspaceEntry": "app",
    "WorkspaceList": "app",
    "__version__": "version",
    "open_store": "store",
    "run_sync": "sync",
    "tool": "tools.function",
}

__all__ = [
    "Agent",
    "AgentAwake",
    "AgentError",
    "AgentEvent",
    "AgentLeaving",
    "AgentProjections",
    "AgentSlots",
    "Approval",
    "ArchiveResult",
    "ChildEnded",
    "ChildStarting",
    "Compacted",
    "Compacting",
    "CompactionResult",
    "ConfigError",
    "Feature",
    "HookSlot",
    "IndexStatus",
    "Item",
    "KimiRayError",
    "LifecycleScope",
    "Limits",
    "LogError",
    "Pending",
    "Profile",
    "Projection",
    "PromptGate",
    "PromptHandle",
    "PromptQueued",
    "PromptResult",
    "ProviderError",
    "ReadStore",
    "RequestFailed",
    "ResolvedModel",
    "ResultRow",
    "RolloutContext",
    "RunError",
    "Runtime",
    "RuntimeConfig",
    "RuntimeFault",
    "Sampling",
    "Session",
    "SessionError",
    "SessionEvent",
    "SessionList",
    "SessionPage",
    "SessionSummary",
    "StepStarting",
    "StoreError",
    "Stream",
    "SubagentHandle",
    "SubagentResult",
    "Summarizer",
    "Summary",
    "SummaryPolicy",
    "SummaryTask",
    "SwarmHandle",
    "SwarmProgress",
    "SwarmReport",
    "TaskChanged",
    "ToolContext",
    "ToolDone",
    "ToolError",
    "ToolGate",
    "ToolOutput",
    "TurnEnded",
    "TurnStarted",
    "TurnStopping",
    "UndoResult",
    "Usage",
    "Workdir",
    "Workspace",
    "WorkspaceEntry",
    "WorkspaceList",
    "__version__",
    "open_store",
    "run_sync",
    "tool",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kimi_ray' has no attribute {name!r}")
    value = getattr(import_module(f"kimi_ray.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
