"""``sessions undo``, and the commands that open a session with tools of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli

IN = ("--address", "in-process")
MINE = """
def count(path: str) -> int:
    \"\"\"Count.

    Args:
        path: Of what.
    \"\"\"
    return len(path)
"""


@pytest.fixture
def session_id(cli: Cli, home: Path, place: Path) -> str:
    first = cli("run", "the first", *IN, "--profile", "bare", "--model", "scripted", "--json")
    made: str = first.document["session_id"]
    for text in ("the second", "the third"):
        assert cli("run", text, "--session", made, *IN).code == 0
    return made


def test_prompts_are_taken_back(cli: Cli, session_id: str) -> None:
    found = cli("sessions", "undo", session_id[-12:], "--json")
    assert found.code == 0, found.err
    document = found.document
    assert (document["session_id"], document["agent_id"], len(document["prompts"])) == (session_id, "main", 1)
    assert document["last_prompt"] == [{"type": "text", "text": "the second"}]
    found = cli("sessions", "undo", f"{session_id}/main", "--count", "2")
    assert found.out == f"{session_id}/main: 2 prompts taken back\nno prompt is left\n"
    assert cli("run", "a fourth", "--session", session_id, *IN).code == 0


def test_turns_that_were_taken_back_are_marked(cli: Cli, session_id: str) -> None:
    assert cli("sessions", "undo", session_id).code == 0
    assert cli("run", "a fourth", "--session", session_id, *IN).code == 0
    (main,) = cli("sessions", "show", session_id, "--turns", "--json").document["agents"]
    assert [turn["undone"] for turn in main["turn_list"]] == [False, False, True, False]
    lines = cli("sessions", "show", session_id, "--turns").out.splitlines()
    assert ["the third" in line for line in lines if "(undone)" in line] == [True]


def test_a_long_first_prompt_is_cut_in_the_tables(cli: Cli) -> None:
    assert cli("run", "word " * 200, *IN, "--profile", "bare", "--model", "scripted").code == 0
    for command in (("list",), ("show", "@last")):
        (line,) = [line for line in cli("sessions", *command).out.splitlines() if line.count("word") > 2][:1]
        assert 10 < line.count("word") <= 20


def test_more_than_there_are_and_none_are_refused(cli: Cli, session_id: str) -> None:
    stored = cli("sessions", "tail", session_id, "--json", "-n", "1000").out
    found = cli("sessions", "undo", session_id, "--count", "9", "--json")
    assert found.code != 0 and found.document["error"]["code"] == "agent.undo_unavailable"
    assert found.document["error"]["details"] == {"reason": "insufficient", "count": 9}
    assert cli("sessions", "tail", session_id, "--json", "-n", "1000").out == stored, "nothing is written for it"
    assert cli("sessions", "undo", session_id, "--count", "0").code == 2


def test_a_session_with_tools_of_the_users_own(cli: Cli, home: Path, place: Path) -> None:
    (place / "mine_to_undo.py").write_text(MINE)
    mine = ("--tools", "mine_to_undo:count")
    text = "tell me " + "everything " * 200
    made = cli("run", text, *IN, "--profile", "bare", "--model", "scripted", *mine, "--json").document["session_id"]
    opens = (("run", "again", "--session", made, *IN), ("sessions", "undo", made), ("sessions", "compact", made))
    for command in opens:
        found = cli(*command, "--json")
        assert found.document["error"]["code"] == "tool.unknown"
        assert "--tools package.module:function" in found.document["error"]["hint"]
    for command in opens:
        found = cli(*command, *mine, "--json")
        assert found.code == 0, found.out


def test_tools_that_would_change_nothing_are_refused(cli: Cli, session_id: str) -> None:
    for tools in ("Read", "none"):
        found = cli("run", "again", "--session", session_id, *IN, "--tools", tools, "--json")
        assert found.code == 2 and found.document["error"]["code"] == "request.conflict"
