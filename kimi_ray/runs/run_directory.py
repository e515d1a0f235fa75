"""A run's directory: ``run.json``, ``results.jsonl``, ``attempts.jsonl``, with one writer at a time.

Blocking calls; on an event loop they belong in a thread. A write that fails leaves the file as it was, and a line torn
by a crash is cut off at the next opening (the rollout then runs again; its log has everything).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from pydantic_core import from_json, to_json

from kimi_ray.errors import RunError
from kimi_ray.runs.manifest import MANIFEST_VERSION
from kimi_ray.runs.rows import AttemptRow, ResultRow, attempt_from_line, result_from_line
from kimi_ray.settings import Durability

MANIFEST = "run.json"
RESULTS = "results.jsonl"
ATTEMPTS = "attempts.jsonl"
LIMITER = "limiter.jsonl"
LIMITER_BYTES = 16 << 20
"""What the limiter did is not kept beyond this."""
_LOCK = "run.lock"
_SLUG_CHARS = 40
_MANIFEST_TYPES: dict[str, type] = {
    "run_id": str,
    "seed": dict,
    "prompt": dict,
    "arguments": dict,
    "config": dict,
    "items": dict,
    "repeats": int,
}

_T = TypeVar("_T")


def default_run_directory(prompt: str, *, base: str | os.PathLike[str] = "runs", now: datetime | None = None) -> Path:
    """``<base>/<utc>-<slug>``: the time to the second and the first words of the prompt.

    If that exists, ``-2``, ``-3`` ... is added.
    """
    at = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    words = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\{\{.*?\}\}", " ", prompt).lower()).strip("-")
    slug = words[:_SLUG_CHARS].rsplit("-", 1)[0] if len(words) > _SLUG_CHARS else words
    name = f"{at}-{slug or 'run'}"
    path, number = Path(base, name), 1
    while path.exists():
        number += 1
        path = Path(base, f"{name}-{number}")
    return path


class RunDirectory:
    """A run directory open for writing, made by ``create`` or ``open``. A context manager; ``close`` unlocks it."""

    def __init__(self, path: Path, lock: int, durability: Durability) -> None:
        self.path = path
        self._lock: int | None = lock
        self._sync = durability == "disk"
        self._files: dict[str, int] = {}

    @classmethod
    def create(cls, path: str | os.PathLike[str], manifest: dict[str, Any], *, durability: Durability = "disk") -> Self:
        """A new run in a directory that has none; missing parents are made.

        Args:
            path: The directory; it may exist.
            manifest: What becomes ``run.json``.
            durability: With ``disk`` every append is synced before it returns.

        Raises:
            RunError: ``run.exists``, ``run.in_use``, ``run.not_writable``, ``run.write_failed``.
        """
        directory = _named(path)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_writable(directory, error) from None
        run = cls(directory, _locked(directory), durability)
        try:
            found = [name for name in (MANIFEST, RESULTS, ATTEMPTS) if _holds_something(directory / name)]
            if found:
                raise RunError(
                    f"{directory} already has a run ({', '.join(found)})",
                    code="run.exists",
                    hint="choose another --out, or go on with --resume (in Python: out=..., resume=True)",
                    details={"run_dir": str(directory)},
                )
            run.write_manifest(manifest)
            for name in (RESULTS, ATTEMPTS):
                _replace(directory / name, b"", sync=run._sync)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, durability: Durability = "disk") -> Self:
        """A run that exists, to go on with it. Torn last lines are cut off.

        Raises:
            RunError: ``run.not_found``, ``run.in_use``, ``run.not_writable``, ``run.corrupt``.
        """
        directory = _named(path)
        read_manifest(directory)
        run = cls(directory, _locked(directory), durability)
        try:
            for name in (RESULTS, ATTEMPTS):
                run._cut_torn_line(directory / name)
            if (directory / LIMITER).exists():
                run._cut_torn_line(directory / LIMITER)
        except BaseException:
            run.close()
            raise
        return run

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replace ``run.json`` atomically.

        Raises:
            RunError: ``run.write_failed``.
        """
        _replace(
            self.path / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False).encode() + b"\n", sync=self._sync
        )

    def append(self, rows: Iterable[ResultRow] = (), attempts: Iterable[AttemptRow] = ()) -> None:
        """Add rows to the files: attempts first, so that a row's attempts are there whenever the row is.

        Raises:
            RunError: ``run.write_failed``; that file is then as it was before.
        """
        self._append(ATTEMPTS, b"".join(attempt.to_line() for attempt in attempts))
        self._append(RESULTS, b"".join(row.to_line() for row in rows))

    def append_limiter(self, changes: Iterable[dict[str, Any]]) -> None:
        """Add what the limiter did, a JSON line each, up to ``LIMITER_BYTES`` in all.

        Raises:
            RunError: ``run.write_failed``.
        """
        data = b"".join(to_json(change) + b"\n" for change in changes)
        try:
            size = (self.path / LIMITER).stat().st_size
        except FileNotFoundError:
            size = 0
        if size + len(data) <= LIMITER_BYTES:
            self._append(LIMITER, data)

    def keep_only(self, rows: Iterable[ResultRow]) -> None:
        """Replace ``results.jsonl`` atomically by these rows; what is left out stays in ``attempts.jsonl``.

        Raises:
            RunError: ``run.write_failed``; the file is then as it was.
        """
        self._forget(RESULTS)
        _replace(self.path / RESULTS, b"".join(row.to_line() for row in rows), sync=self._sync)

    def manifest(self) -> dict[str, Any]:
        """``run.json``."""
        return read_manifest(self.path)

    def rows(self) -> list[ResultRow]:
        """The result rows in the order they were written."""
        return read_rows(self.path)

    def attempts(self) -> list[AttemptRow]:
        """The attempts in the order they were written."""
        return read_attempts(self.path)

    def close(self) -> None:
        """Close the files and let another command have the directory. Idempotent."""
        for name in list(self._files):
            self._forget(name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _append(self, name: str, data: bytes) -> None:
        if not data:
            return
        if self._lock is None:
            raise RunError(f"the run directory {self.path} is closed", code="run.closed")
        path = self.path / name
        try:
            handle = self._files.get(name)
            if handle is None:
                handle = self._files[name] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = os.fstat(handle).st_size
        except OSError as error:
            raise _write_failed(path, error) from None
        try:
            _write_all(handle, data)
            if self._sync:
                os.fdatasync(handle) if hasattr(os, "fdatasync") else os.fsync(handle)
        except OSError as error:
            with suppress(OSError):  # the first error is the one to tell; a torn line is cut off at the next opening
                os.ftruncate(handle, size)
            self._forget(name)
            raise _write_failed(path, error) from None
        if not _is_at(path, handle):
            # Written into a file that has no name any more: nobody would ever find these rows.
            self._forget(name)
            raise RunError(
                f"{path} was removed or replaced while the run went on",
                code="run.write_failed",
                hint="put the directory back and --resume, or start again with another --out; the logs have everything",
                details={"file": str(path), "errno": "ENOENT"},
            )

    def _forget(self, name: str) -> None:
        handle = self._files.pop(name, None)
        if handle is not None:
            os.close(handle)

    def _cut_torn_line(self, path: Path) -> None:
        try:
            with path.open("r+b") as file:
                data = file.read()
                whole = data.rfind(b"\n") + 1
                if whole < len(data):
                    file.truncate(whole)
                    file.flush()
                    os.fsync(file.fileno())
        except FileNotFoundError:
            _replace(path, b"", sync=self._sync)
        except OSError as error:
            raise _write_failed(path, error) from None


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The ``run.json`` of a directory, without a lock.

    Raises:
        RunError: ``run.not_found``, ``run.corrupt``.
    """
    directory = _named(path)
    file = directory / MANIFEST
    try:
        value: Any = from_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"{directory} has no run",
            code="run.not_found",
            hint=f"a run directory holds {MANIFEST}",
            details={"run_dir": str(directory)},
        ) from None
    except ValueError as error:
        raise _bad_manifest(file, str(error)) from None
    except OSError as error:
        raise RunError(
            f"{file} cannot be read: {error.strerror}",
            code="run.unreadable",
            hint="name the run directory, and make it readable",
            details={"file": str(file)},
        ) from None
    if not isinstance(value, dict):
        raise _bad_manifest(file, "it is not a JSON object")
    manifest = cast("dict[str, Any]", value)
    if manifest.get("v", MANIFEST_VERSION) != MANIFEST_VERSION:
        raise RunError(
            f"{file} has the version {manifest['v']!r}, this program knows {MANIFEST_VERSION}",
            code="run.version_unsupported",
            hint="upgrade kimi-ray",
            details={"file": str(file)},
        )
    wrong = [name for name, kind in _MANIFEST_TYPES.items() if name in manifest and type(manifest[name]) is not kind]
    if wrong:
        raise _bad_manifest(file, f"{wrong[0]} is not what a run writes there")
    return manifest


def read_rows(path: str | os.PathLike[str]) -> list[ResultRow]:
    """The rows of a run directory, also beside its writer; a torn last line is left out.

    Raises:
        RunError: ``run.corrupt`` {file, line}, ``run.version_unsupported``.
    """
    return list(_lines(Path(path).expanduser() / RESULTS, result_from_line))


def read_attempts(path: str | os.PathLike[str]) -> list[AttemptRow]:
    """The attempts of a run directory, as ``read_rows``."""
    return list(_lines(Path(path).expanduser() / ATTEMPTS, attempt_from_line))


def _lines(path: Path, parse: Callable[[bytes], _T]) -> Iterator[_T]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            yield parse(line)
        except RunError as error:
            if error.code != "run.bad_row":
                raise error.with_details(file=str(path), line=number) from None
            raise _corrupt(path, number, error.message) from None


def _named(path: str | os.PathLike[str]) -> Path:
    if "\0" in os.fspath(path):
        raise RunError("a path cannot hold NUL", code="run.not_writable", hint="choose another --out")
    return Path(path).expanduser().absolute()


def _holds_something(path: Path) -> bool:
    """An empty file is what a crash in the middle of ``create`` may leave, and no run."""
    return path.is_symlink() or (path.exists() and (not path.is_file() or path.stat().st_size > 0))


def _locked(directory: Path) -> int:
    """An exclusive lock that the kernel lets go of when this process ends, however it ends."""
    path = directory / _LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _not_writable(directory, error) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
        os.close(handle)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise _not_writable(directory, error) from None
        raise RunError(
            f"another command is writing {directory} ({holder or 'unknown process'})",
            code="run.in_use",
            hint="wait until it ends, or choose another --out",
            details={"run_dir": str(directory), "holder": holder},
            retryable=True,
        ) from None
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        os.close(handle)
        raise _write_failed(path, error) from None
    return handle


def _replace(path: Path, data: bytes, *, sync: bool) -> None:
    """Write beside, then rename over: a reader sees the old or the new content, never half of it."""
    beside = path.with_name(f"{path.name}.new")
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            _write_all(handle, data)
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(beside, path)
        if sync:
            _sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):  # the first error is the one to tell
            beside.unlink(missing_ok=True)
        raise _write_failed(path, error) from None


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _is_at(path: Path, handle: int) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except OSError:
        return False


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_failed(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} could not be written: {error.strerror}",
        code="run.write_failed",
        hint="free some space and --resume: finished rollouts are not lost"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "check the directory and --resume: finished rollouts are not lost",
        details={"file": str(path), "errno": errno.errorcode.get(error.errno or 0)},
    )


def _not_writable(directory: Path, error: OSError) -> RunError:
    return RunError(
        f"the run directory {directory} cannot be used: {error.strerror}",
        code="run.not_writable",
        hint="choose another --out",
        details={"run_dir": str(directory), "errno": errno.errorcode.get(error.errno or 0)},
    )


def _bad_manifest(file: Path, what: str) -> RunError:
    return RunError(
        f"{file} is not a run's manifest: {what}",
        code="run.corrupt",
        hint="put back the file as it was written, or start a new run with another --out",
        details={"file": str(file)},
    )


def _corrupt(path: Path, line: int, what: str) -> RunError:
    return RunError(
        f"{path} line {line}: {what}",
        code="run.corrupt",
        hint="move that line aside; its rollout then runs again on --resume, and its log has everything",
        details={"file": str(path), "line": line},
    )
