"""``sessions archive|restore|delete`` on a home that a command has filled, without Ray."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Cli


@pytest.fixture
def ids(cli: Cli, place: Path) -> list[str]:
    options = ("--address", "in-process", "--profile", "bare", "--model", "scripted", "--json")
    made = [cli("run", text, *options).document["session_id"] for text in ("one", "two")]
    assert len(set(made)) == 2
    return made


def listed(cli: Cli, *options: str) -> list[str]:
    return sorted(row["session_id"] for row in cli("sessions", "list", "--json", *options).document["sessions"])


def state_of(home: Path, session_id: str) -> dict[str, Any]:
    (found,) = home.glob(f"sessions/*/{session_id}/state.json")
    return json.loads(found.read_text())


def test_archive_and_restore(cli: Cli, home: Path, ids: list[str]) -> None:
    before = state_of(home, ids[0])
    result = cli("sessions", "archive", *ids)
    assert result.code == 0 and result.out == "".join(f"archived {one}\n" for one in ids)
    assert listed(cli) == []
    assert state_of(home, ids[0])["updated_at"] == before["updated_at"]
    again = cli("sessions", "archive", ids[0], ids[0], "--json")
    assert again.document == {"sessions": [{"session_id": ids[0], "ok": True}]}
    assert cli("sessions", "restore", ids[0][-12:], ids[1]).code == 0
    assert listed(cli) == sorted(ids)
    assert state_of(home, ids[0])["archived"] is False


def test_a_session_whose_directory_is_gone(cli: Cli, home: Path, place: Path, ids: list[str]) -> None:
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    place.rmdir()
    assert cli("sessions", "archive", ids[0]).code == 0
    assert cli("sessions", "delete", ids[0], "--yes").out == f"deleted {ids[0]}\n"
    place.mkdir()
    assert listed(cli) == [ids[1]]


def test_delete_asks(cli: Cli, home: Path, ids: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refused = cli("sessions", "delete", ids[0], "--json")
    assert refused.code == 2 and refused.document["error"]["code"] == "request.needs_yes"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    declined = cli("sessions", "delete", *ids)
    assert declined.code == 1 and "nothing was deleted" in declined.err
    assert all(one in declined.err for one in ids) and "one" in declined.err
    assert listed(cli) == sorted(ids)
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert cli("sessions", "delete", ids[0]).code == 1
    monkeypatch.setattr(sys, "stdin", Terminal("Y\n"))
    assert cli("sessions", "delete", ids[0]).out == f"deleted {ids[0]}\n"
    assert not [path for path in home.rglob(f"*{ids[0]}*") if path.parent.name != "tombstones"]
    assert listed(cli) == [ids[1]]


def test_what_is_not_there_stops_before_anything_is_done(cli: Cli, ids: list[str]) -> None:
    for command in (("archive",), ("restore",), ("delete", "--yes")):
        result = cli("sessions", *command, ids[0], "nobody", "--json")
        assert result.code == 2 and result.document["error"]["code"] == "session.not_found"
    assert listed(cli) == sorted(ids)


def test_a_session_that_somebody_has_open(cli: Cli, home: Path, ids: list[str], monkeypatch: Any) -> None:
    import asyncio
    import threading

    from kimi_ray.cli import settings_of
    from kimi_ray.store.backend import open_store_for_writing
    from kimi_ray.store.seam import StoreOptions

    monkeypatch.setattr(settings_of, "_CLAIM_S", 0.2)
    held, done = threading.Event(), threading.Event()

    async def hold() -> None:
        store = await open_store_for_writing(str(home), StoreOptions())
        await store.open_session(ids[0], "somebody", workspace_id=None)
        held.set()
        await asyncio.to_thread(done.wait, 60)
        await store.close()

    thread = threading.Thread(target=lambda: asyncio.run(hold()))
    thread.start()
    try:
        assert held.wait(20)
        one = cli("sessions", "archive", ids[0])
        assert one.code == 1 and "session.in_use" in one.err and "--address" in one.err and "process" in one.err
        both = cli("sessions", "delete", "--yes", *ids, "--json")
        rows = {row["session_id"]: row for row in both.document["sessions"]}
        assert both.code == 1 and rows[ids[1]]["ok"] and rows[ids[0]]["error"]["code"] == "session.in_use"
    finally:
        done.set()
        thread.join(20)
    assert listed(cli) == [ids[0]]
    assert cli("sessions", "delete", "--yes", ids[0]).code == 0
