"""What can happen: the vocabulary of the logs, as pure data.

Here live the JSON rule, the envelope and header of a log, the payload of every event type and their catalogue.
What may enter: facts about single events. What may not: state over many events (that is ``log``), files, clocks.
"""

from kimi_ray.events.catalog import CORE, SURFACE_TYPES, Catalog, EventType
from kimi_ray.events.envelope import SessionEvent, SurfaceOp, event_from_data, glance, make_event, parse_event
from kimi_ray.events.header import LOG_VERSION, LogHeader, ParentRef, WriterRef, parse_header
from kimi_ray.events.json_rule import FrozenDict, FrozenList, decode, encode, freeze, thaw
from kimi_ray.events.stored import read_stored, type_key

__all__ = [
    "CORE",
    "LOG_VERSION",
    "SURFACE_TYPES",
    "Catalog",
    "EventType",
    "FrozenDict",
    "FrozenList",
    "LogHeader",
    "ParentRef",
    "SessionEvent",
    "SurfaceOp",
    "WriterRef",
    "decode",
    "encode",
    "event_from_data",
    "freeze",
    "glance",
    "make_event",
    "parse_event",
    "parse_header",
    "read_stored",
    "thaw",
    "type_key",
]
