"""The truth in memory: one log's events, what they show the model, and how a broken end is mended.

``EventLog`` is the only way an event comes to be. ``surface``, ``order`` and ``messages`` are folds over a log;
``meter`` says how large the surface is, ``repair`` computes closing events. What may enter: pure state over many
events. What may not: files, tasks, waiting.
"""

from kimi_ray.log.estimate import content_tokens, message_tokens, tokens_of
from kimi_ray.log.event_log import MAX_EVENT_BYTES, EventLog
from kimi_ray.log.messages import Message, complete_tools, derive, derive_messages, message_text, tool_message
from kimi_ray.log.meter import TokenMeter, event_tokens, surface_tokens
from kimi_ray.log.order import Order
from kimi_ray.log.repair import closing_events, interrupted_turn_closers
from kimi_ray.log.surface import Surface, SurfacePlan, tools_balanced
from kimi_ray.wall_clock import epoch_ms

__all__ = [
    "MAX_EVENT_BYTES",
    "EventLog",
    "Message",
    "Order",
    "Surface",
    "SurfacePlan",
    "TokenMeter",
    "closing_events",
    "complete_tools",
    "content_tokens",
    "derive",
    "derive_messages",
    "epoch_ms",
    "event_tokens",
    "interrupted_turn_closers",
    "message_text",
    "message_tokens",
    "surface_tokens",
    "tokens_of",
    "tool_message",
    "tools_balanced",
]
