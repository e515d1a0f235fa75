"""Capabilities that stand on the seams alone, each a Feature: what any package could have brought.

What may enter: a class that subclasses ``kimi_ray.scopes.Feature``, with its services, tools and handlers, in a module
or folder of its own. What may not: knowledge of hosts, of Ray, or of another Feature.
"""

from kimi_ray.features.compaction import CompactionFeature
from kimi_ray.features.external_hooks import ExternalHooks
from kimi_ray.features.git_context import GitContextFeature
from kimi_ray.features.mcp import McpFeature
from kimi_ray.features.permissions import Permissions
from kimi_ray.features.subagents import SubagentsFeature
from kimi_ray.features.swarm import AgentSwarmFeature
from kimi_ray.features.tasks import TasksFeature
from kimi_ray.features.todo import TodoFeature
from kimi_ray.scopes import Feature

BUILTIN: tuple[type[Feature], ...] = (
    AgentSwarmFeature,
    ExternalHooks,
    Permissions,
    SubagentsFeature,
    TasksFeature,
    TodoFeature,
    GitContextFeature,
    CompactionFeature,
    McpFeature,
)
"""The Features of every runtime, in the order in which their handlers come: what refuses calls by their shape first."""

__all__ = ["BUILTIN"]
