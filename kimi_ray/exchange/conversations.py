"""Conversations for others: what an agent's model was last shown, and the course of a log, with every blob in place."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, cast

from pydantic_core import from_json

from kimi_ray.errors import KimiRayError, LogError, StoreError, error_from_data
from kimi_ray.events import CORE, Catalog, LogHeader, SessionEvent, glance, parse_header, thaw, type_key
from kimi_ray.log import EventLog, Message, complete_tools, derive_messages
from kimi_ray.session.log_reader import ColdReader, pages
from kimi_ray.store.checkup import UNREADABLE
from kimi_ray.store.open import ReadStore
from kimi_ray.store.seam import ListedLog, Stream

_PASSED: Final = frozenset({type_key("assistant/chunk"), type_key("llm/tokens")})
_LOST: Final = (*UNREADABLE, "store.not_found", "store.blob_missing")


MALFORMED: Final = (KeyError, IndexError, TypeError, AttributeError, ValueError)
"""What reading a payload of another shape raises."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How a model is asked: what a ``request/header`` says, with its blobs in place."""

    model: str | None = None
    provider: str | None = None
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    """Each {name, description, parameters}."""


@dataclass(slots=True)
class Conversation:
    """One agent's. ``problems`` are what could not be read: the messages go as far as the log verifies."""

    stream: Stream
    header: LogHeader
    asked: Asked
    messages: list[Message]
    facts: dict[str, Any]
    """Where it is from: ids of session, agent, run, item."""
    problems: list[KimiRayError] = field(default_factory=list[KimiRayError])


class Contents:
    """Puts blobs back into place; one that is gone leaves a text that says so, and a problem."""

    def __init__(self, store: ReadStore, problems: list[KimiRayError]) -> None:
        self._store = store
        self._problems = problems

    async def blob(self, digest: str) -> bytes:
        """The content of a blob."""
        try:
            return await self._store.read_blob(digest)
        except KimiRayError as error:
            if error.code not in _LOST:
                raise
            self._problems.append(error)
            return b"(this content is lost)"

    async def message(self, message: Message) -> Message:
        """A message with the texts of its blocks, and of those in its tool results."""
        body: Message = thaw(message)
        body["content"] = await self.blocks(body["content"])
        for block in body["content"]:
            if block["type"] == "tool-result":
                block["content"] = await self.blocks(block["content"])
        return body

    async def blocks(self, content: Any) -> list[dict[str, Any]]:
        """Content blocks with their texts."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if isinstance(content, dict):
            content = [{"type": "text", **content}]
        found: list[dict[str, Any]] = []
        for block in cast("list[dict[str, Any]]", content):
            digest = block.get("$blob")
            if digest is None:
                found.append(block)
                continue
            kept = {key: value for key, value in block.items() if key not in ("$blob", "bytes")}
            found.append({**kept, "text": (await self.blob(digest)).decode("utf-8", "replace")})
        return found

    async def asked(self, header: dict[str, Any]) -> Asked:
        """The facts of a ``request/header``."""
        system, tools = await self._value(header.get("system")), await self._value(header.get("tools"))
        if isinstance(system, bytes):
            system = system.decode("utf-8", "replace")
        if isinstance(tools, bytes):
            try:
                tools = from_json(tools)
            except ValueError:
                tools = ()
        model, provider, system = (
            one if isinstance(one, str) and one else None
            for one in (header.get("model"), header.get("provider"), system)
        )
        return Asked(model, provider, system, _tools(tools))

    async def _value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return await self.blob(str(cast("dict[str, Any]", value)["$blob"]))


def _tools(told: Any) -> tuple[dict[str, Any], ...]:
    """The tools that are described; an import may have names alone, or nothing that is a tool."""
    found: list[dict[str, Any]] = []
    for one in cast("list[Any]", told if isinstance(told, list) else []):
        tool = cast("dict[str, Any]", one if isinstance(one, dict) else {})
        if isinstance(tool.get("name"), str):
            parameters: dict[str, Any] = tool.get("parameters") or {}
            found.append({"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters})
    return tuple(found)


def facts_of(header: LogHeader) -> dict[str, Any]:
    """Which agent, session and rollout a log is of."""
    names = ("session_id", "agent_id", "profile", "run_id", "item_id", "repeat", "attempt")
    return {name: value for name in names if (value := getattr(header, name)) is not None}


def bad_payload(stream: Stream, error: Exception) -> LogError:
    """``log.bad_payload``: a log has an event of another shape, for one of ``MALFORMED``."""
    return LogError(
        f"the log of {stream} has an event without the payload of its type:"
        f" {error.__class__.__name__}: {str(error)[:200]}",
        code="log.bad_payload",
        hint="kimi_ray.events.payloads says what each type carries",
        details={"session_id": stream.session_id, "agent_id": stream.agent_id},
    )


def readable_header(log: ListedLog) -> LogHeader:
    """The header of a listed log.

    Raises:
        KimiRayError: why it cannot be read.
    """
    if log.header is None:
        unknown = StoreError(f"the log of {log.stream} cannot be read", code="store.corrupt")
        raise unknown if log.error is None else error_from_data(log.error)
    return parse_header(log.header)


async def log_lines(
    store: ReadStore, stream: Stream, problems: list[KimiRayError]
) -> AsyncGenerator[tuple[bytes, ...]]:
    """The lines of a log as far as they verify; what stops them is a problem."""
    try:
        async with aclosing(pages(ColdReader(store), stream)) as runs:
            async for run in runs:
                yield run
    except KimiRayError as error:
        if error.code not in _LOST:
            raise
        problems.append(error.with_details(session_id=stream.session_id, agent_id=stream.agent_id))


async def log_events(store: ReadStore, stream: Stream, problems: list[KimiRayError]) -> AsyncGenerator[SessionEvent]:
    """The events of a log without streamed chunks, as far as they verify."""
    seq = 0
    async with aclosing(log_lines(store, stream, problems)) as runs:
        async for run in runs:
            for line in run:
                parts = line.split(b",", 3)
                if len(parts) < 3 or parts[2] not in _PASSED:
                    yield glance(line, at=seq)
                seq += 1


async def read_conversation(store: ReadStore, log: ListedLog, *, catalog: Catalog = CORE) -> Conversation:
    """What an agent's model would be asked with next: the messages that it sees, with every tool call answered.

    Args:
        store: The home.
        log: The agent's log.
        catalog: The event types of the program.

    Raises:
        KimiRayError: its header cannot be read.
    """
    header = readable_header(log)
    problems: list[KimiRayError] = []
    events = EventLog(header, catalog=catalog)
    last: dict[str, Any] = {}

    def follow(event: SessionEvent) -> None:
        last.update(event.data["header"])

    async with aclosing(log_lines(store, log.stream, problems)) as runs:
        async for run in runs:
            events.read_back(run, follow=follow, types=frozenset({"request/header"}))
    contents = Contents(store, problems)
    messages = complete_tools(derive_messages(events.surface))
    return Conversation(
        log.stream,
        header,
        await contents.asked(last),
        [await contents.message(message) for message in messages],
        facts_of(header),
        problems,
    )


def texts_of(blocks: Sequence[dict[str, Any]], kind: str = "text") -> str:
    """The texts of the blocks of one kind, joined by line feeds."""
    return "\n".join(str(block["text"]) for block in blocks if block["type"] == kind)
