"""Where an agent works: a directory made for it, given to it, or none."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from kimi_ray.errors import ToolError
from kimi_ray.settings import Workdir

_FICLONE = 0x40049409
_NO_REFLINK = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM})
_FORMS = "none, shared[:PATH], copy[:PATH]"


@dataclass(frozen=True, slots=True)
class PreparedWorkdir:
    """A directory ready to work in.

    ``path`` is absolute, or None for no directory; ``created``: it was made for this agent, and goes with it;
    ``skipped``: what a copy left out (pipes, sockets, devices, what it was told to, and the place of the copies
    itself), at most 100.
    """

    path: str | None
    kind: Literal["none", "shared", "copy"]
    created: bool
    keep: bool = False
    skipped: tuple[str, ...] = ()

    async def release(self, keep: bool | None = None) -> None:
        """Let go: remove what was created, unless it is to be kept. Idempotent.

        Args:
            keep: None takes what ``prepare_workdir`` was told.

        Raises:
            ToolError: ``workdir.failed`` when it cannot be removed.
        """
        if not self.created or self.path is None or (self.keep if keep is None else keep):
            return
        await asyncio.to_thread(_remove, self.path)


def parse_workdir(text: str, default_path: str | None = None) -> Workdir:
    """The form of the command line: ``copy``, ``copy:PATH``, ``shared``, ``shared:PATH``, ``none``,
    ``git:REPO@REF``, ``factory:package.module:function``. Placeholders such as ``{{repo}}`` are left as they are.

    Args:
        default_path: The directory when ``copy`` or ``shared`` names none.

    Raises:
        ToolError: ``workdir.invalid``.
    """
    kind, _, rest = text.strip().partition(":")
    if kind == "none" and not rest:
        return Workdir.none()
    if kind in ("shared", "copy"):
        path = rest or default_path
        if not path:
            raise _invalid(text, "it names no directory")
        return Workdir.shared(path) if kind == "shared" else Workdir.copy(path)
    if kind == "git":
        repo, _, ref = rest.rpartition("@")
        if not repo or not ref:
            raise _invalid(text, "it must name a repository and a commit: git:REPO@REF")
        return Workdir(kind="git", path=repo, ref=ref)
    if kind == "factory":
        module, _, function = rest.partition(":")
        if not module or not function:
            raise _invalid(text, "it must name a function: factory:package.module:function")
        return Workdir(kind="factory", path=rest)
    raise _invalid(text, f"there is no kind {kind[:40]!r}")


async def prepare_workdir(
    spec: Workdir, *, base_dir: str, name: str, keep: bool = False, leave_out: Sequence[str] = ()
) -> PreparedWorkdir:
    """Make the working directory of one agent, on the machine this runs on.

    A copy appears under its name when it is complete, or not at all: also when this is cancelled, or killed (then a
    ``.partial`` directory is left in ``base_dir``).

    Args:
        spec: Which kind.
        base_dir: Where copies are made; created when missing.
        name: The directory's name in it, one part of a path.
        keep: Whether ``release`` is to keep a copy.
        leave_out: Files and directories that a copy is to be without: what its agent may not read (the run directory,
            the items file) would come within its reach by being copied.

    Raises:
        ToolError: ``workdir.not_found``, ``workdir.not_a_directory``, ``workdir.exists``, ``workdir.failed``,
            ``workdir.unsupported``.
    """
    if spec.kind == "none":
        return PreparedWorkdir(None, "none", created=False)
    if spec.kind not in ("shared", "copy"):
        raise ToolError(
            f"a {spec.kind} working directory cannot be made by this version",
            code="workdir.unsupported",
            hint="use copy or shared: check the directory out beforehand and give its path",
            details={"kind": spec.kind},
        )
    source = await asyncio.to_thread(_directory, spec.path or "")
    if spec.kind == "shared":
        return PreparedWorkdir(source, "shared", created=False)
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ToolError(f"{name!r} cannot name a directory", code="workdir.failed", details={"name": name})
    stopped = threading.Event()
    job = _Copy(source, base_dir, name, stopped.is_set, leave_out)
    making = asyncio.ensure_future(asyncio.to_thread(job.make))
    try:
        await asyncio.shield(making)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait({making})  # it looks at the flag before every file
        if not making.cancelled() and making.exception() is None:
            await asyncio.to_thread(_remove, job.target)
        raise
    return PreparedWorkdir(job.target, "copy", created=True, keep=keep, skipped=tuple(job.skipped))


async def check_workdir(prepared_path: str) -> None:
    """Make sure that a directory recorded earlier is still here.

    Raises:
        ToolError: ``workdir.lost``: its node or its disk is another one now. Work must start again, not go on in an
            empty directory.
    """
    if not await asyncio.to_thread(os.path.isdir, prepared_path):
        raise ToolError(
            f"the working directory {prepared_path} is gone",
            code="workdir.lost",
            hint="it was lost with its node or removed; run again from the start",
            details={"path": prepared_path},
            retryable=True,
        )


def _directory(given: str) -> str:
    whole = given.encode(errors="replace").decode()
    if "\0" in given or given != whole:
        raise _invalid(whole, "a path cannot hold NUL or half a character")
    path = os.path.realpath(os.path.expanduser(given))
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        raise ToolError(
            f"the working directory {path} " + ("does not exist" if missing else f"cannot be used: {error.strerror}"),
            code="workdir.not_found" if missing else "workdir.failed",
            hint="create it, or name another; it must be on the node where the agent works",
            details={"path": path},
        ) from error
    if not stat.S_ISDIR(mode):
        raise ToolError(
            f"the working directory {path} is not a directory", code="workdir.not_a_directory", details={"path": path}
        )
    return path


class _Stopped(Exception):
    """The copy is no longer wanted."""


class _Copy:
    """A copy of a tree: links as links, modes and times kept, blocks shared where the file system can."""

    def __init__(
        self, source: str, base: str, name: str, stopped: Callable[[], bool], leave_out: Sequence[str]
    ) -> None:
        self._source = source
        self._base = base
        self._name = name
        self.target = ""
        self._stopped = stopped
        self._leave_out = frozenset(leave_out)
        self._reflink = sys.platform == "linux"
        self.skipped: list[str] = []

    def make(self) -> None:
        self._base = os.path.realpath(self._base)
        self.target = os.path.join(self._base, self._name)
        # the copies are made inside what is copied, as often as not
        self._leave_out = frozenset(map(os.path.realpath, self._leave_out)) | {self._base}
        partial = os.path.join(self._base, f".{self._name}.{os.getpid()}.{id(self):x}.partial")
        try:
            os.makedirs(self._base, exist_ok=True)
            if os.path.lexists(self.target):
                raise ToolError(
                    f"{self.target} exists already",
                    code="workdir.exists",
                    hint="it belongs to an earlier attempt: remove it, or use another name",
                    details={"path": self.target},
                )
            os.mkdir(partial, 0o700)
            try:
                self._tree(self._source, partial)
                # a plain rename would replace an empty directory that somebody else has just made
                os.mkdir(self.target)
                os.rename(partial, self.target)
            except BaseException:
                _remove(partial)
                raise
        except OSError as error:
            where = error.filename or self.target
            raise ToolError(
                f"{self._source} could not be copied to {self.target}: {where}: {error.strerror or error}",
                code="workdir.exists" if isinstance(error, FileExistsError) else "workdir.failed",
                hint="free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None,
                details={"path": str(where), "reason": error.strerror or str(error)},
            ) from error

    def _tree(self, source: str, target: str) -> None:
        pending = [(source, target)]
        made: list[tuple[str, str]] = []
        while pending:
            of, to = pending.pop()
            made.append((of, to))
            with os.scandir(of) as entries:
                for entry in entries:
                    if self._stopped():
                        raise _Stopped
                    place = os.path.join(to, entry.name)
                    if entry.path in self._leave_out:
                        self._skip(entry.path)
                    elif entry.is_symlink():
                        os.symlink(os.readlink(entry.path), place)
                    elif entry.is_dir():
                        os.mkdir(place, 0o700)
                        pending.append((entry.path, place))
                    elif entry.is_file():
                        self._file(entry.path, place)
                    else:
                        self._skip(entry.path)
        for of, to in reversed(made):  # innermost first: a directory may be read-only
            shutil.copystat(of, to, follow_symlinks=False)

    def _file(self, source: str, target: str) -> None:
        if not (self._reflink and self._clone(source, target)):
            shutil.copyfile(source, target, follow_symlinks=False)
        shutil.copystat(source, target, follow_symlinks=False)

    def _clone(self, source: str, target: str) -> bool:
        with open(source, "rb") as of, open(target, "wb") as to:
            try:
                fcntl.ioctl(to.fileno(), _FICLONE, of.fileno())
            except OSError as error:
                if error.errno not in _NO_REFLINK:
                    raise
                self._reflink = False
                return False
        return True

    def _skip(self, path: str) -> None:
        if len(self.skipped) < 100:
            self.skipped.append(os.path.relpath(path, self._source).encode(errors="replace").decode())


def _remove(path: str) -> None:
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


def _invalid(text: str, why: str) -> ToolError:
    return ToolError(
        f"the workdir {text[:200]!r} cannot be used: {why}",
        code="workdir.invalid",
        hint=f"use one of {_FORMS}",
        details={"workdir": text[:1000]},
    )
