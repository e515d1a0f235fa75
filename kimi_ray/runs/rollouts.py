"""A rollout as it is handed over to be run: everything that decides what one attempt does, rendered and resolved."""

from __future__ import annotations

import os
from typing import Any

from pydantic import Field

from kimi_ray.errors import RunError
from kimi_ray.runs.items import RolloutKey, RunItem
from kimi_ray.runs.prompts import Prompt, render_prompt, render_workdir
from kimi_ray.runs.schedule import Start
from kimi_ray.settings import Isolation, Limits, Profile, Sampling, Settings, Workdir

_WRITING_TOOLS = ("Bash", "Write", "Edit")


class RolloutSpec(Settings):
    """One attempt at one item. ``seed`` is recorded always and sent to the model if ``send_seed``."""

    run_id: str
    item_id: str
    index: int = Field(ge=0)
    repeat: int = Field(ge=0)
    attempt: int = Field(ge=1)
    seed: int
    send_seed: bool
    prompt: str
    item: Any
    """The item's data, for tools and scripted models that are functions of it."""
    profile: Profile
    model: str | None = None
    system_prompt: str | None = None
    tools: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    limits: Limits | None = None
    workdir: Workdir | None = None
    isolation: Isolation | None = None
    tags: dict[str, str] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> RolloutKey:
        """The rollout's identity."""
        return RolloutKey(self.item_id, self.repeat)


class SwarmSettings(Settings):
    """What a swarm says about all of its rollouts; an item's own settings win."""

    profile: Profile
    model: str | None = None
    system_prompt: str | None = None
    tools: tuple[str, ...] | None = None
    """None: the profile's tools less Bash, Write and Edit."""
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
        return tuple(name for name in self.profile.tools if name not in _WRITING_TOOLS)

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

    def rollout(self, run_id: str, prompt: Prompt, item: RunItem, start: Start) -> RolloutSpec:
        """The attempt that ``start`` asks for.

        Raises:
            RunError: ``items.unknown_column``, ``swarm.prompt_failed``.
        """
        own = item.item
        sampling = own.sampling.over(self.sampling) if own.sampling else self.sampling or Sampling()
        fixed = sampling.seed is not None
        return RolloutSpec(
            run_id=run_id,
            item_id=item.id,
            index=item.index,
            repeat=start.key.repeat,
            attempt=start.attempt,
            seed=sampling.seed if sampling.seed is not None else start.seed,
            send_seed=fixed or start.send_seed,
            prompt=render_prompt(prompt, item),
            item=own.data,
            profile=self.profile,
            model=self.model,
            system_prompt=self.system_prompt,
            tools=self.tool_names,
            sampling=sampling if fixed else sampling.model_copy(update={"seed": start.seed}),
            limits=own.limits.over(self.limits) if own.limits else self.limits,
            workdir=render_workdir(self.workdir, item),
            isolation=self.isolation,
            tags={**self.tags, **own.tags},
            metadata=self.metadata,
        )
