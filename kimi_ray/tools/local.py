"""The local machine as the place where tools work: one directory, and a shell that starts in it.

File tools are confined to the root (and the scratch directory), see ``confinement``. A command cannot be confined by
path; it only starts in the root, without this process's secrets. This keeps honest agents on their ground; it is no
sandbox against a hostile one.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat as stat_module
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import Literal, TypeVar

from kimi_ray.errors import ToolError
from kimi_ray.tools.commands import Command, run_command, scrubbed_environment, shell, start_command
from kimi_ray.tools.confinement import Confinement, denied_error, shown_name
from kimi_ray.tools.contract import DirectoryEntry, ExecResult, FileStat, RunningCommand

_T = TypeVar("_T")
FileKind = Literal["file", "directory", "other"]
_MAX_COMMANDS = 16
_SMALL_BYTES = 64 << 10
_LOCAL_TYPES = frozenset({b"overlay", b"tmpfs", b"btrfs", b"zfs", b"bcachefs"})


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
        denied = tuple(os.path.realpath(place) for place in denied_roots)
        self._places = None if self._root is None else Confinement(self._root, self._scratch, denied)
        self._env = dict(env) if env is not None else None
        self._executor = executor
        self._own_executor: ThreadPoolExecutor | None = None
        self._threads = max_concurrent_files
        self._files = asyncio.Semaphore(max_concurrent_files)
        self._slots = asyncio.Semaphore(_MAX_COMMANDS)
        self._running: set[asyncio.Task[ExecResult]] = set()
        self._started: set[_Started] = set()
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
        argv, directory, variables = await self._prepared(command, cwd, env)
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

    async def start(
        self,
        command: Sequence[str] | str,
        *,
        on_output: Callable[[bytes], None],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RunningCommand:
        """Start a command and return; see ``StartsCommands.start``."""
        argv, directory, variables = await self._prepared(command, cwd, env)
        started = _Started(await start_command(argv, cwd=directory, env=variables, on_output=on_output), self._started)
        self._started.add(started)
        if self._closed:
            await started.end()
            raise self._closed_error()
        return started

    async def names_of(self, paths: Sequence[str]) -> list[tuple[str, ...]]:
        """The names by which files are told from one another; see ``KnowsFiles.names_of``."""
        if self._places is None or self._closed:
            return [(path,) for path in paths]
        if self._disk is not None:
            return self._names(*paths)
        return await self._on_thread(self._names, *paths)

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
        if self._started:
            await asyncio.gather(*(started.end() for started in list(self._started)))
        if self._own_executor is not None:
            self._own_executor.shutdown(wait=False, cancel_futures=True)

    # -- the loop's side ---------------------------------------------------------------------------------------------

    def _closed_error(self) -> ToolError:
        return ToolError(f"the environment of {self._root} is closed", code="environment.closed")

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    async def _prepared(
        self, command: Sequence[str] | str, cwd: str | None, env: Mapping[str, str] | None
    ) -> tuple[list[str], str, dict[str, str]]:
        """What a command is started with: arguments, directory, variables."""
        self._check_open()
        if not command:
            raise ToolError("the command is empty", code="environment.failed", hint="give a command")
        directory = await self._on_thread(self._directory, cwd or ".")
        argv = [shell(), "-c", command] if isinstance(command, str) else list(command)
        variables = scrubbed_environment(self._env, scratch=self._scratch)
        variables["PWD"] = directory
        variables.update(env or {})
        return argv, directory, variables

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

    @property
    def _confined(self) -> Confinement:
        assert self._places is not None
        return self._places

    def _names(self, *paths: str) -> list[tuple[str, ...]]:
        return [self._confined.names_of(path) for path in paths]

    def _directory(self, path: str) -> str:
        resolved = self._confined.resolve(path)
        if not stat_module.S_ISDIR(self._confined.status(resolved).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), resolved)
        return resolved

    def _open_to_read(self, path: str) -> int:
        # O_NONBLOCK: opening a FIFO must not wait for somebody to write into it
        return self._confined.open(self._confined.resolve(path), os.O_RDONLY | os.O_NONBLOCK)

    def _read(self, path: str, offset: int, limit: int | None) -> bytes:
        fd = self._open_to_read(path)
        mode = os.fstat(fd).st_mode
        if not stat_module.S_ISREG(mode):
            os.close(fd)  # open() would refuse a directory and leave it open
            if stat_module.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            raise _not_a_file(path)
        with open(fd, "rb", buffering=0) as file:
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
        fd = self._open_to_read(path)
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
        resolved = self._confined.resolve(path)
        with self._confined.parent(resolved) as (directory, name):
            try:
                before = os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                before = None
            if before is not None and stat_module.S_ISDIR(before.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), resolved)
            if before is not None and not stat_module.S_ISREG(before.st_mode):
                raise _not_a_file(path)
            if before is not None and self._confined.is_denied(before):
                raise denied_error(resolved)
            _write_in(directory, name, data, append=append, mode=None if before is None else before.st_mode)

    def _stat(self, path: str) -> FileStat | None:
        try:
            found = self._confined.status(self._confined.resolve(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileStat(_kind(found.st_mode), found.st_size, found.st_mtime_ns)

    def _list(self, path: str, recursive: bool, limit: int) -> list[DirectoryEntry]:
        found: list[DirectoryEntry] = []
        pending: list[tuple[DirectoryEntry, str]] = []

        def push(directory: str, prefix: str) -> None:
            fd = self._confined.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            denied = self._confined.denied_identities()
            try:
                with os.scandir(fd) as entries:
                    ordered = sorted(entries, key=lambda entry: entry.name, reverse=True)
                for entry in ordered:
                    where = os.path.join(directory, entry.name)
                    shown = self._entry(prefix + shown_name(entry.name), entry, where, denied)
                    if shown is not None:
                        pending.append((shown, where))
            finally:
                os.close(fd)

        push(self._directory(path), "")
        while pending and len(found) < limit:
            entry, where = pending.pop()
            found.append(entry)
            if recursive and entry.kind == "directory":
                with suppress(PermissionError, FileNotFoundError, NotADirectoryError):
                    push(where, entry.path + "/")
        return found

    def _entry(
        self, shown: str, entry: os.DirEntry[str], where: str, denied: frozenset[tuple[int, int]]
    ) -> DirectoryEntry | None:
        files = self._confined
        try:
            if entry.is_symlink():
                target = os.path.realpath(where)
                status = None if files.refusal(target) is not None else files.status(target)
                if status is None or not stat_module.S_ISREG(status.st_mode):
                    return DirectoryEntry(shown, "other")
            else:
                status = entry.stat(follow_symlinks=False)
                if (status.st_dev, status.st_ino) in denied or files.refusal(where) is not None:
                    return None
        except (OSError, ToolError):
            return DirectoryEntry(shown, "other")
        return DirectoryEntry(shown, _kind(status.st_mode), status.st_size, status.st_mtime_ns)


class _Started:
    """A command that runs in the background of an environment, which ends it when it is closed."""

    __slots__ = ("_among", "_command")

    def __init__(self, command: Command, among: set[_Started]) -> None:
        self._command = command
        self._among = among

    async def wait(self) -> int:
        return await self._command.wait()

    def terminate(self) -> None:
        self._command.terminate()

    async def end(self) -> int:
        try:
            return await self._command.end()
        finally:
            self._among.discard(self)


def _write_in(directory: int, name: str, data: bytes, *, append: bool, mode: int | None) -> None:
    """Write a file of an open directory; as a whole it appears at once, with the mode that it had."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    if append:
        with open(os.open(name, flags | os.O_APPEND, 0o666, dir_fd=directory), "wb") as file:
            file.write(data)
        return
    temporary = f".kimi-ray-{secrets.token_hex(8)}.tmp"
    try:
        with open(os.open(temporary, flags | os.O_EXCL, 0o666, dir_fd=directory), "wb") as file:
            file.write(data)
            if mode is not None:
                os.fchmod(file.fileno(), stat_module.S_IMODE(mode))
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise


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
        f"{shown_name(path)} is neither a file nor a directory",
        code="environment.not_a_file",
        hint="pipes, sockets and devices cannot be read or written",
        details={"path": shown_name(path)},
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
        path = shown_name(str(error.filename if error.filename is not None else arguments[0]))
        reason = error.strerror or str(error)
        code, words = _CODES.get(type(error), ("environment.failed", f"failed: {reason}"))
        raise ToolError(
            f"{path} {words}",
            code=code,
            details={"path": path, "given": shown_name(str(arguments[0])), "reason": reason},
        ) from error
