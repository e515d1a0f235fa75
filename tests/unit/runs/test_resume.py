"""What a resume keeps, what it runs again, and what must not have changed."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, ProviderError, RunError, StoreError, ToolError
from kimi_ray.runs import (
    AttemptRow,
    ResultRow,
    RolloutKey,
    RowError,
    RunSeed,
    build_manifest,
    check_unchanged,
    plan_resume,
    prepare_items,
)
from kimi_ray.runs.manifest import seed_of
from kimi_ray.settings import Item


def row(item: str, status: str, error: KimiRayError | None = None, attempt: int = 1) -> ResultRow:
    return ResultRow(
        run_id="r", item_id=item, index=0, repeat=0, attempt=attempt, status=status, stop=status, item="x",  # type: ignore[arg-type]
        error=RowError.of(error) if error else None,
    )  # fmt: skip


ROWS = [
    row("completed", "completed"),
    row("limit", "limit"),
    row("cancelled", "cancelled"),
    row("not_started", "not_started"),
    row("infra", "failed", KimiRayError("m", code="infra.actor_died")),
    row("provider", "failed", ProviderError("m", code="provider.server")),
    row("rate", "failed", ProviderError("m", code="provider.rate_limit")),
    row("store", "failed", StoreError("m", code="store.busy"), attempt=3),
    row("auth", "failed", ProviderError("m", code="provider.auth")),
    row("tool", "failed", ToolError("m", code="tool.failed")),
    row("user", "failed", ToolError("m", code="tool.user_code")),
]
KEYS = [RolloutKey("never", 0), *[one.key for one in ROWS]]


def again(**how: Any) -> set[str]:
    plan = plan_resume(KEYS, ROWS, **how)
    assert {one.key for one in plan.kept} | set(plan.again) == set(KEYS)
    assert not {one.key for one in plan.kept} & set(plan.again)
    return {key.item_id for key in plan.again}


USUAL = {"never", "cancelled", "not_started", "infra", "provider", "rate", "store"}


def test_the_rule() -> None:
    assert again() == USUAL
    assert again(retry=["auth"]) == USUAL | {"auth"}
    assert again(retry=["tool", "user_code"]) == USUAL | {"tool", "user"}


def test_a_class_that_is_none() -> None:
    with pytest.raises(RunError) as error:
        again(retry=["everything"])
    assert error.value.code == "swarm.bad_retry_class"


def test_the_order_is_that_of_the_keys_and_rows_of_other_keys_are_dropped() -> None:
    plan = plan_resume(KEYS[:3], list(reversed(ROWS)))
    assert plan.again == (RolloutKey("never", 0),)
    assert [one.item_id for one in plan.kept] == ["completed", "limit"]


def test_of_two_rows_the_later_counts() -> None:
    key = RolloutKey("a", 0)
    assert plan_resume([key], [row("a", "failed"), row("a", "completed")]).again == ()
    assert plan_resume([key], [row("a", "completed"), row("a", "cancelled")]).again == (key,)


def test_attempt_numbers_go_on_also_after_a_crash_between_attempt_and_row() -> None:
    attempts = [
        AttemptRow(run_id="r", item_id=item, index=0, repeat=0, attempt=number, seed=1, status="failed", stop="failed")
        for item, number in (("never", 1), ("never", 2), ("completed", 5))
    ]
    plan = plan_resume(KEYS, ROWS, attempts)
    assert plan.attempts_before[RolloutKey("never", 0)] == 2
    assert plan.attempts_before[RolloutKey("store", 0)] == 3
    assert RolloutKey("completed", 0) not in plan.attempts_before


def manifest(items: list[Any], prompt: str = "{{item}}", repeats: int = 1, seed: int = 7) -> dict[str, Any]:
    return build_manifest(
        run_id="r",
        items=prepare_items(items),
        prompt=prompt,
        seed=RunSeed.choose(seed),
        repeats=repeats,
        arguments={},
        config={},
    )


def test_an_unchanged_run_is_fine_whatever_else_differs() -> None:
    before = manifest(["a", "b"])
    now = {**manifest(["a", "b"]), "argv": ["x"], "versions": {}, "run_id": "s"}
    check_unchanged(before, now)
    assert seed_of(before) == RunSeed(7, sent=True)


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (manifest(["a", "c"]), {"items"}),
        (manifest(["b", "a"]), {"items"}),
        (manifest(["a", Item(data="b", prompt="x")]), {"items"}),
        (manifest(["a", "b"], prompt="other {{item}}"), {"prompt"}),
        (manifest(["a"], prompt="other {{item}}", repeats=2), {"items", "prompt", "repeats"}),
        (manifest(["a", "b"], seed=8), {"seed"}),
        ({}, {"items", "prompt", "repeats", "seed"}),
    ],
)
def test_everything_that_changed_is_named(now: dict[str, Any], named: set[str]) -> None:
    with pytest.raises(RunError) as error:
        check_unchanged(manifest(["a", "b"]), now)
    assert error.value.code == "run.mismatch"
    assert set(error.value.details["changed"]) == named
    for name in named:
        assert name in error.value.message
