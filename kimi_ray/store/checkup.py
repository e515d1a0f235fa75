"""Everything that can be checked about a session: its document, every row of its logs, every blob that they name.

It reads only, beside a live writer too, and goes on behind whatever is broken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from kimi_ray.errors import KimiRayError, error_from_data
from kimi_ray.settings import Settings
from kimi_ray.store.open import ReadStore
from kimi_ray.store.seam import Stream, VerifyReport
from kimi_ray.store.verify import NO_DAMAGE

BLOB_REFERENCE = re.compile(rb'"\$blob":"(sha256:[0-9a-f]{64})"')
"""A reference as it stands in an event's bytes; inside of a text its quotes would be escaped."""

UNREADABLE = frozenset({"store.corrupt", "store.io_failed", "store.permission_denied"})
"""Codes of a document that is there and cannot be read."""

_PAGE_EVENTS = 2_000
_TRIES = 3


class SessionCheck(Settings):
    """What ``check_session`` found."""

    session_id: str
    ok: bool
    document: str = "ok"
    """``ok``, ``missing`` (a session whose logs came to be, but not its document) or ``damaged``."""
    logs: tuple[VerifyReport, ...] = ()
    blobs: int = 0
    """Different blobs that the logs name."""
    problems: tuple[dict[str, object], ...] = Field(default=())
    """All, those of the logs too: ``code``, ``message``, ``details`` {file, offset or rowid, seq, agent_id}."""

    def to_data(self) -> dict[str, object]:
        """The check as plain JSON."""
        return self.model_dump(mode="json")


@dataclass(slots=True)
class Blobs:
    """Which blobs were looked at; shared by the sessions of a home, for most of them name the same."""

    seen: dict[str, dict[str, Any] | None] = field(default_factory=dict[str, "dict[str, Any] | None"])

    async def problem(self, store: ReadStore, digest: str) -> dict[str, Any] | None:
        """What is wrong with a blob, or None."""
        if digest not in self.seen:
            try:
                await store.read_blob(digest)
                self.seen[digest] = None
            except KimiRayError as error:
                self.seen[digest] = error.to_data()
        return self.seen[digest]


def blob_references(line: bytes) -> list[str]:
    """The digests that an event's line refers to."""
    return [found.decode() for found in BLOB_REFERENCE.findall(line)] if b'"$blob"' in line else []


async def all_sessions(store: ReadStore) -> list[str]:
    """The ids of all sessions of a home, those without a document too."""
    documents = {document.session_id for document in await store.list_documents()}
    return sorted(documents | {log.stream.session_id for log in await store.list()})


async def check_session(
    store: ReadStore, session_id: str, *, agents: Iterable[str] | None = None, blobs: Blobs | None = None
) -> SessionCheck:
    """Check a session's document, its logs (or those of ``agents``), and every blob that they name.

    Raises:
        StoreError: ``store.deleted``; ``store.not_found`` when there is neither a document nor a log.
    """
    problems: list[dict[str, object]] = []
    state = "ok"
    try:
        if await store.read_document(session_id) is None:
            state = "missing"
            if any(document.session_id == session_id for document in await store.list_documents()):
                # A database whose index does not lead to it any more.
                state = "damaged"
                message = f"the document of session {session_id} is stored and cannot be found by its id"
                problems.append({"code": "store.corrupt", "message": message, "details": {"session_id": session_id}})
    except KimiRayError as error:
        if error.code not in UNREADABLE:
            raise
        state = "damaged"
        problems.append(_problem(error))
    streams = sorted(log.stream for log in await store.list(session_id))
    if agents is not None:
        wanted = set(agents)
        streams = [stream for stream in streams if stream.agent_id in wanted]
    found = blobs if blobs is not None else Blobs()
    reports: list[VerifyReport] = []
    named: dict[str, tuple[Stream, int]] = {}
    for stream in streams:
        try:
            report = await _verify(store, stream)
            await _name_blobs(store, stream, named)
        except KimiRayError as error:
            # removed or replaced meanwhile, or a file that may not be read: this log is a problem, not the command
            report = VerifyReport(
                session_id=session_id, agent_id=stream.agent_id, ok=False, problems=(_problem(error),)
            )
        reports.append(report)
        for problem in report.problems:
            details = problem.get("details")
            facts: dict[str, object] = dict(details) if isinstance(details, dict) else {}  # pyright: ignore[reportUnknownArgumentType]
            problems.append({**problem, "details": {**facts, "agent_id": stream.agent_id}})
    for digest, (stream, seq) in named.items():
        wrong = await found.problem(store, digest)
        if wrong is not None:
            error = error_from_data(wrong)
            file = error.details.get("file") or error.details.get("path")
            problems.append(_problem(error, agent_id=stream.agent_id, seq=seq, digest=digest, file=file, offset=0))
    return SessionCheck(
        session_id=session_id,
        ok=all(problem["code"] in NO_DAMAGE for problem in problems),
        document=state,
        logs=tuple(reports),
        blobs=len(named),
        problems=tuple(problems),
    )


async def _verify(store: ReadStore, stream: Stream) -> VerifyReport:
    """The report of a log. What looks damaged while somebody writes is looked at again."""
    for _ in range(_TRIES - 1):
        before = await store.revision(stream)
        report = await store.verify(stream)
        if report.ok or await store.revision(stream) == before:
            return report
    return await store.verify(stream)


async def _name_blobs(store: ReadStore, stream: Stream, named: dict[str, tuple[Stream, int]]) -> None:
    cursor: int | None = 0
    while cursor is not None:
        page = await store.read_surviving(stream, cursor, _PAGE_EVENTS)
        for seq, line in page.events:
            for digest in blob_references(line):
                named.setdefault(digest, (stream, seq))
        cursor = page.cursor


def _problem(error: KimiRayError, **details: object) -> dict[str, object]:
    return {"code": error.code, "message": error.message, "details": {**error.details, **details}}
