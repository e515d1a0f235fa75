"""``sessions fork`` and ``sessions diff`` on homes that commands have filled, without Ray."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.runs.seeds import fork_seed
from kimi_ray.store.open import open_store
from kimi_ray.store.seam import Stream
from tests.unit.cli.conftest import Cli


def lines_of(home: Path, session_id: str, agent_id: str = "main") -> list[bytes]:
    page = asyncio.run(open_store(home).read_from(Stream(session_id, agent_id), 0))
    return list(page.lines)


def header_of(home: Path, session_id: str) -> dict[str, Any]:
    logs = asyncio.run(open_store(home).list(session_id))
    header = next(log.header for log in logs if log.stream.agent_id == "main")
    assert header is not None
    return header


@pytest.fixture
def session(cli: Cli, place: Path) -> str:
    """A session of two turns."""
    (place / "file").write_text("x")
    first = cli("run", "say one", "--model", "scripted", "--json")
    assert first.code == 0, first
    session_id = first.document["session_id"]
    assert cli("run", "say two", "--model", "scripted", "--session", session_id).code == 0
    return session_id


def test_the_whole(cli: Cli, home: Path, session: str) -> None:
    before = lines_of(home, session)
    result = cli("sessions", "fork", session, "--json")
    assert result.code == 0, result
    document = result.document
    assert document["source"] == {"session_id": session, "agent_id": "main", "at": None, "seq": len(before)}
    (row,) = document["sessions"]
    assert row["agents"] == 1 and row["title"] == "Fork: say one" and document["left_out"] is None
    assert lines_of(home, row["session_id"])[: len(before)] == before
    assert lines_of(home, session) == before, "the source is only read"
    assert cli("sessions", "diff", session, row["session_id"]).code == 0
    assert cli("sessions", "verify", row["session_id"]).code == 0


def test_at_a_turn_many_with_seeds_and_directories(cli: Cli, home: Path, place: Path, session: str) -> None:
    result = cli(
        "sessions", "fork", session[-8:], "--at", "0", "--count", 4, "--seed", 100, "--workdir", "copy", "--title", "T",
        "--tag", "a=b", "--metadata", '{"k": [1]}', "--json",
    )  # fmt: skip
    assert result.code == 0, result
    rows = result.document["sessions"]
    assert [row["seed"] for row in rows] == [fork_seed(100, index) for index in range(4)]
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    places = {row["workdir"] for row in rows}
    assert len(places) == 4 and all((Path(path) / "file").read_text() == "x" for path in places)
    logs = [lines_of(home, row["session_id"]) for row in rows]
    assert all(log == logs[0] for log in logs), "the copies differ in their headers alone"
    found = cli("sessions", "diff", rows[0]["session_id"], rows[1]["session_id"], "--json")
    assert found.code == 1
    assert [one["path"] for one in found.document["differences"]] == ["sampling.seed"]
    assert {row["title"] for row in rows} == {"T"}
    header = header_of(home, rows[3]["session_id"])
    assert (header["fork_group"], header["fork_index"]) == (result.document["fork_group"], 3)


def test_a_fork_goes_on_with_the_next_turn_and_knows_no_later_one(cli: Cli, home: Path, session: str) -> None:
    """K's test 27: turns through N only, across a resume; the next turn's number goes on."""
    made = cli("sessions", "fork", session, "--at", "0", "--json").document["sessions"][0]["session_id"]
    assert b"say two" not in b"".join(lines_of(home, made))
    result = cli("run", "say three", "--model", "scripted", "--session", made, "--json")
    assert (result.code, result.document["turn"]) == (0, 1)
    found = cli("sessions", "diff", session, made, "--json").document["differences"]
    assert found[0]["path"] == "content[0].text" and (found[0]["a"], found[0]["b"]) == ("say two", "say three")
    assert found[0]["places"] == ["1.0", "1.0"] and found[0]["index"] == 4
    shown = cli("sessions", "diff", session, made)
    assert shown.code == 1 and "main: message 4 (step 1.0): content[0].text" in shown.out


def test_before_a_turn(cli: Cli, home: Path, session: str) -> None:
    made = cli("sessions", "fork", session, "--at", "^1", "--json").document
    other = cli("sessions", "fork", session, "--at", "0", "--json").document
    ids = [one["sessions"][0]["session_id"] for one in (made, other)]
    assert cli("sessions", "diff", *ids).code == 0
    assert b"say two" not in b"".join(lines_of(home, ids[0]))


IMPOSSIBLE = {
    ("--at", "7"): "session.fork_point_not_found",
    ("--at", "0.9"): "session.fork_point_not_found",
    ("--at", "^2"): "session.fork_point_not_found",
    ("--at", "-1"): "request.invalid",
    ("--at", "1.2.3"): "request.invalid",
    ("--at", ""): "request.invalid",
    ("--metadata", "{"): "request.invalid",
    ("--metadata", "[]"): "request.invalid",
    ("--workdir", "nonsense"): "workdir.invalid",
    ("--tag", "x"): "swarm.bad_tag",
    ("--count", "0"): "request.bad_usage",
    ("--count", "1001"): "request.bad_usage",
    ("--seed", "-1"): "request.bad_usage",
    ("--agent", "agent-9"): "request.unknown_id",
}


def test_forks_are_listed_by_their_source_and_by_their_group(cli: Cli, session: str) -> None:
    groups = [cli("sessions", "fork", session, "--at", "0", "--count", n, "--json").document for n in (2, 1)]
    made = [{one["session_id"] for one in group["sessions"]} for group in groups]

    def listed(*flags: str) -> set[str]:
        return {one["session_id"] for one in cli("sessions", "list", *flags, "--json").document["sessions"]}

    assert listed("--forks-of", session[-8:]) == made[0] | made[1]
    assert [listed("--fork-group", group["fork_group"]) for group in groups] == made
    assert listed("--forks-of", "nobody") == listed("--fork-group", "none") == set()


def test_what_cannot_be_leaves_nothing(cli: Cli, session: str) -> None:
    """K's test 28, and the other ways to ask for the impossible."""
    for arguments, code in IMPOSSIBLE.items():
        result = cli("sessions", "fork", session, *arguments, "--json")
        assert (result.code, result.document["error"]["code"]) == (2, code), result
    assert cli("sessions", "list", "--json").document["total"] == 1


def test_a_directory_that_went_with_its_rollout_is_told(cli: Cli, place: Path) -> None:
    (place / "one.txt").write_text("1\n")
    done = cli(
        "swarm", "Say {{item}}", "--in-process", "--items", "one.txt", "--model", "scripted", "--out", "run",
        "--workdir", "copy:.",
    )  # fmt: skip
    assert done.code == 0, done
    forked = cli("sessions", "fork", "run/agent-1")
    assert forked.code == 0 and "is gone" in forked.err and "--workdir git, copy:DIR or none" in forked.err
    assert "is gone" not in cli("sessions", "fork", "run/agent-1", "--workdir", "copy:.").err
    assert "begins as session_" in cli("sessions", "tail", "@last").out


def test_what_cannot_be_compared_is_not_different(cli: Cli, home: Path, session: str) -> None:
    for arguments in ((session, "nobody"), ("nobody", session), (session, session, "--agent", "5"), (session,)):
        assert cli("sessions", "diff", *arguments).code == 2
    log = next(home.rglob("*.jsonl"))
    log.write_bytes(log.read_bytes()[:-40].replace(b"say one", b"say on3") + b"x" * 60 + b"\n")
    result = cli("sessions", "diff", session, session, "--json")
    assert (result.code, result.document["error"]["code"]) == (2, "store.corrupt")


def test_a_rollout_becomes_main_and_stays_a_rollout_of_its_own(cli: Cli, home: Path, place: Path) -> None:
    (place / "items.csv").write_text("id,word\nalpha,one\nbeta,two\n")
    swarm = cli(
        "swarm", "Say {{word}}", "--in-process", "--profile", "bare", "--items", "items.csv", "--id-column", "id",
        "--model", "scripted", "--out", "run",
    )  # fmt: skip
    assert swarm.code == 0, swarm
    result = cli("sessions", "fork", "run:beta", "--at", "0.0", "--count", 2, "--json")
    assert result.code == 0, result
    source = result.document["source"]
    assert source["agent_id"].startswith("agent-")
    made = result.document["sessions"][0]["session_id"]
    header = header_of(home, made)
    assert (header["item_id"], header["agent_id"], header["delegation_depth"]) == ("beta", "main", 0)
    assert header["parent"] == {"session_id": source["session_id"], "agent_id": source["agent_id"]}
    # The run's own names still mean the run, not its forks.
    again = cli("sessions", "fork", "run:beta", "--json").document["source"]
    assert again["session_id"] == source["session_id"]
    assert cli("sessions", "show", "run", "--json").document["session"]["session_id"] == source["session_id"]
    whole = cli("sessions", "fork", "run", "--json").document
    assert whole["sessions"][0]["agents"] == 3 and whole["left_out"] is None


def test_it_never_imports_ray(cli: Cli, session: str) -> None:
    before = "ray" in sys.modules
    assert cli("sessions", "fork", session).code == 0
    assert ("ray" in sys.modules) == before
