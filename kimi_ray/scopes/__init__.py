"""Lifetimes: the App, Session and Agent scopes on dishka containers.

What may enter: what a scope is and how containers are built. What may not: any particular service.
"""

from kimi_ray.scopes.lifecycle import LifecycleScope, assemble

__all__ = ["LifecycleScope", "assemble"]
