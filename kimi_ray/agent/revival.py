"""Bringing an agent back: what a lost life left open in its log is closed, and what becomes of its prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

from kimi_ray.agent.fold import PromptRecord
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.prompts import Prompts
from kimi_ray.agent.turn_ends import error_of, state_of
from kimi_ray.errors import AgentError
from kimi_ray.log import closing_events, epoch_ms
from kimi_ray.store.seam import Stream

MAX_REVIVALS = 3
"""How often an agent is brought back to the same work before it is given up."""

LOST = "its host was lost while it ran"
"""The ``error`` of a hook that a lost host left without a result."""


@dataclass(frozen=True, slots=True)
class Revival:
    """What became of the prompts of the life before, by their ids."""

    ended: list[str] = field(default_factory=list[str])
    """They have their final states."""
    continued: list[str] = field(default_factory=list[str])
    """Their turns go on."""


def revive_log(stream: Stream, journal: Journal, prompts: Prompts) -> Revival:
    """Mend the log of an agent that was lost in the middle of something; a new log needs nothing.

    1. A question that waited is decided as cancelled, and a hook that ran has a result that says why it has none.
    2. An open turn is closed as interrupted, its unanswered calls answered.
    3. A prompt whose turn had ended gets the state that this end gives it.
    4. An interrupted prompt fails with ``turn.interrupted``, or is continued if it was submitted so.
    5. A prompt that was steered into the turn and had not joined it waits again.
    6. After ``MAX_REVIVALS`` lives in a row that finished no turn, all open prompts fail with
       ``agent.revivals_exhausted``: what kills its host each time must not go on for ever.
    """
    _close_questions(journal)
    now = epoch_ms()
    for event in closing_events(journal.log.order, next_seq=journal.log.next_seq, recovered_at=now):
        journal.append(event["type"], event["data"], surface=event.get("surface"), sources=event.get("sources"))
    fold = journal.fold
    if fold.revivals > MAX_REVIVALS:
        return Revival(ended=prompts.give_up(_exhausted(stream, journal).to_data()))
    revival = Revival()
    unheard: list[PromptRecord] = []
    for record in list(fold.prompts.values()):
        if record.state not in ("running", "steered") and not (record.of_rollout and record.state == "pending"):
            continue
        if record.state == "steered" and not record.heard:
            unheard.append(record)
            continue
        turn = fold.turns.get(record.turn) if record.turn is not None else None
        reason = turn.reason if turn is not None else {"kind": "interrupted"}
        if reason["kind"] == "interrupted" and record.on_interrupt == "continue":
            if record.state == "running":
                revival.continued.append(record.prompt_id)
                continue
            if record.state == "steered" and record.steered_into in revival.continued:
                continue
        prompts.finish(record.prompt_id, state_of(reason), turn=record.turn, error=error_of(reason))
        revival.ended.append(record.prompt_id)
    prompts.put_back(unheard)
    return revival


def _close_questions(journal: Journal) -> None:
    fold = journal.fold
    for call_id in list(fold.open_questions):
        journal.append("permission/decided", {"call_id": call_id, "decision": "cancelled", "by": "host"})
    for seq, invoked in list(fold.open_hooks.items()):
        journal.append("hook/result", {**invoked, "invoked": seq, "blocked": False, "error": LOST})


def _exhausted(stream: Stream, journal: Journal) -> AgentError:
    fold = journal.fold
    before = fold.last_lives[0] or {}
    turn = max(fold.turns, default=None)
    cause = f"the host {before.get('host')} (pid {before.get('pid')}, node {before.get('node')}) was lost"
    return AgentError(
        f"{stream} was brought back {MAX_REVIVALS} times without finishing a turn; last, {cause}",
        code="agent.revivals_exhausted",
        hint="kimi-ray logs of that host may say why it died; a new prompt starts counting again",
        details={
            "stream": str(stream),
            "revivals": MAX_REVIVALS,
            "cause": cause,
            "turn": turn,
            **{key: before[key] for key in ("host", "pid", "node") if key in before},
        },
    )
