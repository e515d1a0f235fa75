"""Lifetimes: the App, Session and Agent scopes on dishka containers; Features and the slots they put handlers into.

What may enter: what a scope is, how containers are built and ended, what a Feature may contribute. What may not: any
particular service.
"""

from kimi_ray.scopes.assembly import assemble, provided_by, service_name
from kimi_ray.scopes.feature import Feature
from kimi_ray.scopes.hook_slot import HookSlot
from kimi_ray.scopes.lifecycle import LifecycleScope, TaskLock, dispose, open_scope

__all__ = [
    "Feature",
    "HookSlot",
    "LifecycleScope",
    "TaskLock",
    "assemble",
    "dispose",
    "open_scope",
    "provided_by",
    "service_name",
]
