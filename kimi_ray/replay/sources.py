"""Where recordings are read from: a home that nobody need have open, or a runtime's store."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, Protocol, cast

from pydantic_core import from_json

from kimi_ray.events import thaw
from kimi_ray.log import Message
from kimi_ray.replay.malformed import shape_of
from kimi_ray.replay.recording import Recording
from kimi_ray.replay.recording_reader import RecordingReader
from kimi_ray.session.log_reader import LogReader, header_of, pages
from kimi_ray.store.open import ReadStore
from kimi_ray.store.seam import ListedLog, Page, Stream


class LogSource(LogReader, Protocol):
    """A ``LogReader`` that also has the blobs."""

    async def read_blob(self, session_id: str, digest: str) -> bytes:
        """The content of a blob that a log of the session refers to.

        Raises:
            StoreError: ``store.not_found``, ``store.corrupt``.
        """
        ...


class HomeSource:
    """A home opened by ``open_store``."""

    def __init__(self, store: ReadStore) -> None:
        self._store = store

    async def read_from(self, stream: Stream, seq: int, limit: int = 1000, max_bytes: int = 8 << 20) -> Page:
        """See ``LogReader``."""
        return await self._store.read_from(stream, seq, limit, max_bytes)

    async def list_logs(self, session_id: str) -> list[ListedLog]:
        """See ``LogReader``."""
        return await self._store.list(session_id)

    async def read_blob(self, session_id: str, digest: str) -> bytes:
        """See ``LogSource``."""
        return await self._store.read_blob(digest)


async def load_recording(
    source: LogSource,
    stream: Stream,
    logs: dict[str, ListedLog] | None = None,
    *,
    whole: bool = False,
    until: int | None = None,
) -> Recording:
    """The script of a log.

    Args:
        source: Where it is.
        stream: Which.
        logs: The session's logs by agent, where they are known.
        whole: See ``RecordingReader``.
        until: The seq up to which it is read; what stands from there on may be damaged.

    Raises:
        SessionError: ``session.not_found``; AgentError: ``agent.not_found``.
        StoreError: ``store.corrupt``; LogError: ``log.*``.
    """
    if logs is None:
        logs = {log.stream.agent_id: log for log in await source.list_logs(stream.session_id)}
    reader = RecordingReader(header_of(logs, stream), whole=whole)
    lines = pages(source, stream, until)
    async with aclosing(lines):
        async for page in lines:
            reader.feed(page)
            await asyncio.sleep(0)
    return reader.finish()


class Blobs:
    """The blobs of one session, and what refers to them put in full.

    Args:
        source: Where they are.
        session_id: Whose.
    """

    def __init__(self, source: LogSource, session_id: str) -> None:
        self._source = source
        self._session_id = session_id
        self._headers: dict[str, bytes] = {}
        """System prompts and tools: few, and most turns have the same."""

    async def read(self, digest: str) -> bytes:
        """One blob.

        Raises:
            StoreError: ``store.not_found``, ``store.corrupt``.
        """
        return await self._source.read_blob(self._session_id, digest)

    async def message(self, message: Message) -> Message:
        """A message with every text in place.

        Raises:
            LogError: ``log.bad_payload``: it is none.
            StoreError: why a blob cannot be read.
        """
        named = message.get("id")
        with shape_of(f"the message {named}" if isinstance(named, str) else "a message", message_id=named):
            body: Message = thaw(message)
            for block in body["content"]:
                await self._fill(block)
                inner: Any = block.get("content")
                if isinstance(inner, list):
                    for part in cast("list[Any]", inner):
                        await self._fill(part)
            return body

    async def blocks(self, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Content blocks with every text in place."""
        return (await self.message({"content": blocks}))["content"]

    async def header(self, header: dict[str, Any]) -> dict[str, Any]:
        """A request header with its system prompt and tools in place.

        Raises:
            LogError: ``log.bad_payload``: it is none.
            StoreError: why a blob cannot be read.
        """
        with shape_of("a request header"):
            body: dict[str, Any] = thaw(header)
            for key, value in body.items():
                if isinstance(value, dict) and "$blob" in value:
                    digest = str(cast("dict[str, Any]", value)["$blob"])
                    raw = self._headers.get(digest)
                    if raw is None:
                        raw = self._headers[digest] = await self.read(digest)
                    body[key] = raw.decode() if key == "system" else from_json(raw)
            return body

    async def _fill(self, block: dict[str, Any]) -> None:
        digest = block.pop("$blob", None)
        if digest is not None:
            block.pop("bytes", None)
            block["text"] = (await self.read(digest)).decode()
