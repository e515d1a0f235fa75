"""The refusals that every backend gives in the same words."""

from __future__ import annotations

from kimi_ray.errors import StoreError
from kimi_ray.store.seam import Batch, LogView, Stream


def already_exists(stream: Stream) -> StoreError:
    """``store.exists``: a new log was asked for under the name of another."""
    return StoreError(
        f"{stream} exists already",
        code="store.exists",
        hint="open the existing log by its stream",
        details={"stream": list(stream)},
    )


def file_held(path: str) -> StoreError:
    """``store.busy``: another process has a file locked, and does not let go of it."""
    return StoreError(
        f"{path} is held by another process for too long",
        code="store.busy",
        details={"path": path},
        retryable=True,
    )


def claim_superseded(session_id: str) -> StoreError:
    """``session.fenced``: the caller acts for a claim that is not the newest."""
    return StoreError(
        f"session {session_id} is held by another host now",
        code="session.fenced",
        hint="the host that was taken for lost must let go of it",
        details={"session_id": session_id},
    )


def session_fenced(session_id: str, grant: int, newest: int) -> StoreError:
    """``store.fenced``: a document write under a claim that is not the newest."""
    return StoreError(
        f"the claim {grant} of session {session_id} is not the newest",
        code="store.fenced",
        hint="another host has this session now; stop, and open it again if it is yours",
        details={"session_id": session_id, "grant": grant, "newest": newest},
    )


def document_conflict(session_id: str, stored: int, expected: int) -> StoreError:
    """``store.conflict`` {revision}: the document was changed by somebody else."""
    return StoreError(
        f"the document of session {session_id} is at revision {stored}, not {expected}",
        code="store.conflict",
        hint="read it again, apply the change to what it says now, and write that",
        details={"session_id": session_id, "revision": stored, "expected": expected},
        retryable=True,
    )


def turn_open(stream: Stream, view: LogView) -> StoreError:
    """``log.turn_open``: a log whose writer may be alive is not repaired."""
    return StoreError(
        f"{stream} has an open turn, and its writer may be alive",
        code="log.turn_open",
        hint="wait until the turn has ended, or inspect the log instead",
        details={"stream": list(stream), "next_seq": view.cut, "epoch": view.epoch},
        retryable=True,
    )


def grant_fenced(batch: Batch, epoch: int, nonce: str) -> StoreError:
    """``store.fenced``: the grant of a batch was closed, or is not the newest (``epoch``, ``nonce``)."""
    ended = (batch.epoch, batch.nonce) == (epoch, nonce)
    return StoreError(
        f"the grant {batch.epoch} to write {batch.stream} {'was closed' if ended else 'is not the newest'}",
        code="store.fenced",
        hint="another writer has this log now; stop, and open it again if it is yours",
        details={"stream": list(batch.stream), "epoch": batch.epoch, "newest": epoch},
    )


def source_too_short(source: object, next_seq: int, cut: int) -> StoreError:
    """``store.gap`` {expected}: a fork asks for more events than there are."""
    return StoreError(
        f"{source} has {next_seq} events, fewer than the {cut} to fork",
        code="store.gap",
        hint="flush the source first, or fork at an earlier event",
        details={"expected": next_seq, "cut": cut},
    )


def session_exists(session_id: str) -> StoreError:
    """``store.exists``: a new session was asked for under the id of another."""
    return StoreError(
        f"session {session_id} exists already",
        code="store.exists",
        hint="choose another id, or resume the session",
        details={"session_id": session_id},
    )


def is_being_made(session_id: str, other: str) -> StoreError:
    """``session.in_use`` or ``store.invalid_id``: a session of this name, or almost this name, is being made."""
    if other != session_id:
        return StoreError(
            f"session id {session_id!r} differs only in case from {other!r}",
            code="store.invalid_id",
            hint="some file systems would mix the two up; choose another id",
            details={"id": session_id, "existing": other},
        )
    return StoreError(
        f"session {session_id} is being made by somebody else",
        code="session.in_use",
        hint="choose another id, or wait until it is made",
        details={"session_id": session_id},
        retryable=True,
    )


def no_publication(group: str) -> StoreError:
    """``store.not_found``: a publication was discarded, or never begun."""
    return StoreError(
        f"there is no publication {group}",
        code="store.not_found",
        hint="its store process ended meanwhile, or it was discarded: begin again",
        details={"group": group},
    )
