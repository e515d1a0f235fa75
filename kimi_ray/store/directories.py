"""Directories made durable, each sync shared by everyone who waits for the same directory."""

from __future__ import annotations

import contextlib
import errno
import threading

from kimi_ray.store.fs import Fs


class _Shared:
    """One directory's syncs: a run serves all who asked before it started."""

    __slots__ = ("asked", "condition", "done", "running")

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.asked = 0
        self.done = 0
        self.running = False


class Directories:
    """Creates and syncs the directories below a home. Thread-safe and blocking."""

    def __init__(self, fs: Fs, home: str, *, durable: bool) -> None:
        """
        Args:
            fs: The files.
            home: The root; it is not created here.
            durable: False makes every sync a no-op (durability ``os`` and ``none``).
        """
        self._fs = fs
        self._home = home
        self._durable = durable
        self._known: set[str] = {home}
        self._shared: dict[str, _Shared] = {}
        self._lock = threading.Lock()
        self._making = threading.Lock()

    @property
    def durable(self) -> bool:
        """Whether syncs are made."""
        return self._durable

    def ensure(self, path: str) -> None:
        """Create ``path`` and what is missing above it, each durable in its parent before this returns.

        Raises:
            OSError: As the file system gave it.
        """
        missing: list[str] = []
        with self._making:
            step = path
            while step not in self._known and len(step) > len(self._home):
                missing.append(step)
                step = step.rsplit("/", 1)[0]
            for directory in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    self._fs.mkdir(directory)
        for directory in missing:
            self.sync(directory.rsplit("/", 1)[0])
        self._known.update(missing)

    def prune(self, path: str) -> None:
        """Remove a directory if it is empty. Only for a process that is alone: what others know of it would be wrong.

        Raises:
            OSError: As the file system gave it.
        """
        with self._making:
            try:
                self._fs.rmdir(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                    raise
                return
            self.forget(path)

    def sync(self, path: str) -> None:
        """Make the entries of ``path`` durable, together with others who ask at the same time.

        Raises:
            OSError: As the file system gave it, to everyone whose sync it was.
        """
        if not self._durable:
            return
        with self._lock:
            shared = self._shared.setdefault(path, _Shared())
        with shared.condition:
            shared.asked += 1
            mine = shared.asked
            while shared.running and shared.done < mine:
                shared.condition.wait(timeout=60)
            if shared.done >= mine:
                return
            shared.running = True
            serves = shared.asked
        finished = False
        try:
            self._fs.sync_dir(path)
            finished = True
        finally:
            with shared.condition:
                shared.running = False
                if finished:
                    shared.done = max(shared.done, serves)
                shared.condition.notify_all()

    def forget(self, path: str) -> None:
        """The directory was removed, and all below it."""
        below = path + "/"
        self._known = {known for known in self._known if known != path and not known.startswith(below)}
        with self._lock:
            for name in [name for name in self._shared if name == path or name.startswith(below)]:
                del self._shared[name]
