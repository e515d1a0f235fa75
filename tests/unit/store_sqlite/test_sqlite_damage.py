"""Flipped bits in a database and in its log: never a wrong or a missing event without an error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.unit.store_sqlite.damage_oracle import Written, write_home
from tests.unit.store_sqlite.sqlite_home import SqliteHome


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def flips(written: Written, path: Path, dice: random.Random, count: int) -> None:
    bits = path.stat().st_size * 8
    for _ in range(count):
        bit = dice.randrange(bits)
        before = path.stat()
        flip(path, bit)
        written.check(f"bit {bit % 8} of byte {bit // 8} of {path.name}")
        flip(path, bit)
        assert path.stat().st_size == before.st_size
    assert not written.check("nothing is left of it")


@pytest.mark.parametrize("in_log", [False, True])
async def test_some_flipped_bits(tmp_path: Path, in_log: bool) -> None:
    written = await write_home(SqliteHome(tmp_path / "home"), in_log=in_log)
    path = Path(f"{written.home.database()}{'-wal' if in_log else ''}")
    flips(written, path, random.Random(17), 50)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("in_log", [False, True])
async def test_five_thousand_flipped_bits(tmp_path: Path, in_log: bool, budget) -> None:
    written = await write_home(SqliteHome(tmp_path / "home"), in_log=in_log)
    path = Path(f"{written.home.database()}{'-wal' if in_log else ''}")
    done = 0
    for dice in budget.rounds():
        flips(written, path, dice, 100)
        done += 100
        if done >= 2500:
            break
    print(done, "flips:", dict(written.said))
