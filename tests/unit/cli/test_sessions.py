"""``sessions list|show|tail`` on a home that a command has filled, without Ray."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from kimi_ray.cli.agent_facts import AgentFacts, as_tree
from kimi_ray.cli.lookup import find_session
from kimi_ray.errors import KimiRayError
from kimi_ray.events import parse_event
from kimi_ray.llm import ChatRequest, Step
from kimi_ray.runs import read_rows
from kimi_ray.store.seam import Document, Stream
from tests.unit.cli.conftest import Cli

if TYPE_CHECKING:
    from kimi_ray.store.open import ReadStore

ROOT = Path(__file__).parents[3]
EVIL = "red \x1b[31mtext\x1b]0;title\x07 and \u202eback\x9b"


def evil(_request: ChatRequest) -> Step:
    """A model that tries to take over the terminal."""
    return Step(text=EVIL)


@pytest.fixture
def filled(cli: Cli, place: Path) -> Path:
    (place / "items.csv").write_text("id,word\nalpha,one\nbeta,two\nit:em#1,three\n")
    result = cli(
        "swarm", "Say {{word}}", "--in-process", "--profile", "bare", "--items", "items.csv", "--id-column", "id",
        "--model", "scripted", "--repeats", 2, "--out", "run",
    )  # fmt: skip
    assert result.code == 0, result
    return place


def test_nothing_yet(cli: Cli, home: Path) -> None:
    assert cli("sessions", "list").out == f"no sessions in {home}\n"
    nothing = {"home": str(home), "total": 0, "sessions": [], "next_cursor": None, "index": "none"}
    assert cli("sessions", "list", "--json").document == nothing
    assert not home.exists()
    missing = cli("sessions", "show", "@last")
    assert missing.code == 2
    assert "code: store.not_found" in missing.err


def test_names_that_no_file_can_have(cli: Cli, filled: Path) -> None:
    (filled / "circle").symlink_to("circle")
    long = "x" * 300
    for name in (long, long + ":a", 20 * long, "circle", "circle:a", "circle/agent-1", "~nobody-here", "\udcff"):
        for command in ("show", "tail", "verify", "salvage"):
            result = cli("sessions", command, name, "--json")
            assert result.code == 2, (name, result)
            assert result.document["error"]["code"] in ("session.not_found", "request.unknown_id"), (name, result)


def test_list(cli: Cli, filled: Path, home: Path) -> None:
    document = cli("sessions", "list", "--json").document
    assert document["total"] == 1
    (one,) = document["sessions"]
    assert one["cwd"] == str(filled)
    assert one["title"] == "Say {{word}}"
    assert one["agents"] == 7
    assert one["run_id"].startswith("run_")
    shown = cli("sessions", "list").out
    assert "Say {{word}}" in shown
    assert one["session_id"][-10:] in shown


def test_show(cli: Cli, filled: Path) -> None:
    document = cli("sessions", "show", "@last", "--json").document
    assert document["live"] is False
    agents = {one["agent_id"]: one for one in document["agents"]}
    assert list(agents)[:2] == ["main", "agent-1"]
    assert len(agents) == 7
    rows = {row.agent_id: row for row in read_rows(filled / "run")}
    for agent_id, row in rows.items():
        facts = agents[str(agent_id)]
        assert facts["item_id"] == row.item_id
        assert facts["state"] == "completed"
        assert (facts["turns"], facts["steps"]) == (row.turns, row.steps) == (1, 1)
        assert facts["output_tokens"] == row.usage.output
        assert facts["last_text"] == row.text
        assert facts["events"] == (row.last_seq or 0) + 1
    text = cli("sessions", "show", "@last").out
    assert "it:em#1#1" in text
    limited = cli("sessions", "show", "@last", "--limit", 2, "--json").document
    assert len(limited["agents"]) == 2
    assert limited["more"] == 5
    only = cli("sessions", "show", "@last", "--agent", "3", "--json").document
    assert [one["agent_id"] for one in only["agents"]] == ["agent-3"]


def test_ids(cli: Cli, filled: Path, home: Path) -> None:
    session = cli("sessions", "list", "--json").document["sessions"][0]["session_id"]
    rows = {(row.item_id, row.repeat): row.agent_id for row in read_rows(filled / "run")}
    run_id = json.loads((filled / "run" / "run.json").read_text())["run_id"]

    def agent(*name: str) -> str:
        document = cli("sessions", "show", *name, "--json").document
        assert document["session"]["session_id"] == session
        return document["agents"][0]["agent_id"]

    assert agent(session) == "main"
    assert agent(session[-6:].lower()) == "main"
    assert agent(f"{session}/agent-2") == "agent-2"
    assert agent("run") == agent("./run/") == agent(str(filled / "run")) == agent(run_id) == "main"
    assert agent("run", "--agent", "2") == "agent-2"
    assert cli("sessions", "tail", "./run", "-n", "1").code == 0
    assert agent("run:alpha") == rows["alpha", 0]
    assert agent("run:beta#1") == rows["beta", 1]
    assert agent("run:it:em#1") == rows["it:em#1", 0]
    assert agent("run:it:em#1#1") == rows["it:em#1", 1]
    assert agent(f"{run_id}:alpha#1") == rows["alpha", 1]
    assert agent(f"{run_id[-8:]}:beta") == rows["beta", 0]
    for wrong in ("run:gamma", "run:alpha#2", f"{run_id}:gamma", "norun:alpha", f"{session}/agent-99"):
        result = cli("sessions", "show", wrong)
        assert (result.code, "code: request.unknown_id" in result.err) == (2, True), wrong
    nobody = cli("sessions", "show", "zzzz")
    assert nobody.code == 2
    assert "code: session.not_found" in nobody.err


async def test_ambiguous_ends() -> None:
    class Home:
        home = "/nowhere"

        async def list_documents(self) -> list[Document]:
            return [
                Document(f"session_{name}", "w", 1, {"updated_at": at}) for at, name in enumerate("A1X B1X C2X".split())
            ]

    home = cast("ReadStore", Home())
    assert await find_session(home, "@last") == "session_C2X"
    assert await find_session(home, "2x") == "session_C2X"
    assert await find_session(home, "A1X") == "session_A1X"
    for text, code in (("1X", "request.ambiguous_id"), ("X", "request.ambiguous_id"), ("", "session.not_found")):
        with pytest.raises(KimiRayError) as caught:
            await find_session(home, text)
        assert caught.value.code == code
        assert caught.value.hint


def test_items_that_are_text_can_be_named_by_it(cli: Cli, place: Path) -> None:
    (place / "items.txt").write_text("one.py\nsub/two.py\none.py\n")
    arguments = ("swarm", "{{item}}", "--in-process", "--profile", "bare", "--model", "scripted", "--repeats", 2)
    assert cli(*arguments, "--items", "items.txt", "--out", "run").code == 0
    rows = {(row.item_id, row.repeat): row for row in read_rows(place / "run")}
    two = next(row for (_, repeat), row in rows.items() if row.item == "sub/two.py" and repeat == 1)
    shown = cli("sessions", "show", "run:sub/two.py#1", "--json").document["agents"]
    assert [one["agent_id"] for one in shown] == [two.agent_id]
    assert cli("sessions", "show", "run:two.py").code == 2


def test_a_run_directory_knows_its_home(
    cli: Cli, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIMI_RAY_HOME", str(tmp_path / "another home"))
    assert cli("sessions", "show", "run:alpha").code == 0
    assert cli("sessions", "tail", "run:alpha").code == 0
    assert cli("sessions", "show", "run:alpha", "--home", tmp_path / "another home").code == 2


def test_tail(cli: Cli, filled: Path) -> None:
    lines = cli("sessions", "tail", "run:alpha", "--json", "-n", 1000).out.splitlines()
    events = [parse_event(line.encode()) for line in lines]
    assert [event.seq for event in events] == list(range(len(events)))
    newest = cli("sessions", "tail", "run:alpha", "--json", "-n", 3).out.splitlines()
    assert newest == lines[-3:]
    assert cli("sessions", "tail", "run:alpha", "--json", "--from", 4).out.splitlines() == lines[4:]
    assert cli("sessions", "tail", "run:alpha", "--json", "--from", len(lines)).out == ""
    beyond = cli("sessions", "tail", "run:alpha", "--from", len(lines) + 1)
    assert beyond.code == 2
    assert "code: request.bad_seq" in beyond.err
    only = cli("sessions", "tail", "run:alpha", "--json", "-n", 100, "--type", "turn", "--type", "llm/response").out
    assert {parse_event(line.encode()).type for line in only.splitlines()} == {"turn/start", "turn/end", "llm/response"}
    newest_two = cli("sessions", "tail", "run:alpha", "--json", "-n", 2, "--type", "turn").out.splitlines()
    assert [parse_event(line.encode()).type for line in newest_two] == ["turn/start", "turn/end"]
    assert cli("sessions", "tail", "run:alpha", "-n", 0, "--type", "turn").out == ""
    first = cli("sessions", "tail", "run:alpha", "--json", "--from", 0, "-n", 1, "--type", "turn/end").out
    assert parse_event(first.encode()).type == "turn/end"
    text = cli("sessions", "tail", "run:alpha", "--full").out
    assert "Say one" in text
    assert "turn 0 completed" in text


def test_terminal_escapes_are_shown_not_sent(cli: Cli, place: Path) -> None:
    script = "scripted:tests.unit.cli.test_sessions:evil"
    result = cli("run", "go", "--model", script, "--profile", "bare", "--title", EVIL)
    assert result.code == 0
    outs = [result.out, result.err]
    outs += [cli("sessions", *words).out for words in (("list",), ("show", "@last"), ("tail", "@last", "--full"))]
    for out in outs:
        assert not any(char in out for char in "\x1b\x07\x9b\u202e"), out
    assert "\\x1b[31mtext" in outs[-1]


def test_reading_never_imports_ray(filled: Path, home: Path) -> None:
    code = (
        "import sys; from kimi_ray.cli.app import run_command;"
        "codes = [run_command(['sessions', *words]) for words in (['list'], ['show', '@last'], ['tail', '@last'])];"
        "heavy = {'ray', 'openai', 'pyarrow', 'rich', 'dishka'} & set(sys.modules);"
        "sys.exit(f'{codes} {heavy}' if any(codes) or heavy else 0)"
    )
    environment = {"PYTHONPATH": str(ROOT), "KIMI_RAY_HOME": str(home), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_is_quick_and_light() -> None:
    code = (
        "import sys; from kimi_ray.cli.app import run_command; run_command(['--help']);"
        "sys.exit(str({'ray', 'openai', 'pyarrow', 'rich', 'dishka'} & set(sys.modules) or 0))"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr.strip() in ("0", ""), done.stderr
    assert "swarm" in done.stdout
    assert time.monotonic() - began < 5  # about 0.25 s on an idle machine


def test_a_reader_that_goes_away(filled: Path, home: Path) -> None:
    """``sessions tail | head -1`` is quiet and no failure."""
    environment = {"PYTHONPATH": str(ROOT), "KIMI_RAY_HOME": str(home), "PATH": "/bin:/usr/bin"}
    line = f"{shlex.quote(sys.executable)} -u -m kimi_ray.cli sessions tail @last -n 1000 --full --json | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_goes_away_before_an_error(filled: Path, home: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT), "KIMI_RAY_HOME": str(home), "PATH": "/bin:/usr/bin"}
    line = f"{shlex.quote(sys.executable)} -m kimi_ray.cli sessions show nobody --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.strip() in ("1", "2"), done.stderr) == (True, "")


def test_follow_a_growing_log(cli: Cli, place: Path, home: Path) -> None:
    """A second command resumes the session; the follower shows its events, in order and once."""
    assert cli("run", "first", "--model", "scripted", "--profile", "bare").code == 0
    command = [sys.executable, "-m", "kimi_ray.cli", "sessions", "tail", "@last", "-f", "--json", "--from", "0"]
    environment = {"PYTHONPATH": str(ROOT), "KIMI_RAY_HOME": str(home), "PATH": ""}
    follower = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert follower.stdout is not None
        seen = [parse_event(follower.stdout.readline().encode())]
        result = cli("run", "second", "--session", "@last", "--model", "scripted", "--json")
        assert result.code == 0
        assert result.document["turn"] == 1
        while seen[-1].type != "prompt/completed" or seen[-1].data.get("turn") != 1:
            seen.append(parse_event(follower.stdout.readline().encode()))
    finally:
        follower.kill()
        follower.wait()
    assert [event.seq for event in seen] == list(range(len(seen)))


def two_turns(request: ChatRequest) -> Step:
    """A model that looks at a file, and then answers."""
    last = request.messages[-1]
    return Step(text="seen") if last["source"]["kind"] == "tool" else Step.call("Glob", {"pattern": "*"})


TWO = "scripted:tests.unit.cli.test_sessions:two_turns"


def test_show_has_turns_tools_workdir_and_lineage(cli: Cli, place: Path) -> None:
    assert cli("run", "first thing", "--model", TWO, "--tools", "Glob").code == 0
    assert cli("run", "second thing", "--model", TWO, "--session", "@last").code == 0
    source = cli("sessions", "show", "@last", "--json").document["session"]["session_id"]
    document = cli("sessions", "show", source, "--turns", "--json").document
    (main,) = document["agents"]
    assert (main["level"], main["tools"], main["pending_prompts"], main["state"]) == (0, {"Glob": 2}, 0, "completed")
    assert main["workdir"] == {
        "kind": "shared",
        "path": str(place),
        "prepared": str(place),
        "created": False,
        "here": True,
    }
    assert [turn["prompts"] for turn in main["turn_list"]] == [["first thing"], ["second thing"]]
    for number, turn in enumerate(main["turn_list"]):
        assert (turn["turn"], turn["steps"], turn["tool_calls"], turn["reason"]) == (number, 2, 1, "completed")
        assert turn["output_tokens"] > 0 and turn["duration_ms"] >= 0 and turn["first_seq"] < turn["last_seq"]
    assert sum(turn["output_tokens"] for turn in main["turn_list"]) == main["output_tokens"]
    fork = cli("sessions", "fork", source, "--json")
    assert fork.code == 0, fork
    shown = cli("sessions", "show", source, "--json").document
    (fork_id,) = shown["forks"]
    forked = cli("sessions", "show", fork_id, "--turns", "--json").document
    assert forked["session"]["forked_from"]["session_id"] == source
    (main,) = forked["agents"]
    assert main["forked_from"]["session_id"] == source and "parent" not in main
    assert (main["turns"], main["tools"], len(main["turn_list"])) == (0, {}, 2)
    assert all(turn["copied"] for turn in main["turn_list"])
    text = cli("sessions", "show", fork_id, "--turns").out
    assert f"forked from {source}/main" in text and "first thing" in text and "1*" in text
    text = cli("sessions", "show", source, "--turns").out
    assert f"forks       {fork_id}" in text and "Glob 2" in text and "workdir     shared" in text


def test_the_tree_is_indented_by_parent_whatever_its_depth() -> None:
    def facts(agent_id: str, parent: str | None) -> AgentFacts:
        return AgentFacts(agent_id, parent, None, None, "new", 0, 0, 0, 0, 0, 0, 0, 0, None, {}, 0)

    pairs = [("main", None), ("agent-1", "main"), ("agent-2", "agent-1"), ("agent-3", "main"), ("agent-4", "agent-2"),
             ("agent-5", "gone"), ("agent-6", "agent-7"), ("agent-7", "agent-6"), ("agent-8", "agent-8")]  # fmt: skip
    rows = [(level, one.agent_id) for level, one in as_tree([facts(*pair) for pair in pairs])]
    assert rows[:5] == [(0, "main"), (1, "agent-1"), (2, "agent-2"), (3, "agent-4"), (1, "agent-3")]
    assert sorted(rows[5:]) == [(0, "agent-5"), (0, "agent-6"), (0, "agent-7"), (0, "agent-8")]


def test_tail_refuses_a_misspelt_type(cli: Cli, filled: Path) -> None:
    for text, close in (
        ("turn/ends", "turn/end"),
        ("lmm", "llm"),
        ("subagent/started_", "subagent/started"),
        ("zzz", ""),
    ):
        refused = cli("sessions", "tail", "run:alpha", "--type", text)
        assert refused.code == 2 and "code: request.unknown_type" in refused.err and "hint: " in refused.err
        assert close in refused.err
    assert cli("sessions", "tail", "run:alpha", "--type", "subagent").code == 0


def test_tail_from_with_a_number(cli: Cli, filled: Path) -> None:
    lines = cli("sessions", "tail", "run:alpha", "--json", "-n", 1000).out.splitlines()
    assert len(lines) > 6
    assert cli("sessions", "tail", "run:alpha", "--json", "--from", 2, "-n", 3).out.splitlines() == lines[2:5]
    assert cli("sessions", "tail", "run:alpha", "--json", "--from", 2, "-n", 0).out == ""
    assert cli("sessions", "tail", "run:alpha", "--json", "--from", 2, "-n", 3, "-f").out.splitlines() == lines[2:5]
    assert cli("sessions", "tail", "run:alpha", "--json", "--from", 4).out.splitlines() == lines[4:]
    beyond = cli("sessions", "tail", "run:alpha", "--from", len(lines) + 1, "-n", 2)
    assert "code: request.bad_seq" in beyond.err


def test_tail_of_the_whole_tree(cli: Cli, filled: Path) -> None:
    rows = [
        json.loads(line)
        for line in cli("sessions", "tail", "run", "--all-agents", "--json", "-n", 9999).out.splitlines()
    ]
    by_agent: dict[str, list[int]] = {}
    for row in rows:
        by_agent.setdefault(row["agent_id"], []).append(row["event"]["seq"])
    assert len(by_agent) == 7 and all(seqs == list(range(len(seqs))) for seqs in by_agent.values())
    assert [row["event"]["time"] for row in rows] == sorted(row["event"]["time"] for row in rows)
    newest = cli("sessions", "tail", "@last", "--all-agents", "--json", "-n", 5).out.splitlines()
    assert [json.loads(line) for line in newest] == rows[-5:]
    assert "agent-3" in cli("sessions", "tail", "@last", "--all-agents", "-n", 999).out
    assert cli("sessions", "tail", "@last", "--all-agents", "--agent", "1").code == 2
    ends = cli("sessions", "tail", "run/agent-1", "--all-agents", "--json", "-n", 6, "--type", "turn/end").out
    assert [json.loads(line)["event"]["type"] for line in ends.splitlines()] == ["turn/end"] * 6
    assert cli("sessions", "tail", "run:alpha", "--all-agents", "--json", "-n", 5).out.splitlines() == newest


def test_an_agent_of_a_run_and_what_only_a_whole_session_can_be(cli: Cli, filled: Path) -> None:
    (one,) = cli("sessions", "show", f"{filled}/run/agent-3", "--json").document["agents"]
    assert one["agent_id"] == "agent-3"
    assert cli("sessions", "tail", "run/3", "-n", 1).code == 0
    for part in ("run:alpha", "run/agent-3"):
        refused = cli("sessions", "archive", part)
        assert refused.code == 2 and "a rollout or an agent is not one" in refused.err, refused
    assert "match" in cli("sessions", "list", "--text", "nothing like it").out


async def test_the_newest_of_a_type_are_found_behind_many_others() -> None:
    from kimi_ray.cli.logs_read import newest_lines

    class Lines:
        """A log of numbers."""

        async def read_from(self, _stream: object, seq: int, limit: int) -> SimpleNamespace:
            return SimpleNamespace(lines=[b"%d" % at for at in range(seq, min(seq + limit, 9000))], next_seq=9000)

    async def newest(count: int, every: int) -> list[int]:
        store, stream = cast("Any", Lines()), Stream("session_a", "main")
        return [
            int(line) for line in await newest_lines(store, stream, count, 9000, lambda line: int(line) % every == 0)
        ]

    assert await newest(2, 3000) == [3000, 6000]
    assert await newest(9, 4000) == [0, 4000, 8000]
    assert await newest(3, 1) == [8997, 8998, 8999]


def test_follow_the_whole_tree(cli: Cli, place: Path, home: Path) -> None:
    assert cli("run", "first", "--model", "scripted", "--profile", "bare").code == 0
    command = [sys.executable, "-m", "kimi_ray.cli", "sessions", "tail", "@last", "-f", "--all-agents", "--json"]
    environment = {"PYTHONPATH": str(ROOT), "KIMI_RAY_HOME": str(home), "PATH": ""}
    follower = subprocess.Popen([*command, "-n", "9999"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert follower.stdout is not None
        seen = [json.loads(follower.stdout.readline())]
        assert cli("run", "second", "--session", "@last", "--model", "scripted").code == 0
        while seen[-1]["event"]["type"] != "prompt/completed" or seen[-1]["event"]["data"].get("turn") != 1:
            seen.append(json.loads(follower.stdout.readline()))
    finally:
        follower.kill()
        follower.wait()
    assert [one["event"]["seq"] for one in seen] == list(range(len(seen)))


def test_the_tree_of_a_fork_is_its_own(cli: Cli, filled: Path) -> None:
    source = cli("sessions", "show", "@last", "--json").document
    assert cli("sessions", "fork", "@last", "--json").code == 0
    fork = cli("sessions", "show", "@last", "--json").document
    assert [(one["agent_id"], one["level"], one.get("parent")) for one in fork["agents"]] == [
        (one["agent_id"], one["level"], one.get("parent")) for one in source["agents"]
    ]
    assert {one["level"] for one in fork["agents"]} == {0, 1}
    assert all(one["forked_from"]["session_id"] == source["session"]["session_id"] for one in fork["agents"])


def test_a_terminal_without_the_letters_of_a_title(cli: Cli, home: Path) -> None:
    assert cli("run", "Grüße 日本", "--address", "in-process", "--profile", "bare", "--model", "scripted").code == 0
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "kimi_ray.cli", "sessions", "list", "--home", str(home)]
    shown = subprocess.run(command, env=ascii_only, cwd=ROOT, capture_output=True, timeout=60)
    assert shown.returncode == 0 and b"Gr\\xfc\\xdfe \\u65e5\\u672c" in shown.stdout, shown
    document = subprocess.run([*command, "--json"], env=ascii_only, cwd=ROOT, capture_output=True, timeout=60).stdout
    assert json.loads(document)["sessions"][0]["title"] == "Grüße 日本"
