"""A driver's tie to one session: the session's host, found again when it is lost, and notes for its document."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from kimi_ray.errors import KimiRayError, SessionError, StoreError
from kimi_ray.hosts.courier import Courier
from kimi_ray.hosts.ports import Group, is_lost
from kimi_ray.hosts.specs import SessionInfo, SessionSpec
from kimi_ray.ids import new_ulid
from kimi_ray.session import Activity, last_prompt
from kimi_ray.session.document_value import TurnReasonKind
from kimi_ray.wall_clock import epoch_ms

OPEN_S = 90.0
_TRIES = 6
_PAUSE_S = 0.1

_IDENTITY = ("session_id", "created_at", "cwd", "profile", "writer")
"""What of the header of main's log tells one creation from another."""

_T = TypeVar("_T")

PromptContent = str | tuple[dict[str, Any], ...]
"""What a prompt holds: text, or content blocks."""


async def ask_host_of(courier: Courier, session_id: str, ask: Callable[[str, int], Awaitable[_T]]) -> _T:
    """Ask the host that the registry names for a session, however many hosts are lost on the way.

    Args:
        courier: The driver's.
        session_id: Whose host; the session need not be live.
        ask: Given the host, and how often it was asked before. Asked again, it must do the same again.

    Raises:
        KimiRayError: what the last host raised.
    """
    for attempt in range(_TRIES):
        host = await courier.registry.place_session(session_id, None)
        try:
            return await ask(host, attempt)
        except KimiRayError as error:
            lost = is_lost(error.code)
            if attempt == _TRIES - 1 or not (lost or error.code == "session.not_live"):
                raise
            if lost:
                await courier.registry.report_lost(host)
        await asyncio.sleep(_PAUSE_S * attempt)
    raise AssertionError


class SessionLink:
    """One open session.

    Args:
        courier: The driver's.
        spec: How to bring the session back: ``create`` False.
        host: The session host.
        opened: Whether this driver brought it to life, so that its close is this driver's.
        main_host: Where its main agent lives, as it was told with the session.
    """

    def __init__(
        self, courier: Courier, spec: SessionSpec, host: str, *, opened: bool, main_host: str | None = None
    ) -> None:
        self.courier = courier
        self.spec = spec
        self.host = host
        self.opened = opened
        self.main_host = main_host
        self.closed = False
        self.closing = False
        """Nobody but the close itself may bring the session back any more."""
        self.on_waiting: Callable[[dict[str, str]], None] | None = None
        """Hears, when the session came back, whose accepted prompts wait for a model, with its name."""
        self._finding = asyncio.Lock()

    @property
    def id(self) -> str:
        """The session's id."""
        return self.spec.session_id

    async def close(self, force: bool) -> None:
        """Close the session, wherever it is by now. Idempotent."""
        if self.closed:
            return
        self.closing = True
        try:
            await self._call("close_session", (self.id, force), "default", OPEN_S)
        except BaseException:
            self.closing = False
            raise
        self.closed = True

    async def call(self, method: str, *args: Any, group: Group = "default", timeout_s: float = OPEN_S) -> Any:
        """Call the session's host for something that may be asked twice; a lost session is resumed elsewhere.

        Raises:
            SessionError: ``session.closed`` after the close.
            KimiRayError: what the host raised, or why the session cannot be brought back.
        """
        self.courier.check_loop()
        if self.closed:
            raise self._is_closed()
        return await self._call(method, args, group, timeout_s)

    def _is_closed(self) -> SessionError:
        return SessionError(
            f"session {self.id} is closed",
            code="session.closed",
            hint="resume it and use the session that this gives",
            details={"session_id": self.id},
        )

    async def _call(self, method: str, args: tuple[Any, ...], group: Group, timeout_s: float) -> Any:
        for attempt in range(_TRIES):
            host = self.host
            try:
                return await self.courier.cluster.peer(host).call(method, *args, timeout_s=timeout_s, group=group)
            except KimiRayError as error:
                gone = is_lost(error.code) or error.code == "session.not_live"
                over = self.closed or (self.closing and method != "close_session")
                if over and error.code == "session.not_live":
                    raise self._is_closed() from error  # it was closed in between
                if attempt == _TRIES - 1 or not gone or over:
                    raise
                await self._find_again(host, error)
            await asyncio.sleep(_PAUSE_S * attempt)
        raise AssertionError

    async def _find_again(self, lost: str, error: KimiRayError) -> None:
        async with self._finding:
            if self.host != lost:
                return
            if is_lost(error.code) and not await self.courier.registry.report_lost(lost):
                return
            spec = replace(self.spec, nonce=new_ulid(), main=replace(self.spec.main, nonce=new_ulid()))
            info, host = await open_session(self.courier, spec)
            self.spec = spec
            self.host = host
            self.opened = self.opened or info.opened
            self.came_back(info)

    def came_back(self, info: SessionInfo) -> None:
        """The session was brought to life, or joined."""
        if info.waiting and self.on_waiting is not None:
            self.on_waiting(info.waiting)


async def open_session(courier: Courier, spec: SessionSpec) -> tuple[SessionInfo, str]:
    """Create or resume a session on the host that the registry names, however many hosts are lost on the way.

    Raises:
        SessionError: ``session.exists``, ``session.not_found``, ``session.in_use``; what the activation raised.
    """
    method = "create_session" if spec.create else "resume_session"
    asked_before = False
    for attempt in range(_TRIES):
        host = await courier.registry.place_session(spec.session_id, spec.isolation)
        try:
            info: SessionInfo = await courier.cluster.peer(host).call(method, spec, timeout_s=OPEN_S)
            return info, host
        except KimiRayError as error:
            if error.code == "session.exists" and asked_before and await _is_made(courier, spec):
                # The creation whose answer was lost did happen.
                spec = replace(
                    spec, create=False, nonce=new_ulid(), main=replace(spec.main, header=None, nonce=new_ulid())
                )
                method = "resume_session"
                continue
            elsewhere = error.code == "session.not_live"
            if attempt == _TRIES - 1 or not (elsewhere or is_lost(error.code)):
                raise
            if not elsewhere:
                await courier.registry.report_lost(host)
                asked_before = True
        await asyncio.sleep(_PAUSE_S * (attempt + 1))
    raise AssertionError


async def _is_made(courier: Courier, spec: SessionSpec) -> bool:
    """Whether the session that is there is the one that was to be made, and not another one's of the same id."""
    try:
        stored = (await courier.store.inspect(spec.main.stream)).header
    except StoreError as error:
        if error.code not in ("store.not_found", "store.deleted"):
            raise
        return False
    asked = spec.main.header or {}
    return all(stored.get(key) == asked.get(key) for key in _IDENTITY)


class _Note:
    """What the main agent of a session did since its document last heard of it."""

    __slots__ = ("at", "first", "last", "link", "reason")

    def __init__(self, link: SessionLink) -> None:
        self.link = link
        self.at = 0
        self.first: PromptContent | None = None
        self.last: PromptContent | None = None
        self.reason: TurnReasonKind | None = None

    def activity(self) -> Activity:
        # Of many prompts only these two are read: to take what is secret out of a text costs more than to run it.
        first = None if not self.first or self.first is self.last else last_prompt(self.first)
        last = None if self.last is None else last_prompt(self.last)
        return Activity(self.link.id, self.at, last, self.reason, first)


class Notes:
    """What main agents did, on its way to their documents: at most a call a second to each session host."""

    SPACING_S = 1.0

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self._pending: dict[str, _Note] = {}
        self._pump: asyncio.Task[None] | None = None

    def add(
        self, link: SessionLink, *, prompt: PromptContent | None = None, reason: TurnReasonKind | None = None
    ) -> None:
        """The newest of a session; what it does not say is kept from the one before.

        Args:
            link: Whose.
            prompt: What it was given; an empty text where an undo took back the only prompt.
            reason: How a turn ended.
        """
        note = self._pending.get(link.id)
        if note is None:
            note = self._pending[link.id] = _Note(link)
        note.at = epoch_ms()
        if prompt is not None:
            note.first = note.first or prompt
            note.last = prompt
        note.reason = reason or note.reason
        if self._pump is None or self._pump.done():
            self._pump = self._courier.spawn(self._send_soon())

    async def flush(self) -> None:
        """Hand over what there is. A session whose host is lost is left out: its log has it all."""
        pending, self._pending = self._pending, {}
        by_host: dict[str, list[Activity]] = {}
        for note in pending.values():
            by_host.setdefault(note.link.host, []).append(note.activity())

        async def send(host: str, activities: list[Activity]) -> None:
            try:
                await self._courier.cluster.peer(host).call(
                    "note_activity", activities, timeout_s=OPEN_S, group="control"
                )
            except KimiRayError as error:
                if not is_lost(error.code):
                    raise

        await asyncio.gather(*(send(host, activities) for host, activities in by_host.items()))

    async def _send_soon(self) -> None:
        while self._pending:
            await asyncio.sleep(self.SPACING_S)
            self._courier.afterwards(self.flush())
