"""What a finished swarm gives back."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Self, get_args

from pydantic import Field

from kimi_ray.errors import RunError
from kimi_ray.runs.items import RolloutKey
from kimi_ray.runs.outcomes import RowStatus
from kimi_ray.runs.rows import ResultRow
from kimi_ray.settings import Settings, Usage

_FINE: tuple[RowStatus, ...] = ("completed", "limit")


class ScoreMean(Settings):
    """The mean of a score over the ``n`` rows that have it as a number; true is 1 and false is 0."""

    mean: float
    n: int


class SwarmReport(Settings):
    """All rows of a run in the order of its items, and their sums over all attempts."""

    run_id: str
    session_id: str | None = None
    rows: tuple[ResultRow, ...]
    totals: dict[str, int] = Field(default_factory=dict)
    """Rows by status; every status is there."""
    usage: Usage = Usage()
    cost_usd: float | None = None
    """US dollars; None when no price is known."""
    wall_s: float = 0.0
    run_dir: str | None = None
    scores: dict[str, ScoreMean] = Field(default_factory=dict)
    """By name, over the rows that have a number under it; scores of other kinds are in their rows alone."""

    @classmethod
    def of(
        cls,
        asked: Sequence[RolloutKey],
        rows: Iterable[ResultRow],
        *,
        run_id: str,
        session_id: str | None = None,
        wall_s: float = 0.0,
        run_dir: str | None = None,
    ) -> Self:
        """Put the rows into the order that was asked for and sum them up.

        Raises:
            RunError: ``swarm.incomplete`` when a key has no row, has two, or a row has a key that nobody asked for.
        """
        by_key: dict[RolloutKey, ResultRow] = {}
        twice: list[str] = []
        for row in rows:
            if row.key in by_key:
                twice.append(str(row.key))
            by_key[row.key] = row
        missing = [str(key) for key in asked if key not in by_key]
        strange = [str(key) for key in by_key.keys() - set(asked)]
        if twice or missing or strange or len(set(asked)) != len(asked):
            wrong = {"missing": missing, "twice": twice, "strange": strange}
            told = "; ".join(f"{word}: {', '.join(keys[:3])}" for word, keys in wrong.items() if keys)
            raise RunError(
                f"{len(asked)} rollouts were asked for and {len(by_key)} returned ({told})",
                code="swarm.incomplete",
                hint="this is a defect of kimi_ray; the logs and the run directory hold what was done",
                details={"missing": missing[:20], "twice": twice[:20], "strange": strange[:20]},
            )
        ordered = tuple(by_key[key] for key in asked)
        usage = Usage()
        for row in ordered:
            usage = usage.plus(row.total_usage)
        costs = [cost for row in ordered if (cost := row.total_cost_usd) is not None]
        return cls(
            run_id=run_id,
            session_id=session_id,
            rows=ordered,
            totals=count_statuses(ordered),
            usage=usage,
            cost_usd=sum(costs) if costs else None,
            wall_s=wall_s,
            run_dir=run_dir,
            scores=mean_scores(ordered),
        )

    @property
    def ok(self) -> bool:
        """Whether every rollout completed or ended at one of its limits."""
        return all(row.status in _FINE for row in self.rows)

    def raise_for_status(self) -> Self:
        """This report, unless rollouts failed, were cancelled or never started.

        Raises:
            RunError: ``swarm.failed`` with the counts and the first errors.
        """
        if self.ok:
            return self
        bad = [row for row in self.rows if row.status not in _FINE]
        told = ", ".join(f"{count} {status}" for status, count in self.totals.items() if count)
        first = next((row.error for row in bad if row.error is not None), None)
        raise RunError(
            f"{len(bad)} of {len(self.rows)} rollouts did not complete: {told}",
            code="swarm.failed",
            hint=f"the first error is {first.code}: {first.message}" if first else None,
            details={
                "totals": self.totals,
                "run_dir": self.run_dir,
                "first": [
                    {
                        "item_id": row.item_id,
                        "repeat": row.repeat,
                        "stop": row.stop,
                        "code": row.error and row.error.code,
                    }
                    for row in bad[:10]
                ],
            },
        )


def mean_scores(rows: Iterable[ResultRow]) -> dict[str, ScoreMean]:
    """The means of the numeric scores by name, in the order in which the names come."""
    numbers: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.scores.items():
            if isinstance(value, int | float):
                numbers.setdefault(name, []).append(float(value))
    # `statistics.mean` and not `fmean`: exact, and its sum does not overflow
    return {name: ScoreMean(mean=statistics.mean(values), n=len(values)) for name, values in numbers.items()}


def count_statuses(rows: Iterable[ResultRow]) -> dict[str, int]:
    """Rows by status, with a zero for a status that no row has."""
    counts = dict.fromkeys(get_args(RowStatus), 0)
    for row in rows:
        counts[row.status] += 1
    return counts
