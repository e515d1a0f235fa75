"""``sessions verify``: what is wrong is named with its place, beside a writer too; nothing is written."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from kimi_ray.store import StoreOptions, open_store_for_writing
from tests.conformance.store_contract import fingerprint
from tests.unit.cli.conftest import Cli
from tests.unit.store.rescue_homes import (
    DIGEST,
    SESSION,
    blob_file,
    filled_home,
    flip,
    header_of,
    log_file,
    turn_events,
    write_log,
)


@pytest.fixture
def filled(home: Path) -> Path:
    asyncio.run(filled_home(home))
    return home


def test_a_whole_session_verifies_and_no_byte_is_written(cli: Cli, filled: Path) -> None:
    before = fingerprint(filled)
    result = cli("sessions", "verify", "@last", "--json")
    assert result.code == 0
    document = result.document
    assert document["ok"] is True
    (session,) = document["sessions"]
    assert (session["session_id"], session["document"], session["blobs"]) == (SESSION, "ok", 1)
    events = len(turn_events())
    assert [(log["agent_id"], log["events"], log["ok"]) for log in session["logs"]] == [
        ("agent-1", events, True),
        ("main", events, True),
    ]
    assert "all of it verifies" in cli("sessions", "verify", "--all").out
    assert fingerprint(filled) == before


def test_each_problem_has_its_place_and_the_exit_code_is_1(cli: Cli, filled: Path) -> None:
    log = log_file(filled)
    flip(log, b'"do 1"', at=2)
    blob_file(filled).unlink()
    (log.parents[2] / "state.json").write_bytes(b"{")
    result = cli("sessions", "verify", SESSION, "--json")
    assert result.code == 1
    (session,) = result.document["sessions"]
    assert (result.document["ok"], session["document"]) == (False, "damaged")
    found = {problem["code"]: problem["details"] for problem in session["problems"]}
    assert set(found) == {"store.corrupt", "store.blob_missing"}
    assert found["store.blob_missing"]["digest"] == DIGEST
    assert found["store.blob_missing"]["file"] == str(blob_file(filled))
    seq = next(event.seq for event in turn_events() if event.type == "request/header")
    assert found["store.blob_missing"]["seq"] == seq
    damage = next(problem["details"] for problem in session["problems"] if problem["details"].get("agent_id") == "main")
    wanted = next(event.seq for event in turn_events() if b'"do 1"' in event.line)
    assert (damage["file"], damage["seq"]) == (str(log), wanted)
    assert log.read_bytes()[damage["offset"] :].startswith(b'{"seq":%d,' % wanted)
    shown = cli("sessions", "verify", "--all")
    assert shown.code == 1
    assert f"{SESSION}/main: store.corrupt" in shown.out
    assert f"seq {wanted}" in shown.out
    assert "salvage" in shown.out


def test_a_blob_with_other_content_is_corrupt(cli: Cli, filled: Path) -> None:
    blob_file(filled).write_bytes(b"another")
    (problem,) = cli("sessions", "verify", SESSION, "--json").document["sessions"][0]["problems"]
    assert (problem["code"], problem["details"]["file"]) == ("store.corrupt", str(blob_file(filled)))


def test_one_agent(cli: Cli, filled: Path) -> None:
    flip(log_file(filled), b'"do 1"', at=2)
    assert cli("sessions", "verify", f"{SESSION}/agent-1").code == 0
    assert cli("sessions", "verify", SESSION, "--agent", "1").code == 0
    assert cli("sessions", "verify", SESSION, "--agent", "main").code == 1


def test_bad_usage(cli: Cli, filled: Path) -> None:
    for arguments in ((), ("@last", "--all"), ("--all", "--agent", "main")):
        result = cli("sessions", "verify", *arguments)
        assert result.code == 2
        assert "code: request.bad_usage" in result.err
    assert cli("sessions", "verify", "nope").code == 2


def test_a_home_with_broken_parts_and_sessions_without_a_document(cli: Cli, filled: Path) -> None:
    agents = log_file(filled).parents[1]
    (agents / "agent-7").mkdir()
    (agents / "agent-7/wire.jsonl").write_bytes(b"not a header\n")
    (agents / "agent-8").mkdir()
    (agents / "agent-8/wire.jsonl").write_bytes(b"")
    (filled / "sessions/a file").write_bytes(b"")
    (filled / "sessions/wd_x_0123/session_empty").mkdir()

    async def more() -> None:
        store = await open_store_for_writing(str(filled), StoreOptions())
        await store.open_session("session_two", "n", workspace_id="wd_y_0123")
        await write_log(store, turn_events(1), header_of(session="session_two"))
        await store.close()

    asyncio.run(more())
    document = cli("sessions", "verify", "--all", "--json").document
    sessions = {session["session_id"]: session for session in document["sessions"]}
    assert set(sessions) == {SESSION, "session_two"}
    assert (sessions["session_two"]["ok"], sessions["session_two"]["document"]) == (True, "missing")
    states = {log["agent_id"]: log["ok"] for log in sessions[SESSION]["logs"]}
    assert states == {"main": True, "agent-1": True, "agent-7": False, "agent-8": False}


def test_a_document_that_cannot_be_read_is_told_and_hides_nobody(cli: Cli, filled: Path) -> None:
    state = log_file(filled).parents[2] / "state.json"
    state.unlink()
    state.mkdir()

    async def more() -> None:
        store = await open_store_for_writing(str(filled), StoreOptions())
        grant = await store.open_session("two", "n", workspace_id="wd_y_0123")
        await write_log(store, turn_events(1), header_of(session="two"))
        await store.write_document("two", {}, grant=grant.grant, nonce="n", revision=0)
        await store.close()

    asyncio.run(more())
    result = cli("sessions", "verify", "--all", "--json")
    assert result.code == 1
    sessions = {session["session_id"]: session for session in result.document["sessions"]}
    assert {name: one["document"] for name, one in sessions.items()} == {SESSION: "damaged", "two": "ok"}
    assert [problem["code"] for problem in sessions[SESSION]["problems"]] == ["store.io_failed"]
    salvaged = cli("sessions", "salvage", SESSION, "--json")
    assert salvaged.code == 0 and salvaged.document["document"] == "rebuilt"
    assert cli("sessions", "verify", salvaged.document["session_id"]).code == 0


def test_what_is_not_ours_between_the_sessions_is_passed_over(cli: Cli, filled: Path) -> None:
    workspace = log_file(filled).parents[3]
    agents = log_file(filled).parents[1]
    for place in (filled / "sessions", workspace, agents):
        for name in (".DS_Store", "README", "a copy (1)", "é"):
            (place / name).write_bytes(b"x")
        shutil.copytree(
            log_file(filled).parents[2],
            place / "session_old.bak",
            ignore=lambda _, names: {"session_old.bak"} & set(names),
        )
    result = cli("sessions", "verify", "--all", "--json")
    assert result.code == 0, result
    assert [session["session_id"] for session in result.document["sessions"]] == [SESSION]
    assert cli("sessions", "list", "--json").document["total"] == 1
    assert cli("sessions", "sweep", "--dry-run").code == 0
    assert cli("sessions", "salvage", SESSION).code == 0


@pytest.mark.parametrize("name", ["session_x", "other"])
def test_a_session_whose_document_is_gone_is_told_and_salvaged(cli: Cli, filled: Path, name: str) -> None:
    """Its id may be any: imported ones keep theirs."""

    async def more() -> None:
        store = await open_store_for_writing(str(filled), StoreOptions())
        await store.open_session(name, "n", workspace_id="wd_y_0123")
        await write_log(store, turn_events(1), header_of(session=name))
        await store.close()

    asyncio.run(more())
    shown = cli("sessions", "verify", name)
    assert shown.code == 0 and f"{name}: no document" in shown.out
    result = cli("sessions", "salvage", name, "--json")
    assert result.code == 0 and result.document["document"] == "rebuilt", result


def test_words_and_numbers(cli: Cli, filled: Path) -> None:
    result = cli("sessions", "verify", SESSION)
    assert "1 session, 2 logs, 1 reference to a blob: all of it verifies" in result.out, result.out
    with log_file(filled).open("ab") as file:
        file.write(b"torn")
    result = cli("sessions", "verify", SESSION)
    assert result.code == 0 and "store.torn_tail" in result.out
    assert "all of it verifies; 1 note" in result.out and "salvage" not in result.out, result.out


def test_beside_a_live_writer(cli: Cli, filled: Path) -> None:
    async def beside() -> None:
        store = await open_store_for_writing(str(filled), StoreOptions())
        await store.open_session("session_live", "n", workspace_id="wd_x_0123")
        await write_log(store, turn_events(3), header_of(session="session_live"), close=False)
        result = await asyncio.to_thread(cli, "sessions", "verify", "--all", "--json")
        assert result.code == 0
        assert len(result.document["sessions"]) == 2
        await store.close()

    asyncio.run(beside())
