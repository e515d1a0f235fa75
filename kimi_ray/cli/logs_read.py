"""Reading logs of a home for the commands: pages, the newest events, a fold; never a whole log for its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_ray.events import parse_event
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.agent.fold import AgentFold
    from kimi_ray.store.open import ReadStore

_PAGE_EVENTS = 2000
_NO_SEQ = 1 << 62
_CHUNK = b'"type":"assistant/chunk"'
"""The third key of an event's canonical line, behind seq and time."""


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What the log of one agent says, for ``sessions show``."""

    agent_id: str
    parent: str | None
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
    item_id: str | None = None
    repeat: int | None = None
    attempt: int | None = None
    run_id: str | None = None
    last_text: str | None = None
    error: dict[str, Any] | None = None

    def to_data(self) -> dict[str, Any]:
        """As JSON; what is not known is absent."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


def is_live(home: str, session_id: str) -> bool:
    """Whether a living process holds the claim of a session."""
    from kimi_ray.store.fs import RealFs
    from kimi_ray.store.layout import Layout
    from kimi_ray.store.owners import is_held, read_owner

    fs = RealFs()
    layout = Layout(fs, home)
    owner = read_owner(fs, layout.owner_file(session_id))
    return owner is not None and bool(owner.writer) and is_held(fs, f"{layout.writers}/{owner.writer}.lock")


async def next_seq(store: ReadStore, stream: Stream) -> int:
    """The seq after the last stored event; reads the end of the file only."""
    return (await store.read_from(stream, _NO_SEQ, 0)).next_seq


async def lines_from(store: ReadStore, stream: Stream, seq: int, until: int | None = None) -> AsyncIterator[bytes]:
    """Canonical lines from a seq on, up to what is stored now, or to ``until``."""
    while until is None or seq < until:
        limit = _PAGE_EVENTS if until is None else min(_PAGE_EVENTS, until - seq)
        page = await store.read_from(stream, seq, limit)
        for line in page.lines:
            yield line
        seq += len(page.lines)
        if not page.lines or seq >= page.next_seq:
            return


async def follow(store: ReadStore, stream: Stream, seq: int, *, every_s: float = 0.2) -> AsyncIterator[bytes]:
    """Lines from a seq on, and those that come, until the caller stops."""
    while True:
        page = await store.read_from(stream, seq, _PAGE_EVENTS)
        for line in page.lines:
            yield line
        seq += len(page.lines)
        if not page.lines:
            await asyncio.sleep(every_s)


async def agent_facts(store: ReadStore, stream: Stream, header: dict[str, Any], *, live: bool) -> AgentFacts:
    """Fold a whole log into what is shown about its agent."""
    from kimi_ray.agent.fold import AgentFold

    fold = AgentFold(keep_turns=1)
    last_line = b""
    open_turn = False
    text: str | None = None
    reason: dict[str, Any] = {}
    async for line in lines_from(store, stream, 0):
        last_line = line
        if line.split(b",", 3)[2] == _CHUNK:
            continue  # most of a long log, and nothing that is shown here
        event = parse_event(line)
        fold.apply(event)
        if event.type == "turn/start":
            open_turn = True
        elif event.type == "turn/end":
            open_turn = False
            reason = event.data["reason"]
            text = _last_text(fold)
    last = parse_event(last_line) if last_line else None
    totals = fold.totals()
    usage = totals.usage
    parent: dict[str, Any] = header.get("parent") or {}
    return AgentFacts(
        agent_id=stream.agent_id,
        parent=parent.get("agent_id"),
        profile=header.get("profile"),
        model=fold.model_name,
        state=_state(fold, reason, open_turn=open_turn, live=live),
        turns=totals.turns,
        steps=totals.steps,
        tool_calls=totals.tool_calls,
        input_tokens=usage.input + usage.cached + usage.cache_write,
        output_tokens=usage.output,
        retries=totals.retries,
        interruptions=totals.interruptions,
        events=0 if last is None else last.seq + 1,
        last_time=None if last is None else last.time,
        item_id=header.get("item_id"),
        repeat=header.get("repeat"),
        attempt=header.get("attempt"),
        run_id=header.get("run_id"),
        last_text=text,
        error=reason.get("error"),
    )


def _last_text(fold: AgentFold) -> str | None:
    newest = next(reversed(fold.turns.values()), None)
    return newest.text if newest is not None else None


def _state(fold: AgentFold, reason: dict[str, Any], *, open_turn: bool, live: bool) -> str:
    if open_turn:
        return "running" if live else "interrupted"
    waiting = any(record.state in ("pending", "running") for record in fold.prompts.values())
    if waiting:
        return "queued" if live else "interrupted"
    kind = str(reason.get("kind") or "new")
    return f"limit:{reason.get('name')}" if kind == "limit" else kind
