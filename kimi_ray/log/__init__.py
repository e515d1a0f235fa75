"""The truth in memory: one log's events, what they show the model, and how a broken end is mended.

``EventLog`` is the only way an event comes to be. ``surface``, ``order`` and ``messages`` are folds over a log;
``meter`` says how large the next request is, ``pruning``, ``compaction_range`` and ``undo_span`` what may leave the
surface; ``repair`` and ``inheritance`` compute closing events, ``slicing`` says where a log can be cut, ``projections``
keeps the states of any folds. What may enter: pure state over many events. What may not: files, tasks, waiting.
"""

from kimi_ray.log.compaction_range import PricedNode, Span, select_range, span_between
from kimi_ray.log.estimate import content_tokens, message_tokens, tokens_of
from kimi_ray.log.event_log import MAX_EVENT_BYTES, EventLog
from kimi_ray.log.inheritance import inherited_closers
from kimi_ray.log.messages import Message, complete_tools, derive, derive_messages, message_text, tool_message
from kimi_ray.log.meter import Counted, Measurement, TokenMeter, event_tokens, surface_prices, surface_tokens
from kimi_ray.log.order import Order
from kimi_ray.log.projection_units import TodosProjection, ToolsProjection, UsageProjection
from kimi_ray.log.projections import Projection, Projections, Snapshot
from kimi_ray.log.pruning import PruneRule, pruned
from kimi_ray.log.repair import closing_events, interrupted_turn_closers
from kimi_ray.log.slicing import WHOLE, ChildPosition, LogScanner, LogSlice, Where, slice_log
from kimi_ray.log.surface import Surface, SurfacePlan, tools_balanced
from kimi_ray.log.undo_span import UndoSpan, undo_span
from kimi_ray.wall_clock import epoch_ms

__all__ = [
    "MAX_EVENT_BYTES",
    "WHOLE",
    "ChildPosition",
    "Counted",
    "EventLog",
    "LogScanner",
    "LogSlice",
    "Measurement",
    "Message",
    "Order",
    "PricedNode",
    "Projection",
    "Projections",
    "PruneRule",
    "Snapshot",
    "Span",
    "Surface",
    "SurfacePlan",
    "TodosProjection",
    "TokenMeter",
    "ToolsProjection",
    "UndoSpan",
    "UsageProjection",
    "Where",
    "closing_events",
    "complete_tools",
    "content_tokens",
    "derive",
    "derive_messages",
    "epoch_ms",
    "event_tokens",
    "inherited_closers",
    "interrupted_turn_closers",
    "message_text",
    "message_tokens",
    "pruned",
    "select_range",
    "slice_log",
    "span_between",
    "surface_prices",
    "surface_tokens",
    "tokens_of",
    "tool_message",
    "tools_balanced",
    "undo_span",
]
