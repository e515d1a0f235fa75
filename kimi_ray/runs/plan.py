"""A run before it begins: everything checked, every key named, nothing started."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kimi_ray.errors import RunError
from kimi_ray.ids import is_path_safe_id, new_ulid
from kimi_ray.runs.filters import Filter
from kimi_ray.runs.items import RolloutKey, RunItem, keys_of, prepare_items
from kimi_ray.runs.prompts import Prompt, check_prompt, render_prompt, render_workdir
from kimi_ray.runs.resume import ResumePlan
from kimi_ray.runs.rollouts import SwarmSettings
from kimi_ray.runs.rows import ResultRow
from kimi_ray.runs.schedule import DEFAULT_RETRY_ON, FailOn, Schedule
from kimi_ray.runs.seeds import RunSeed
from kimi_ray.settings import Item, Limits, Sampling, Workdir
from kimi_ray.tools.carried import carried_workdir
from kimi_ray.tools.contract import Tool
from kimi_ray.tools.workdirs import check_factory, refuse_remote

OnInterrupted = Literal["continue", "restart"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """What one key works on, rendered. ``index`` is the item's place in the run."""

    key: RolloutKey
    index: int
    prompt: str
    item: Any
    sampling: Sampling | None
    limits: Limits | None
    workdir: Workdir | None
    tags: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A checked run. ``again`` are the keys to run, in order; ``kept`` the rows of an earlier command that stay."""

    run_id: str
    items: tuple[RunItem, ...]
    prompt: Prompt
    settings: SwarmSettings
    seed: RunSeed
    repeats: int
    keys: tuple[RolloutKey, ...]
    again: tuple[RolloutKey, ...]
    max_concurrency: int = 32
    total_limits: Limits | None = None
    retries: int = 0
    retry_on: tuple[str, ...] = DEFAULT_RETRY_ON
    fail_on: FailOn | None = None
    on_interrupted: OnInterrupted = "continue"
    keep_workdirs: bool = False
    user_tools: tuple[Tool, ...] = ()
    rollout: Tool | None = None
    """The function that runs in place of the loop, carried."""
    output_schema: dict[str, Any] | None = None
    """The JSON schema of each rollout's output."""
    denied_paths: tuple[str, ...] = ()
    kept: tuple[ResultRow, ...] = ()
    attempts_before: dict[RolloutKey, int] = field(default_factory=dict[RolloutKey, int])

    def resumed(self, plan: ResumePlan) -> RunPlan:
        """The same run with what an earlier command finished left out."""
        return replace(self, kept=plan.kept, again=plan.again, attempts_before=plan.attempts_before)

    def by_id(self) -> dict[str, RunItem]:
        """The items by id."""
        return {item.id: item for item in self.items}

    def rollouts(self, keys: Sequence[RolloutKey], cwd: str | None) -> Iterator[Rollout]:
        """What these keys work on, rendered one by one; relative working directories are relative to ``cwd``.

        Raises:
            RunError: ``swarm.prompt_failed``, ``items.unknown_column``; ToolError: ``workdir.invalid``.
        """
        by_id = self.by_id()
        codes: dict[str | None, str] = {}
        for key in keys:
            item = by_id[key.item_id]
            own = item.item
            workdir = render_workdir(self.settings.workdir, item)
            if workdir is not None and cwd is not None:
                workdir = workdir.within(cwd)
            if workdir is not None and workdir.kind == "factory":
                if workdir.path not in codes:
                    codes[workdir.path] = carried_workdir(workdir).code
                workdir = workdir.with_code(codes[workdir.path])
            yield Rollout(
                key=key,
                index=item.index,
                prompt=render_prompt(self.prompt, item),
                item=own.data,
                sampling=own.sampling.over(self.settings.sampling) if own.sampling else self.settings.sampling,
                limits=own.limits.over(self.settings.limits) if own.limits else self.settings.limits,
                workdir=workdir,
                tags=self.tags_of(item),
            )

    def tags_of(self, item: RunItem) -> dict[str, str]:
        """A row's tags: the run's, and the item's on top."""
        return {**self.settings.tags, **item.item.tags}


def plan_run(
    prompt: Prompt,
    items: Iterable[str | dict[str, Any] | Item],
    settings: SwarmSettings,
    *,
    run_id: str | None = None,
    repeats: int = 1,
    seed: int | RunSeed | None = None,
    max_concurrency: int = 32,
    total_limits: Limits | None = None,
    retries: int = 0,
    retry_on: Sequence[str] = DEFAULT_RETRY_ON,
    fail_on: FailOn | str | None = None,
    on_interrupted: OnInterrupted = "continue",
    keep_workdirs: bool = False,
    user_tools: Sequence[Tool] = (),
    rollout: Tool | None = None,
    output_schema: dict[str, Any] | None = None,
    denied_paths: Sequence[str] = (),
    id_column: str | None = None,
    filters: Sequence[Filter] = (),
    shuffle: int | None = None,
    limit: int | None = None,
    sources: Iterable[str] | None = None,
) -> RunPlan:
    """Check a run and name its rollouts. Nothing is started and nothing is written.

    Args:
        prompt: A template with ``{{item}}`` or ``{{column}}``, or a function of the item.
        items: Strings, dicts of columns, or ``Item`` objects.
        settings: What holds for all rollouts.
        run_id: Must fit into a path; None makes one.
        repeats: How often each item is run.
        seed: The run's seed; None draws one that is recorded and not sent.
        max_concurrency: Most rollouts at once.
        total_limits: Bounds of the run as a whole.
        retries: Further attempts after a failure whose class is in ``retry_on``.
        retry_on: Error classes that are tried again.
        fail_on: ``N`` or ``P%`` failed rollouts end the run early.
        on_interrupted: Whether a rollout whose host was lost goes on from its log or begins again.
        keep_workdirs: Leave private working directories in place.
        user_tools: The tools among ``settings.tools`` that are not built in.
        rollout: The function that runs in place of the loop (``tools.rollout_function.carried_rollout``).
        output_schema: What each output must fit (``tools.output_schema.schema_of``).
        denied_paths: What no agent's file tools may read.
        id_column: The column with the items' ids.
        filters: Which items to take.
        shuffle: The seed of their order.
        limit: How many of them.
        sources: Where each item was read, for messages.

    Raises:
        RunError: ``items.*``, ``swarm.*``, ``run.bad_id``; ToolError: ``workdir.invalid`` for a factory that cannot be
            imported here, or a repository that is a URL.
    """
    if run_id is not None and not is_path_safe_id(run_id):
        raise RunError(
            f"{run_id[:80]!r} cannot be a run's id", code="run.bad_id", hint="use 1 to 128 letters, digits, _ and -"
        )
    prepared = prepare_items(items, id_column=id_column, filters=filters, shuffle=shuffle, limit=limit, sources=sources)
    # A rollout function has the item itself: its prompt need not.
    check_prompt(prompt, prepared, settings.workdir, needs_item=rollout is None)
    keys = keys_of(prepared, repeats)
    _check_shared_writes(settings, user_tools, prepared, len(keys))
    _check_workdirs(settings.workdir, prepared)
    run_seed = seed if isinstance(seed, RunSeed) else RunSeed.choose(seed)
    bound = FailOn.parse(fail_on) if isinstance(fail_on, str) else fail_on
    plan = RunPlan(
        run_id=run_id or f"run_{new_ulid()}",
        items=prepared,
        prompt=prompt,
        settings=settings,
        seed=run_seed,
        repeats=repeats,
        keys=keys,
        again=keys,
        max_concurrency=max_concurrency,
        total_limits=total_limits,
        retries=retries,
        retry_on=tuple(retry_on),
        fail_on=bound,
        on_interrupted=on_interrupted,
        keep_workdirs=keep_workdirs,
        user_tools=tuple(user_tools),
        rollout=rollout,
        output_schema=output_schema,
        denied_paths=tuple(denied_paths),
    )
    # What the schedule refuses is told before anything is started.
    Schedule(
        (), seed=run_seed, clock=time.monotonic, max_concurrency=max_concurrency, retries=retries, retry_on=retry_on
    )
    return plan


def _check_shared_writes(
    settings: SwarmSettings, user_tools: Sequence[Tool], items: tuple[RunItem, ...], rollouts: int
) -> None:
    names = set(settings.tool_names)
    if any(tool.writes and tool.name in names for tool in user_tools):
        # A user's tool that writes is as bad as Write.
        settings = settings.model_copy(update={"tools": (*settings.tool_names, "Write")})
    settings.check_shared_writes(items, rollouts)


def _check_workdirs(workdir: Workdir | None, items: tuple[RunItem, ...]) -> None:
    """What would fail in every rollout is told before the first."""
    seen: set[tuple[str, str | None]] = set()
    for item in items:
        own = render_workdir(workdir, item)
        if own is not None and own.kind in ("git", "factory") and (own.kind, own.path) not in seen:
            seen.add((own.kind, own.path))
            refuse_remote(own)
            check_factory(own)
