"""The projections that come with the log: tokens used, the todo list, statistics of tools.

What a fork began with is its source's: at ``log/end-seed`` counts begin anew, and what the model saw goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kimi_ray.events import SessionEvent, thaw

KEPT_TODO_WRITES: Final = 256
"""So many writes of the list can be taken back by undos."""

_TOKENS: Final = ("input", "cached", "cache_write", "output", "reasoning")


@dataclass(frozen=True, slots=True)
class UsageProjection:
    """Tokens and requests: ``{"input", "cached", "cache_write", "output", "reasoning", "estimated", "requests",
    "failed_requests", "turns", "steps"}``."""

    key: str = "usage"
    version: int = 1
    types: frozenset[str] = frozenset(
        {"llm/response", "compaction/response", "turn/start", "step/start", "log/end-seed"}
    )

    def start(self) -> dict[str, Any]:
        """See ``Projection``."""
        counts = dict.fromkeys((*_TOKENS, "requests", "failed_requests", "turns", "steps"), 0)
        return {**counts, "estimated": False}

    def apply(self, state: dict[str, Any], event: SessionEvent) -> dict[str, Any]:
        """See ``Projection``."""
        kind, data = event.type, event.data
        if kind == "log/end-seed":
            return self.start()
        if kind == "turn/start":
            return {**state, "turns": state["turns"] + 1}
        if kind == "step/start":
            return {**state, "steps": state["steps"] + 1}
        usage: dict[str, Any] = data.get("usage") or {}
        added = {name: state[name] + usage.get(name, 0) for name in _TOKENS}
        return {
            **state,
            **added,
            "estimated": state["estimated"] or bool(usage.get("estimated")),
            "requests": state["requests"] + 1,
            "failed_requests": state["failed_requests"] + ("error" in data),
        }

    def value(self, state: Any) -> Any:
        """See ``Projection``."""
        return state


@dataclass(frozen=True, slots=True)
class TodosProjection:
    """The todo list as it was last written: a list of ``{"title", "status"}``, None until there is one.

    What an undo takes back is undone here too: the state is the last writes, ``[[seq, todos], ...]``.
    """

    key: str = "todos"
    version: int = 2
    types: frozenset[str] = frozenset({"todo/write", "surface/cut"})

    def start(self) -> list[list[Any]]:
        """See ``Projection``."""
        return []

    def apply(self, state: list[list[Any]], event: SessionEvent) -> list[list[Any]]:
        """See ``Projection``."""
        if event.type == "todo/write":
            return [*state, [event.seq, thaw(event.data["todos"])]][-KEPT_TODO_WRITES:]
        first = event.seq if event.replaced is None else event.replaced[0]
        return [write for write in state if write[0] < first]

    def value(self, state: list[list[Any]]) -> Any:
        """See ``Projection``."""
        return state[-1][1] if state else None


@dataclass(frozen=True, slots=True)
class ToolsProjection:
    """Calls by tool: ``{"tools": {name: {"calls", "errors", "run_ms", "longest_ms"}}, "open": {call_id: name}}``.

    ``open`` are calls that were started and have no result yet.
    """

    key: str = "tools"
    version: int = 1
    types: frozenset[str] = frozenset({"tool/call", "tool/result", "log/end-seed"})

    def start(self) -> dict[str, Any]:
        """See ``Projection``."""
        return {"tools": {}, "open": {}}

    def apply(self, state: dict[str, Any], event: SessionEvent) -> dict[str, Any]:
        """See ``Projection``."""
        kind, data = event.type, event.data
        if kind == "log/end-seed":
            return self.start()
        if kind == "tool/call":
            known = self._known(state, data["name"])
            told = {**known, "calls": known["calls"] + 1}
            return {
                "tools": {**state["tools"], data["name"]: told},
                "open": {**state["open"], data["call_id"]: data["name"]},
            }
        block = data["message"]["content"][0]
        name = state["open"].get(block["tool_call_id"])
        if name is None or event.replaced is not None:
            return state
        known, took = self._known(state, name), data.get("run_ms", 0)
        told = {
            **known,
            "errors": known["errors"] + bool(block["is_error"]),
            "run_ms": known["run_ms"] + took,
            "longest_ms": max(known["longest_ms"], took),
        }
        waiting = {key: value for key, value in state["open"].items() if key != block["tool_call_id"]}
        return {"tools": {**state["tools"], name: told}, "open": waiting}

    def value(self, state: Any) -> Any:
        """See ``Projection``."""
        return state

    @staticmethod
    def _known(state: dict[str, Any], name: str) -> dict[str, int]:
        return state["tools"].get(name) or {"calls": 0, "errors": 0, "run_ms": 0, "longest_ms": 0}
