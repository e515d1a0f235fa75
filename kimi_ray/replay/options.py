"""What a replay takes from the recording, and what from today."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kimi_ray.errors import ConfigError
from kimi_ray.events import SessionEvent
from kimi_ray.settings import Sampling, Workdir, check_settings
from kimi_ray.store.seam import Stream
from kimi_ray.tools import Tool, as_tool, parse_workdir

ToolMode = Literal["recorded", "real"]

_WHOLE: Final = ("model", "system", "stream", "reasoning_history", "compaction")
_MAY_DIFFER: Final = re.compile(
    rf"(?:{'|'.join(_WHOLE)}"
    rf"|sampling(?:\.(?:{'|'.join(Sampling.model_fields)})(?:\[\d+\])?)?"
    r"|tools(?:\[\d+\](?:\.(?:name|(?:description|parameters)(?:[.\[].+)?))?)?"
    r"|extra_body(?:\..+)?"
    r"|messages\[\d+\](?:\.(?:role|content(?:\[.+)?))?)"
)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay.

    Attributes:
        tools: ``recorded``: every result is the recorded one. ``real``: tools run again, but for those that start
            agents or ask after tasks, and for calls that somebody kept from running.
        own_tools: The user's tools, as for a session: typed functions, tools, ``"module:function"``; code is not in a
            log. Here they are tools.
        workdir: Where real tools work: a ``Workdir`` or the form of the command line (``"shared"`` is the current
            directory); None is nowhere. Here it is a ``Workdir``.
        ignore: Fields that may differ: ``system``, ``tools``, ``tools[2].description``, ``sampling.seed``,
            ``messages[3]``, ...; how many differences that were is in the report.
        observe: Called as ``observe(stream, event)`` with every event that comes to a replayed log, the moment it is
            there: whose log it is (a ``Stream``: ``session_id``, ``agent_id``), and the ``SessionEvent``. What it
            raises ends the replay, and is raised there.

    Raises:
        ConfigError: ``request.invalid``, ``request.bad_argument``.
        ToolError: ``tool.bad_signature``, ``tool.not_importable``; ``workdir.invalid``.
    """

    tools: ToolMode = "recorded"
    own_tools: Sequence[Tool | Callable[..., Any] | str] = ()
    workdir: Workdir | str | None = None
    ignore: Sequence[str] = ()
    observe: Callable[[Stream, SessionEvent], None] | None = None

    def __post_init__(self) -> None:
        if self.tools not in ("recorded", "real"):
            raise ConfigError(
                f"tools={self.tools!r} is neither recorded nor real",
                code="request.invalid",
                hint='own_tools takes your own tools; tools is "recorded" or "real"',
                details={"tools": str(self.tools)},
            )
        for name in ("own_tools", "ignore"):
            if isinstance(getattr(self, name), str) or not isinstance(getattr(self, name), Sequence):
                raise ConfigError(
                    f"{name} must be a list, not {type(getattr(self, name)).__name__}",
                    code="request.bad_argument",
                    hint=f"write {name}=[...]",
                    details={"argument": name},
                )
        workdir = self.workdir
        if isinstance(workdir, str):
            workdir = parse_workdir(workdir, os.getcwd())
        check_settings(workdir=(Workdir, workdir))
        object.__setattr__(self, "own_tools", tuple(as_tool(thing) for thing in self.own_tools))
        object.__setattr__(self, "workdir", workdir)
        object.__setattr__(self, "ignore", tuple(checked_field(field) for field in self.ignore))


def checked_field(field: object) -> str:
    """A field that may differ, if a request has such a one.

    Raises:
        ConfigError: ``request.invalid`` {ignore}.
    """
    if field == "messages":
        why = "would hide every difference of the conversation: a replay could then find nothing"
    elif isinstance(field, str) and _MAY_DIFFER.fullmatch(field):
        return field
    else:
        why = "is no field of a request"
    raise ConfigError(
        f"ignore: {str(field)[:200]!r} {why}",
        code="request.invalid",
        hint=f"name {', '.join(_WHOLE)}, sampling, sampling.seed, tools, tools[2].description, extra_body, messages[3]",
        details={"ignore": str(field)[:200]},
    )
