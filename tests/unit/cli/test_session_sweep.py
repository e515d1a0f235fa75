"""``sessions sweep``: what would go, what went, and when it is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kimi_ray.store import StoreOptions, open_store_for_writing
from kimi_ray.store.blobs import digest_of
from tests.unit.cli.conftest import Cli
from tests.unit.store.rescue_homes import blob_file, filled_home, log_file
from tests.unit.store.test_sweep import age

OLD = b"nobody's"


@pytest.fixture
def filled(home: Path) -> Path:
    async def fill() -> None:
        await filled_home(home)
        store = await open_store_for_writing(str(home), StoreOptions())
        await store.put_blobs({digest_of(OLD): OLD})
        await store.close()

    asyncio.run(fill())
    return home


def test_sweep(cli: Cli, filled: Path) -> None:
    assert cli("sessions", "sweep", "--json").document["young"] == 1
    age(filled, 90_000)
    dry = cli("sessions", "sweep", "--dry-run")
    assert dry.code == 0
    assert f"1 blobs would go ({len(OLD)} bytes)" in dry.out
    assert blob_file(filled, digest_of(OLD)).exists()
    result = cli("sessions", "sweep", "--json")
    assert result.code == 0
    assert (result.document["deleted"], result.document["kept"], result.document["logs"]) == (1, 1, 2)
    assert blob_file(filled).exists()
    assert not blob_file(filled, digest_of(OLD)).exists()
    assert cli("sessions", "verify", "--all").code == 0


def test_a_short_grace_is_refused_beside_a_writer(cli: Cli, filled: Path) -> None:
    async def beside() -> None:
        store = await open_store_for_writing(str(filled), StoreOptions())
        await store.open_session("session_live", "n", workspace_id="wd_x_0123")
        refused = await asyncio.to_thread(cli, "sessions", "sweep", "--grace-h", 1)
        assert refused.code == 1
        assert "code: store.grace_too_short" in refused.err
        assert (await asyncio.to_thread(cli, "sessions", "sweep", "--grace-h", 1, "--dry-run")).code == 0
        assert (await asyncio.to_thread(cli, "sessions", "sweep", "--grace-h", 12)).code == 0
        await store.close()

    asyncio.run(beside())
    assert cli("sessions", "sweep", "--grace-h", 0).code == 0
    assert not blob_file(filled, digest_of(OLD)).exists()


def test_nothing_goes_where_something_cannot_be_read(cli: Cli, filled: Path) -> None:
    age(filled, 90_000)
    log = log_file(filled)
    log.unlink()
    log.symlink_to(log.name)
    result = cli("sessions", "sweep", "--json")
    assert result.code == 1
    assert (result.document["deleted"], result.document["held_back"]) == (0, 1)
    assert blob_file(filled, digest_of(OLD)).exists()
