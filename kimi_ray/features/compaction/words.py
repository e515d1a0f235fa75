"""What a compaction tells: its result, and its errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kimi_ray.errors import AgentError, ConfigError, KimiRayError
from kimi_ray.events import freeze

Trigger = Literal["pressure", "overflow", "manual", "region"]


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """A compaction that took effect."""

    compaction_id: str
    trigger: Trigger
    start_seq: int
    """Of ``compaction/start``."""
    summary_seq: int
    message_seq: int
    """Of the message that stands for what was compacted."""
    end_seq: int
    """Of ``compaction/end``; ``message_seq`` where the host was lost just before it."""
    shadowed_range: tuple[int, int]
    shadowed_seqs: tuple[int, ...]
    shadowed_tokens: int
    """What was compacted had so many tokens, by the estimate."""
    message_tokens: int
    """What stands for it has so many."""
    summary: str


def checked_instruction(instruction: object) -> None:
    """Refuse what is no text for a summarizer.

    Raises:
        ConfigError: ``request.invalid``.
        LogError: ``log.not_json`` for what no log can hold.
    """
    if instruction is None:
        return
    if not isinstance(instruction, str):
        raise ConfigError(
            f"an instruction of type {type(instruction).__name__}", code="request.invalid", hint="give a text, or None"
        )
    freeze(instruction)


def busy(why: str, **details: object) -> AgentError:
    """``compaction.busy``."""
    return AgentError(
        f"nothing was compacted: {why}",
        code="compaction.busy",
        hint="wait until the agent is idle",
        details=dict(details),
        retryable=True,
    )


def cancelled(compaction_id: str | None = None) -> AgentError:
    """``compaction.cancelled``."""
    details = {} if compaction_id is None else {"compaction_id": compaction_id}
    return AgentError("the compaction was cancelled; nothing changed", code="compaction.cancelled", details=details)


def changed(compaction_id: str) -> AgentError:
    """``compaction.changed``."""
    return AgentError(
        "the conversation changed while its summary was written; nothing was compacted",
        code="compaction.changed",
        hint="try again",
        details={"compaction_id": compaction_id},
        retryable=True,
    )


def not_smaller(compaction_id: str, tokens: int, shadowed: int) -> AgentError:
    """``compaction.summary`` for one that saves nothing."""
    return AgentError(
        f"the summary has {tokens} tokens, and what it was to replace {shadowed}: nothing was compacted",
        code="compaction.summary",
        hint="there is little to compact yet, or the model writes too much",
        details={"compaction_id": compaction_id, "tokens": tokens, "shadowed_tokens": shadowed},
    )


def failed_summary(compaction_id: str, error: KimiRayError) -> AgentError:
    """``compaction.summary`` for a summarizer that failed."""
    why = error.message.removeprefix("there is no summary: ")
    return AgentError(
        f"there is no summary, and nothing was compacted: {why}",
        code="compaction.summary",
        hint=error.hint,
        details={"compaction_id": compaction_id, "cause": error.to_data()},
        retryable=error.retryable,
    )


def failed_commit(compaction_id: str, error: KimiRayError) -> AgentError:
    """``compaction.commit``."""
    return AgentError(
        f"the compaction could not be written: {error.message}",
        code="compaction.commit",
        hint=error.hint,
        details={"compaction_id": compaction_id, "cause": error.to_data()},
    )


def not_durable(compaction_id: str | None, error: KimiRayError) -> AgentError:
    """``compaction.persistence``."""
    return AgentError(
        f"the compaction is in the log, and the log is not durable yet: {error.message}",
        code="compaction.persistence",
        hint="the store goes on trying; agent.flush() tells when it is",
        details={"compaction_id": compaction_id, "cause": error.to_data()},
    )


def not_enough(total: int, threshold: int) -> AgentError:
    """``compaction.not_enough``."""
    return AgentError(
        f"what can be compacted is, and the next request still has {total} tokens, at a threshold of {threshold}",
        code="compaction.not_enough",
        hint="lower retain_ratio or user_tokens in [models.X.compaction], or give the agent less at once",
        details={"tokens": total, "threshold": threshold},
    )
