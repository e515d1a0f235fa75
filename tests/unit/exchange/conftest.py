from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.exchange.dsh import Reading, Refusal, read_source
from kimi_ray.exchange.dsh.interpret import interpret
from kimi_ray.exchange.dsh.log_file import read_compressed, read_plain

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dsh"


@pytest.fixture
def untouched() -> Callable[[Path], dict[str, Any]]:
    """Everything about the files below a path that reading may not change."""

    def state(place: Path) -> dict[str, Any]:
        files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        return {str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}

    return state


def only(path: Path) -> Reading:
    """The one session that a path holds."""
    (reading,) = read_source(str(path))
    return reading


def verdict(reading: Reading) -> Any:
    """``(stored, after repair)``, or the class of the refusal."""
    data = reading.to_data()
    return data["error"]["class"] if data["error"] else (data["stored"], data["after_repair"])


def verdict_of(data: bytes) -> Any:
    """The verdict on a log in memory, for tests that read thousands."""
    zstd = data[:3] == b"\x28\xb5\x2f"
    reading = Reading("s1", "log", "zstd" if zstd else "none")
    try:
        interpret(reading, read_compressed(data) if zstd else read_plain(data))
    except Refusal as refusal:
        reading.error = refusal
    return verdict(reading)
