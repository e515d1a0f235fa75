"""The SQLite backend keeps the contract of every store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.store_contract import StoreContract
from tests.unit.store_sqlite.sqlite_home import SqliteHome


class TestSqlite(StoreContract):
    @pytest.fixture
    def home(self, tmp_path: Path) -> SqliteHome:
        return SqliteHome(tmp_path / "home", syncs=False)
