"""What stored logs tell of a session's agents: how far each came, and what their parents have heard of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from kimi_ray.agent.fold import FINAL_STATES, AgentFold, PromptRecord, fold_stored
from kimi_ray.agent.told import told as told_result
from kimi_ray.agent.turn_ends import stop_of
from kimi_ray.errors import StoreError
from kimi_ray.events import type_key
from kimi_ray.hosts.specs import LogEntry, Outcome, PromptResult
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.session.log_reader import pages
from kimi_ray.settings import Usage
from kimi_ray.store.seam import ListedLog, Stream

_PAGE_EVENTS = 4000
_PAGE_BYTES = 4 << 20
_HEAD_BYTES = 96
_CHILD_EVENTS = {type_key(f"subagent/{word}") for word in ("spawned", "suspended", "completed", "failed")}


@dataclass(frozen=True, slots=True)
class StoredAgent:
    """A log as it is stored now: ``seq`` is the next one, ``epoch`` that of the writer of the last event."""

    fold: AgentFold
    seq: int
    epoch: int

    @property
    def is_open(self) -> bool:
        """Whether a prompt was accepted and has no final state."""
        return any(record.state not in FINAL_STATES for record in self.fold.prompts.values())

    @property
    def first_prompt(self) -> PromptRecord | None:
        """The prompt that a rollout is about."""
        return next(iter(self.fold.prompts.values()), None)

    @property
    def position(self) -> dict[str, int]:
        """As ``subagent/*`` events record it."""
        return {"seq": self.seq, "epoch": self.epoch}


def ended_outcome(stored: StoredAgent, stream: Stream, cost_usd: float | None) -> Outcome | None:
    """How the first prompt of a log ended, as its living agent would have told it; None while it is open."""
    fold, record = stored.fold, stored.first_prompt
    if record is None or record.state not in FINAL_STATES:
        return None
    found = fold.turns.get(record.turn) if record.turn is not None else None
    result = PromptResult(
        prompt_id=record.prompt_id,
        state=record.state,
        text=found.text if found is not None else "",
        turn=record.turn,
        stop=stop_of(found.reason) if found is not None else record.state,
        usage=found.usage if found is not None else Usage(),
        steps=found.steps if found is not None else 0,
        tool_calls=found.tool_calls if found is not None else 0,
        error=record.error,
    )
    workdir: dict[str, Any] = (fold.bind or {}).get("workdir") or {}
    return Outcome(
        stream=stream,
        prompt_id=record.prompt_id,
        result=told_result(result, fold),
        seq=stored.seq,
        epoch=stored.epoch,
        totals=fold.totals(cost_usd),
        message_seq=found.message_seq if found is not None else None,
        served_model=fold.served_model,
        fingerprint=fold.fingerprint,
        workdir_path=workdir.get("prepared"),
        node_id=(fold.last_lives[1] or {}).get("node"),
    )


async def read_agent(store: StoreCalls, stream: Stream) -> StoredAgent | None:
    """Fold a log; None when nothing of it is stored."""
    fold, seq, epoch = AgentFold(), 0, 0
    while True:
        try:
            page = await store.read_from(stream, seq, _PAGE_EVENTS, _PAGE_BYTES)
        except StoreError as error:
            if error.code != "store.not_found":
                raise
            return None
        fold_stored(fold, page.lines, seq)
        seq += len(page.lines)
        epoch = page.epoch
        if not page.lines or seq >= page.next_seq:
            break
    if not seq:
        return None
    activated = fold.last_lives[1]
    # A grant under which nothing was written yet is not the writer of the last event.
    return StoredAgent(fold, seq, epoch if activated is None else int(activated["epoch"]))


class ChildrenTold:
    """What a parent's log says about its children."""

    def __init__(self) -> None:
        self.spawned: set[str] = set()
        self.ended: set[str] = set()
        self.suspended: dict[str, tuple[int, int]] = {}

    def follow(self, lines: Sequence[bytes]) -> None:
        """Go through a run of stored lines."""
        for line in lines:
            head = line[:_HEAD_BYTES]
            if any(key in head for key in _CHILD_EVENTS):
                event: dict[str, Any] = from_json(line)
                self._take(event["type"], event["data"])

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        agent_id = data.get("agent_id", "")
        if kind == "subagent/spawned":
            self.spawned.add(agent_id)
        elif kind in ("subagent/completed", "subagent/failed"):
            self.ended.add(agent_id)
        elif kind == "subagent/suspended" and "seq" in data:
            self.suspended[agent_id] = (data["seq"], data["epoch"])


async def read_children(store: StoreCalls, parent: Stream) -> ChildrenTold:
    """What a stored log says about its agent's children."""
    told = ChildrenTold()
    async with aclosing(pages(store, parent)) as read:
        async for lines in read:
            told.follow(lines)
    return told


async def untold(
    store: StoreCalls, parent: Stream, run_ids: Collection[str], logs: Sequence[ListedLog], living: Collection[str]
) -> list[LogEntry]:
    """What a parent's log does not say about its children, since the host that would have was lost.

    Those of swarms are told by their run's id, others by their own.

    A child that ended is told with its end, one that did not with ``subagent/suspended``, both with the position
    of its log, which is durable. Of those that live nothing is said: they go on.
    """
    told = await read_children(store, parent)
    entries: list[LogEntry] = []
    for log in logs:
        header, agent_id = log.header or {}, log.stream.agent_id
        if header.get("run_id") not in run_ids and agent_id not in run_ids:
            continue
        if agent_id in told.ended:
            continue
        if agent_id not in told.spawned:
            keys = ("profile", "labels", "item_id", "repeat", "attempt")
            said = {key: header[key] for key in keys if header.get(key) is not None}
            entries.append(LogEntry("subagent/spawned", {"agent_id": agent_id, **said}))
        stored = await read_agent(store, log.stream) if agent_id not in living else None
        if stored is not None and (entry := _news_of(agent_id, stored, told)) is not None:
            entries.append(entry)
    return entries


def _news_of(agent_id: str, stored: StoredAgent, told: ChildrenTold) -> LogEntry | None:
    record = stored.first_prompt
    if record is None or stored.is_open:
        if told.suspended.get(agent_id) == (stored.seq, stored.epoch):
            return None
        data: dict[str, Any] = {"agent_id": agent_id, **stored.position, "reason": "session host lost"}
        return LogEntry("subagent/suspended", data)
    if record.error is not None:
        return LogEntry("subagent/failed", {"agent_id": agent_id, **stored.position, "error": record.error})
    data = {"agent_id": agent_id, **stored.position, "status": record.state}
    found = stored.fold.turns.get(record.turn) if record.turn is not None else None
    if found is not None and found.message_seq is not None:
        data["message_seq"] = found.message_seq
    return LogEntry("subagent/completed", data)
