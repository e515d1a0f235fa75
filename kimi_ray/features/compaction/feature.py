"""The Feature: its services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dishka import Provider

from kimi_ray.features.compaction.compactor import Compactor
from kimi_ray.features.compaction.context_size import ContextSize
from kimi_ray.features.compaction.engine import CompactionEngine
from kimi_ray.features.compaction.guard import WindowGuard
from kimi_ray.features.compaction.pruner import Pruner
from kimi_ray.features.compaction.undo import Undo
from kimi_ray.features.compaction.window import ContextWindow
from kimi_ray.scopes import Feature, LifecycleScope


class CompactionFeature(Feature):
    """Keeps conversations inside of the model's window (``[models.X.compaction]``)."""

    name: ClassVar[str] = "compaction"

    def services(self) -> Sequence[Provider]:
        """See ``Feature.services``."""
        provider = Provider(scope=LifecycleScope.AGENT)
        for service in (ContextSize, ContextWindow, Pruner, Compactor, CompactionEngine, Undo):
            provider.provide(service)
        return (provider,)

    def on_agent(self) -> Sequence[type]:
        """See ``Feature.on_agent``."""
        return (WindowGuard,)
