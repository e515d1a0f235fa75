"""Content by its digest: ``<home>/blobs/<hex[:2]>/<hex>``, written once, verified on every read.

A blob is young while its time of modification is: storing it, or asking whether it is stored, makes it young again
before the answer. A sweep deletes what is old and named by nobody. The two meet under ``<home>/blobs.lock``, which a
sweep holds alone for each blob that it deletes and others share for the moment of a touch, so that no blob goes between
the answer and the event that refers to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass

from kimi_ray.errors import StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import Fs, exists, io_errors, names_in, read_file, wait_for_lock, write_file
from kimi_ray.store.layout import Layout
from kimi_ray.store.owners import io_errors_but_missing
from kimi_ray.store.refusals import file_held
from kimi_ray.store.reserve import Reserve

TOUCH_LASTS_S = 3600.0
"""How long this process takes its own touch of a blob for granted; far below any grace."""
TOUCHES = 65_536
"""How many newest touches a process remembers; a blob whose touch it does not is touched again."""
_LOCK_TIMEOUT_S = 30.0
_LOCK_PAUSE_S = 0.001
_FROM_RESERVE = 64 << 10
"""A blob up to this size may use the reserve: the end of a turn may be waiting behind it."""
_DIGEST = re.compile(r"\Asha256:[0-9a-f]{64}\Z")


def digest_of(content: bytes) -> str:
    """``sha256:<hex>`` of the content."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass(slots=True)
class Swept:
    """Counts of one sweep."""

    kept: int = 0
    young: int = 0
    deleted: int = 0
    deleted_bytes: int = 0


class Blobs:
    """The blobs of one home. Blocking and thread-safe."""

    def __init__(
        self,
        fs: Fs,
        layout: Layout,
        directories: Directories,
        *,
        durable: bool,
        reserve: Reserve | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.fs = fs
        self._reserve = reserve
        self._layout = layout
        self._directories = directories
        self._durable = durable
        self._clock = clock
        self._touched: OrderedDict[str, float] = OrderedDict()

    @property
    def home(self) -> str:
        """The home that they are in."""
        return self._layout.home

    def has(self, digest: str) -> bool:
        """Whether the blob is stored durably. It is young then.

        What was found is synced first: it may be page cache only.

        Raises:
            StoreError: ``store.bad_blob``, ``store.busy``, and what a file call gives.
        """
        path = self._path(digest)
        now = self._clock()
        touched = self._touched.get(digest)
        if touched is not None and 0 <= now - touched < TOUCH_LASTS_S:
            return True
        if not exists(self.fs, path):
            self._touched.pop(digest, None)
            return False
        with io_errors(path), self._lock(fcntl.LOCK_SH):
            try:
                self.fs.utime(path)
            except FileNotFoundError:
                return False
        self._sync_found(path)
        self._note_touch(digest, now)
        return True

    def put(self, digest: str, content: bytes) -> None:
        """Store the content, durable and young when this returns.

        Raises:
            StoreError: ``store.bad_blob`` when the content has another digest.
        """
        path = self._path(digest)
        if digest_of(content) != digest:
            raise StoreError(
                f"the content given for {digest} has the digest {digest_of(content)}",
                code="store.bad_blob",
                details={"digest": digest},
            )
        if self.has(digest):
            return
        now = self._clock()
        directory = path.rsplit("/", 1)[0]
        temporary = f"{path}.tmp-{new_ulid()}"

        def write() -> None:
            self._directories.ensure(directory)
            write_file(self.fs, temporary, content, sync=self._durable)
            try:
                with self._lock(fcntl.LOCK_SH):
                    self.fs.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.fs.unlink(temporary)
                raise
            self._directories.sync(directory)

        with io_errors(path):
            if self._reserve is not None and len(content) <= _FROM_RESERVE:
                self._reserve.spend(len(content), write)
            else:
                write()
        self._note_touch(digest, now)

    def _note_touch(self, digest: str, now: float) -> None:
        self._touched[digest] = now
        if len(self._touched) > TOUCHES:
            with contextlib.suppress(KeyError):  # other threads do the same
                self._touched.popitem(last=False)

    def read(self, digest: str) -> bytes:
        """The content, verified.

        Raises:
            StoreError: ``store.blob_missing``, ``store.corrupt``.
        """
        path = self._path(digest)
        try:
            with io_errors_but_missing(path):
                content = read_file(self.fs, path)
        except FileNotFoundError:
            raise StoreError(
                f"the blob {digest} is not in this store",
                code="store.blob_missing",
                hint="it was collected or not copied with its log; restore it from where the log came from",
                details={"digest": digest, "path": path},
            ) from None
        if digest_of(content) != digest:
            self._touched.pop(digest, None)
            raise StoreError(
                f"the blob {digest} is damaged",
                code="store.corrupt",
                hint="restore it from a backup",
                details={"file": path, "offset": 0, "seq": -1},
            )
        return content

    def sweep(self, named: set[str], before: float, dry_run: bool) -> Swept:
        """Delete blobs that are not in ``named`` and were last touched before ``before`` (epoch seconds).

        Files that a writer left half written go with them. Two sweeps at once do not disturb each other.
        """
        swept = Swept()
        with io_errors(self._layout.blobs):
            for prefix in names_in(self.fs, self._layout.blobs):
                directory = f"{self._layout.blobs}/{prefix}"
                for name in names_in(self.fs, directory):
                    self._sweep_one(f"{directory}/{name}", f"sha256:{name}", named, before, dry_run, swept)
        return swept

    def _sweep_one(self, path: str, digest: str, named: set[str], before: float, dry_run: bool, swept: Swept) -> None:
        if digest in named:
            swept.kept += 1
            return
        with contextlib.suppress(FileNotFoundError):
            found = self.fs.stat(path)
            if found.st_mtime < before and not dry_run:
                with self._lock(fcntl.LOCK_EX):
                    found = self.fs.stat(path)
                    if found.st_mtime < before:
                        self._touched.pop(digest, None)
                        self.fs.unlink(path)
            if found.st_mtime >= before:
                swept.young += 1
            else:
                swept.deleted += 1
                swept.deleted_bytes += found.st_size

    @contextlib.contextmanager
    def _lock(self, kind: int) -> Generator[None]:
        path = f"{self._layout.home}/blobs.lock"
        fd = self.fs.open(path, os.O_RDWR | os.O_CREAT)
        try:
            try:
                wait_for_lock(self.fs, fd, kind, _LOCK_TIMEOUT_S, _LOCK_PAUSE_S)
            except BlockingIOError:
                raise file_held(path) from None
            yield
        finally:
            self.fs.close(fd)

    def _sync_found(self, path: str) -> None:
        if self._durable:
            with io_errors(path):
                fd = self.fs.open(path, os.O_RDONLY)
                try:
                    self.fs.fsync(fd)
                finally:
                    self.fs.close(fd)
                self._directories.sync(path.rsplit("/", 1)[0])

    def _path(self, digest: str) -> str:
        if not _DIGEST.match(digest):
            raise StoreError(f"{digest!r} is not a digest", code="store.bad_blob", details={"digest": digest})
        name = digest[7:]
        return f"{self._layout.blobs}/{name[:2]}/{name}"
