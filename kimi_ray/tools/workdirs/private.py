"""The private directories of a node: how they are named, made whole or not at all, and removed.

All are in one directory, ``base``. One that is being made is inside a hidden ``*.partial`` directory that its maker
holds locked: a dead maker's lock is free. Blocking; for threads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from kimi_ray.errors import ToolError

PARTIAL = ".partial"
REPOSITORY = "repository"
"""The file in a ``.partial`` directory that names the repository of a worktree in the making."""

Stopped = Callable[[], bool]


class NotWanted(Exception):
    """What was being made is no longer wanted."""


def workdir_name(session_id: str, agent_id: str, nonce: str) -> str:
    """The name of an agent's private directory; no id holds a dot, so whose it is can be told from it."""
    return f"{session_id}.{agent_id}.{nonce[-8:]}"


def session_of(name: str) -> str:
    """The session of a private directory by its name, complete or partial."""
    return name.removeprefix(".").partition(".")[0]


def check_name(name: str) -> None:
    """Refuse what is not one plain part of a path.

    Raises:
        ToolError: ``workdir.failed``.
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        raise ToolError(f"{name!r} cannot name a directory", code="workdir.failed", details={"name": name})


class Workshop:
    """Where one private directory is made: built as ``tree``, then shown under its name by ``publish``.

    A context manager: at its end whatever was not published is gone.

    Raises:
        ToolError: at the entry ``workdir.exists``, ``workdir.failed``.
    """

    def __init__(self, base: str, name: str) -> None:
        check_name(name)
        self.base = os.path.realpath(base)
        self.target = os.path.join(self.base, name)
        self.partial = os.path.join(self.base, f".{name}.{os.getpid()}.{id(self):x}{PARTIAL}")
        self.tree = os.path.join(self.partial, "tree")
        self._lock = -1

    def __enter__(self) -> Self:
        os.makedirs(self.base, exist_ok=True)
        if os.path.lexists(self.target):
            raise taken(self.target)
        os.mkdir(self.partial, 0o700)
        self._lock = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks: the sweep goes by age
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            remove(self.partial)
        except ToolError:
            if error is None:
                raise
        finally:
            if self._lock >= 0:
                os.close(self._lock)

    def publish(self) -> None:
        """Show what was made under its name.

        Raises:
            ToolError: ``workdir.exists``.
        """
        # a plain rename would replace an empty directory that somebody else has just made
        try:
            os.mkdir(self.target)
        except FileExistsError:
            raise taken(self.target) from None
        try:
            os.rename(self.tree, self.target)
        except OSError:
            os.rmdir(self.target)
            raise


def taken(path: str) -> ToolError:
    """The place of a private directory is not free."""
    return ToolError(
        f"{path} exists already",
        code="workdir.exists",
        hint="it belongs to an earlier attempt: remove it, or use another name",
        details={"path": path},
    )


def not_made(what: str, target: str, error: OSError) -> ToolError:
    """The file system's refusal, as an error that names the place."""
    where = error.filename or target
    return ToolError(
        f"{what}: {where}: {error.strerror or error}",
        code="workdir.failed",
        hint="free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None,
        details={"path": str(where), "reason": error.strerror or str(error)},
    )


def is_being_made(partial: str) -> bool:
    """Whether the maker of a ``.partial`` directory lives."""
    try:
        handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def private_root(path: str, base: str) -> str | None:
    """The private directory that a path is in, or None: what is removed when an agent is done with the path."""
    top = os.path.realpath(base)
    inside = os.path.relpath(path, top)
    first = inside.split(os.sep, 1)[0]
    return None if first in (os.curdir, os.pardir) else os.path.join(top, first)


def remove(path: str) -> None:
    """Remove a directory and all that is in it, read-only or not. Idempotent.

    Raises:
        ToolError: ``workdir.failed``.
    """
    try:
        for last in (False, False, True):
            try:
                shutil.rmtree(path)
            except PermissionError:
                if last:
                    raise
                _make_writable(path)
            except OSError:
                # somebody else removes it too, or a dying process still writes: once more
                if last and os.path.lexists(path):
                    raise
            if not os.path.lexists(path):
                return
    except OSError as error:
        raise ToolError(
            f"the working directory {path} could not be removed: {error.strerror or error}",
            code="workdir.failed",
            hint="remove it by hand",
            details={"path": path, "reason": error.strerror or str(error)},
        ) from error


def _make_writable(top: str) -> None:
    """A directory without write permission keeps its entries."""
    pending = [top]
    while pending:
        directory = pending.pop()
        with suppress(OSError):
            os.chmod(directory, 0o700)
            with os.scandir(directory) as entries:
                pending += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
