"""Compaction: what an agent's conversation has too much of is pruned and summarized, in the log and explained by it.

``ContextSize`` measures, ``Pruner`` shortens tool results, ``Compactor`` replaces a span in one transaction,
``CompactionEngine`` decides what is replaced, ``WindowGuard`` when; ``Undo`` takes prompts back. The summary comes from
the service ``kimi_ray.agent.summarizer.Summarizer``. What may enter: what changes the surface of one agent's log.
"""

from kimi_ray.features.compaction.compactor import Compactor
from kimi_ray.features.compaction.context_size import ContextSize
from kimi_ray.features.compaction.engine import CompactionEngine, span_of_all
from kimi_ray.features.compaction.feature import CompactionFeature
from kimi_ray.features.compaction.guard import WindowGuard
from kimi_ray.features.compaction.pruner import Pruner
from kimi_ray.features.compaction.undo import Undo, UndoResult, check_count, undo_span_of
from kimi_ray.features.compaction.window import ContextWindow
from kimi_ray.features.compaction.words import CompactionResult, Trigger, checked_instruction

__all__ = [
    "CompactionEngine",
    "CompactionFeature",
    "CompactionResult",
    "Compactor",
    "ContextSize",
    "ContextWindow",
    "Pruner",
    "Trigger",
    "Undo",
    "UndoResult",
    "WindowGuard",
    "check_count",
    "checked_instruction",
    "span_of_all",
    "undo_span_of",
]
