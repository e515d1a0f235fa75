"""What a fork copies: the agent's log up to a point, and of each agent below it what the agent had heard of.

A plan is made once from stored logs, without opening any of them; ``ForkPlan.for_target`` gives the copies for each of
N new sessions, which differ in ids, seeds and directories only.

- The forked agent becomes ``main``; agents below it keep their ids; others stay behind.
- Who is whose child is told by ``subagent/spawned`` in the parent's log. A child is cut where its parent last recorded
  it inside its own cut; without a record it is left out. What a user asked a child directly is not part of that.
- Where a child's log is missing, damaged or was salvaged with losses, it is left out too, and ``left_out`` says so:
  one broken rollout of a thousand does not bar the way to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kimi_ray.errors import LogError, SessionError, StoreError
from kimi_ray.events import LogHeader, ParentRef, WriterRef, make_event, parse_header
from kimi_ray.ids import MAIN, agent_number
from kimi_ray.log import closing_events, inherited_closers
from kimi_ray.log.slicing import WHOLE, ChildPosition, LogScanner, LogSlice, Where
from kimi_ray.session.document_value import AgentEntry
from kimi_ray.session.fork_point import ForkPoint
from kimi_ray.session.log_reader import LogReader, header_of, scan
from kimi_ray.session.prompt_text import last_prompt
from kimi_ray.settings import Sampling
from kimi_ray.store.seam import ListedLog, LogCopy, Stream
from kimi_ray.version import __version__

INHERITED = "inherited"
"""The header's word for how many events of a log are another agent's history (``plan_agent_fork``)."""
_PARENT_LABEL = "parent_agent_id"
_SCANS_AT_ONCE = 8
_LISTED_LEFT_OUT = 100
_UNREADABLE = frozenset({"store.not_found", "store.corrupt", "store.deleted"})

Reason = Literal["no_position", "log_missing", "log_damaged", "log_salvaged", "later", "not_spawned"]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An agent below the forked one that is not copied, with all that is below it.

    ``no_position``: its parent had not recorded where it stood; ``later``: it had written nothing then;
    ``log_missing``, ``log_damaged``, ``log_salvaged``: its log cannot be cut there; ``not_spawned``: its position is
    recorded but nobody spawned it.
    """

    agent_id: str
    parent: str
    """The agent (of the source) that speaks of it."""
    reason: Reason
    error: dict[str, Any] | None = None

    def to_data(self) -> dict[str, Any]:
        """As JSON."""
        data: dict[str, Any] = {"agent_id": self.agent_id, "parent": self.parent, "reason": self.reason}
        return data if self.error is None else data | {"error": self.error}


@dataclass(frozen=True, slots=True)
class PlannedLog:
    """One log of a fork.

    Attributes:
        source: The log it is copied from.
        agent_id: The agent in the new session.
        parent: Its parent there; None for main.
        cut: How many events are copied.
        tail: The canonical lines behind them: closers of an open turn, ``log/forked``, ``log/end-seed``.
        header: The copy's header, with the source's session id until ``copy``; never changed.
        bind: As ``profile/bind`` would say it at the cut, model switches included; None if the log never said.
            ``workdir.created`` is False: the directory is the source's, and not the fork's to remove.
        epoch: Of the writer of the last copied event, or None.
        node: The node of that writer.
        prompt: The last prompt, as a document keeps it.
        reason: The kind of the last ended turn's reason.
        interrupted: Whether the cut lies in a turn, which is closed as interrupted in the copy.
    """

    source: Stream
    agent_id: str
    parent: str | None
    cut: int
    tail: tuple[bytes, ...]
    header: Mapping[str, Any]
    bind: dict[str, Any] | None
    epoch: int | None
    node: str | None
    prompt: str | None
    reason: str | None
    interrupted: bool

    def copy(
        self,
        session_id: str,
        *,
        group: str | None = None,
        index: int | None = None,
        bind: dict[str, Any] | None = None,
    ) -> LogCopy:
        """The copy for a new session. ``bind`` replaces the planned one."""
        bound = self.bind if bind is None else bind
        data: dict[str, Any] = {**self.header, "session_id": session_id}
        if self.parent is not None:
            data["parent"] = {"session_id": session_id, "agent_id": self.parent}
        if group is not None:
            data["fork_group"] = group
        if index is not None:
            data["fork_index"] = index
        if bound is not None:
            data["bind"] = bound
        return LogCopy(self.source, self.cut, parse_header(data).to_data(), self.tail)


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """A fork that can be made any number of times.

    Attributes:
        source: The forked agent.
        at: The point in canonical form; None for the whole.
        created_at: Of the copies, epoch milliseconds.
        logs: ``main`` first, then the agents below it, parents before children.
        left_out: Agents below it that are not copied.
        highest_agent: No new agent of the fork may have this number or a lower one: an agent of that name is spoken
            of in a copied log. Main's header says it too.
    """

    source: Stream
    at: str | None
    created_at: int
    logs: tuple[PlannedLog, ...]
    left_out: tuple[LeftOut, ...]
    highest_agent: int

    @property
    def main(self) -> PlannedLog:
        """The forked agent's log."""
        return self.logs[0]

    @property
    def forked_from(self) -> dict[str, Any]:
        """The lineage, for the fork's document: {session_id, agent_id, at, seq}."""
        return {
            "session_id": self.source.session_id,
            "agent_id": self.source.agent_id,
            "at": self.at,
            "seq": self.main.cut,
        }

    @property
    def agents(self) -> tuple[AgentEntry, ...]:
        """The agents as the fork's document registers them."""
        return tuple(
            AgentEntry(
                log.agent_id,
                type="main" if log.parent is None else "sub",
                parent_agent_id=log.parent,
                labels=dict(log.header.get("labels") or {}),
                forked_from=log.source.agent_id,
            )
            for log in self.logs
        )

    def left_out_data(self) -> dict[str, Any] | None:
        """What was left out, for the fork's document: {count, agents: [...]}, or None."""
        if not self.left_out:
            return None
        shown = [one.to_data() for one in self.left_out[:_LISTED_LEFT_OUT]]
        return {"count": len(self.left_out), "agents": shown}

    def for_target(
        self,
        session_id: str,
        *,
        group: str | None = None,
        index: int | None = None,
        sampling: Sampling | None = None,
        seed: int | None = None,
        workdirs: Mapping[str, dict[str, Any]] | None = None,
    ) -> tuple[LogCopy, ...]:
        """The copies for one new session.

        Args:
            session_id: The new session.
            group: Names the forks that were made together.
            index: The fork's number among them, from 0.
            sampling: Main's, on top of what it was bound with.
            seed: Main's seed, over that.
            workdirs: By agent of the new session, as ``profile/bind`` records a working directory (``Workdir`` fields,
                ``prepared``, ``created``); an agent that is not named keeps the source's.
        """
        copies: list[LogCopy] = []
        for log in self.logs:
            bind = log.bind
            if log.parent is None and (sampling is not None or seed is not None):
                bind = _sampled(bind, sampling, seed)
            if workdirs is not None and log.agent_id in workdirs:
                bind = {**(bind or {}), "workdir": workdirs[log.agent_id]}
            copies.append(log.copy(session_id, group=group, index=index, bind=bind))
        return tuple(copies)


async def plan_fork(
    reader: LogReader,
    source: Stream,
    point: ForkPoint | None = None,
    *,
    now: int,
    ended: bool = False,
) -> ForkPlan:
    """Plan the fork of an agent and of those below it. Only reads; live logs must be flushed first.

    Args:
        reader: The store.
        source: The agent.
        point: Where in its log; None takes all that is stored.
        now: Epoch milliseconds: when the copies are created.
        ended: Nobody writes the source: a turn or step that is open at its end counts as over.

    Raises:
        SessionError: ``session.not_found``; ``session.fork_point_not_found`` {at, turns, steps};
            ``session.fork_inconsistent`` {agent_id, seq, epoch, ...} when a child's log is not the one that its parent
            recorded.
        AgentError: ``agent.not_found``.
        KimiRayError: why the agent's own log cannot be read.
    """
    logs = {log.stream.agent_id: log for log in await reader.list_logs(source.session_id)}
    header = header_of(logs, source)
    scanner = scanner_of(header, WHOLE if point is None else point.where, ended=ended)
    found = (await scan(reader, source, scanner)).slice
    if found is None:
        assert point is not None
        raise no_such_point(source, point, scanner)
    at = None if point is None else str(point)
    root = _planned(source, header, found, None, MAIN, at, now, header.delegation_depth)
    by_time = WHOLE if point is None else Where("time", found.latest_time)
    gathered = _Gathering(reader, logs, source, now, header.delegation_depth, by_time)
    await gathered.below(root, found)
    planned = [root, *gathered.planned]
    highest = max(gathered.highest, found.highest_agent, *(agent_number(log.agent_id) or 0 for log in planned))
    if highest:
        planned[0] = _with_header(root, {"highest_agent": highest})
    return ForkPlan(source, at, now, tuple(planned), gathered.settled(), highest)


async def plan_agent_fork(reader: LogReader, source: Stream, *, agent_id: str, now: int) -> LogCopy:
    """Plan a new agent of the same session that begins with another's history (K 4.9); nobody below comes along.

    Args:
        reader: The store; a live source must be flushed first.
        source: The agent whose history it is; it may be in the middle of a turn.
        agent_id: The new agent.
        now: Epoch milliseconds.

    Raises:
        SessionError: ``session.not_found``; AgentError: ``agent.not_found``; KimiRayError: why the log cannot be read.
    """
    logs = {log.stream.agent_id: log for log in await reader.list_logs(source.session_id)}
    header = header_of(logs, source)
    found = (await scan(reader, source, scanner_of(header, WHOLE))).slice
    assert found is not None
    closers = inherited_closers(found.order, next_seq=found.cut, at=found.last_time)
    planned = _planned(source, header, found, source.agent_id, agent_id, None, now, -1, closers=closers)
    return _with_header(planned, {INHERITED: planned.header["seed_length"]}).copy(source.session_id)


@dataclass(slots=True)
class _Gathering:
    """Collects the agents below the forked one, level by level."""

    reader: LogReader
    logs: dict[str, ListedLog]
    source: Stream
    now: int
    depth: int
    by_time: Where
    """Where an imported agent is cut."""
    planned: list[PlannedLog] = field(default_factory=list[PlannedLog])
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])
    highest: int = 0
    seen: set[str] = field(default_factory=set[str])
    told: dict[str, LeftOut] = field(default_factory=dict[str, LeftOut])
    """Agents whose position is recorded by somebody who did not spawn them."""

    async def below(self, root: PlannedLog, found: LogSlice) -> None:
        """All that is below ``root``."""
        gate = asyncio.Semaphore(_SCANS_AT_ONCE)

        async def cut(job: tuple[PlannedLog, str, Where, int | None]) -> tuple[PlannedLog, LogSlice] | LeftOut:
            async with gate:
                return await self._cut(*job)

        self.seen |= {MAIN, self.source.agent_id}
        level: list[tuple[PlannedLog, LogSlice]] = [(root, found)]
        while level:
            jobs = [job for parent, of in level for job in self._children(parent, of)]
            level = []
            for answer in await asyncio.gather(*map(cut, jobs)):
                if isinstance(answer, LeftOut):
                    self.left_out.append(answer)
                else:
                    self.planned.append(answer[0])
                    self.highest = max(self.highest, answer[1].highest_agent)
                    level.append(answer)

    def settled(self) -> tuple[LeftOut, ...]:
        """All that was left out."""
        strays = [one for agent_id, one in self.told.items() if agent_id not in self.seen]
        return (*self.left_out, *strays)

    def _children(self, parent: PlannedLog, found: LogSlice) -> list[tuple[PlannedLog, str, Where, int | None]]:
        jobs: list[tuple[PlannedLog, str, Where, int | None]] = []
        speaker = parent.source.agent_id
        imported = self._imported_below(parent)
        for agent_id, position in {**imported, **found.children}.items():
            if agent_id in self.seen:
                continue
            if not position.spawned and agent_id not in imported:
                self.told.setdefault(agent_id, LeftOut(agent_id, speaker, "not_spawned"))
                continue
            self.seen.add(agent_id)
            if position.seq is not None:
                jobs.append((parent, agent_id, Where("seq", position.seq), position.epoch))
            elif agent_id in imported:
                jobs.append((parent, agent_id, self.by_time, None))
            else:
                self.left_out.append(LeftOut(agent_id, speaker, "no_position"))
        return jobs

    def _imported_below(self, parent: PlannedLog) -> dict[str, ChildPosition]:
        """The children of an imported log that came with it: their headers say so, and no event where they stood."""
        if "imported" not in parent.header:
            return {}
        own = parent.source.agent_id
        found: dict[str, ChildPosition] = {}
        for agent_id, log in self.logs.items():
            header = log.header or {}
            above: dict[str, Any] = header.get("parent") or {}
            if "imported" in header and above == {"session_id": self.source.session_id, "agent_id": own}:
                found[agent_id] = ChildPosition(spawned=True)
        return found

    async def _cut(
        self, parent: PlannedLog, agent_id: str, where: Where, epoch: int | None
    ) -> tuple[PlannedLog, LogSlice] | LeftOut:
        speaker = parent.source.agent_id
        log = self.logs.get(agent_id)
        if log is None:
            return LeftOut(agent_id, speaker, "log_missing")
        if log.header is None:
            return LeftOut(agent_id, speaker, "log_damaged", log.error)
        stream = Stream(self.source.session_id, agent_id)
        try:
            header = parse_header(log.header)
            scanner = scanner_of(header, where)
            found = (await scan(self.reader, stream, scanner)).slice
        except (StoreError, LogError) as error:
            if isinstance(error, StoreError) and error.code not in _UNREADABLE:
                raise
            return LeftOut(agent_id, speaker, "log_damaged", error.to_data())
        if found is None:
            raise _inconsistent(stream, where.number, epoch, stored=scanner.next_seq)
        if found.lost and where.kind == "seq":
            return LeftOut(agent_id, speaker, "log_salvaged")
        if epoch is not None and found.epoch is not None and found.epoch != epoch and found.cut:
            raise _inconsistent(stream, where.number, epoch, found=found.epoch)
        if found.cut == 0:
            return LeftOut(agent_id, speaker, "later")
        return _planned(stream, header, found, parent.agent_id, agent_id, None, self.now, self.depth), found


def _planned(
    source: Stream,
    header: LogHeader,
    found: LogSlice,
    parent: str | None,
    agent_id: str,
    at: str | None,
    now: int,
    depth: int,
    *,
    closers: list[dict[str, Any]] | None = None,
) -> PlannedLog:
    if closers is None:
        closers = closing_events(found.order, next_seq=found.cut, recovered_at=found.last_time)
    tail = _tail(source, found, closers, at, now)
    copied = header.model_copy(
        update={
            "agent_id": agent_id,
            "created_at": now,
            "parent": ParentRef(session_id=source.session_id, agent_id=source.agent_id),
            "origin": "fork" if parent is None or depth < 0 else header.origin,
            "delegation_depth": max(0, header.delegation_depth - depth),
            "seed_length": found.cut + len(tail),
            "labels": _labels(header.labels, parent),
            "fork_group": None,
            "fork_index": None,
            "writer": WriterRef(name="kimi-ray", version=__version__),
        }
    )
    lineage = {"session_id": source.session_id, "agent_id": source.agent_id, "seq": found.cut}
    data = {key: value for key, value in copied.to_data().items() if key not in ("bind", "highest_agent")}
    return PlannedLog(
        source=source,
        agent_id=agent_id,
        parent=parent,
        cut=found.cut,
        tail=tail,
        header={**data, "forked_from": lineage},
        bind=bind_at(header, found),
        epoch=found.epoch,
        node=found.node,
        prompt=None if found.prompt is None else last_prompt(found.prompt) or None,
        reason=None if found.reason is None else str(found.reason["kind"]),
        interrupted=found.order.open_turn is not None,
    )


def _labels(labels: Mapping[str, str], parent: str | None) -> dict[str, str]:
    """The labels, of which one may name the agent that this one belongs to."""
    kept = {key: text for key, text in labels.items() if key != _PARENT_LABEL}
    return kept if parent is None or _PARENT_LABEL not in labels else {**kept, _PARENT_LABEL: parent}


def _with_header(log: PlannedLog, more: dict[str, Any]) -> PlannedLog:
    return replace(log, header={**log.header, **more})


def _tail(
    source: Stream, found: LogSlice, closers: list[dict[str, Any]], at: str | None, now: int
) -> tuple[bytes, ...]:
    """The closers at the time of the last copied event, then the two marks of a fork."""
    origin: dict[str, Any] = {"session_id": source.session_id, "agent_id": source.agent_id, "seq": found.cut}
    if found.epoch is not None:
        origin["epoch"] = found.epoch
    forked: dict[str, Any] = {"source": origin}
    if at is not None:
        forked["at"] = at
    marks: list[dict[str, Any]] = [{"type": "log/forked", "data": forked}, {"type": "log/end-seed", "data": {}}]
    events = [(found.last_time, event) for event in closers] + [(now, event) for event in marks]
    return tuple(
        make_event(seq, time, event["type"], event["data"], event.get("surface"), event.get("sources")).line
        for seq, (time, event) in enumerate(events, found.cut)
    )


def scanner_of(header: LogHeader, where: Where, *, ended: bool = False) -> LogScanner:
    """The scanner of a log, by what its header says of its beginning."""
    inherited: Any = (header.model_extra or {}).get(INHERITED)
    return LogScanner(where, header.seed_length or 0, inherited if isinstance(inherited, int) else 0, ended)


def bind_at(header: LogHeader, found: LogSlice) -> dict[str, Any] | None:
    """How the agent of a log was bound at a cut, as ``profile/bind`` would say it; None if the log never says.

    What this life of the log wrote wins; then the header of a fork or an import; then the seed.
    """
    said: dict[str, Any] | None = header.to_data().get("bind") if found.bind is None else found.bind
    model = found.model
    if said is None:
        said, model = found.seed_bind, found.model or found.seed_model
    if said is None:
        return None
    bind = {**said}
    if model is not None:
        bind["model"] = model
    if isinstance(bind.get("workdir"), Mapping) and bind["workdir"].get("created"):
        bind["workdir"] = {**bind["workdir"], "created": False}
    return bind


def _sampled(bind: dict[str, Any] | None, sampling: Sampling | None, seed: int | None) -> dict[str, Any]:
    said: dict[str, Any] = {**((bind or {}).get("sampling") or {})}
    if sampling is not None:
        said |= sampling.said()
    if seed is not None:
        said["seed"] = seed
    return {**(bind or {}), "sampling": said}


def no_such_point(source: Stream, point: ForkPoint, scanner: LogScanner) -> SessionError:
    """``session.fork_point_not_found`` {at, turns, steps}, by a scanner that read the whole log."""
    turns, steps = scanner.turns, scanner.steps
    details: dict[str, Any] = {"at": str(point), "turns": turns, "steps": None}
    open_turn = scanner.open_turn
    if turns == 0:
        hint = f"{source} has no turn yet"
    elif point.turn >= turns:
        hint = f"the turns of {source} are 0 to {turns - 1}"
    elif point.kind == "step":
        details["steps"] = steps
        going = open_turn == point.turn and scanner.open_step == point.step
        hint = f"turn {point.turn} has " + (f"the steps 0 to {steps - 1}" if steps else "no step")
        hint += f"; step {point.step} has not ended yet" if going else ""
    else:
        hint = f'turn {point.turn} has not ended yet: fork at one of its steps, "{point.turn}.0"'
    return SessionError(
        f"{source} has no point {point}", code="session.fork_point_not_found", hint=hint, details=details
    )


def _inconsistent(
    stream: Stream, seq: int, epoch: int | None, *, stored: int | None = None, found: int | None = None
) -> SessionError:
    what = f"has {stored} events" if stored is not None else f"was written there by epoch {found}"
    details: dict[str, Any] = {"session_id": stream.session_id, "agent_id": stream.agent_id, "seq": seq}
    more = {"epoch": epoch, "stored": stored, "found_epoch": found}
    return SessionError(
        f"the log of {stream} {what}, but its parent recorded it at event {seq} of epoch {epoch}",
        code="session.fork_inconsistent",
        hint="fork at an earlier point, or the agent alone",
        details=details | {key: value for key, value in more.items() if value is not None},
    )
