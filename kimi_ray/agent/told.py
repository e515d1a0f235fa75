"""What the result of a prompt says beyond its turn: the checked answer, the scores, and all of a rollout function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kimi_ray.agent.fold import FINAL_STATES, AgentFold, PromptRecord
from kimi_ray.agent.specs import PromptResult
from kimi_ray.events import thaw


def told(result: PromptResult, fold: AgentFold, scores: Mapping[str, Any] | None = None) -> PromptResult:
    """The result as the log tells it by now; ``scores``: those of now, when the fold is of an earlier day.

    A rollout function has no turn of its own: its result counts all turns of the log, and its text is what it
    returned, if that is text, else the last answer.
    """
    record = fold.prompts.get(result.prompt_id)
    if record is None:
        return result
    changes: dict[str, object] = {}
    if record.state == "completed" and record.output is not None:
        changes["output"] = thaw(record.output)
    scores = fold.scores if scores is None else scores
    if scores:
        changes["scores"] = {name: thaw(value) for name, value in scores.items()}
    if record.is_rollout:
        last = next((turn.text for turn in reversed(fold.turns.values()) if turn.text), "")
        output = changes.get("output")
        changes |= {
            "text": output if isinstance(output, str) else last,
            "stop": _stop(record),
            "usage": fold.sums.usage(),
            "steps": fold.sums.steps,
            "tool_calls": fold.sums.tool_calls,
        }
    return result.model_copy(update=changes) if changes else result


def _stop(record: PromptRecord) -> str | None:
    """As a turn's reason would tell it."""
    code = str((record.error or {}).get("code", ""))
    if code.startswith("limit.") and record.state != "cancelled":
        return f"limit:{code.removeprefix('limit.')}"
    if code == "turn.interrupted":
        return "interrupted"
    return record.state if record.state in FINAL_STATES else None
