"""What a summarizer gave is looked at before it stands for a conversation: it may be anybody's code."""

from __future__ import annotations

from typing import Any, cast

from kimi_ray.agent.summarizer import Summary
from kimi_ray.errors import AgentError
from kimi_ray.events import freeze
from kimi_ray.settings import Usage

_HINT = "a summarizer gives a Summary of text blocks, not all blank"


def checked_summary(found: object) -> Summary:
    """A summary that says something, and that a log can hold.

    Raises:
        AgentError: ``compaction.summary``: it is none.
        LogError: ``log.not_json`` for what no log can hold.
    """
    if not isinstance(found, Summary):
        raise _none(f"the summarizer gave {type(found).__name__}")
    content, model, usage = cast("tuple[Any, Any, Any]", (found.content, found.model, found.usage))
    if not isinstance(content, list | tuple):
        raise _none(f"its content is {type(content).__name__}")
    blocks = list(cast("list[Any]", content))
    for block in blocks:
        if not isinstance(block, dict):
            raise _none(f"a block of it is {type(block).__name__}")
        said = cast("dict[Any, Any]", block)
        if said.get("type") != "text" or not isinstance(said.get("text"), str):
            raise _none(f"a block of it is no text, its type {said.get('type')!r}")
    if not any(block["text"].strip() for block in blocks):
        raise _none("the summarizer wrote none")
    if not isinstance(model, str | None):
        raise _none(f"its model is {type(model).__name__}")
    if usage is not None:
        _check_usage(usage)
    return Summary(freeze(blocks), None if model is None else freeze(model), freeze(usage))


def _check_usage(usage: Any) -> None:
    if not isinstance(usage, dict):
        raise _none(f"its usage is {type(usage).__name__}")
    counts = cast("dict[Any, Any]", usage)
    for name in Usage.model_fields:
        count = counts.get(name, 0)
        if name != "estimated" and (type(count) is not int or count < 0):
            raise _none(f"its usage.{name} is {str(count)[:40]}")


def _none(why: str) -> AgentError:
    return AgentError(why, code="compaction.summary", hint=_HINT)
