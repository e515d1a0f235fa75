"""What a swarm says about all of its rollouts, and what it may not say."""

from __future__ import annotations

import os
from typing import Any, Self

from pydantic import Field, ValidationError

from kimi_ray.errors import LogError, RunError
from kimi_ray.events.json_rule import freeze
from kimi_ray.runs.items import RunItem
from kimi_ray.runs.prompts import render_workdir
from kimi_ray.settings import Isolation, Limits, Profile, Sampling, Settings, Workdir

_WRITING_TOOLS = ("Bash", "Write", "Edit", "Agent", "AgentSwarm")
"""Agent and AgentSwarm, since the agents that they start may have the others."""
_FOLLOWING_TOOLS = ("TaskList", "TaskOutput", "TaskStop", "WaitFor")
"""They follow what Bash and Agent start in the background."""


def _bad_setting(place: str, why: str) -> RunError:
    return RunError(
        f"{place} cannot be used: {why[:1].lower()}{why[1:]}",
        code="swarm.bad_setting",
        hint=f"see what start_swarm says of {place.partition('.')[0]}",
        details={"setting": place},
    )


class SwarmSettings(Settings):
    """What a swarm says about all of its rollouts; an item's own settings win. ``of`` checks what users say."""

    @classmethod
    def of(cls, **said: Any) -> Self:
        """Settings from what a user said.

        Raises:
            RunError: ``swarm.bad_setting`` naming it.
        """
        try:
            freeze(said.get("metadata") or {})
            return cls(**said)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise _bad_setting(place, first["msg"]) from None
        except LogError as error:
            raise _bad_setting("metadata", error.message) from None

    profile: Profile
    model: str | None = None
    system_prompt: str | None = None
    tools: tuple[str, ...] | None = None
    """None: the profile's tools less those that write (Bash, Write, Edit, Agent and AgentSwarm) and those that follow
    background tasks."""
    sampling: Sampling | None = None
    limits: Limits | None = None
    workdir: Workdir | None = None
    """Where each works, with placeholders; None is no directory (a session's own is put in by the session)."""
    isolation: Isolation | None = None
    tags: dict[str, str] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def tool_names(self) -> tuple[str, ...]:
        """The tools that each rollout gets."""
        if self.tools is not None:
            return self.tools
        return tuple(name for name in self.profile.tools if name not in (*_WRITING_TOOLS, *_FOLLOWING_TOOLS))

    def check_shared_writes(self, items: tuple[RunItem, ...], rollouts: int) -> None:
        """Refuse several agents with writing tools in one directory.

        Args:
            items: The run's items.
            rollouts: Items times repeats.

        Raises:
            RunError: ``swarm.shared_writes``.
        """
        writing = [name for name in self.tool_names if name in _WRITING_TOOLS]
        if rollouts < 2 or not writing:
            return
        repeats = max(1, rollouts // len(items))
        users: dict[str, int] = {}
        for item in items:
            workdir = render_workdir(self.workdir, item)
            if workdir is None or workdir.kind != "shared" or workdir.writes:
                continue
            path = os.path.normpath(workdir.path or "")
            users[path] = users.get(path, 0) + repeats
            if users[path] > 1:
                raise RunError(
                    f"several agents with {', '.join(writing)} would share the directory {path}",
                    code="swarm.shared_writes",
                    hint="use --workdir copy, or accept it with Workdir.shared(path, writes=True) or"
                    " --allow-shared-writes",
                    details={"path": path, "tools": writing},
                )
