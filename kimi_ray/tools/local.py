"""The local machine as the place where tools work: one directory, and a shell that starts in it.

File tools are confined to the root (and the scratch directory): a path is resolved through all symbolic links first.
A command cannot be confined by path; it only starts in the root, without this process's secrets. This keeps honest
agents on their ground; it is no sandbox against a hostile one.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import shutil
import stat as stat_module
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Literal, TypeVar

from kimi_ray.errors import ToolError
from kimi_ray.tools.commands import run_command, scrubbed_environment
from kimi_ray.tools.contract import DirectoryEntry, ExecResult, FileStat

_T = TypeVar("_T")
FileKind = Literal["file", "directory", "other"]
_MAX_COMMANDS = 16
_SMALL_BYTES = 64 << 10
_LOCAL_TYPES = frozenset({b"overlay", b"tmpfs", b"btrfs", b"zfs", b"bcachefs"})


def _within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory if directory.endswith(os.sep) else directory + os.sep)


def _storable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(name: str) -> str:
    """A file name as text that can be stored: bytes that are not UTF-8 become U+FFFD."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", errors="replace")


@cache
def _shell() -> str:
    """Bash, which models write for, else the system's shell; looked for once a process."""
    return shutil.which("bash") or "/bin/sh"


class LocalEnvironment:
    """An ``Environment`` on this machine.

    Args:
        root: The working directory; None makes every call that needs one raise ``environment.no_workdir``.
        scratch: A second directory that file tools may use by absolute path; ``TMPDIR`` of commands.
        denied_roots: Files and directories that file tools may not touch (the home, the run directory, the items
            file), also inside the root. A root inside a denied directory is allowed itself.
        env: Variables for commands beyond the few that every program needs.
        max_concurrent_files: File operations at a time.
        executor: The threads for file work; None makes a pool of ``max_concurrent_files`` threads of its own.

    Raises:
        ToolError: ``environment.not_found`` when ``root`` is not a directory.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None,
        *,
        scratch: str | os.PathLike[str] | None = None,
        denied_roots: Sequence[str | os.PathLike[str]] = (),
        env: Mapping[str, str] | None = None,
        max_concurrent_files: int = 4,
        executor: Executor | None = None,
    ) -> None:
        self._root = None if root is None else os.path.realpath(root)
        if self._root is not None and not os.path.isdir(self._root):
            raise ToolError(
                f"the working directory {self._root} does not exist",
                code="environment.not_found",
                hint="create it, or name another working directory",
                details={"path": self._root},
            )
        self._disk = None if self._root is None else _local_disk(self._root)
        self._scratch = None if scratch is None else os.path.realpath(scratch)
        self._allowed = tuple(place for place in (self._root, self._scratch) if place is not None)
        self._denied = tuple(os.path.realpath(place) for place in denied_roots)
        self._env = dict(env) if env is not None else None
        # models write for bash, whatever the system's plain shell is
        self._shell = _shell()
        self._executor = executor
        self._own_executor: ThreadPoolExecutor | None = None
        self._threads = max_concurrent_files
        self._files = asyncio.Semaphore(max_concurrent_files)
        self._slots = asyncio.Semaphore(_MAX_COMMANDS)
        self._running: set[asyncio.Task[ExecResult]] = set()
        self._closed = False

    @property
    def root(self) -> str | None:
        """The working directory, absolute and without symbolic links."""
        return self._root

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a command to its end; see ``Environment.exec``.

        The shell is bash where there is one. Standard input is empty.
        """
        self._check_open()
        if not command:
            raise ToolError("the command is empty", code="environment.failed", hint="give a command")
        directory = await self._on_thread(self._directory, cwd or ".")
        argv = [self._shell, "-c", command] if isinstance(command, str) else list(command)
        variables = scrubbed_environment(self._env, scratch=self._scratch)
        variables["PWD"] = directory
        variables.update(env or {})
        async with self._slots:
            self._check_open()
            # a task of its own, so that close() can end it and a cancelled caller still waits for the kill
            task = asyncio.create_task(
                run_command(argv, cwd=directory, env=variables, timeout_s=timeout_s, max_output_bytes=max_output_bytes)
            )
            self._running.add(task)
            try:
                return await task
            except asyncio.CancelledError:
                if self._closed and not _being_cancelled():
                    raise self._closed_error() from None
                raise
            finally:
                self._running.discard(task)

    async def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """The bytes of a regular file from ``offset``, at most ``limit``."""
        if self._disk is not None and not self._closed:
            found = _named(self._read_small, (path, offset, limit))
            if found is not None:
                return found
        return await self._on_thread(self._read, path, offset, limit)

    async def write_bytes(self, path: str, data: bytes, *, append: bool = False) -> None:
        """Write a whole file, seen by others either as it was or as it is now, or append to it."""
        await self._on_thread(self._write, path, data, append)

    async def stat(self, path: str) -> FileStat | None:
        """What is at ``path``, or None when nothing is."""
        return await self._on_thread(self._stat, path)

    async def list(self, path: str, *, recursive: bool = False, limit: int = 100_000) -> list[DirectoryEntry]:
        """The entries of a directory in name order, a directory's own entries right behind it when recursive.

        A link to a file that may be read shows as that file, any other link as ``other``, so that nobody descends
        through it. What may not be touched is left out.
        """
        return await self._on_thread(self._list, path, recursive, limit)

    async def close(self) -> None:
        """Kill the running commands and refuse further calls. Idempotent."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.gather(*running, return_exceptions=True)
        if self._own_executor is not None:
            self._own_executor.shutdown(wait=False, cancel_futures=True)

    # -- the loop's side ---------------------------------------------------------------------------------------------

    def _closed_error(self) -> ToolError:
        return ToolError(f"the environment of {self._root} is closed", code="environment.closed")

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    async def _on_thread(self, work: Callable[..., _T], *arguments: object) -> _T:
        self._check_open()
        if self._root is None:
            raise ToolError(
                "there is no working directory",
                code="environment.no_workdir",
                hint="this agent was started without one (Workdir.none()); answer without files and commands, "
                "or start it with a workdir",
            )
        executor = self._executor or self._own_executor
        if executor is None:
            executor = self._own_executor = ThreadPoolExecutor(self._threads, thread_name_prefix="kimi-ray-files")
        async with self._files:
            return await asyncio.get_running_loop().run_in_executor(executor, _named, work, arguments)

    # -- blocking, in a thread ---------------------------------------------------------------------------------------

    def _refusal(self, resolved: str) -> ToolError | None:
        around = max((len(place) for place in self._allowed if _within(resolved, place)), default=-1)
        if around < 0:
            return ToolError(
                f"{_shown(resolved)} is outside the working directory {self._root}",
                code="environment.outside_workdir",
                hint="use a path inside the working directory",
                details={"path": _shown(resolved), "root": self._root},
            )
        # the deeper of two nested places decides: a working directory below the home is usable, the home is not
        if any(_within(resolved, place) and len(place) >= around for place in self._denied):
            return ToolError(
                f"{_shown(resolved)} may not be touched by tools",
                code="environment.denied",
                hint="it belongs to the run itself; work on the files of the working directory",
                details={"path": _shown(resolved)},
            )
        return None

    def _resolve(self, path: str) -> str:
        if not path or "\0" in path or not _storable(path):
            raise ToolError(
                "the path is empty" if not path else "a path cannot hold NUL or half a character",
                code="environment.bad_path",
                hint="give a path relative to the working directory",
            )
        assert self._root is not None
        resolved = os.path.realpath(os.path.join(self._root, path))
        refusal = self._refusal(resolved)
        if refusal is not None:
            raise refusal.with_details(given=_shown(path))
        return resolved

    def _directory(self, path: str) -> str:
        resolved = self._resolve(path)
        if not stat_module.S_ISDIR(os.stat(resolved).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), resolved)
        return resolved

    def _read(self, path: str, offset: int, limit: int | None) -> bytes:
        # O_NONBLOCK: opening a FIFO must not wait for somebody to write into it
        fd = os.open(self._resolve(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb", buffering=0) as file:
            mode = os.fstat(fd).st_mode
            if stat_module.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if not stat_module.S_ISREG(mode):
                raise _not_a_file(path)
            if offset:
                file.seek(offset)
            if limit is None:
                return file.readall()
            parts: list[bytes] = []
            while limit > 0 and (part := file.read(limit)):
                parts.append(part)
                limit -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_small(self, path: str, offset: int, limit: int | None) -> bytes | None:
        """A small file of a local disk, read on the loop: going through a thread costs six times the read."""
        fd = os.open(self._resolve(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if status.st_size > _SMALL_BYTES or status.st_dev != self._disk or not stat_module.S_ISREG(status.st_mode):
                return None
            wanted = status.st_size + 1 if limit is None else min(limit, status.st_size + 1)
            data = os.pread(fd, wanted, offset)
        finally:
            os.close(fd)
        # it has grown meanwhile: let the other way find its end
        return None if limit is None and len(data) + offset > status.st_size else data

    def _write(self, path: str, data: bytes, append: bool) -> None:
        resolved = self._resolve(path)
        try:
            before = os.lstat(resolved)
        except FileNotFoundError:
            before = None
            os.makedirs(os.path.dirname(resolved), exist_ok=True)
        if before is not None and stat_module.S_ISDIR(before.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), resolved)
        if before is not None and not stat_module.S_ISREG(before.st_mode):
            raise _not_a_file(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        if append:
            with open(os.open(resolved, flags | os.O_APPEND, 0o666), "wb") as file:
                file.write(data)
            return
        temporary = os.path.join(os.path.dirname(resolved), f".kimi-ray-{secrets.token_hex(8)}.tmp")
        try:
            with open(os.open(temporary, flags | os.O_EXCL, 0o666), "wb") as file:
                file.write(data)
                if before is not None:
                    os.fchmod(file.fileno(), stat_module.S_IMODE(before.st_mode))
            os.replace(temporary, resolved)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _stat(self, path: str) -> FileStat | None:
        try:
            found = os.stat(self._resolve(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileStat(_kind(found.st_mode), found.st_size, found.st_mtime_ns)

    def _list(self, path: str, recursive: bool, limit: int) -> list[DirectoryEntry]:
        top = self._directory(path)
        found: list[DirectoryEntry] = []
        pending: list[tuple[str, os.DirEntry[str]]] = []

        def push(directory: str, prefix: str) -> None:
            with os.scandir(directory) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name, reverse=True)
            pending.extend((prefix, entry) for entry in ordered)

        push(top, "")
        while pending and len(found) < limit:
            prefix, entry = pending.pop()
            shown = self._entry(prefix + _shown(entry.name), entry)
            if shown is None:
                continue
            found.append(shown)
            if recursive and shown.kind == "directory":
                with suppress(PermissionError, FileNotFoundError):
                    push(entry.path, shown.path + "/")
        return found

    def _entry(self, shown: str, entry: os.DirEntry[str]) -> DirectoryEntry | None:
        if entry.is_symlink():
            if self._refusal(os.path.realpath(entry.path)) is not None or not entry.is_file():
                return DirectoryEntry(shown, "other")
        elif self._denied and self._refusal(entry.path) is not None:
            return None
        try:
            status = entry.stat()
        except OSError:
            return DirectoryEntry(shown, "other")
        return DirectoryEntry(shown, _kind(status.st_mode), status.st_size, status.st_mtime_ns)


def _local_disk(path: str) -> int | None:
    """The device of a directory when it is of a disk of this machine; None for a network's, or when it is not clear."""
    device = os.stat(path).st_dev
    if os.major(device) != 0:
        return device
    # no block device below: an overlay, memory, or somebody else's machine
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    with suppress(OSError), open("/proc/self/mountinfo", "rb") as mounts:
        for line in mounts:
            fields = line.split()
            if fields[2] == number:
                return device if fields[fields.index(b"-") + 1] in _LOCAL_TYPES else None
    return None


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _kind(mode: int) -> FileKind:
    if stat_module.S_ISREG(mode):
        return "file"
    return "directory" if stat_module.S_ISDIR(mode) else "other"


def _not_a_file(path: str) -> ToolError:
    return ToolError(
        f"{_shown(path)} is neither a file nor a directory",
        code="environment.not_a_file",
        hint="pipes, sockets and devices cannot be read or written",
        details={"path": _shown(path)},
    )


_CODES: dict[type[OSError], tuple[str, str]] = {
    FileNotFoundError: ("environment.not_found", "does not exist"),
    IsADirectoryError: ("environment.is_directory", "is a directory"),
    NotADirectoryError: ("environment.not_a_directory", "is not a directory"),
    FileExistsError: ("environment.not_a_directory", "is not a directory"),
    PermissionError: ("environment.permission", "may not be accessed by this user"),
}


def _named(work: Callable[..., _T], arguments: tuple[object, ...]) -> _T:
    """Call ``work``; an OSError becomes the environment's own error, naming the path."""
    try:
        return work(*arguments)
    except OSError as error:
        path = _shown(str(error.filename if error.filename is not None else arguments[0]))
        reason = error.strerror or str(error)
        code, words = _CODES.get(type(error), ("environment.failed", f"failed: {reason}"))
        raise ToolError(
            f"{path} {words}", code=code, details={"path": path, "given": _shown(str(arguments[0])), "reason": reason}
        ) from error
