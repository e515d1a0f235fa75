"""What SQLite says when something fails, in the codes that every backend uses."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Generator

from kimi_ray.errors import StoreError

FAILURES = (sqlite3.Error, UnicodeDecodeError)
"""What a call of SQLite raises: of a damaged schema even the message may be no text."""

_SALVAGE = "`kimi-ray sessions salvage` makes a new session of everything that verifies"
_RESTORE = "restore the file from a backup, or salvage what can still be read: " + _SALVAGE


def corrupt_row(file: str, rowid: int, seq: int, why: str, *, table: str = "rows") -> StoreError:
    """``store.corrupt`` {file, rowid, seq}: a row that does not verify, or is not there."""
    return StoreError(
        f"{file} is damaged at {table} {rowid} (seq {seq}): {why}",
        code="store.corrupt",
        hint=_SALVAGE,
        details={"file": file, "table": table, "rowid": rowid, "seq": seq},
    )


def corrupt_database(file: str, why: str) -> StoreError:
    """``store.corrupt`` {file}: SQLite itself cannot read it."""
    return StoreError(
        f"{file} is damaged: {why}",
        code="store.corrupt",
        hint=_RESTORE,
        details={"file": file, "rowid": -1, "seq": -1},
    )


def foreign(file: str, why: str) -> StoreError:
    """``store.foreign_database``: not one of ours."""
    return StoreError(
        f"{file} is no database of kimi_ray: {why}",
        code="store.foreign_database",
        hint="move it away if it belongs to another program; restore it from a backup if its first page was damaged",
        details={"file": file},
    )


def store_error(error: Exception, file: str) -> StoreError:
    """The ``StoreError`` of a failed call: one of ``FAILURES``."""
    if isinstance(error, UnicodeDecodeError):
        return corrupt_database(file, "its schema is no text")
    code = getattr(error, "sqlite_errorcode", None)
    name = str(getattr(error, "sqlite_errorname", None) or type(error).__name__)
    details = {"path": file, "errno": name}
    primary = code & 0xFF if isinstance(code, int) else -1
    if primary == sqlite3.SQLITE_FULL:
        return StoreError(
            f"no space left for {file}",
            code="store.disk_full",
            hint="free space on the file system of the home; what was not stored is kept and sent again",
            details=details,
            retryable=True,
        )
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
        return StoreError(
            f"{file} is locked by another process for too long",
            code="store.busy",
            hint="another process writes the same home; it is tried again",
            details=details,
            retryable=True,
        )
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return StoreError(
            f"not allowed to write {file}: {error}",
            code="store.permission_denied",
            hint="give this user read and write access to the home",
            details=details,
        )
    # A damaged schema format number in the file's head is told as a plain error.
    if primary == sqlite3.SQLITE_CORRUPT or "unsupported file format" in str(error):
        return corrupt_database(file, str(error))
    if primary == sqlite3.SQLITE_NOTADB:
        return foreign(file, str(error))
    return StoreError(
        f"a call on {file} failed: {error}",
        code="store.io_failed",
        hint="check the disk and the kernel log",
        details=details,
        retryable=True,
    )


@contextlib.contextmanager
def sqlite_errors(file: str) -> Generator[None]:
    """Re-raise each of ``FAILURES`` in the block as the ``StoreError`` that ``store_error`` gives."""
    try:
        yield
    except FAILURES as error:
        raise store_error(error, file) from error


def is_damage(error: Exception) -> bool:
    """Whether SQLite found a page that it cannot read."""
    if isinstance(error, UnicodeDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(code, int) and code & 0xFF == sqlite3.SQLITE_CORRUPT
