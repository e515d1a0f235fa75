"""The words between the runtime and a hook: what it reads on stdin, and what its end means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kimi_ray.features.external_hooks.process import CommandEnd

BLOCKS = frozenset({"UserPromptSubmit", "PreToolUse", "Stop"})
"""The events of which a hook may say no."""
CLIENT = "kimi_ray"
BLOCK_EXIT = 2
MESSAGE_CHARS = 30_000
"""Longest text of a hook that a model is shown, or that goes into the log."""
TOOL_OUTPUT_CHARS = 2000
_CUT = "\n[... cut here ...]"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a hook said. Blocked: ``message`` is the reason; else text for the model, or None."""

    blocked: bool
    message: str | None = None
    problem: str | None = None
    """Why nothing was made of it: the event went on as if it had not been asked."""


def hook_input(event: str, base: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
    """What a hook reads: one JSON object.

    Raises:
        ValueError: it cannot be written as JSON.
    """
    try:
        return json.dumps({"hook_event_name": event, **base, **fields}, default=str).encode() + b"\n"
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def verdict_of(event: str, end: CommandEnd) -> Verdict:
    """What a command's end means.

    Exit 2, or exit 0 and ``hookSpecificOutput.permissionDecision == "deny"`` on stdout, blocks an event that can be
    blocked. Other text on stdout is a message. Everything else lets the event go on: the problem is told.
    """
    if end.error is not None:
        return Verdict(False, problem=end.error)
    if end.timed_out:
        return Verdict(False, problem=f"it took too long and was killed after {end.duration_ms / 1000:.3g} s")
    if end.exit_code == BLOCK_EXIT:
        return _blocked(event, end.stderr)
    if end.exit_code != 0:
        said = end.stderr.strip()[-500:]
        return Verdict(False, problem=f"it ended with exit code {end.exit_code}{f': {said}' if said else ''}")
    text = end.stdout.strip()
    answer = _json_object(text)
    if answer is None:
        return Verdict(False, shortened(text) or None)
    specific = answer.get("hookSpecificOutput")
    inner = cast("dict[str, Any]", specific) if isinstance(specific, dict) else {}
    if inner.get("permissionDecision") == "deny":
        return _blocked(event, str(inner.get("permissionDecisionReason") or ""))
    for message in (answer.get("message"), inner.get("message"), inner.get("additionalContext")):
        if isinstance(message, str) and message.strip():
            return Verdict(False, shortened(message.strip()))
    return Verdict(False)


def shortened(text: str, limit: int = MESSAGE_CHARS) -> str:
    """The text, or its beginning; half characters, which JSON can hold and a log cannot, are replaced."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[:limit] + _CUT


def result_block(event: str, message: str) -> dict[str, Any]:
    """A hook's message as the model sees it."""
    return {"type": "text", "text": f'<hook_result hook_event="{event}">\n{message}\n</hook_result>'}


def _blocked(event: str, reason: str) -> Verdict:
    text = shortened(reason.strip()) or f"A {event} hook blocked this and gave no reason."
    if event in BLOCKS:
        return Verdict(True, text)
    return Verdict(False, problem=f"it said no, but {event} cannot be blocked: {text[:500]}")


def _json_object(text: str) -> dict[str, Any] | None:
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None
