"""The model of a replayed turn: what its table says today; as recorded where there is no table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_ray.llm.models import ModelSettings, ResolvedModel

_OF_A_TABLE = ("stream", "extra_body", "reasoning_history")
"""Keys of a request header that come from a model's table."""

_PATIENT = {"max_attempts": 1 << 20, "retry_base_s": 0.0, "retry_max_s": 0.0, "record_chunks": "none"}
"""Whether an attempt is followed by another one is what the recording says."""


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model, and what its requests' header has besides what the model says of itself."""

    model: ResolvedModel
    extra: dict[str, Any]


def model_of_turn(name: str | None, header: Mapping[str, Any], tables: Mapping[str, ModelSettings]) -> ChosenModel:
    """The model of a turn. It is never reached: no key is looked for, no address.

    Args:
        name: As it was bound.
        header: The recorded request header.
        tables: The ``[models.X]`` tables of today.
    """
    said: Any = header.get("context")
    context: dict[str, Any] = {}
    if said is not None:  # as it was when it was recorded, whatever is said today
        asked = ModelSettings.model_validate({"provider": "recorded", **said})
        context = {"max_context_tokens": asked.max_context_tokens, "compaction": asked.compaction}
    recorded = str(header.get("model") or name or "recorded")
    table = tables.get(name or "")
    if table is None or table.provider == "chaos":
        settings = ModelSettings().model_copy(update=_PATIENT | context)
        model = ResolvedModel(name=name or recorded, provider="recorded", model=recorded, settings=settings)
        return ChosenModel(model, {key: header[key] for key in _OF_A_TABLE if key in header})
    settings = table.model_copy(update=_PATIENT | context)
    wire = table.model or name or recorded
    return ChosenModel(ResolvedModel(name=name or wire, provider="recorded", model=wire, settings=settings), {})
