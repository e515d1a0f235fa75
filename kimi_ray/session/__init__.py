"""Session-scope services: what one session is, apart from its agents' logs.

Here live the session's document (its fields, its queue of changes) and the text that a prompt leaves in it; and what is
computed from a session's stored logs: what a fork of it copies, where it parts from another, what projections say. What
may enter: state of one session, pure plans over what is stored. What may not: placement and calls
(``kimi_ray.hosts``), an agent's turns (``kimi_ray.agent``), files (``kimi_ray.store``).
"""

from kimi_ray.session.comparison import Comparison, Difference, compare_sessions
from kimi_ray.session.document import SessionDocument
from kimi_ray.session.document_value import (
    DOCUMENT_VERSION,
    Activity,
    AgentEntry,
    Lineage,
    TitleKind,
    TurnReasonKind,
    checked_metadata,
    checked_tags,
    checked_title,
    entry_of_log,
    lineage_of,
    loaded_document,
    new_document,
    parent_of_log,
    turn_reason,
)
from kimi_ray.session.fork_plan import ForkPlan, LeftOut, PlannedLog, plan_agent_fork, plan_fork
from kimi_ray.session.fork_point import ForkPoint, parse_fork_point
from kimi_ray.session.in_flight import InFlight, in_flight
from kimi_ray.session.log_reader import ColdReader, LogReader
from kimi_ray.session.projected import STANDARD_PROJECTIONS, AgentProjections, TitleProjection, project
from kimi_ray.session.prompt_text import last_prompt, prompt_text

__all__ = [
    "DOCUMENT_VERSION",
    "STANDARD_PROJECTIONS",
    "Activity",
    "AgentEntry",
    "AgentProjections",
    "ColdReader",
    "Comparison",
    "Difference",
    "ForkPlan",
    "ForkPoint",
    "InFlight",
    "LeftOut",
    "Lineage",
    "LogReader",
    "PlannedLog",
    "SessionDocument",
    "TitleKind",
    "TitleProjection",
    "TurnReasonKind",
    "checked_metadata",
    "checked_tags",
    "checked_title",
    "compare_sessions",
    "entry_of_log",
    "in_flight",
    "last_prompt",
    "lineage_of",
    "loaded_document",
    "new_document",
    "parent_of_log",
    "parse_fork_point",
    "plan_agent_fork",
    "plan_fork",
    "project",
    "prompt_text",
    "turn_reason",
]
