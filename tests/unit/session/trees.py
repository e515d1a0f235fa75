"""Trees of agents to fork: random lives of several logs that speak of each other, and a home in memory for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hypothesis import strategies as st

from kimi_ray.errors import StoreError
from kimi_ray.events import LogHeader, ParentRef, SessionEvent, WriterRef, parse_event, parse_header
from kimi_ray.log import EventLog, closing_events, derive_messages, tool_message, tools_balanced
from kimi_ray.session import ForkPlan
from kimi_ray.store.seam import ListedLog, LogCopy, Page, Stream

NOW = 9_000_000
WRITER = WriterRef(name="k", version="t")


_parsed = lru_cache(1 << 16)(parse_event)


class MemoryHome:
    """Logs by stream, read as a store is read."""

    def __init__(self) -> None:
        self.headers: dict[Stream, dict[str, Any]] = {}
        self.lines: dict[Stream, list[bytes]] = {}
        self.broken: dict[Stream, StoreError] = {}
        self.page_events = 1 << 30

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        if stream in self.broken:
            raise self.broken[stream]
        lines = self.lines[stream]
        return Page(seq, tuple(lines[seq : seq + min(limit, self.page_events)]), len(lines))

    async def list_logs(self, session_id: str) -> list[ListedLog]:
        return [ListedLog(stream, header) for stream, header in self.headers.items() if stream.session_id == session_id]

    def add(self, header: LogHeader) -> list[bytes]:
        stream = Stream(header.session_id, header.agent_id)
        self.headers[stream] = header.to_data()
        return self.lines.setdefault(stream, [])

    def publish(self, copies: Sequence[LogCopy]) -> None:
        """Make the copies, as a store does."""
        for copy in copies:
            assert copy.cut <= len(self.lines[copy.source])
            lines = self.add(parse_header(copy.header))
            assert not lines
            lines.extend([*self.lines[copy.source][: copy.cut], *copy.tail])

    def events(self, stream: Stream, cut: int | None = None) -> list[SessionEvent]:
        found = [_parsed(line) for line in self.lines[stream][:cut]]
        assert [event.seq for event in found] == list(range(len(found)))
        return found

    def log(self, stream: Stream, cut: int | None = None) -> EventLog:
        """The log as its next writer would have it."""
        return EventLog.restore(parse_header(self.headers[stream]), self.events(stream, cut))

    def messages(self, stream: Stream, cut: int | None = None) -> list[dict[str, Any]]:
        return derive_messages(self.log(stream, cut).surface)


@dataclass
class Life:
    """One agent of a random tree."""

    log: EventLog
    depth: int
    epoch: int
    children: list[str] = field(default_factory=list[str])
    queued: list[str] = field(default_factory=list[str])
    steered: list[str] = field(default_factory=list[str])
    before: dict[int, list[Any]] = field(default_factory=dict[int, list[Any]])
    """By turn, the messages that the model had when its prompt came."""


class Tree:
    """A session whose agents live at the same time, each by its own clock."""

    def __init__(self, home: MemoryHome, session_id: str = "source", *, max_depth: int = 3, most: int = 12) -> None:
        self.home = home
        self.session_id = session_id
        self.lives: dict[str, Life] = {}
        self._max_depth = max_depth
        self._most = most
        self._ticks = 0
        self._ids = 0
        self._make("main", None, 0)

    def stream(self, agent_id: str = "main") -> Stream:
        return Stream(self.session_id, agent_id)

    def _new(self, prefix: str) -> str:
        self._ids += 1
        return f"{prefix}{self._ids}"

    def _make(self, agent_id: str, parent: str | None, depth: int) -> Life:
        skew = len(self.lives) % 3 * 180_000

        def clock() -> int:
            self._ticks += 7
            return 1_000_000 + self._ticks + (-skew if len(agent_id) % 2 else skew)

        header = LogHeader(
            session_id=self.session_id,
            agent_id=agent_id,
            created_at=1,
            parent=None if parent is None else ParentRef(session_id=self.session_id, agent_id=parent),
            origin="main" if parent is None else "subagent",
            delegation_depth=depth,
            labels={"of": agent_id},
            writer=WRITER,
        )
        lines = self.home.add(header)
        log = EventLog(header, clock=clock)
        log.observe(lambda event: lines.append(event.line))
        life = self.lives[agent_id] = Life(log, depth, epoch=1)
        log.append("runtime/activated", {"epoch": 1, "node": f"node-{depth}"})
        log.append("profile/bind", {"profile": {"name": "agent"}, "model": "m0", "sampling": {"seed": 1}})
        return life

    # -- what an agent does ------------------------------------------------------------------------------------------

    def act(self, who: int, what: str, number: int) -> None:
        """One thing of a script; what does not fit now is left out."""
        agent_id = list(self.lives)[who % len(self.lives)]
        life = self.lives[agent_id]
        order = life.log.order
        if what in ("turn", "undo") and order.open_turn is not None:
            return
        if what in ("answer", "tool", "step", "retry", "chunk", "end", "prune") and order.open_step is None:
            return
        if what in ("answer", "step", "end") and order.pending_calls:
            self._answer_all(life)
        getattr(self, f"_{what}")(life, number)

    def _turn(self, life: Life, number: int) -> None:
        log, turn = life.log, life.log.order.next_turn
        if life.queued and number % 2:
            prompt_id = life.queued.pop(0)
            life.before[turn] = derive_messages(log.surface)
        else:
            prompt_id = self._new("p")
            life.before[turn] = derive_messages(log.surface)
            self._submit(life, prompt_id)
        prompts = [] if number % 7 == 6 else [prompt_id]
        data: dict[str, Any] = {"turn": turn, "prompts": prompts}
        log.append("turn/start", data if prompts else data | {"continuation": "user"})
        for one in prompts:
            log.append("prompt/started", {"prompt_id": one, "turn": turn})
        if number % 5 == 4:
            self._finish(life, "cancelled")  # an empty turn
            return
        log.append("step/start", {"turn": turn, "step": 0})
        for one in prompts:
            self._say(life, one)

    def _submit(self, life: Life, prompt_id: str) -> None:
        content = [{"type": "text", "text": f"text of {prompt_id}"}]
        life.log.append("prompt/submitted", {"prompt_id": prompt_id, "content": content})

    def _say(self, life: Life, prompt_id: str) -> None:
        content = [{"type": "text", "text": f"text of {prompt_id}"}]
        body = {"id": prompt_id, "role": "user", "content": content, "source": {"kind": "user"}}
        life.log.append("user/message", body, surface="append")

    def _queue(self, life: Life, number: int) -> None:
        prompt_id = self._new("q")
        self._submit(life, prompt_id)
        life.queued.append(prompt_id)
        life.log.append("prompt/queued", {"prompt_id": prompt_id, "queue_length": len(life.queued)})

    def _steer(self, life: Life, number: int) -> None:
        turn = life.log.order.open_turn
        if turn is not None:
            prompt_id = self._new("s")
            self._submit(life, prompt_id)
            data = {"prompt_ids": [prompt_id], "active_prompt_id": "p", "turn": turn}
            life.log.append("prompt/steered", data)
            life.steered.append(prompt_id)

    def _answer(self, life: Life, number: int) -> None:
        log, order = life.log, life.log.order
        content: list[dict[str, Any]] = [{"type": "text", "text": f"answer {log.next_seq}"}]
        calls = [self._new("c") for _ in range(number % 4)]
        content += [{"type": "tool-call", "id": call, "name": "t", "arguments": "{}"} for call in calls]
        message = {"id": f"a{log.next_seq}", "role": "assistant", "content": content, "source": {}}
        place = {"turn": order.open_turn, "step": order.open_step}
        log.append("assistant/message", {**place, "message": message}, surface="append")
        for call in calls[: number // 4 % 4]:
            log.append("tool/call", {**place, "call_id": call, "name": "t", "arguments": "{}"})

    def _tool(self, life: Life, number: int) -> None:
        pending = life.log.order.pending_calls
        if pending:
            self._answer_one(life, list(pending)[number % len(pending)])

    def _answer_one(self, life: Life, call: str) -> None:
        log, order = life.log, life.log.order
        place = {"turn": order.open_turn, "step": order.open_step}
        if order.pending_calls[call] is None:
            log.append("tool/call", {**place, "call_id": call, "name": "t", "arguments": "{}"})
        message = tool_message(f"r{call}", call, [{"type": "text", "text": f"result {call}"}], is_error=False)
        log.append("tool/result", {**place, "message": message}, surface="append")

    def _answer_all(self, life: Life) -> None:
        for call in list(life.log.order.pending_calls):
            self._answer_one(life, call)

    def _step(self, life: Life, number: int) -> None:
        log, order = life.log, life.log.order
        log.append("step/end", {"turn": order.open_turn, "step": order.open_step})
        log.append("step/start", {"turn": order.open_turn, "step": order.next_step})
        for prompt_id in life.steered:
            self._say(life, prompt_id)
        life.steered.clear()

    def _end(self, life: Life, number: int) -> None:
        order = life.log.order
        life.log.append("step/end", {"turn": order.open_turn, "step": order.open_step})
        self._finish(life, "completed")

    def _finish(self, life: Life, kind: str) -> None:
        log = life.log
        turn = log.order.open_turn
        log.append("turn/end", {"turn": turn, "reason": {"kind": kind}})
        log.append("prompt/completed", {"prompt_id": "p", "state": kind, "turn": turn})
        life.steered.clear()

    def _retry(self, life: Life, number: int) -> None:
        order = life.log.order
        place = {"turn": order.open_turn, "step": order.open_step, "attempt": 1}
        life.log.append("llm/retry", {**place, "delay_ms": 1, "max_attempts": 3, "error": {}})

    def _chunk(self, life: Life, number: int) -> None:
        order = life.log.order
        place = {"turn": order.open_turn, "step": order.open_step, "attempt": 1}
        life.log.append("assistant/chunk", {**place, "chunk": {"type": "text-delta", "index": 0, "text": "x"}})

    def _compact(self, life: Life, number: int) -> None:
        log = life.log
        seqs = log.surface.seqs
        if len(seqs) < 2 or log.order.pending_calls or log.order.open_compaction:
            return
        balanced = tools_balanced(log.surface)
        ends = [end for end in range(1, len(seqs) + 1) if balanced[end]]
        last = ends[number % len(ends)] - 1
        turn = {} if log.order.open_turn is None else {"turn": log.order.open_turn}
        log.append("compaction/start", {"compaction_id": f"k{log.next_seq}", **turn})
        body = {"id": f"m{log.next_seq}", "role": "user", "content": [{"type": "text", "text": "summary"}]}
        source = {"kind": "compaction"}
        span = {"replace": [seqs[0], seqs[last]]}
        log.append("user/message", {**body, "source": source}, surface=span, sources=seqs[: last + 1])
        if number % 3:
            log.append("compaction/end", {"compaction_id": log.order.open_compaction})

    def _undo(self, life: Life, number: int) -> None:
        log = life.log
        nodes = list(log.surface)
        starts = [index for index, node in enumerate(nodes) if node.type == "user/message"]
        if not starts:
            return
        start = starts[number % len(starts)]
        if log.surface.is_balanced(start, len(nodes)):
            seqs = [node.seq for node in nodes[start:]]
            data = {"reason": "undo", "prompts": []}
            log.append("surface/cut", data, surface={"replace": [seqs[0], seqs[-1]]}, sources=seqs)

    def _model(self, life: Life, number: int) -> None:
        life.log.append("profile/model", {"model": f"m{number}"})

    def _note(self, life: Life, number: int) -> None:
        life.log.append("note/added", {"text": "n"})

    def _crash(self, life: Life, number: int) -> None:
        """The host is lost; the next one mends the log."""
        log = life.log
        life.epoch += 1 + number % 2
        log.append("runtime/activated", {"epoch": life.epoch})
        for event in closing_events(log.order, next_seq=log.next_seq, recovered_at=5):
            log.append(event["type"], event["data"], surface=event.get("surface"), sources=event.get("sources"))
        life.steered.clear()

    def _spawn(self, life: Life, number: int) -> None:
        if life.depth < self._max_depth and len(self.lives) < self._most:
            agent_id = f"agent-{len(self.lives)}"
            life.log.append("subagent/spawned", {"agent_id": agent_id})
            life.children.append(agent_id)
            self._make(agent_id, life.log.header.agent_id, life.depth + 1)

    def _record(self, life: Life, number: int) -> None:
        if life.children:
            child_id = life.children[number % len(life.children)]
            child = self.lives[child_id]
            at = {"seq": child.log.next_seq, "epoch": child.epoch}
            if number % 4 == 0:
                life.log.append("subagent/suspended", {"agent_id": child_id, **at})
            elif number % 4 == 1:
                life.log.append("swarm/end", {"run_id": "r", "counts": {}, "agents": {child_id: at}})
            elif number % 4 == 2:
                life.log.append("subagent/failed", {"agent_id": child_id, "error": {}, **at})
            else:
                life.log.append("subagent/completed", {"agent_id": child_id, **at})
            if number % 5 == 0:
                life.log.append("subagent/suspended", {"agent_id": child_id, "reason": "host lost"})


ACTS = (
    "turn turn answer answer tool step step end queue steer retry chunk compact undo model note crash spawn spawn "
    "record record record record"
).split()

Script = list[tuple[int, str, int]]


def script_of(seed: int, size: int) -> Script:
    """A dense script: main acts half of the time. Lists of hypothesis' own hardly ever give a tree."""
    chance = random.Random(seed)
    return [
        (0 if chance.random() < 0.4 else chance.randrange(12), chance.choice(ACTS), chance.randrange(60))
        for _ in range(size)
    ]


SCRIPTS = st.builds(script_of, st.integers(0, 1 << 30), st.integers(10, 180))


def grown(script: Script, **options: Any) -> Tree:
    """A tree that lived through a script."""
    tree = Tree(MemoryHome(), **options)
    for who, what, number in script:
        tree.act(who, what, number)
    return tree


# -- what must be true of a fork, said the slow way ------------------------------------------------------------------


def recorded(events: list[SessionEvent]) -> dict[str, int]:
    """By spawned child, the last position that the events record."""
    spawned = [event.data["agent_id"] for event in events if event.type == "subagent/spawned"]
    positions: dict[str, int] = {}
    for event in events:
        told = event.data.get("agents") if event.type == "swarm/end" else None
        if event.type in ("subagent/completed", "subagent/failed", "subagent/suspended"):
            told = {event.data["agent_id"]: event.data}
        for agent_id, position in (told or {}).items():
            if "seq" in position:
                positions[agent_id] = position["seq"]
    return {agent_id: positions[agent_id] for agent_id in spawned if agent_id in positions}


def cuts_below(home: MemoryHome, source: Stream, cut: int) -> dict[str, int]:
    """By agent below a cut, where it is to be cut."""
    found: dict[str, int] = {}
    level = {source.agent_id: cut}
    while level:
        below: dict[str, int] = {}
        for agent_id, end in level.items():
            below |= recorded(home.events(Stream(source.session_id, agent_id), end))
        found |= below
        level = below
    return found


def places(home: MemoryHome, source: Stream) -> dict[str, int]:
    """By point, where the log is to be cut: every ended turn and step."""
    found: dict[str, int] = {}
    events = home.events(source)
    for event in events:
        if event.type == "step/end":
            found[f"{event.data['turn']}.{event.data['step']}"] = event.seq + 1
        elif event.type == "turn/end":
            cut = event.seq + 1
            while cut < len(events) and events[cut].type == "prompt/completed" and "turn" in events[cut].data:
                cut += 1
            found[str(event.data["turn"])] = cut
    return found


def check_fork(home: MemoryHome, plan: ForkPlan, session_id: str, cut: int) -> None:
    """Publish a plan and compare every log of the fork with what it is to be a copy of."""
    copies = plan.for_target(session_id, group="g", index=0)
    home.publish(copies)
    expected = {"main": (plan.source, cut)} | {
        agent_id: (Stream(plan.source.session_id, agent_id), end)
        for agent_id, end in cuts_below(home, plan.source, cut).items()
    }
    assert {copy.header["agent_id"]: (copy.source, copy.cut) for copy in copies} == expected
    for copy in copies:
        made = Stream(session_id, copy.header["agent_id"])
        source, end = expected[made.agent_id]
        log = home.log(made)
        assert log.last is not None and log.last.type == "log/end-seed"
        assert log.next_seq == copy.header["seed_length"] == log.last_end_seed + 1  # type: ignore[operator]
        assert home.lines[made][:end] == home.lines[source][:end]
        before, after = home.messages(source, end), home.messages(made)
        assert after[: len(before)] == before
        assert all(message["source"]["kind"] == "tool" for message in after[len(before) :])
        assert tools_balanced(log.surface)[-1], "a call without its answer"
        assert log.order.open_turn is None and log.order.open_step is None and not log.order.pending_calls
        times = [event.time for event in home.events(made)]
        assert set(times[end:-2]) <= {times[end - 1]} and times[-2:] == [plan.created_at] * 2
