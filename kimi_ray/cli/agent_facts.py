"""What the log of one agent says about it, folded for ``sessions show``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kimi_ray.cli.logs_read import lines_from
from kimi_ray.events import SessionEvent, parse_event
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.agent.fold import AgentFold
    from kimi_ray.store.open import ReadStore

_CHUNK = b'"type":"assistant/chunk"'
"""The third key of an event's canonical line, behind seq and time."""


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """One turn, for ``--turns``. ``copied``: of a fork's log, it ran in the source. ``undone``: it was taken back."""

    turn: int
    prompts: tuple[str, ...]
    steps: int
    tool_calls: int
    input_tokens: int
    output_tokens: int
    duration_ms: int | None
    reason: str
    first_seq: int
    last_seq: int | None
    copied: bool = False
    undone: bool = False
    error: dict[str, Any] | None = None

    def to_data(self) -> dict[str, Any]:
        """As JSON; what is not known is absent."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What the log of one agent says. Counts are its own: of a fork's log, what the source did is not counted."""

    agent_id: str
    parent: str | None
    """Of the same session; whose history a copied log has is in ``forked_from``."""
    profile: str | None
    model: str | None
    state: str
    turns: int
    steps: int
    tool_calls: int
    input_tokens: int
    output_tokens: int
    retries: int
    interruptions: int
    events: int
    last_time: int | None
    tools: dict[str, int]
    pending_prompts: int
    item_id: str | None = None
    repeat: int | None = None
    attempt: int | None = None
    run_id: str | None = None
    forked_from: dict[str, Any] | None = None
    seed_length: int | None = None
    fork_group: str | None = None
    fork_index: int | None = None
    workdir: dict[str, Any] | None = None
    last_text: str | None = None
    error: dict[str, Any] | None = None
    turn_list: tuple[TurnFacts, ...] | None = None

    def to_data(self) -> dict[str, Any]:
        """As JSON; what is not known is absent."""
        data = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        if self.turn_list is not None:
            data["turn_list"] = [turn.to_data() for turn in self.turn_list]
        return data


async def agent_facts(
    store: ReadStore, stream: Stream, header: dict[str, Any], *, live: bool, turns: bool = False
) -> AgentFacts:
    """Fold a whole log into what is shown about its agent; with ``turns`` into each of its turns too."""
    from kimi_ray.agent.fold import AgentFold
    from kimi_ray.session.document_value import parent_of_log

    fold = AgentFold(keep_turns=1, seed_bind=header.get("bind"))
    course = _Course(fold, keep=turns)
    last_line = b""
    async for line in lines_from(store, stream, 0):
        last_line = line
        if line.split(b",", 3)[2] == _CHUNK:
            continue  # most of a long log, and nothing that is shown here
        event = parse_event(line)
        fold.apply(event)
        course.follow(event)
    last = parse_event(last_line) if last_line else None
    totals = fold.totals()
    usage = totals.usage
    parent: dict[str, Any] = header.get("parent") or {}
    copied = parent.get("session_id") not in (None, stream.session_id) or header.get("origin") == "fork"
    source: dict[str, Any] | None = header.get("forked_from") or (parent if copied else None)
    waiting = sum(record.state == "pending" for record in fold.prompts.values())
    return AgentFacts(
        agent_id=stream.agent_id,
        parent=None if stream.agent_id == "main" else parent_of_log(header),
        profile=header.get("profile"),
        model=fold.model_name,
        state=course.state(fold, live=live),
        turns=totals.turns,
        steps=totals.steps,
        tool_calls=totals.tool_calls,
        input_tokens=usage.input + usage.cached + usage.cache_write,
        output_tokens=usage.output,
        retries=totals.retries,
        interruptions=totals.interruptions,
        events=0 if last is None else last.seq + 1,
        last_time=None if last is None else last.time,
        tools=dict(course.tools.most_common()),
        pending_prompts=waiting,
        item_id=header.get("item_id"),
        repeat=header.get("repeat"),
        attempt=header.get("attempt"),
        run_id=header.get("run_id"),
        forked_from=dict(source) if source else None,
        seed_length=header.get("seed_length"),
        fork_group=header.get("fork_group"),
        fork_index=header.get("fork_index"),
        workdir=_workdir(fold.bind),
        last_text=course.text,
        error=course.reason.get("error"),
        turn_list=tuple(course.turns) if turns else None,
    )


def as_tree(agents: Iterable[AgentFacts]) -> list[tuple[int, AgentFacts]]:
    """The agents with their levels, each behind its parent; those whose parent is not there come at the top."""
    known = {one.agent_id: one for one in agents}
    below: dict[str | None, list[AgentFacts]] = {}
    for one in known.values():
        below.setdefault(one.parent if one.parent in known and one.parent != one.agent_id else None, []).append(one)
    rows: list[tuple[int, AgentFacts]] = []
    pending = [(0, one) for one in reversed(below.get(None, []))]
    while pending:
        level, one = pending.pop()
        rows.append((level, one))
        del known[one.agent_id]
        pending += [(level + 1, child) for child in reversed(below.get(one.agent_id, [])) if child.agent_id in known]
    return rows + [(0, one) for one in known.values()]  # a circle of parents is damage, and hides nobody


class _Course:
    """What the fold does not keep: the turns one by one, the tools by name, how it ended last."""

    def __init__(self, fold: AgentFold, *, keep: bool) -> None:
        self._fold = fold
        self._keep = keep
        self._open: SessionEvent | None = None
        self._prompts: dict[str, str] = {}
        self._asked: dict[int, set[str]] = {}
        """By turn, the ids of its prompts."""
        self.tools: Counter[str] = Counter()
        self.turns: list[TurnFacts] = []
        self.text: str | None = None
        self.reason: dict[str, Any] = {}

    def follow(self, event: SessionEvent) -> None:
        kind, data = event.type, event.data
        if kind == "turn/start":
            self._open = event
        elif kind == "turn/end":
            self.reason = data["reason"]
            newest = next(reversed(self._fold.turns.values()), None)
            self.text = newest.text if newest is not None else None
            self._end(event)
        elif kind == "tool/call":
            self.tools[data["name"]] += 1
        elif kind == "prompt/completed":
            record = self._fold.prompts.get(data["prompt_id"])
            if record is not None and record.is_rollout:
                from kimi_ray.runs.outcomes import reason_of_function

                self.reason = reason_of_function(data)
        elif kind == "prompt/submitted" and self._keep:
            self._prompts[data["prompt_id"]] = _text(data["content"])
        elif kind == "surface/cut" and data.get("reason") == "undo":
            self._take_back(event)
        elif kind == "log/end-seed":
            self.tools.clear()
            self.turns = [_copied(turn) for turn in self.turns]

    def _end(self, event: SessionEvent) -> None:
        begun, self._open = self._open, None
        if not self._keep or begun is None:
            return
        turn = event.data["turn"]
        self._asked[turn] = set(begun.data.get("prompts") or ())
        record = self._fold.turns.get(turn)
        usage = None if record is None else record.usage
        self.turns.append(
            TurnFacts(
                turn=turn,
                prompts=tuple(self._prompts.pop(prompt, "") for prompt in begun.data.get("prompts") or ()),
                steps=0 if record is None else record.steps,
                tool_calls=0 if record is None else record.tool_calls,
                input_tokens=0 if usage is None else usage.input + usage.cached + usage.cache_write,
                output_tokens=0 if usage is None else usage.output,
                duration_ms=max(0, event.time - begun.time),
                reason=_reason(event.data["reason"]),
                first_seq=begun.seq,
                last_seq=event.seq,
                error=event.data["reason"].get("error"),
            )
        )

    def _take_back(self, cut: SessionEvent) -> None:
        gone, seqs = set(cut.data.get("prompts") or ()), cut.sources or ()
        for at, turn in enumerate(self.turns):
            asked = self._asked.get(turn.turn)
            last = turn.first_seq if turn.last_seq is None else turn.last_seq
            if asked & gone if asked else any(turn.first_seq <= seq <= last for seq in seqs):
                self.turns[at] = replace(turn, undone=True)

    def state(self, fold: AgentFold, *, live: bool) -> str:
        if self._open is not None:
            if self._keep:
                self._still_open(live=live)
            return "running" if live else "interrupted"
        if any(record.state in ("pending", "running") for record in fold.prompts.values()):
            return "queued" if live else "interrupted"
        return _reason(self.reason) if self.reason else "new"

    def _still_open(self, *, live: bool) -> None:
        begun = self._open
        assert begun is not None
        told = tuple(self._prompts.pop(prompt, "") for prompt in begun.data.get("prompts") or ())
        reason = "running" if live else "interrupted"
        self.turns.append(TurnFacts(begun.data["turn"], told, 0, 0, 0, 0, None, reason, begun.seq, None))


def _copied(turn: TurnFacts) -> TurnFacts:
    return replace(turn, copied=True)


def _reason(reason: dict[str, Any]) -> str:
    kind = str(reason.get("kind"))
    if kind == "completed" and reason.get("cause"):
        return str(reason["cause"])
    return f"limit:{reason.get('name')}" if kind == "limit" else kind


def _text(content: Any) -> str:
    from kimi_ray.log import message_text

    return message_text({"content": content}) if isinstance(content, list) else "(kept as a blob)"


def _workdir(bind: dict[str, Any] | None) -> dict[str, Any] | None:
    """Where the agent works, and whether that is here; a directory of another node is ``gone`` here too."""
    bound: dict[str, Any] | None = (bind or {}).get("workdir")
    if bound is None:
        return None
    told = {key: bound[key] for key in ("kind", "path", "ref", "prepared", "created") if bound.get(key) is not None}
    prepared = told.get("prepared")
    return told if prepared is None else {**told, "here": os.path.isdir(prepared)}
