from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import ProviderError, StoreError
from kimi_ray.llm import RetryPolicy
from kimi_ray.llm.faults import scripted_fault


def test_the_waits_double_up_to_the_cap() -> None:
    policy = RetryPolicy(jitter=0)
    error = scripted_fault("provider.server", status=500)
    waits = [policy.delay_ms(attempt, error, random.Random(0)) for attempt in range(1, 11)]
    assert waits == [500, 1000, 2000, 4000, 8000, 16000, 32000, 32000, 32000, None]


@given(st.integers(1, 9), st.integers())
def test_the_jitter_only_adds_and_at_most_a_quarter(attempt: int, seed: int) -> None:
    base = min(500 * 2 ** (attempt - 1), 32_000)
    delay = RetryPolicy().delay_ms(attempt, scripted_fault("provider.connection"), random.Random(seed))
    assert delay is not None
    assert base <= delay <= base * 1.25
    again = RetryPolicy().delay_ms(attempt, scripted_fault("provider.connection"), random.Random(seed))
    assert delay == again


@pytest.mark.parametrize(
    ("asked", "delay"), [(1, 1), (7000, 7000), (120_000, 120_000), (120_001, None), (0, 500), (None, 500)]
)
def test_a_server_that_says_how_long_is_obeyed_within_reason(asked: int | None, delay: int | None) -> None:
    error = scripted_fault("provider.rate_limit", status=429, retry_after_ms=asked)
    assert RetryPolicy(jitter=0).delay_ms(1, error, random.Random(0)) == delay
    assert RetryPolicy(max_attempts=3).delay_ms(3, error, random.Random(0)) is None


def test_what_cannot_get_better_is_not_tried_again() -> None:
    rng = random.Random(0)
    assert RetryPolicy().delay_ms(1, scripted_fault("provider.auth", status=401), rng) is None
    assert RetryPolicy().delay_ms(1, scripted_fault("provider.quota", retry_after_ms=5), rng) is None
    assert RetryPolicy(max_attempts=1).delay_ms(1, scripted_fault("provider.server"), rng) is None
    assert RetryPolicy(jitter=0).delay_ms(1, StoreError("x", code="store.busy", retryable=True), rng) == 500


def test_a_budget_of_any_size_is_fine() -> None:
    policy = RetryPolicy(max_attempts=10**9, jitter=0)
    error = ProviderError("x", code="provider.server", retryable=True)
    assert policy.delay_ms(10**8, error, random.Random(0)) == 32_000
