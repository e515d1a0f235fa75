"""Whether the index may be believed: the marks of the processes that write documents.

Before it writes its first document a process puts ``<home>/index-writers/<ulid>.lock`` down, holds ``flock`` on it for
life, and takes it away when every document that it wrote is in the index, durable. A mark that nobody holds is of a
process that died before: documents may be newer than the index, until somebody has read them all.

A program that knows nothing of the index (an older version) makes no mark. But whoever writes takes a lock in
``<home>/writers/``: the last process that leaves the index whole *seals* it with the time at which that directory
changed last. Where no process has a mark down, an index whose seal is another one is not believed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass

from kimi_ray.ids import new_ulid
from kimi_ray.store.fs import RealFs, is_locked

MARKS_NAME = "index-writers"
SEAL_NAME = "index.seal"
WRITERS_NAME = "writers"
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
    sealed: bool = False
    """Whether nobody has written since the last process left the index whole."""

    @property
    def trusted(self) -> bool:
        """Whether every process that has marks, or had, has its documents in the index."""
        return not self.dead and not self.stale

    @property
    def believed(self) -> bool:
        """As ``trusted``, for somebody who was not there: nobody wrote without a mark either."""
        return self.trusted and (bool(self.living) or self.sealed)


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
        """Whether it is down, and is still there."""
        return self._fd is not None and bool(os.fstat(self._fd).st_nlink)

    def put(self) -> None:
        """Put it down, once more if somebody has removed it. Idempotent.

        Raises:
            OSError: It is not there, or would not survive.
        """
        if self.held:
            return
        self.drop()
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
            with contextlib.suppress(FileNotFoundError):
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
        return Marks(sealed=is_sealed(home))
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
    return Marks(tuple(living), tuple(dead), tuple(stale), is_sealed(home))


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


def seal(home: str) -> None:
    """All documents are in the index. Without effect while any process has the home open for writing.

    Raises:
        OSError: It could not be written.
    """
    fs, changed = RealFs(), _writers_changed(home)
    if any(is_locked(fs, f"{home}/{WRITERS_NAME}/{name}") for name in _writers(home)):
        return
    path = f"{home}/{SEAL_NAME}"
    partial = f"{path}.{new_ulid()}.tmp"
    try:
        with open(partial, "wb") as file:
            file.write(changed)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def is_sealed(home: str) -> bool:
    """Whether no process took a writer's lock in this home since the last ``seal``."""
    try:
        with open(f"{home}/{SEAL_NAME}", "rb") as file:
            sealed = file.read(100)
    except OSError:
        return False
    return sealed == _writers_changed(home)


def distrust_unsealed(home: str, index: str, *, durable: bool) -> None:
    """Call it before a process opens a home for writing: an index that nobody vouches for is to be compared.

    Args:
        home: The home.
        index: The name of the index in it.
        durable: The mark is to survive a power cut.

    Raises:
        OSError: It cannot be looked at, or no mark can be made.
    """
    if os.path.exists(f"{home}/{index}"):
        marks = read_marks(home)
        if not marks.living and not marks.dead and not marks.sealed:
            distrust(home, durable=durable)


def _writers(home: str) -> list[str]:
    try:
        return os.listdir(f"{home}/{WRITERS_NAME}")
    except FileNotFoundError:
        return []


def _writers_changed(home: str) -> bytes:
    try:
        return b"%d\n" % os.stat(f"{home}/{WRITERS_NAME}").st_mtime_ns
    except FileNotFoundError:
        return b"0\n"


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
