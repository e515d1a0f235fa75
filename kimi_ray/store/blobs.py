"""Content by its digest: ``<home>/blobs/<hex[:2]>/<hex>``, written once, verified on every read."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass

from kimi_ray.errors import StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import Fs, exists, io_errors, names_in, read_file, replace_file
from kimi_ray.store.layout import Layout
from kimi_ray.store.owners import io_errors_but_missing
from kimi_ray.store.reserve import Reserve

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
        self, fs: Fs, layout: Layout, directories: Directories, *, durable: bool, reserve: Reserve | None = None
    ) -> None:
        self._reserve = reserve
        self._fs = fs
        self._layout = layout
        self._directories = directories
        self._durable = durable
        self._known: set[str] = set()

    def has(self, digest: str) -> bool:
        """Whether the blob is stored durably; one found on disk is synced first, it may be page cache only."""
        path = self._path(digest)
        if digest in self._known:
            return True
        if not exists(self._fs, path):
            return False
        self._sync_found(digest, path)
        return True

    def put(self, digest: str, content: bytes) -> None:
        """Store the content, durable when this returns.

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
        directory = path.rsplit("/", 1)[0]

        def write() -> None:
            self._directories.ensure(directory)
            replace_file(self._fs, path, content, sync=self._durable, unique=new_ulid())
            self._directories.sync(directory)

        with io_errors(path):
            if self._reserve is not None and len(content) <= _FROM_RESERVE:
                self._reserve.spend(len(content), write)
            else:
                write()
        self._known.add(digest)

    def read(self, digest: str) -> bytes:
        """The content, verified.

        Raises:
            StoreError: ``store.blob_missing``, ``store.corrupt``.
        """
        path = self._path(digest)
        try:
            with io_errors_but_missing(path):
                content = read_file(self._fs, path)
        except FileNotFoundError:
            raise StoreError(
                f"the blob {digest} is not in this store",
                code="store.blob_missing",
                hint="it was collected or not copied with its log; restore it from where the log came from",
                details={"digest": digest, "path": path},
            ) from None
        if digest_of(content) != digest:
            with contextlib.suppress(KeyError):
                self._known.remove(digest)
            raise StoreError(
                f"the blob {digest} is damaged",
                code="store.corrupt",
                hint="restore it from a backup",
                details={"file": path, "offset": 0, "seq": -1},
            )
        return content

    def sweep(self, named: set[str], before: float, dry_run: bool) -> Swept:
        """Delete blobs that are not in ``named`` and were last touched before ``before`` (epoch seconds)."""
        swept = Swept()
        with io_errors(self._layout.blobs):
            for prefix in names_in(self._fs, self._layout.blobs):
                directory = f"{self._layout.blobs}/{prefix}"
                for name in names_in(self._fs, directory):
                    self._sweep_one(f"{directory}/{name}", f"sha256:{name}", named, before, dry_run, swept)
        return swept

    def _sweep_one(self, path: str, digest: str, named: set[str], before: float, dry_run: bool, swept: Swept) -> None:
        if digest in named:
            swept.kept += 1
            return
        try:
            found = self._fs.stat(path)
        except FileNotFoundError:
            return
        if found.st_mtime >= before:
            swept.young += 1
            return
        if not dry_run:
            self._known.discard(digest)
            self._fs.unlink(path)
        swept.deleted += 1
        swept.deleted_bytes += found.st_size

    def _sync_found(self, digest: str, path: str) -> None:
        if self._durable:
            with io_errors(path):
                fd = self._fs.open(path, os.O_RDONLY)
                try:
                    self._fs.fsync(fd)
                finally:
                    self._fs.close(fd)
                self._directories.sync(path.rsplit("/", 1)[0])
        self._known.add(digest)

    def _path(self, digest: str) -> str:
        if not _DIGEST.match(digest):
            raise StoreError(f"{digest!r} is not a digest", code="store.bad_blob", details={"digest": digest})
        name = digest[7:]
        return f"{self._layout.blobs}/{name[:2]}/{name}"
