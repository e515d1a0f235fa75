"""What a replay takes from the recording, and what from today."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kimi_ray.errors import ConfigError
from kimi_ray.events import SessionEvent
from kimi_ray.settings import Workdir
from kimi_ray.store.seam import Stream
from kimi_ray.tools.contract import Tool

ToolMode = Literal["recorded", "real"]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay.

    Attributes:
        tools: ``recorded``: every result is the recorded one. ``real``: tools run again, but for those that start
            agents or ask after tasks, and for calls that somebody kept from running.
        own_tools: The user's tools; code is not in a log.
        workdir: Where real tools work; None is nowhere.
        ignore: Fields that may differ: ``system``, ``tools``, ``tools[2].description``, ``sampling.seed``, ...
        observe: Called with every event of the replayed logs, the moment it is there.
    """

    tools: ToolMode = "recorded"
    own_tools: Sequence[Tool] = ()
    workdir: Workdir | None = None
    ignore: tuple[str, ...] = ()
    observe: Callable[[Stream, SessionEvent], None] | None = None

    def __post_init__(self) -> None:
        if self.tools not in ("recorded", "real"):
            raise ConfigError(
                f"tools={self.tools!r} is neither recorded nor real",
                code="request.invalid",
                details={"tools": str(self.tools)},
            )
