"""Where two sessions part: the first message that differs, then settings, then the agents below, pair by pair.

What is compared is what the model would see and how it would be asked. Not looked at, because two sessions always
differ in it: seqs, times, epochs, ids of sessions, logs and messages; where a private working directory lies and who
made it. Of a message the role and the content count: its source (which model or provider answered) is not sent. Ids of
tool calls count by the order in which they appear. A text that one log keeps inline and the other as a blob is compared
by its digest; no blob is read.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from kimi_ray.errors import LogError, StoreError
from kimi_ray.events import CORE, Catalog, LogHeader, SessionEvent, thaw
from kimi_ray.log import EventLog
from kimi_ray.log.slicing import WHOLE, LogSlice
from kimi_ray.session.fork_plan import bind_at, scanner_of
from kimi_ray.session.log_reader import LogReader, header_of, pages
from kimi_ray.store.seam import ListedLog, Stream

_FOLLOWED = frozenset({"turn/start", "step/start", "request/header"})
_SETTINGS = ("profile", "model", "sampling", "limits", "workdir")
_NOTHING_SAID = ("sampling", "limits")
"""Settings that are the same absent and empty."""
_WHERE_IT_LIES = ("prepared", "created", "node")
_REQUEST = ("provider", "system", "tools")
_UNREADABLE = ("store.corrupt", "store.not_found")
_NOT_SENT = ("id", "source")
"""What of a message no model is told."""

Area = Literal["messages", "settings", "agents"]


class _Absent:
    """Nothing is there."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference. ``a`` and ``b`` are the two values; ``ABSENT`` where one side has none.

    Attributes:
        area: ``messages``, ``settings`` or ``agents``.
        agents: The two agents.
        path: The field, e.g. ``content[0].text`` or ``sampling.seed``; "" for the message or agent itself.
        index: Of the message, from 0.
        places: The message's turn and step in either log, None where it has none.
    """

    area: Area
    agents: tuple[str, str]
    path: str
    a: Any
    b: Any
    index: int | None = None
    places: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)

    def to_data(self) -> dict[str, Any]:
        """As JSON: a value that is absent has no key."""
        data: dict[str, Any] = {"area": self.area, "agents": list(self.agents), "path": self.path}
        if self.index is not None:
            data["index"] = self.index
            data["places"] = [None if place is None else f"{place[0]}.{place[1]}" for place in self.places]
        data |= {name: thaw(value) for name, value in (("a", self.a), ("b", self.b)) if value is not ABSENT}
        return data


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer. ``differences`` in order: an agent's first differing message, its settings, then those below it."""

    a: Stream
    b: Stream
    messages: tuple[int, int]
    """How many messages either agent has."""
    agents: int
    """How many pairs of agents were compared."""
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def to_data(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "a": {"session_id": self.a.session_id, "agent_id": self.a.agent_id, "messages": self.messages[0]},
            "b": {"session_id": self.b.session_id, "agent_id": self.b.agent_id, "messages": self.messages[1]},
            "equal": self.equal,
            "agents": self.agents,
            "differences": [one.to_data() for one in self.differences],
        }


async def compare_sessions(reader: LogReader, a: Stream, b: Stream, catalog: Catalog = CORE) -> Comparison:
    """Compare two agents and those below them. Only reads; a live log is compared as far as it is written.

    ``catalog``: The event types that the logs may have.

    Raises:
        SessionError: ``session.not_found``; AgentError: ``agent.not_found``; KimiRayError: why one of the two logs
            cannot be read (one below them that cannot is a difference, or none if neither can).
    """
    logs: dict[str, dict[str, ListedLog]] = {}
    for stream in (a, b):
        if stream.session_id not in logs:
            listed = await reader.list_logs(stream.session_id)
            logs[stream.session_id] = {log.stream.agent_id: log for log in listed}
    sides = tuple(_Side(reader, stream.session_id, logs[stream.session_id], catalog) for stream in (a, b))
    differences: list[Difference] = []
    counts: tuple[int, int] | None = None
    pairs: list[tuple[str, str]] = [(a.agent_id, b.agent_id)]
    seen: set[tuple[str, str]] = set(pairs)
    for pair in pairs:  # grows as agents below are found
        one, other = [await side.read(name, raising=counts is None) for side, name in zip(sides, pair, strict=True)]
        if isinstance(one, str) or isinstance(other, str):
            a_code, b_code = (ABSENT if isinstance(agent, _Agent) else agent for agent in (one, other))
            if a_code != b_code:
                differences.append(Difference("agents", pair, "error", a_code, b_code))
            continue
        if counts is None:
            counts = (len(one.messages), len(other.messages))
        differences += _first_message(pair, one, other)
        differences += _settings(pair, one, other)
        below = (sides[0].below(one), sides[1].below(other))
        for key in dict.fromkeys([*below[0], *below[1]]):
            left, right = below[0].get(key), below[1].get(key)
            if left is None or right is None:
                known = left or right or ""
                named = (left or known, right or known)
                differences.append(Difference("agents", named, "", left or ABSENT, right or ABSENT))
            elif (left, right) not in seen:
                seen.add((left, right))
                pairs.append((left, right))
    return Comparison(a, b, counts or (0, 0), len(pairs), tuple(differences))


@dataclass(slots=True)
class _Agent:
    """What a log says at its end."""

    stream: Stream
    header: LogHeader
    log: EventLog
    found: LogSlice
    begins: list[tuple[int, tuple[int, int] | None]] = field(default_factory=list[tuple[int, tuple[int, int] | None]])
    """Where turns and steps begin: seq, and what began."""
    request: Mapping[str, Any] | None = None
    messages: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    seqs: list[int] = field(default_factory=list[int])

    def place(self, index: int) -> tuple[int, int] | None:
        """The turn and step of a message."""
        if index >= len(self.seqs):
            return None
        at = bisect_right(self.begins, self.seqs[index], key=lambda begin: begin[0])
        return self.begins[at - 1][1] if at else None


@dataclass(slots=True)
class _Side:
    """One session."""

    reader: LogReader
    session_id: str
    logs: dict[str, ListedLog]
    catalog: Catalog

    async def read(self, agent_id: str, *, raising: bool) -> _Agent | str:
        """An agent's log to its end; or, unless ``raising``, the code of the error that its log gives."""
        try:
            return await self._read(agent_id)
        except (StoreError, LogError) as error:
            if raising or (isinstance(error, StoreError) and error.code not in _UNREADABLE):
                raise
            return error.code

    async def _read(self, agent_id: str) -> _Agent:
        stream = Stream(self.session_id, agent_id)
        header = header_of(self.logs, stream)
        log = EventLog(header, catalog=self.catalog)
        scanner = scanner_of(header, WHOLE)
        begins: list[tuple[int, tuple[int, int] | None]] = []
        request: Mapping[str, Any] | None = None

        def follow(event: SessionEvent) -> None:
            nonlocal request
            if event.type == "request/header":
                request = event.data["header"]
            else:
                begins.append((event.seq, (event.data["turn"], event.data.get("step", 0))))

        async with aclosing(pages(self.reader, stream)) as read:
            async for page in read:
                log.read_back(page, follow=follow, types=_FOLLOWED)
                scanner.feed(page)
        found = scanner.finish()
        assert found is not None
        agent = _Agent(stream, header, log, found, begins, request)
        for event in log.surface:
            message = _message_of(event)
            if message is not None:
                agent.messages.append(message)
                agent.seqs.append(event.seq)
        return agent

    def below(self, agent: _Agent) -> dict[tuple[str, ...], str]:
        """The agents below, by what makes a pair: the rollout (its last attempt), else the id."""
        found: dict[tuple[str, ...], str] = {}
        for agent_id, child in agent.found.children.items():
            listed = self.logs.get(agent_id)
            if not child.spawned or listed is None:
                continue
            header = listed.header or {}
            item = header.get("item_id")
            key = (agent_id,) if item is None else (str(item), str(header.get("repeat") or 0))
            found[key] = agent_id
        return found


def _message_of(event: SessionEvent) -> Mapping[str, Any] | None:
    data = event.data
    message: Mapping[str, Any] = data if event.type == "user/message" else data["message"]
    return message if message["content"] or event.type != "assistant/message" else None


def _first_message(pair: tuple[str, str], one: _Agent, other: _Agent) -> Iterator[Difference]:
    calls: tuple[dict[str, str], dict[str, str]] = ({}, {})
    size = max(len(one.messages), len(other.messages))
    for index in range(size):
        a = _shown(one.messages[index], calls[0]) if index < len(one.messages) else ABSENT
        b = _shown(other.messages[index], calls[1]) if index < len(other.messages) else ABSENT
        found = first_difference(a, b)
        if found is not None:
            yield Difference("messages", pair, *found, index=index, places=(one.place(index), other.place(index)))
            return


def _settings(pair: tuple[str, str], one: _Agent, other: _Agent) -> Iterator[Difference]:
    binds = [bind_at(agent.header, agent.found) or {} for agent in (one, other)]
    for name in _SETTINGS:
        a, b = [_setting(bind, name) for bind in binds]
        for found in all_differences(a, b, name):
            yield Difference("settings", pair, *found)
    if one.request is not None and other.request is not None:
        for name in _REQUEST:
            found = first_difference(one.request.get(name, ABSENT), other.request.get(name, ABSENT), f"request.{name}")
            if found is not None:
                yield Difference("settings", pair, *found)


def _setting(bind: Mapping[str, Any], name: str) -> Any:
    value = bind.get(name)
    if value is None:
        return {} if name in _NOTHING_SAID else ABSENT
    if name == "workdir":
        return {key: item for key, item in value.items() if key not in _WHERE_IT_LIES}
    return value


def _shown(message: Mapping[str, Any], calls: dict[str, str]) -> Any:
    """A message as a model is told it, its calls numbered by appearance."""

    def number(call_id: Any) -> Any:
        return calls.setdefault(call_id, f"call {len(calls)}") if isinstance(call_id, str) else call_id

    shown = {key: value for key, value in message.items() if key not in _NOT_SENT}
    content = message["content"]
    if isinstance(content, Sequence) and not isinstance(content, str):
        blocks: list[Any] = []
        for block in cast("Sequence[Mapping[str, Any]]", content):
            if block.get("type") == "tool-call":
                blocks.append({**block, "id": number(block.get("id"))})
            elif block.get("type") == "tool-result":
                blocks.append({**block, "tool_call_id": number(block.get("tool_call_id"))})
            else:
                blocks.append(block)
        shown["content"] = blocks
    return shown


def first_difference(a: object, b: object, path: str = "") -> tuple[str, Any, Any] | None:
    """The first field in which two JSON values differ: its path and both values; None when they are equal."""
    return next(all_differences(a, b, path), None)


def all_differences(a: object, b: object, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every field in which two JSON values differ, in order."""
    one, other = _object(a), _object(b)
    if one is not None and other is not None:
        if ("$blob" in one) != ("$blob" in other) and ("text" in one or "text" in other):
            one, other = _with_digest(one), _with_digest(other)
        for key in dict.fromkeys([*one, *other]):
            inner = f"{path}.{key}" if path else key
            yield from all_differences(one.get(key, ABSENT), other.get(key, ABSENT), inner)
        return
    left, right = _array(a), _array(b)
    if left is not None and right is not None:
        for index in range(max(len(left), len(right))):
            x, y = (side[index] if index < len(side) else ABSENT for side in (left, right))
            yield from all_differences(x, y, f"{path}[{index}]")
    elif not _same(a, b):
        yield path, a, b


def _object(value: object) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def _array(value: object) -> Sequence[Any] | None:
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else None


def _same(a: object, b: object) -> bool:
    """Whether two values that are not both objects or both lists are the same JSON value: ``true`` is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _with_digest(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """A block with its text as a blob's reference."""
    if "$blob" in block or not isinstance(block.get("text"), str):
        return block
    raw = str(block["text"]).encode()
    kept = {key: value for key, value in block.items() if key != "text"}
    return {**kept, "$blob": f"sha256:{hashlib.sha256(raw).hexdigest()}", "bytes": len(raw)}
