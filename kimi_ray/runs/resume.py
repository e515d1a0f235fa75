"""Which rollouts a resumed run does again, and what must not have changed since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kimi_ray.errors import RunError
from kimi_ray.runs.items import RolloutKey
from kimi_ray.runs.rows import AttemptRow, ResultRow
from kimi_ray.runs.schedule import DEFAULT_RETRY_ON, checked_classes

_MUST_MATCH = (
    ("items", "sha256"),
    ("prompt", "sha256"),
    ("repeats",),
    ("seed",),
    ("rollout",),
    ("output_schema",),
)


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """What a resume keeps and what it runs, both in the order of the run's keys."""

    kept: tuple[ResultRow, ...]
    again: tuple[RolloutKey, ...]
    attempts_before: dict[RolloutKey, int]
    """The number of the last attempt of each key to be run; numbers (and so seeds) go on from there."""


def plan_resume(
    keys: Sequence[RolloutKey],
    rows: Iterable[ResultRow],
    attempts: Iterable[AttemptRow] = (),
    *,
    retry: Sequence[str] = (),
) -> ResumePlan:
    """Keep completed and limit; run again what has no row, was not started, was cancelled, or failed by no fault of
    its own (class infra, provider, rate_limit, store), and failures of the classes in ``retry``.

    Args:
        keys: All keys of the run, in order.
        rows: The rows there are; of two rows with one key the later counts.
        attempts: The attempts there are.
        retry: Further error classes to run again.

    Raises:
        RunError: ``swarm.bad_retry_class``.
    """
    classes = checked_classes((*DEFAULT_RETRY_ON, *retry))
    by_key = {row.key: row for row in rows}
    kept = tuple(row for key in keys if (row := by_key.get(key)) is not None and not _again(row, classes))
    done = {row.key for row in kept}
    again = tuple(key for key in keys if key not in done)
    last: dict[RolloutKey, int] = {}
    for attempt in attempts:
        last[attempt.key] = max(last.get(attempt.key, 0), attempt.attempt)
    for key, row in by_key.items():
        last[key] = max(last.get(key, 0), row.attempt)
    return ResumePlan(kept, again, {key: last[key] for key in again if last.get(key)})


def what_resumes(rows: Iterable[ResultRow]) -> tuple[bool, tuple[str, ...]]:
    """Whether a plain resume runs any of these rows again, and the error classes of those that only ``retry`` does."""
    classes = checked_classes(DEFAULT_RETRY_ON)
    plainly, only_asked = False, set[str]()
    for row in rows:
        if _again(row, classes):
            plainly = True
        elif row.status == "failed" and row.error is not None:
            only_asked.add(row.error.error_class)
    return plainly, tuple(sorted(only_asked))


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the manifest of a run with the one that a resume would write.

    Raises:
        RunError: ``run.mismatch`` naming every part that changed: items, prompt, repeats, seed, rollout, output_schema.
    """
    changed = {
        path[0]: {"before": old, "now": new}
        for path in _MUST_MATCH
        if (old := _at(before, path)) != (new := _at(now, path))
    }
    if changed:
        raise RunError(
            f"the {' and the '.join(changed)} changed since the run was started",
            code="run.mismatch",
            hint="start a new run with another --out, or put back what changed",
            details={"changed": changed},
        )


def check_same_run(run_id: str, rows: Iterable[ResultRow | AttemptRow]) -> None:
    """Refuse rows of another run: what they say was done was not done here.

    Raises:
        RunError: ``run.mismatch`` naming the first.
    """
    for row in rows:
        if row.run_id != run_id:
            raise RunError(
                f"the row of {row.key} is of the run {row.run_id}, the manifest is of {run_id}",
                code="run.mismatch",
                hint="take the rows of other runs out of the directory: what they name then runs here",
                details={"run_id": run_id, "row_run_id": row.run_id, "item_id": row.item_id, "repeat": row.repeat},
            )


def _again(row: ResultRow, classes: frozenset[Any]) -> bool:
    if row.status in ("completed", "limit"):
        return False
    if row.status == "failed":
        return row.error is None or row.error.error_class in classes
    return True


def _at(manifest: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = manifest
    for name in path:
        value = cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else None
    return value
