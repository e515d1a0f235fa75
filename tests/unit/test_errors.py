"""Errors: one tree, stable codes, the same on both sides of a pickle and of JSON."""

from __future__ import annotations

import json
import pickle

import pytest

from kimi_ray import errors
from kimi_ray.errors import (
    ConfigError,
    KimiRayError,
    ProviderError,
    RunError,
    RuntimeFault,
    StoreError,
    ToolError,
    as_error,
    error_from_data,
)

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KimiRayError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_class_survives_pickle_and_json(kind: type[KimiRayError]) -> None:
    made = kind("it broke", code="family.what", hint="mend it", details={"at": [1, {"x": None}]}, retryable=True)
    for copy in (pickle.loads(pickle.dumps(made)), error_from_data(json.loads(json.dumps(made.to_data())))):
        assert type(copy) is kind
        assert copy.to_data() == made.to_data()
        assert (copy.code, copy.hint, copy.details, copy.retryable) == ("family.what", "mend it", made.details, True)
        assert str(copy) == "family.what: it broke (mend it)"


def test_a_kind_from_the_future_is_still_an_error_with_its_code() -> None:
    copy = error_from_data(
        {"kind": "QuantumError", "code": "quantum.lost", "message": "m", "retryable": True, "new": 1}
    )
    assert type(copy) is KimiRayError
    assert (copy.code, copy.retryable) == ("quantum.lost", True)


def test_an_error_without_any_data_can_be_read() -> None:
    assert error_from_data({}).code == "internal"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ProviderError("m", code="provider.rate_limit"), "rate_limit"),
        (ProviderError("m", code="provider.auth"), "auth"),
        (ProviderError("m", code="provider.server"), "provider"),
        (StoreError("m", code="store.busy"), "store"),
        (RuntimeFault("m", code="infra.actor_died"), "infra"),
        (RunError("m", code="swarm.cancelled"), "cancelled"),
        (ConfigError("m", code="config.invalid"), "user_code"),
        (ToolError("m", code="workdir.no_git"), "environment"),
        (ToolError("m", code="workdir.bad_ref"), "environment"),
        (ToolError("m", code="workdir.not_a_repository"), "environment"),
        (ToolError("m", code="workdir.lost"), "infra"),
    ],
)
def test_classes_that_retry_rules_group_by(error: KimiRayError, expected: str) -> None:
    assert error.error_class == expected
    assert pickle.loads(pickle.dumps(error)).error_class == expected


def test_a_foreign_exception_keeps_its_type_and_text() -> None:
    wrapped = as_error(ValueError("bad thing"), code="tool.user_code")
    assert wrapped.code == "tool.user_code"
    assert "ValueError" in wrapped.message
    assert "bad thing" in wrapped.message
    assert wrapped.details == {"exception": "ValueError"}
    assert as_error(ValueError()).message.strip() == "ValueError: ValueError"


def test_an_error_of_ours_is_not_wrapped() -> None:
    mine = StoreError("m", code="store.gap")
    assert as_error(mine) is mine


def test_details_of_two_errors_are_not_shared() -> None:
    first, second = KimiRayError("m", code="c"), KimiRayError("m", code="c")
    first.with_details(a=1)
    assert second.details == {}
