"""Where an agent works: a directory given to it, made for it, or none.

A module a way of making one (``copying``, ``worktrees``, ``factory``); ``private`` has what they share, ``leftovers``
what removes them when their session is gone.
"""

from kimi_ray.tools.workdirs.factory import FactoryContext, Leave, load_factory
from kimi_ray.tools.workdirs.leftovers import belongs_to, drop_sessions, sweep_sessions
from kimi_ray.tools.workdirs.prepare import (
    PreparedWorkdir,
    check_factory,
    check_workdir,
    found_again,
    prepare_workdir,
)
from kimi_ray.tools.workdirs.private import workdir_name
from kimi_ray.tools.workdirs.spec import parse_workdir, refuse_remote

__all__ = [
    "FactoryContext",
    "Leave",
    "PreparedWorkdir",
    "belongs_to",
    "check_factory",
    "check_workdir",
    "drop_sessions",
    "found_again",
    "load_factory",
    "parse_workdir",
    "prepare_workdir",
    "refuse_remote",
    "sweep_sessions",
    "workdir_name",
]
