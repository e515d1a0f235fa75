"""What every backend offers to somebody who only reads: beside a live writer, without a claim, writing no byte."""

from __future__ import annotations

from typing import Protocol

from kimi_ray.errors import StoreError
from kimi_ray.store.fs import Fs
from kimi_ray.store.seam import (
    Document,
    ListedLog,
    LogSnapshot,
    LogView,
    Page,
    StoreIdentity,
    Stream,
    SurvivingPage,
    VerifyReport,
)


class Reader(Protocol):
    """Blocking reads of one home; each method is the ``Store`` method of its name. Thread-safe."""

    def inspect(self, stream: Stream) -> LogView:
        """See ``Store.inspect``."""
        ...

    def read_from(self, stream: Stream, seq: int, limit: int, max_bytes: int, *, chunks: bool = True) -> Page:
        """See ``Store.read_from``. Without ``chunks`` packed chunks are not unpacked: each is an empty line."""
        ...

    def list_logs(self, session_id: str | None) -> list[ListedLog]:
        """See ``Store.list_logs``."""
        ...

    def snapshots(self, session_id: str | None) -> list[LogSnapshot]:
        """See ``Store.snapshots``."""
        ...

    def revision(self, stream: Stream) -> str:
        """See ``Store.revision``."""
        ...

    def locate(self, stream: Stream) -> str | None:
        """See ``Store.locate``."""
        ...

    def read_raw(self, stream: Stream) -> bytes:
        """See ``Store.read_raw``."""
        ...

    def verify(self, stream: Stream) -> VerifyReport:
        """See ``Store.verify``."""
        ...

    def read_surviving(self, stream: Stream, cursor: int, limit: int) -> SurvivingPage:
        """See ``Store.read_surviving``."""
        ...

    def read_document(self, session_id: str) -> Document | None:
        """See ``Store.read_document``."""
        ...

    def list_documents(self) -> list[Document]:
        """See ``Store.list_documents``."""
        ...

    def read_blob(self, digest: str) -> bytes:
        """See ``Store.read_blob``."""
        ...

    def close(self) -> None:
        """Give descriptors and connections back. Idempotent."""
        ...


def open_reader(fs: Fs, home: str, identity: StoreIdentity) -> Reader:
    """The reader of a home, by what its ``store.json`` says.

    Raises:
        StoreError: ``store.backend_unavailable``.
    """
    if identity.backend == "jsonl":
        from kimi_ray.store.jsonl_reader import jsonl_reader

        return jsonl_reader(fs, home, identity)
    if identity.backend == "sqlite":
        from kimi_ray.store.sqlite import sqlite_reader

        return sqlite_reader(fs, home, identity)
    raise unavailable(identity.backend, identity.compression)


def unavailable(backend: str, compression: str) -> StoreError:
    """``store.backend_unavailable``."""
    return StoreError(
        f"the backend {backend!r} with compression {compression!r} is not available",
        code="store.backend_unavailable",
        hint="use backend='jsonl' with compression='none' or 'zstd', or backend='sqlite'",
        details={"backend": backend, "compression": compression},
    )
