"""Whether the index may be believed: the marks of the processes that write documents.

Before it writes its first document a process puts ``<home>/index-writers/<ulid>.lock`` down, holds ``flock`` on it for
life, and takes it away when every document that it wrote is in the index, durable. A mark that nobody holds is of a
process that died before: documents may be newer than the index, until somebody has read them all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass

from kimi_ray.ids import new_ulid

MARKS_NAME = "index-writers"
_HOLD_S = 1.0
_PAUSE_S = 0.001
READY, STALE = b"ready\n", b"stale\n"
"""What a mark says: its process keeps the index up to date, or has failed to."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a home."""

    living: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    """Living ones that say so of themselves."""

    @property
    def trusted(self) -> bool:
        """Whether every process that writes documents, or did, has them in the index."""
        return not self.dead and not self.stale


class WriterMark:
    """This process's mark. Blocking."""

    def __init__(self, home: str, *, durable: bool) -> None:
        """``durable``: the mark is to survive a power cut, as the documents will."""
        self._directory = f"{home}/{MARKS_NAME}"
        self._durable = durable
        self._fd: int | None = None
        self._said = READY
        self.name = f"{new_ulid()}.lock"

    @property
    def held(self) -> bool:
        """Whether it is down."""
        return self._fd is not None

    def put(self) -> None:
        """Put it down. Idempotent.

        Raises:
            OSError: It is not there, or would not survive.
        """
        if self._fd is not None:
            return
        path = f"{self._directory}/{self.name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._directory, 0o700)
            if self._durable:
                _sync_directory(os.path.dirname(self._directory))
        fd = _hold(path)
        try:
            os.pwrite(fd, self._said, 0)
            if self._durable:
                _sync_directory(self._directory)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        self._fd = fd

    def say(self, what: bytes) -> None:
        """Write ``READY`` or ``STALE`` on it."""
        if what != self._said:
            self._said = what
            if self._fd is not None:
                os.pwrite(self._fd, what, 0)

    def take_away(self) -> None:
        """Everything that was written is in the index."""
        if self._fd is not None:
            os.unlink(f"{self._directory}/{self.name}")
            self.drop()

    def drop(self) -> None:
        """Let go of it and leave it there, as death would."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)


def read_marks(home: str, own: str | None = None) -> Marks:
    """All marks of a home, but one's ``own``.

    Raises:
        OSError: They cannot be read.
    """
    directory = f"{home}/{MARKS_NAME}"
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return Marks()
    living: list[str] = []
    dead: list[str] = []
    stale: list[str] = []
    for name in names:
        if name == own:
            continue
        try:
            fd = os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # taken away just now
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            living.append(name)
            if os.pread(fd, len(STALE), 0) == STALE:
                stale.append(name)
        else:
            # Taken away between our opening it and its lock being free: no mark any more.
            if os.fstat(fd).st_nlink:
                dead.append(name)
        finally:
            os.close(fd)
    return Marks(tuple(living), tuple(dead), tuple(stale))


def remove_marks(home: str, names: tuple[str, ...]) -> None:
    """The documents have been read since these processes died."""
    for name in names:
        path = f"{home}/{MARKS_NAME}/{name}"
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            except BlockingIOError:
                continue  # it was just being put down when it looked dead
            finally:
                os.close(fd)


def distrust(home: str, *, durable: bool = True) -> None:
    """Documents of this home were, or will be, written by somebody who does not tell the index.

    Nobody believes the index then until a store process has read all documents. Call it before writing them.
    """
    mark = WriterMark(home, durable=durable)
    mark.put()
    mark.drop()


def _hold(path: str) -> int:
    """A new file under its lock; somebody may look at it, or take it for dead and remove it, before it is locked."""
    deadline = time.monotonic() + _HOLD_S
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                raise
        os.close(fd)
        time.sleep(_PAUSE_S)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
