"""What travels comes back as it was, by pickle and by copy."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from kimi_ray.agent.specs import AgentTotals, Outcome, PromptResult, PromptSpec
from kimi_ray.settings import Item, Limits, Profile, Sampling, Usage
from kimi_ray.store.seam import Stream

RESULT = PromptResult(prompt_id="p", state="failed", usage=Usage(input=1), error={"code": "x"}, scores={"a": 1.5})
VALUES: list[Any] = [
    RESULT,
    Usage(),
    Usage(input=3, estimated=True),
    Sampling(temperature=0.5, extra_body={"a": [1]}),
    Limits(max_turns=2),
    Profile(name="n", tools=("Read",)),
    Item(id="i", data={"a": 1}),
    PromptSpec("p", "text", limits=Limits(max_turns=1), source={"kind": "k"}),
    PromptSpec("p", content=({"type": "text", "text": "t"},), continuation=True),
    AgentTotals(turns=2, usage=Usage(output=1), cost_usd=0.5),
    Outcome(Stream("s", "a"), "p", RESULT, 3, 2, AgentTotals(), message_seq=1, node_id="n"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_what_is_pickled_comes_back(value: Any, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(value, protocol))
    assert again == value and type(again) is type(value) and repr(again) == repr(value)
    assert copy.copy(value) == value and copy.deepcopy(value) == value


@pytest.mark.parametrize("value", [value for value in VALUES if hasattr(value, "model_dump")])
def test_a_model_that_came_back_is_as_good_as_before(value: Any) -> None:
    again = pickle.loads(pickle.dumps(value))
    assert again.model_fields_set == value.model_fields_set
    assert again.model_dump(exclude_unset=True) == value.model_dump(exclude_unset=True)
    assert again.model_copy(update={}) == value
    with pytest.raises(ValidationError):
        setattr(again, next(iter(type(again).model_fields)), None)
