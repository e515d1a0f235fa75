"""An agent's journal: its log, the fold over it, and the way to durability, as one service.

Everything that the agent does goes through ``append``; ``flush`` is the only place where it waits for a disk.
Content above ``INLINE_BYTES`` leaves the event for a blob and comes back in ``resolve`` when a request is built.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from pydantic_core import from_json

from kimi_ray.agent.fold import AgentFold
from kimi_ray.events import SessionEvent, SurfaceOp, encode, thaw
from kimi_ray.log import EventLog, Message, complete_tools

INLINE_BYTES = 16 << 10
"""Longest text of a message that stays in its event, in bytes."""

HEADER_INLINE_BYTES = 512
"""Longest system prompt or tool list that stays in ``request/header``: most agents of a run share theirs."""


class Durable(Protocol):
    """The write controller as the agent sees it."""

    @property
    def durable_seq(self) -> int:
        """Every event below it is durable."""
        ...

    def attach_blob(self, digest: str, data: bytes) -> None:
        """Hand in a blob that the next flush covers."""
        ...

    async def flush(self) -> None:
        """Return when everything appended before the call is durable."""
        ...

    async def wait_for_room(self) -> None:
        """Wait while a bound of retained bytes is reached."""
        ...


BlobReader = Callable[[str], Awaitable[bytes]]


class Journal:
    """The log of one agent and what it means.

    Args:
        log: The log in memory.
        fold: The fold, already over what the log holds; from here on it follows.
        durable: The log's write controller.
        read_blob: Reads a blob that is not in memory any more.
    """

    def __init__(self, log: EventLog, fold: AgentFold, durable: Durable, read_blob: BlobReader) -> None:
        self.log = log
        self.fold = fold
        self.durable = durable
        self.store_wait_ms = 0
        self._read_blob = read_blob
        self._blobs: dict[str, bytes] = {}
        self._unstored: set[str] = set()
        """Of these blobs, those that no flush has covered: nobody could read them from the store."""
        self._wire: list[Message] = []
        self._wire_through = 0
        self._wire_generation = 0
        log.observe(fold.apply)

    def append(
        self,
        type: str,
        data: dict[str, Any],
        *,
        surface: SurfaceOp | None = None,
        sources: Iterable[int] | None = None,
    ) -> SessionEvent:
        """``EventLog.append``."""
        return self.log.append(type, data, surface=surface, sources=sources)

    @property
    def durable_seq(self) -> int:
        """Every event below it is durable."""
        return self.durable.durable_seq

    async def flush(self) -> None:
        """Wait until all of it is durable.

        Raises:
            StoreError: ``store.unavailable``, ``store.fenced``, ...
        """
        covered = frozenset(self._unstored)
        await self.durable.flush()
        self._unstored -= covered

    async def wait_for_store(self, *, durable: bool) -> None:
        """On the turn's own path: wait for room and, with ``durable``, until all of it is durable.

        The time adds to ``store_wait_ms``; that of others who flush beside the turn does not.

        Raises:
            StoreError: ``store.unavailable``, ``store.fenced``, ...
        """
        began = time.monotonic()
        try:
            await self.durable.wait_for_room()
            if durable:
                await self.flush()
        finally:
            self.store_wait_ms += round((time.monotonic() - began) * 1000)

    def take_store_wait_ms(self) -> int:
        """The time waited since the last call, in milliseconds."""
        waited, self.store_wait_ms = self.store_wait_ms, 0
        return waited

    def block(self, block: dict[str, Any]) -> dict[str, Any]:
        """A content block as it is stored: itself, or with its text as a blob."""
        text = block.get("text")
        if type(text) is not str or len(text) <= INLINE_BYTES // 4:
            return block
        raw = text.encode()
        if len(raw) <= INLINE_BYTES:
            return block
        return {key: value for key, value in block.items() if key != "text"} | self._keep(raw)

    def value(self, value: Any, *, inline_bytes: int = HEADER_INLINE_BYTES) -> Any:
        """A string or JSON value as it is stored in a header: itself, or a blob reference."""
        raw = value.encode() if isinstance(value, str) else encode(value)
        return value if len(raw) <= inline_bytes else self._keep(raw)

    def _keep(self, raw: bytes) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
        self.durable.attach_blob(digest, raw)
        self._blobs[digest] = raw
        self._unstored.add(digest)
        return {"$blob": digest, "bytes": len(raw)}

    def forget_blobs(self) -> None:
        """Blobs that are in the store need not stay in memory: who wants one again reads it."""
        self._blobs = {digest: self._blobs[digest] for digest in self._unstored}

    async def wire_messages(self) -> list[Message]:
        """What goes over the wire now: every tool call answered, every blob in place.

        Only what came since the last call is looked at: by then every call had its result, so what was complete
        stays complete until a replace.
        """
        log = self.log
        if self._wire_generation != log.surface.generation:
            self._wire, self._wire_through, self._wire_generation = [], 0, log.surface.generation
        messages = log.messages()
        fresh = await self.resolve(complete_tools(messages[self._wire_through :]))
        if not log.order.pending_calls:
            self._wire.extend(fresh)
            self._wire_through = len(messages)
            return list(self._wire)
        return [*self._wire, *fresh]

    async def header(self) -> dict[str, Any] | None:
        """The last ``request/header``, every blob in place; None before the first request."""
        header = self.fold.header
        if header is None:
            return None
        whole: dict[str, Any] = thaw(header)
        for key in ("system", "tools"):
            digest = whole.get(key, {}).get("$blob") if isinstance(whole.get(key), dict) else None
            if digest is not None:
                raw = await self._blob(digest)
                whole[key] = raw.decode() if key == "system" else from_json(raw)
        return whole

    async def resolve(self, messages: list[Message]) -> list[Message]:
        """The messages with every blob in place: what goes over the wire."""
        return [await self._resolved(message) if _has_blob(message) else message for message in messages]

    async def _resolved(self, message: Message) -> Message:
        body: Message = thaw(message)
        for block in body["content"]:
            await self._fill(block)
            for inner in block.get("content", ()):
                await self._fill(inner)
        return body

    async def _fill(self, block: dict[str, Any]) -> None:
        digest = block.pop("$blob", None)
        if digest is None:
            return
        block.pop("bytes", None)
        block["text"] = (await self._blob(digest)).decode()

    async def _blob(self, digest: str) -> bytes:
        raw = self._blobs.get(digest)
        if raw is None:
            raw = self._blobs[digest] = await self._read_blob(digest)
        return raw


def _has_blob(message: Message) -> bool:
    return any(
        "$blob" in block or any("$blob" in inner for inner in block.get("content", ())) for block in message["content"]
    )
