"""``sessions compact`` on a home that a command has filled, without Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli


@pytest.fixture
def session_id(cli: Cli, home: Path, place: Path) -> str:
    options = ("--address", "in-process", "--profile", "bare", "--model", "scripted", "--json")
    made: str = cli("run", "tell me " + "everything " * 200, *options).document["session_id"]
    cli("run", "and then " + "more " * 50, "--session", made, "--address", "in-process", "--json")
    return made


def test_a_conversation_is_compacted_and_a_second_time_there_is_nothing_to_do(cli: Cli, session_id: str) -> None:
    found = cli("sessions", "compact", session_id[-12:], "--instruction", "briefly", "--json")
    assert found.code == 0
    document = found.document
    assert (document["session_id"], document["agent_id"]) == (session_id, "main")
    compaction = document["compaction"]
    assert compaction["trigger"] == "manual" and compaction["message_tokens"] < compaction["shadowed_tokens"]
    stored = cli("sessions", "tail", session_id, "--json", "-n", "1000").out
    again = cli("sessions", "compact", session_id)
    assert again.code == 0 and again.out == f"{session_id}/main: nothing to compact\n"
    assert cli("sessions", "compact", session_id, "--json").document["compaction"] is None
    assert cli("sessions", "tail", session_id, "--json", "-n", "1000").out == stored, "nothing is written for it"
    shown = cli("sessions", "tail", session_id, "--type", "compaction", "--json").out.splitlines()
    types = [json.loads(line)["type"] for line in shown]
    assert types == [f"compaction/{what}" for what in ("start", "request", "response", "summary", "end")]
    assert json.loads(shown[0])["data"]["instruction"] == "briefly"


def test_it_says_what_it_did(cli: Cli, session_id: str) -> None:
    found = cli("sessions", "compact", f"{session_id}/main")
    assert found.code == 0
    assert found.out.startswith(f"{session_id}/main: compacted ") and " messages, about " in found.out
    again = cli("replay", session_id)
    assert again.code == 0 and ", 1 shortening done again: as recorded" in again.out
    assert ", 1 shortening done again: as recorded" in again.err


def test_a_session_that_is_not_there(cli: Cli, session_id: str) -> None:
    found = cli("sessions", "compact", "nobody", "--json")
    assert found.code == 2 and found.document["error"]["code"] == "session.not_found"
    found = cli("sessions", "compact", session_id, "--agent", "9", "--json")
    assert found.code == 2


def test_a_summary_by_the_model_behind_one_of_a_feature_is_told(cli: Cli, home: Path, session_id: str) -> None:
    config = home / "config.toml"
    before = config.read_text() if config.exists() else ""
    config.write_text('features = ["tests.unit.context.test_runtime_context:OwnSummaries"]\n' + before)
    found = cli("sessions", "compact", session_id)
    assert found.code == 0 and "note: " not in found.err
    config.write_text(before)
    assert cli("run", "further " * 300, "--session", session_id, "--address", "in-process", "--json").code == 0
    found = cli("sessions", "compact", session_id)
    assert found.code == 0 and "not asked of the agent's model" in found.err
    assert cli("run", "further " * 300, "--session", session_id, "--address", "in-process", "--json").code == 0
    assert "note: " not in cli("sessions", "compact", session_id).err
