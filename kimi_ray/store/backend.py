"""Which backend a home is written with."""

from __future__ import annotations

from kimi_ray.store.fs import Fs
from kimi_ray.store.jsonl import JsonlStore
from kimi_ray.store.reader import unavailable
from kimi_ray.store.seam import Store, StoreOptions


async def open_store_for_writing(home: str, options: StoreOptions, *, fs: Fs | None = None) -> Store:
    """The store of ``home`` with the backend that ``options`` names.

    Args:
        home: Its directory, created when there is none.
        options: How to open it; ``extra["fs"]`` may describe failing files (``faults.fs_from_spec``).
        fs: The files; None takes the real ones, or what ``options`` says.

    Raises:
        StoreError: ``store.backend_unavailable``, and as ``identity.open_identity``.
    """
    if fs is None and options.extra.get("fs"):
        from kimi_ray.store.faults import fs_from_spec

        fs = fs_from_spec(str(options.extra["fs"]))
    if options.backend == "jsonl":
        return await JsonlStore.open(home, options, fs=fs)
    if options.backend == "sqlite":
        from kimi_ray.store.sqlite import SqliteStore

        return await SqliteStore.open(home, options, fs=fs)
    raise unavailable(options.backend, options.compression)
