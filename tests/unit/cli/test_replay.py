"""``kimi-ray replay``: runs and sessions of a home, their divergences, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.cli.app import run_command

TOOLS = '''
import kimi_ray

VALUE = "blue"

@kimi_ray.tool
def colour(thing: str) -> str:
    """The colour of a thing."""
    return f"{thing} is {VALUE}"


def model(request):
    from kimi_ray.llm.script import Step
    if len(request.messages) == 1:
        return Step.call("colour", {"thing": "it"})
    return "it is seen"
'''


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three items, each with one call of a tool of the user's."""
    import sys

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KIMI_RAY_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(tmp_path))  # pyright: ignore[reportUnknownMemberType]
    monkeypatch.delitem(sys.modules, "replay_mine", raising=False)
    (tmp_path / "replay_mine.py").write_text(TOOLS)
    (tmp_path / "items.txt").write_text("one\ntwo\nthree\n")
    swarm = "--items items.txt --model scripted:replay_mine:model --tools replay_mine:colour --out run --profile bare"
    assert run_command(["swarm", "See {{item}}", *swarm.split(), "--address", "in-process"]) == 0
    return tmp_path / "run"


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run_command([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_is_replayed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _json(capsys, "replay", str(run_dir))
    assert code == 0 and found["ok"] and found["divergence"] is None
    assert [agent["requests"] for agent in found["agents"]] == [0, 2, 2, 2]
    assert sum(agent["tools_run"] for agent in found["agents"]) == 0
    code, found = _json(capsys, "replay", str(run_dir), "--run-tools")
    assert code == 0 and sum(agent["tools_run"] for agent in found["agents"]) == 3


def test_a_changed_tool_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import replay_mine  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(replay_mine, "VALUE", "red")  # pyright: ignore[reportUnknownArgumentType]
    code, found = _json(capsys, "replay", str(run_dir), "--run-tools")
    first = found["divergence"]
    assert code == 1 and not found["ok"]
    assert (first["kind"], first["request"], first["turn"], first["step"]) == ("request", 1, 0, 1)
    assert first["field"] == "messages[2].content[0].content[0].text"
    assert (first["recorded"], first["replayed"]) == ("it is blue", "it is red")
    capsys.readouterr()
    assert run_command(["replay", f"{run_dir}:two", "--run-tools"]) == 1
    out = capsys.readouterr().out
    assert "request 1 (turn 0, step 1) differs at messages[2]" in out
    assert "recorded: it is blue" in out and "replayed: it is red" in out
    assert 'the result of colour({"thing":"it"}), call_0_0_0' in out
    assert "\n                  ^^^^\n" in out, "under the characters that differ"
    assert run_command(["replay", str(run_dir)]) == 0


def test_tools_that_need_a_directory_are_given_one_by_a_flag(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "def reads(request):\n    from kimi_ray.llm.script import Step\n    first = len(request.messages) == 1\n"
    script += '    return Step.call("Read", {"path": "items.txt"}) if first else "read"\n'
    (tmp_path / "replay_reads.py").write_text(script)
    where = "--workdir shared --model scripted:replay_reads:reads --address in-process"
    assert run_command(["run", "read it", *where.split()]) == 0
    capsys.readouterr()
    assert run_command(["replay", "@last", "--run-tools"]) == 1
    out, err = capsys.readouterr()
    assert f"worked in shared:{tmp_path}: --workdir copy:{tmp_path} runs them in a copy of it" in err
    assert 'the result of Read({"path":"items.txt"})' in out
    assert run_command(["replay", "@last", "--run-tools", "--workdir", "shared"]) == 0
    assert "--workdir" not in capsys.readouterr().err
    assert run_command(["replay", "@last", "--run-tools", "--workdir", f"copy:{tmp_path}"]) == 0


@pytest.mark.parametrize(
    ("recorded", "hint"),
    [
        ([None, {"kind": "none"}, {"kind": "shared", "path": 5}], "--workdir shared runs them here"),
        ([{"kind": "copy", "path": "/a b"}], "worked in copy:/a b: --workdir 'copy:/a b' runs them in a copy of it"),
        ([{"kind": "git", "path": "/r", "ref": "v1"}], "git:/r@v1: --workdir git:/r@v1 runs them in a worktree of it"),
        ([{"kind": "factory", "path": "m:f"}], "--workdir factory:m:f runs them in what that makes"),
        ([{"kind": "shared", "path": "/a"}] * 2 + [{"kind": "shared", "path": "/b"}], "; there were 2 directories, th"),
    ],
)
def test_the_hint_names_the_recorded_directory_and_never_lets_tools_write_there(recorded: list[Any], hint: str) -> None:
    from kimi_ray.cli.replay_words import workdir_hint
    from kimi_ray.replay import AgentReplay

    said = workdir_hint([AgentReplay(session_id="s", agent_id="a").model_copy(update={"workdir": w}) for w in recorded])
    assert hint in said and "--workdir shared:" not in said


def test_agents_are_named_by_their_items(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import replay_mine  # pyright: ignore[reportMissingImports]

    capsys.readouterr()
    assert run_command(["replay", "run"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert {line.split()[0] for line in lines[1:]} == {"run:one", "run:two", "run:three"}
    assert lines[1].endswith("/agent-1): 2 requests as recorded") and len(lines) == 4
    monkeypatch.setattr(replay_mine, "VALUE", "red")  # pyright: ignore[reportUnknownArgumentType]
    assert run_command(["replay", "run", "--run-tools"]) == 1
    out, err = capsys.readouterr()
    first = out.split(" ", 1)[0]
    others = {"run:one", "run:two", "run:three"} - {first}
    said = err.splitlines()[-1]
    assert said.startswith("2 other agents differ too, later in the recording: ")
    assert len(others) == 2 and set(said.split(": ", 1)[1].split(", ")) == others
    assert run_command(["replay", first]) == 0, "its name is what the command takes"
    code, found = _json(capsys, "replay", "run:two")
    (two,) = found["agents"]
    assert code == 0 and len(two["item_id"]) == 12 and (two["repeat"], two["workdir"]["kind"]) == (0, "shared")
    capsys.readouterr()
    assert run_command(["replay", two["session_id"]]) == 0
    name = f"{two['run_id']}:{two['item_id']}"
    assert f"{name} ({two['session_id']}/{two['agent_id']}): 2 requests" in capsys.readouterr().err
    assert run_command(["replay", name]) == 0
    (run_dir / "results.jsonl").write_text("{}\n" * 3)
    capsys.readouterr()
    assert run_command(["replay", f"run/{two['agent_id']}"]) == 0, "names are not worth a refusal"
    assert f"run:{two['item_id']} (" in capsys.readouterr().err


def test_values_are_shown_with_their_line_breaks_and_marks(capsys: pytest.CaptureFixture[str]) -> None:
    from kimi_ray.cli.replay import compared

    assert compared("a\nb\tc", "a\nX\tc") == ["  recorded: a\\nb\\tc", "  replayed: a\\nX\\tc", " " * 15 + "^"]
    assert compared("日本 1 x", "日本 22 x")[2] == " " * 17 + "^^"
    assert compared({"a": 1}, "(nothing)")[2].endswith("^")
    long = "x" * 3000
    lines = compared(f"{long}one{long}", f"{long}two{long}")
    at = lines[2].index("^")
    assert [line[at : at + 3] for line in lines] == ["one", "two", "^^^"] and max(map(len, lines)) < 200
    assert compared("abc", "abcd")[2].endswith("   ^")
    assert compared(f"one {long} two", f"One {long} Two")[2] == " " * 12 + "^^^", "of several only the first"
    assert compared(f"a{'x' * 90}", f"a{'y' * 90}")[2] == " " * 13 + "^" * 30, "never a line of marks"
    assert compared(f"a {'x' * 90}", f"a\n{'y' * 90}")[2] == " " * 13 + "^"


def test_what_was_ignored_is_told(run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    changed = TOOLS.replace("The colour of a thing", "What colour a thing has")
    (tmp_path / "replay_other.py").write_text(changed)
    assert run_command(["replay", str(run_dir), "--tools", "replay_other:colour"]) == 1
    assert "2 other agents differ too" in capsys.readouterr().err
    assert run_command(["replay", f"{run_dir}", "--tools", "replay_other:colour", "--ignore", "tools"]) == 0
    assert "as recorded, but for 3 differences ignored (tools 3)" in capsys.readouterr().out
    code, found = _json(capsys, "replay", str(run_dir), "--tools", "replay_other:colour", "--ignore", "tools")
    assert code == 0 and found["ignored"] == {"tools": 3}
    for field in ("sistem", "messages"):
        code, found = _json(capsys, "replay", str(run_dir), "--ignore", field)
        assert code == 2 and found["error"]["code"] == "request.invalid"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["replay", "nobody"], "session.not_found"),
        (["replay", "runs/nope"], "run.not_found"),
        (["replay", "session.zip"], "run.not_found"),
        (["replay", "items.txt"], "run.not_found"),
        (["replay", "@last", "--agent", "agent-99"], "request.unknown_id"),
        (["replay", "@last", "--workdir", "copy"], "request.conflict"),
        (["replay", "@last", "--tools", "no_such_module:f"], "tool.not_importable"),
    ],
)
def test_bad_usage(run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str) -> None:
    status, found = _json(capsys, *arguments)
    assert status == 2 and found["error"]["code"] == code


def test_a_path_that_is_no_run_is_told_as_one(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = _json(capsys, "replay", "runs/nope")
    assert found["error"]["message"] == "there is no run directory runs/nope, and no session 'runs'"
    _, found = _json(capsys, "replay", "items.txt")
    assert "takes no archives" in found["error"]["message"]


def test_what_the_model_saw_at_a_step(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = _json(capsys, "sessions", "show", f"{run_dir}:one", "--at", "0.0")
    assert code == 0 and found["request"]["header"]["tools"][0]["name"] == "colour"
    assert len(found["request"]["messages"]) == 1 and len(found["messages"]) == 3
    assert run_command(["sessions", "show", f"{run_dir}:one", "--at", "0.0"]) == 0
    out, err = capsys.readouterr()
    line = "======== above: the request of step 0 of turn 0; below: what came of it"
    assert out.index("at 0.0: 3 messages") < out.index("tools colour") < out.index("See one")
    assert out.index("See one") < out.index(line) < out.index("it is blue")
    assert '[assistant]\ncalls colour({"thing":"it"})\n\n[tool result]\nit is blue\n' in out
    assert "it is seen" not in out and err == ""
    code, found = _json(capsys, "sessions", "show", f"{run_dir}:one", "--at", "0")
    assert code == 0 and len(found["messages"]) == 4 and found["request"] is None
    end = found["seq"]
    code, found = _json(capsys, "sessions", "show", f"{run_dir}:one", "--seq", str(end))
    assert code == 0 and len(found["messages"]) == 4 and found["seq"] == end and found["at"] is None
    code, found = _json(capsys, "sessions", "show", f"{run_dir}:one", "--seq", "5000")
    assert code == 2 and found["error"]["code"] == "request.out_of_range"
    code, found = _json(capsys, "sessions", "show", f"{run_dir}:one", "--seq", "2", "--at", "0")
    assert code == 2 and found["error"]["code"] == "request.conflict"
    code, found = _json(capsys, "sessions", "show", f"{run_dir}:one", "--at", "5.1")
    assert code == 2 and found["error"]["code"] == "session.fork_point_not_found"


def test_a_message_has_one_heading_however_many_blocks_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    from kimi_ray.cli.session_at import print_message

    texts = [{"type": "text", "text": text} for text in ("It was compacted.", "first", "second\x1b", "summary")]
    print_message({"role": "user", "source": {"kind": "compaction"}, "content": texts})
    out = capsys.readouterr().out
    assert out == "[user: stands for what was compacted]\nIt was compacted.\n\nfirst\n\nsecond\\x1b\n\nsummary\n\n"
    blocks = [{"type": "reasoning", "text": "hm"}, {"type": "tool-call", "name": "f", "arguments": "{}"}]
    print_message({"role": "assistant", "content": blocks})
    assert capsys.readouterr().out == "[assistant]\n(reasoning) hm\n\ncalls f({})\n\n"


def test_the_answers_of_a_session_are_a_model(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = _json(capsys, "replay", str(run_dir), "--answers", "answers.jsonl")
    assert code == 0 and found == {"answers": 6, "file": "answers.jsonl"}
    again = "--model recorded:answers.jsonl --tools replay_mine:colour --out again --profile bare --items items.txt"
    assert run_command(["swarm", "See {{item}}", *again.split(), "--address", "in-process"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "again" / "results.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == ["it is seen"] * 3 and {row["tool_calls"] for row in rows} == {1}
    code, found = _json(capsys, "replay", str(run_dir), "--answers", "answers.jsonl")
    assert code != 0, "a file that is there is not written over"
    assert found["error"]["hint"] == "name another file with --answers, or remove that one"
    code, found = _json(capsys, "run", "one more", "--model", "recorded:answers.jsonl", "--address", "in-process")
    assert code == 1 and found["error"]["code"] == "provider.recording_exhausted"
    (tmp_path / "bad.jsonl").write_text('{"agent_id": "main"}\n{"content": [{"type": "image"}]}\n')
    code, found = _json(capsys, "run", "x", "--model", "recorded:bad.jsonl", "--address", "in-process")
    assert found["error"]["code"] == "config.invalid_recording" and found["error"]["details"]["line"] == 2


def test_tools_that_are_not_here_to_be_compared_are_told(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = json.loads((run_dir / "results.jsonl").read_text().splitlines()[0])["session_id"]
    capsys.readouterr()
    assert run_command(["replay", session]) == 0
    out, err = capsys.readouterr()
    assert "as recorded" in out and "form of colour taken from the recording (--tools module:function" in err
    assert "KIMI_RAY_FEATURES=module:Class" in err and "`features`" in err and "not run" not in err
    assert run_command(["replay", session, "--run-tools"]) == 0
    err = capsys.readouterr().err
    assert "not here, and so not run: colour; form of colour taken" in err and "KIMI_RAY_FEATURES=module:Class" in err
    for more in ([], ["--run-tools"]):
        code, found = _json(capsys, "replay", session, *more)
        assert code == 0 and found["ok"] and found["tools_absent"] == ["colour"]
        assert [one["tools_absent"] for one in found["agents"] if one["requests"]] == [["colour"]] * 3
    capsys.readouterr()
    assert run_command(["replay", session, "--tools", "replay_mine:colour"]) == 0
    assert "taken from the recording" not in capsys.readouterr().err
    assert _json(capsys, "replay", str(run_dir))[1]["tools_absent"] == [], "the run names them"


def test_tools_of_servers_are_asked_for_otherwise() -> None:
    from kimi_ray.cli.replay_words import absent_tools

    [own, server] = absent_tools(["count", "mcp__t__add"], run_tools=False)
    assert own.startswith("form of count taken") and "--run-tools" not in own
    assert server == "form of mcp__t__add taken from the recording (--run-tools asks their servers)"
    [server] = absent_tools(["mcp__t__add"], run_tools=True)
    assert server.startswith("not here, and so not run: mcp__t__add; form") and "mcp_servers" in server
    assert absent_tools([], run_tools=True) == []
    assert absent_tools([f"t{n}" for n in range(30)], run_tools=False)[0].startswith("form of t0, t1, ")


def _damage(home: Path, session: str, mark: bytes) -> None:
    """Change one byte of its main agent's log, where a text stands for the last time."""
    [log] = (home / "sessions").glob(f"*/{session}/agents/main/wire*")
    raw = bytearray(log.read_bytes())
    raw[raw.rindex(mark)] ^= 0x01
    log.write_bytes(bytes(raw))


@pytest.fixture
def three_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """A session whose three turns are in three runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KIMI_RAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KIMI_RAY_COMPRESSION", "none")
    (tmp_path / "replay_echo.py").write_text("def model(request):\n    return f'{len(request.messages)} messages'\n")
    where = ["--model", "scripted:replay_echo:model", "--profile", "bare", "--address", "in-process"]
    code, found = _json(capsys, "run", "say one", *where)
    assert code == 0, found
    session = str(found["session_id"])
    for text in ("say two", "say three"):
        assert run_command(["run", text, "--session", session, "--address", "in-process"]) == 0
    capsys.readouterr()
    return session


def test_a_damaged_log_is_not_as_recorded(three_turns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _damage(tmp_path / "home", three_turns, b"say two")
    capsys.readouterr()
    assert run_command(["replay", three_turns]) == 1
    out, err = capsys.readouterr()
    assert "cannot be replayed" in out and "damaged" in out and "nothing could be replayed" in out
    assert "as recorded" not in out + err and "sessions salvage" in err


def test_what_could_be_replayed_is_told_beside_what_could_not(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = json.loads((run_dir / "results.jsonl").read_text().splitlines()[1])["session_id"]
    for log in (tmp_path / "home" / "sessions").glob(f"*/{session}/agents/main/wire*"):
        log.write_bytes(log.read_bytes()[:40])
    capsys.readouterr()
    assert run_command(["replay", str(run_dir)]) == 1
    out, _ = capsys.readouterr()
    assert out.count("cannot be replayed: ") == 1
    assert "agents, 6 requests: as recorded; 1 other agent cannot be replayed" in out


def test_what_the_model_saw_before_the_damage(
    three_turns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {at: _json(capsys, "sessions", "show", three_turns, "--at", at)[1] for at in ("0", "0.0", "1.0")}
    assert whole["0.0"]["damage"] is None
    _damage(tmp_path / "home", three_turns, b"say three")
    for at, before in whole.items():
        code, found = _json(capsys, "sessions", "show", three_turns, "--at", at)
        assert code == 0 and found["damage"]["code"] == "store.corrupt", found
        assert found | {"damage": None} == before
    code, found = _json(capsys, "sessions", "show", three_turns, "--seq", "3")
    assert code == 0 and found["damage"]["code"] == "store.corrupt"
    assert run_command(["sessions", "show", three_turns, "--at", "1.0"]) == 0
    out, err = capsys.readouterr()
    assert "say two" in out and "is damaged" in err and "sessions salvage" in err
    code, found = _json(capsys, "sessions", "show", three_turns, "--at", "2.0")
    assert code == 1 and found["error"]["code"] == "store.corrupt"
