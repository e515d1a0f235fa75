"""The JSONL backend keeps the contract of every store, plain and compressed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimi_ray.store import Store, StoreOptions, open_store_for_writing
from tests.conformance.store_contract import StoreContract
from tests.unit.store.killable_fs import KillableFs


class JsonlHome:
    def __init__(self, path: Path, *, syncs: bool = True, compression: str = "none") -> None:
        self.path = path
        self.syncs = syncs
        self.compression = compression
        self._files: dict[int, KillableFs] = {}

    def options(self, **options: Any) -> StoreOptions:
        return StoreOptions(**{"backend": "jsonl", "compression": self.compression, "claim_timeout_s": 2.0, **options})

    async def open(self, **options: Any) -> Store:
        files = KillableFs(syncs=self.syncs)
        store = await open_store_for_writing(str(self.path), self.options(**options), fs=files)
        self._files[id(store)] = files
        return store

    async def kill(self, store: Store) -> None:
        self._files.pop(id(store)).kill()


class TestJsonl(StoreContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> JsonlHome:
        return JsonlHome(tmp_path / "home", syncs=False)


class TestZstd(StoreContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> JsonlHome:
        return JsonlHome(tmp_path / "home", syncs=False, compression="zstd")
