"""What a turn's requests are made with: the agent's settings, and what its prompt asks for on top."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_not
from typing import Any

from kimi_ray.agent.fold import PromptRecord
from kimi_ray.agent.requester import ModelRoute
from kimi_ray.agent.specs import AgentSpec, PromptSpec
from kimi_ray.llm.chat import ChatProvider, ToolSpec
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.settings import Limits, Sampling


@dataclass(frozen=True, slots=True)
class TurnConfig:
    """A snapshot, so a switch of the model takes effect in the next turn."""

    route: ModelRoute
    system: str | None
    tools: tuple[ToolSpec, ...]
    sampling: Sampling
    header_extra: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Asked:
    """What a prompt, or a continuation, asks of its turn alone."""

    sampling: Sampling | None = None
    limits: Limits | None = None

    @classmethod
    def by(cls, prompt: PromptRecord | PromptSpec | None) -> Asked:
        """What this one asks for; nothing, if there is none."""
        if prompt is None or not (prompt.sampling or prompt.limits):
            return NOTHING
        sampling = Sampling.model_validate(prompt.sampling) if prompt.sampling else None
        return cls(sampling, Limits.model_validate(prompt.limits) if prompt.limits else None)

    def limits_over(self, limits: Limits | None) -> Limits:
        """The limits of the turn, those of the agent being these."""
        return self.limits.over(limits) if self.limits is not None else limits or _NO_LIMITS


NOTHING = Asked()
_NO_LIMITS = Limits()
_NO_SAMPLING = Sampling()


class TurnConfigs:
    """The snapshots of one agent's turns: most of them are the one before."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, ...], TurnConfig] | None = None

    def of(
        self, spec: AgentSpec, model: ResolvedModel, provider: ChatProvider, tools: tuple[ToolSpec, ...], asked: Asked
    ) -> TurnConfig:
        """``turn_config``, made anew only where something is another than the last time."""
        if asked.sampling is not None:
            return turn_config(spec, model, provider, tools, asked)
        made_of = (spec, model, provider, *tools)
        last = self._last
        if last is None or len(last[0]) != len(made_of) or any(map(is_not, last[0], made_of)):
            last = self._last = (made_of, turn_config(spec, model, provider, tools, asked))
        return last[1]


def turn_config(
    spec: AgentSpec, model: ResolvedModel, provider: ChatProvider, tools: tuple[ToolSpec, ...], asked: Asked
) -> TurnConfig:
    """The snapshot of a turn that begins now."""
    sampling = (spec.sampling or _NO_SAMPLING).over(spec.profile.sampling)
    if asked.sampling is not None:
        sampling = asked.sampling.over(sampling)
    if not spec.send_seed and sampling.seed is not None:
        sampling = sampling.model_copy(update={"seed": None})
    return TurnConfig(
        route=ModelRoute(provider, model.model, model.retry, model.settings.record_chunks),
        system=spec.profile.system_prompt,
        tools=tools,
        sampling=sampling,
        header_extra=_wire_settings(model),
    )


def _wire_settings(model: ResolvedModel) -> dict[str, Any]:
    """What the model's settings add to every request, for ``request/header``; what is the default is left out.

    ``context`` is not sent: it says when and how the conversation is shortened, so that a log explains it.
    """
    settings = model.settings
    extra: dict[str, Any] = {}
    if not settings.stream:
        extra["stream"] = False
    if settings.extra_body:
        extra["extra_body"] = settings.extra_body
    if settings.reasoning_history != "tool_calls":
        extra["reasoning_history"] = settings.reasoning_history
    context = settings.model_dump(mode="json", exclude_defaults=True, include={"max_context_tokens", "compaction"})
    if context:
        extra["context"] = context
    return extra
