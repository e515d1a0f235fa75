"""Archive, restore and delete from a driver: by id, whether the session is live, where, or cold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from kimi_ray.app import SessionSummary, summary_of
from kimi_ray.errors import ConfigError, KimiRayError, SessionError
from kimi_ray.hosts.courier import Courier
from kimi_ray.hosts.ports import is_lost
from kimi_ray.ids import is_path_safe_id
from kimi_ray.session_link import OPEN_S, Notes, ask_host_of
from kimi_ray.settings import Settings


class ArchiveResult(Settings):
    """What became of one id of ``archive_many``. ``reason`` and ``message`` say why it is not archived."""

    id: str
    ok: bool
    reason: Literal["not_found", "error"] | None = None
    message: str | None = None


class Lifecycle:
    """The operations on sessions by id.

    Args:
        courier: The driver's.
        notes: What it saw and has not told yet: an operation must not overtake it.
        let_go: Told the id of a session that is no longer live, for the handles that this driver has of it.
    """

    def __init__(self, courier: Courier, notes: Notes, let_go: Callable[[str], None]) -> None:
        self._courier = courier
        self._notes = notes
        self._let_go = let_go

    async def archive(self, session_id: str, workspaces: Sequence[str] | None = None) -> SessionSummary:
        """See ``Runtime.archive``; ``workspaces``: only in one of these."""
        document = await self._ask("archive_session", session_id, workspaces)
        self._let_go(session_id)
        return summary_of(document)

    async def restore(self, session_id: str, workspaces: Sequence[str] | None = None) -> SessionSummary:
        """See ``Runtime.restore``."""
        return summary_of(await self._ask("restore_session", session_id, workspaces))

    async def delete(self, session_id: str, workspaces: Sequence[str] | None = None) -> None:
        """See ``Runtime.delete``."""
        await self._ask("delete_session", session_id, workspaces)
        self._let_go(session_id)

    async def archive_many(
        self, session_ids: Iterable[str], workspaces: Sequence[str] | None = None, *, concurrency: int = 8
    ) -> list[ArchiveResult]:
        """See ``Runtime.archive_many``."""
        if type(concurrency) is not int or concurrency < 1:
            raise ConfigError(
                f"a concurrency of {concurrency!r}", code="request.out_of_range", hint="give 1 or more, or leave it out"
            )
        if isinstance(session_ids, str | bytes) or not isinstance(session_ids, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"session_ids must be a list of ids, not {type(session_ids).__name__}",
                code="request.bad_argument",
                hint="archive_many([id, ...]), or archive(id)",
                details={"argument": "session_ids"},
            )
        gate = asyncio.Semaphore(concurrency)

        async def one(session_id: str) -> ArchiveResult:
            async with gate:
                try:
                    await self.archive(session_id, workspaces)
                except KimiRayError as error:
                    reason = "not_found" if error.code == "session.not_found" else "error"
                    return ArchiveResult(id=as_text(session_id), ok=False, reason=reason, message=error.message)
            return ArchiveResult(id=session_id, ok=True)

        return list(await asyncio.gather(*(one(session_id) for session_id in session_ids)))

    async def _ask(self, method: str, session_id: str, workspaces: Sequence[str] | None) -> Any:
        """Ask the host that the registry names, however many hosts are lost on the way."""
        courier = self._courier
        checked_id(session_id)
        courier.check_open()
        await self._notes.flush()
        lost = False

        async def ask(host: str, _attempt: int) -> Any:
            nonlocal lost
            try:
                return await courier.cluster.peer(host).call(method, session_id, workspaces, timeout_s=OPEN_S)
            except KimiRayError as error:
                if lost and method == "delete_session" and error.code == "session.not_found":
                    return None  # the deletion whose answer was lost did happen
                lost = lost or is_lost(error.code)
                raise

        return await ask_host_of(courier, session_id, ask)


def checked_id(session_id: str) -> str:
    """The id, if it can be one.

    Raises:
        SessionError: ``session.bad_id``.
    """
    if isinstance(session_id, str) and is_path_safe_id(session_id):  # pyright: ignore[reportUnnecessaryIsInstance]
        return session_id
    raise SessionError(
        f"{as_text(session_id)[:80]!r} cannot be a session's id",
        code="session.bad_id",
        hint="use 1 to 128 letters, digits, _ and -",
        details={"session_id": as_text(session_id)[:200]},
    )


def as_text(given: object) -> str:
    """Anything that was given, as text that can be written down."""
    return (given if isinstance(given, str) else repr(given)).encode(errors="backslashreplace").decode()
