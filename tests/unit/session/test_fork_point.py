"""How a fork point is written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import ConfigError
from kimi_ray.log import Where
from kimi_ray.session import ForkPoint, parse_fork_point

POINTS = st.builds(
    lambda kind, turn, step: ForkPoint(kind, turn, step if kind == "step" else 0),
    st.sampled_from(["turn", "step", "before"]),
    st.integers(0, 10**9 - 1),
    st.integers(0, 10**9 - 1),
)


@given(POINTS)
def test_the_canonical_form_comes_back(point: ForkPoint) -> None:
    assert parse_fork_point(str(point)) == point
    assert point.where == Where(point.kind, point.turn, point.step)


@pytest.mark.parametrize(
    ("at", "form"), [("3", "3"), ("003", "3"), ("0.17", "0.17"), ("00.007", "0.7"), ("^3", "^3"), ("^0", "^0")]
)
def test_forms(at: str, form: str) -> None:
    assert str(parse_fork_point(at)) == form


def test_nothing_is_the_whole_and_an_index_is_a_turn() -> None:
    assert parse_fork_point() is None
    assert parse_fork_point(None, 3) == parse_fork_point("3") == parse_fork_point("03", 3)


@pytest.mark.parametrize("at", ["^0", "3.0", "4"])
def test_two_different_points(at: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fork_point(at, 3)
    assert caught.value.code == "request.conflict"


BAD: list[Any] = [
    "", " ", "-1", "+1", "1 ", " 1", "1\n", "1.", ".1", "1.2.3", "^", "^1.2", "1^", "^^1", "1e3", "0x1", "1_0",
    "\u0663", "last", "1.-2", "9" * 10, "1." + "9" * 10, 3, 0.17, True, b"3", None.__class__,
]  # fmt: skip


@pytest.mark.parametrize("at", BAD)
def test_what_is_no_point(at: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fork_point(at)
    assert caught.value.code == "request.invalid"
    assert "at" in caught.value.to_data()["details"]


@pytest.mark.parametrize("index", [-1, True, False, 1.0, "1", 10**9, 2**60])
def test_an_index_that_is_none(index: Any) -> None:
    """K's test 28."""
    with pytest.raises(ConfigError) as caught:
        parse_fork_point(None, index)
    assert caught.value.code == "request.invalid"


@given(st.text(alphabet="0123456789.^ -\n\u0660", max_size=8))
def test_any_text_is_a_point_or_refused(text: str) -> None:
    try:
        point = parse_fork_point(text)
    except ConfigError as error:
        assert error.code == "request.invalid"
    else:
        assert parse_fork_point(str(point)) == point
