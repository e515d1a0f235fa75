"""``sessions salvage``: what survived, what was lost, the new session; nothing but the new session is written."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.store import salvage
from kimi_ray.store.seam import Store
from tests.conformance.store_contract import fingerprint
from tests.unit.cli.conftest import Cli
from tests.unit.store.rescue_homes import SESSION, blob_file, filled_home, flip, log_file, turn_events


@pytest.fixture
def damaged(home: Path) -> Path:
    asyncio.run(filled_home(home))
    flip(log_file(home), b'"do 1"', at=2)
    blob_file(home).unlink()
    return home


def test_salvage_says_what_survived_and_the_new_session_verifies(cli: Cli, damaged: Path) -> None:
    before = fingerprint(damaged / "sessions")
    result = cli("sessions", "salvage", "@last", "--json")
    assert result.code == 0, result
    report = result.document
    assert report["source"] == SESSION
    logs = {log["agent_id"]: log for log in report["logs"]}
    events = len(turn_events())
    assert (logs["agent-1"]["events"], logs["agent-1"]["lost"]) == (events, [])
    assert logs["main"]["survived"] == events - 1
    (lost,) = logs["main"]["lost"]
    assert (lost["count"], lost["file"]) == (1, str(log_file(damaged)))
    assert [blob["code"] for blob in logs["main"]["missing_blobs"]] == ["store.blob_missing"]
    after = fingerprint(damaged / "sessions")
    assert {name: facts for name, facts in after.items() if name in before} == before
    checked = cli("sessions", "verify", report["session_id"], "--json").document
    assert {problem["code"] for problem in checked["sessions"][0]["problems"]} == {"store.blob_missing"}
    shown = cli("sessions", "show", report["session_id"])
    assert shown.code == 0
    assert "Things" in shown.out


def test_in_words_and_of_one_agent(cli: Cli, damaged: Path) -> None:
    result = cli("sessions", "salvage", SESSION, "--agent", "main")
    assert result.code == 0, result
    assert "main: lost 1 event after seq" in result.out
    assert "store.blob_missing" in result.out
    new = result.out.strip().splitlines()[-1].removeprefix("new session: ")
    document = cli("sessions", "verify", new, "--json").document
    assert [log["agent_id"] for log in document["sessions"][0]["logs"]] == ["main"]


def test_what_cannot_be_salvaged(cli: Cli, damaged: Path) -> None:
    assert cli("sessions", "salvage", "nope").code == 2
    for agent in ("main", "agent-1"):
        log_file(damaged, agent).write_bytes(b"x")
    result = cli("sessions", "salvage", SESSION)
    assert result.code == 1
    assert "code: store.nothing_survives" in result.err


def test_a_result_that_does_not_verify_is_no_success(cli: Cli, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database whose pages are damaged may take what is written and give something else back."""
    write = salvage.salvage_session

    async def badly(store: Store, session_id: str, **how: Any) -> salvage.SalvageReport:
        report = await write(store, session_id, **how)
        flip(log_file(damaged).parents[3] / report.session_id / "agents/main/wire.jsonl", b'"do 0"')
        return report

    monkeypatch.setattr(salvage, "salvage_session", badly)
    result = cli("sessions", "salvage", SESSION, "--json")
    assert result.code == 1
    error = result.document["error"]
    assert error["code"] == "store.corrupt" and error["details"]["session_id"] in error["message"]
