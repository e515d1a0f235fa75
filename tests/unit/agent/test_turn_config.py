"""The snapshot of a turn is that of the turn before, unless what it is made of is another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kimi_ray.agent.specs import AgentSpec, PromptSpec
from kimi_ray.agent.turn_config import NOTHING, Asked, TurnConfigs, turn_config
from kimi_ray.llm.chat import ToolSpec
from kimi_ray.llm.models import ModelSettings, ResolvedModel
from kimi_ray.llm.scripted import ScriptedProvider
from kimi_ray.settings import Limits, Profile, Sampling
from kimi_ray.store.seam import Stream


def model(name: str, **settings: Any) -> ResolvedModel:
    return ResolvedModel(name=name, provider="scripted", model=name, settings=ModelSettings(**settings))


LOOK, ANSWER = (ToolSpec(name, "says what", {"type": "object"}) for name in ("look", "final_answer"))
SPEC = AgentSpec(Stream("s", "main"), "nonce", Profile(name="p", sampling=Sampling(top_k=3)), model("first"))
GIVEN: dict[str, Any] = {
    "spec": SPEC,
    "model": SPEC.model,
    "provider": ScriptedProvider([]),
    "tools": (LOOK,),
    "asked": NOTHING,
}
OTHERS: dict[str, Any] = {
    "spec": replace(SPEC, sampling=Sampling(temperature=0.5)),
    "model": model("first", max_context_tokens=1000),
    "provider": ScriptedProvider([], name="another"),
    "tools": (LOOK, ANSWER),
    "asked": Asked(Sampling(seed=7)),
}


@pytest.mark.parametrize("what", list(OTHERS))
def test_each_thing_that_it_is_made_of_counts_and_so_does_the_way_back(what: str) -> None:
    configs = TurnConfigs()
    first = configs.of(**GIVEN)
    assert configs.of(**{**GIVEN, "tools": tuple(GIVEN["tools"])}) is first == turn_config(**GIVEN)
    other = {**GIVEN, what: OTHERS[what]}
    assert configs.of(**other) == turn_config(**other) != first
    assert configs.of(**GIVEN) == first


def test_limits_of_one_prompt_leave_nothing_behind() -> None:
    asked = Asked.by(PromptSpec("p", limits=Limits(max_turns=1)))
    assert asked.limits_over(Limits(max_steps=2)) == Limits(max_turns=1, max_steps=2)
    assert NOTHING.limits_over(None) == Limits()
    configs = TurnConfigs()
    assert configs.of(**GIVEN) is configs.of(**{**GIVEN, "asked": asked})
