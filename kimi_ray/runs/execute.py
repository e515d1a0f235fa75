"""A run and its directory: begun, or gone on with, with every row on disk before anybody is told of it.

Whoever runs rollouts gives each page of rows to the ``RunSink``; blocking file calls happen in a thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kimi_ray.runs.items import items_hash
from kimi_ray.runs.manifest import build_manifest
from kimi_ray.runs.plan import RunPlan
from kimi_ray.runs.prompts import prompt_hash
from kimi_ray.runs.report import SwarmReport
from kimi_ray.runs.resume import check_same_run, check_unchanged, plan_resume
from kimi_ray.runs.rows import AttemptRow, ResultRow
from kimi_ray.runs.run_directory import RunDirectory
from kimi_ray.settings import Durability

_T = TypeVar("_T")
_Handle_co = TypeVar("_Handle_co", bound="RunningRun", covariant=True)


class RunSink:
    """An open run directory as a place for rows."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._lock = asyncio.Lock()

    @property
    def path(self) -> Path:
        """The directory."""
        return self._directory.path

    async def write(self, rows: list[ResultRow], attempts: list[AttemptRow]) -> None:
        """On disk when it returns.

        Raises:
            RunError: ``run.write_failed``.
        """
        await self._alone(lambda: self._directory.append(rows, attempts))

    async def write_limiter(self, changes: list[dict[str, Any]]) -> None:
        """What the limiter did (``RunDirectory.append_limiter``).

        Raises:
            RunError: ``run.write_failed``.
        """
        await self._alone(lambda: self._directory.append_limiter(changes))

    async def amend(self, facts: Mapping[str, Any]) -> None:
        """Put facts into ``run.json`` that are known at the end only.

        Raises:
            RunError: ``run.write_failed``, ``run.corrupt``.
        """
        await self._alone(lambda: self._directory.write_manifest({**self._directory.manifest(), **facts}))

    async def close(self) -> None:
        """Let another command have the directory. Idempotent."""
        await self._alone(self._directory.close)

    async def _alone(self, work: Callable[[], None]) -> None:
        """File work in a thread, one after the other: what a caller gives up is done, and nobody comes in between."""

        async def whole() -> None:
            async with self._lock:
                await asyncio.to_thread(work)

        await asyncio.shield(asyncio.ensure_future(whole()))


class PricedModel(Protocol):
    """What a manifest says of a model."""

    @property
    def name(self) -> str:
        """The name that the user said."""
        ...

    @property
    def settings(self) -> Any:
        """Its settings; ``price`` is a model or None."""
        ...


class RunningRun(Protocol):
    """A run under way (a ``SwarmHandle``)."""

    async def result(self) -> SwarmReport:
        """Wait for its end."""
        ...


class RunsPlans(Protocol[_Handle_co]):
    """Whoever runs a plan (a ``Session``)."""

    async def start_plan(self, plan: RunPlan, model: Any, *, sink: RunSink | None = None) -> _Handle_co:
        """Begin; the sink is closed when the run is over."""
        ...


async def open_run(
    plan: RunPlan,
    out: str | os.PathLike[str],
    *,
    arguments: Mapping[str, Any],
    config: Mapping[str, Any],
    model: PricedModel,
    cwd: str | os.PathLike[str] = ".",
    items_source: str | None = None,
    selection: Mapping[str, Any] | None = None,
    served_models: Sequence[str] | None = None,
    argv: Sequence[str] | None = None,
    durability: Durability = "disk",
) -> RunSink:
    """A new run directory with its manifest. The arguments are those of ``build_manifest``.

    Raises:
        RunError: ``run.exists``, ``run.in_use``, ``run.not_writable``, ``run.write_failed``.
    """
    manifest = await _manifest(
        plan, arguments, config, model, cwd, items_source, selection, served_models=served_models, argv=argv
    )
    return RunSink(await _kept(lambda: RunDirectory.create(out, manifest, durability=durability), RunDirectory.close))


async def reopen_run(
    plan: RunPlan,
    out: str | os.PathLike[str],
    *,
    retry: Sequence[str] = (),
    durability: Durability = "disk",
) -> tuple[RunPlan, RunSink]:
    """Go on with a run: the plan with what is finished left out, and the directory with only the rows that stay.

    Args:
        plan: The run as it is now, with the recorded run id and seed (``seed_of`` of its manifest).
        out: Its directory.
        retry: Error classes that are run again beyond those that always are.
        durability: As in ``RunDirectory.open``.

    Raises:
        RunError: ``run.not_found``, ``run.in_use``, ``run.mismatch``, ``run.corrupt``, ``swarm.bad_retry_class``.
    """
    now = unchanged_parts(plan)

    def reopen() -> tuple[RunPlan, RunDirectory]:
        directory = RunDirectory.open(out, durability=durability)
        try:
            check_unchanged(directory.manifest(), now)
            rows, attempts = directory.rows(), directory.attempts()
            check_same_run(plan.run_id, (*rows, *attempts))
            resumed = plan.resumed(plan_resume(plan.keys, rows, attempts, retry=retry))
            directory.keep_only(resumed.kept)
        except BaseException:
            directory.close()
            raise
        return resumed, directory

    resumed, directory = await _kept(reopen, lambda opened: opened[1].close())
    return resumed, RunSink(directory)


async def execute_run(session: RunsPlans[RunningRun], plan: RunPlan, model: Any, sink: RunSink) -> SwarmReport:
    """Run a plan into an open run directory (``open_run``, ``reopen_run``) to its end."""
    return await (await session.start_plan(plan, model, sink=sink)).result()


def unchanged_parts(plan: RunPlan) -> dict[str, Any]:
    """The parts of a manifest that a resume must find unchanged."""
    return {
        "items": {"sha256": items_hash(plan.items)},
        "prompt": {"sha256": prompt_hash(plan.prompt)},
        "repeats": plan.repeats,
        "seed": {"value": plan.seed.value, "sent": plan.seed.sent},
        "rollout": None if plan.rollout is None else plan.rollout.name,
        "output_schema": plan.output_schema,
    }


async def _manifest(
    plan: RunPlan,
    arguments: Mapping[str, Any],
    config: Mapping[str, Any],
    model: PricedModel,
    cwd: str | os.PathLike[str],
    items_source: str | None,
    selection: Mapping[str, Any] | None,
    *,
    served_models: Sequence[str] | None,
    argv: Sequence[str] | None,
) -> dict[str, Any]:
    price = model.settings.price
    prices = {} if price is None else {model.name: price.model_dump(mode="json")}
    return await asyncio.to_thread(
        build_manifest,
        run_id=plan.run_id,
        items=plan.items,
        prompt=plan.prompt,
        seed=plan.seed,
        repeats=plan.repeats,
        rollout=None if plan.rollout is None else plan.rollout.name,
        output_schema=plan.output_schema,
        arguments=arguments,
        config=config,
        items_source=items_source,
        selection=selection,
        prices=prices,
        served_models=served_models,
        argv=argv,
        directory=cwd,
    )


async def _kept(work: Callable[[], _T], let_go: Callable[[_T], None]) -> _T:
    """What is opened in a thread; ``let_go`` closes it when the caller has gone meanwhile."""
    opening = asyncio.ensure_future(asyncio.to_thread(work))

    def close(done: asyncio.Future[_T]) -> None:
        if not done.cancelled() and done.exception() is None:
            let_go(done.result())

    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(close)
        raise
