"""The frames: what each row says, from every kind of place, and what becomes of what cannot be read."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kimi_ray import frames
from kimi_ray.errors import KimiRayError
from kimi_ray.exchange import export_session
from kimi_ray.frames import rollouts, schemas
from kimi_ray.runs.rows import AttemptSummary
from kimi_ray.settings import Usage
from kimi_ray.store import open_store
from tests.unit.frames.homes import BACKENDS, Scribe, eventful, pylist, row_of, run_directory, store_logs

DOCS = Path(__file__).parents[3] / "docs"
S = "session_one"


@pytest.fixture(params=[*BACKENDS, "archive"], ids=str)
async def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A source with the eventful log, and its home."""
    home = tmp_path / "home"
    await store_logs(home, [eventful()], BACKENDS[0] if request.param == "archive" else request.param)
    if request.param != "archive":
        return S, home
    await export_session(open_store(home), S, tmp_path / "a.zip")
    return str(tmp_path / "a.zip"), tmp_path / "none"


def test_steps(named: tuple[str, Path]) -> None:
    table = frames.steps(named[0], home=named[1])
    assert pylist(table, "turn", "step", "state", "requests", "retries", "tool_calls", "tool_errors") == [
        (0, 0, "ended", 2, 1, 3, 2),
        (0, 1, "ended", 1, 0, 0, 0),
        (1, 0, "ended", 1, 0, 0, 0),
    ]
    assert pylist(table, "model_ms", "tools_ms", "store_ms") == [(900, 9, 2), (30, 4, 1), (30, 4, 1)]
    assert pylist(table, "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "usage_estimated") == [
        (10, 4, 7, 2, False), (1, 0, 2, 0, True), (5, 0, 1, 0, False)
    ]  # fmt: skip
    assert pylist(table, "model", "finish_reason")[0] == ("small", "tool_calls")
    (first, *_) = table.to_pylist()
    assert (first["session_id"], first["agent_id"], first["parent_agent_id"], first["copied"]) == (
        S,
        "main",
        None,
        False,
    )
    assert (first["ended"] - first["started"]).total_seconds() * 1000 == (first["end_seq"] - first["seq"]) * 10
    assert first["started"].isoformat() == "1970-01-01T00:16:40.030000+00:00"


def test_model_calls(named: tuple[str, Path]) -> None:
    table = frames.model_calls(named[0], home=named[1])
    assert pylist(table, "turn", "step", "request_attempt", "outcome", "error_code", "retry_delay_ms") == [
        (0, 0, 1, "failed", "provider.overloaded", 250),
        (0, 0, 2, "answered", None, None),
        (0, 1, 1, "answered", None, None),
        (1, 0, 1, "cut", None, None),
    ]
    failed, answered, *_ = table.to_pylist()
    assert (failed["error_class"], failed["error_message"], failed["http_status"]) == ("provider", "busy", 503)
    assert failed["input_tokens"] is None and failed["message_seq"] is None
    assert (answered["model"], answered["request_model"], answered["provider"]) == ("small", "small-wire", "openai")
    assert (answered["served_model"], answered["response_id"], answered["finish_reason"]) == (
        "served",
        "r2",
        "tool_calls",
    )
    assert (answered["total_ms"], answered["ttft_ms"], answered["limiter_ms"], answered["connect_ms"]) == (30, 5, 2, 1)
    assert (answered["ended"] - answered["started"]).total_seconds() == 0.03
    assert (answered["input_tokens"], answered["cache_write_tokens"], answered["usage_estimated"]) == (10, 1, False)
    assert set(pylist(table, "purpose")) == {"step"}


def test_tool_calls(named: tuple[str, Path]) -> None:
    table = frames.tool_calls(named[0], home=named[1])
    assert pylist(table, "index", "call_id", "name", "arguments", "status", "error_code", "exit_code") == [
        (0, "c1", "Read", '{"path":"a"}', "ok", None, None),
        (1, "c2", "Bash", "not json", "error", "tool.bad_arguments", 3),
        (2, "c3", "Read", "{}", "not_started", "tool.not_started", None),
    ]
    assert pylist(table, "result", "result_bytes", "run_ms", "queued_ms")[0] == ("the file", 8, 7, 1)
    refused = table.to_pylist()[2]
    assert refused["call_seq"] is None and refused["started"] is None and refused["ended"] is not None
    assert refused["recovered"] is False and len(set(pylist(table, "asked_seq"))) == 1


def test_messages(named: tuple[str, Path]) -> None:
    table = frames.messages(named[0], home=named[1])
    assert pylist(table, "role", "source", "text", "is_error", "interrupted") == [
        ("user", "user", "first, ünïcödé 🦆", None, False),
        ("assistant", "model", "look", None, False),
        ("tool", "tool", "the file", False, False),
        ("tool", "tool", "no", True, False),
        ("tool", "tool", "This tool call was not started", True, False),
        ("assistant", "model", "done", None, False),
        ("user", "user", "second", None, False),
        ("assistant", "model", "so fa", None, True),
    ]
    asked = table.to_pylist()[1]
    assert asked["reasoning"] == "hm" and [one["id"] for one in json.loads(asked["tool_calls"])] == ["c1", "c2", "c3"]
    assert pylist(table, "turn", "step") == [*[(0, 0)] * 5, (0, 1), (1, 0), (1, 0)]
    assert pylist(table, "call_id")[2:5] == ["c1", "c2", "c3"]


def test_rows_of_a_log(named: tuple[str, Path]) -> None:
    (row,) = frames.rows(named[0], home=named[1]).to_pylist()
    assert (row["status"], row["stop"], row["error_code"], row["text"]) == (
        "cancelled",
        "cancelled",
        "turn.cancelled",
        "so fa",
    )
    assert (row["turns"], row["steps"], row["tool_calls"], row["attempts"], row["source"]) == (2, 3, 2, 1, "log")
    assert (row["input_tokens"], row["output_tokens"], row["total_tokens"]) == (16, 10, 16 + 10 + 4 + 1)
    assert row["last_seq"] == len(eventful().events) - 1 and row["model"] == "small"


# -- the contract ---------------------------------------------------------------------------------------------------


def test_columns_are_those_of_the_docs() -> None:
    page = (DOCS / "frames.md").read_text()
    for frame in frames.FRAMES:
        section = page.split(f"### `{frame}`", 1)[1].split("\n### ", 1)[0].split("\n## ", 1)[0]
        told = re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \| ([^|]*) \|$", section, re.MULTILINE)
        assert [(name, type_, doc) for name, type_, doc in told] == [tuple(one) for one in frames.columns(frame)], frame


def test_tables_have_their_columns_also_when_they_are_empty(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", None)
    found = frames.tables(run)
    assert list(found) == list(frames.FRAMES)
    for name, table in found.items():
        assert table.num_rows == 0
        assert table.column_names == [one.name for one in frames.columns(name)]
        assert [str(field.type) for field in table.schema] == [
            str(schemas.arrow_type(pa, one.type)) for one in frames.columns(name)
        ]
        assert table.schema.metadata[b"kimi_ray.frames_version"] == b"1"
        assert frames.problems(table) == []


async def test_a_run_of_which_no_rollout_has_ended(tmp_path: Path) -> None:
    """Its directory names no log: the headers of the logs name the run."""
    home = tmp_path / "home"
    mine = Scribe("session_one", "agent-1", run_id="run_a", item_id="a", repeat=0, attempt=1)
    other = Scribe("session_one", "agent-2", run_id="run_b", item_id="a", repeat=0, attempt=1)
    for log in (mine, other):
        log.turn()
        log.step()
        log.user("x")
    await store_logs(home, [mine, other])
    run = run_directory(tmp_path / "run", home)
    found = frames.tables(run)
    assert found["rows"].num_rows == 0 and pylist(found["steps"], "agent_id", "state") == [("agent-1", "open")]
    assert frames.tables(run_directory(tmp_path / "none", tmp_path / "gone"))["steps"].num_rows == 0


def test_places_in_a_row_are_those_of_the_columns() -> None:
    names = [one.name for one in frames.columns("rows")]
    places = (rollouts._ATTEMPTS, rollouts._TEXT, rollouts._TOTAL_TOKENS, rollouts._TOTAL_COST)
    assert [names[at] for at in places] == ["attempts", "text", "total_tokens", "total_cost_usd"]


@pytest.mark.parametrize("source", ["", "no such thing", "a\0b", 7, [None], "../x/y/z", "session_one/../x"])
def test_what_names_nothing(tmp_path: Path, source: Any) -> None:
    with pytest.raises(KimiRayError) as caught:
        frames.steps(source, home=tmp_path)
    assert caught.value.code in ("frames.bad_source", "store.not_found") and caught.value.hint


async def test_names_that_are_unknown(tmp_path: Path) -> None:
    await store_logs(tmp_path / "home", [eventful()])
    for source, code in {
        "session_two": "session.not_found",
        f"{S}/agent-7": "agent.not_found",
        "session_two/agent-7": "session.not_found",
        "runs/nope": "run.not_found",
        "run_zzz": "request.unknown_id",
        str(tmp_path): "run.not_found",
    }.items():
        with pytest.raises(KimiRayError) as caught:
            frames.steps(source, home=tmp_path / "home")
        assert caught.value.code == code and caught.value.hint
    with pytest.raises(KimiRayError, match=r"frames\.unknown"):
        frames.tables(S, ["stepz"], home=tmp_path / "home")
    with pytest.raises(KimiRayError, match=r"request\.invalid"):
        frames.steps(S, home=tmp_path / "home", on_damage="ignore")  # type: ignore[arg-type]
    (tmp_path / "x.zip").write_bytes(b"PK nothing")
    with pytest.raises(KimiRayError, match=r"export\.not_an_archive"):
        frames.steps(tmp_path / "x.zip")


# -- runs -----------------------------------------------------------------------------------------------------------


def rollout(item: str, agent: str, *, attempt: int = 1, run: str = "run_a", session: str = S) -> Scribe:
    log = Scribe(session, agent, run_id=run, item_id=item, repeat=0, attempt=attempt, origin="subagent")
    log.bind()
    log.plain_turn(item)
    return log


async def test_a_run(tmp_path: Path) -> None:
    home = tmp_path / "home"
    main, other = Scribe(), rollout("a", "agent-3", run="run_b")
    main.plain_turn("main")
    child = Scribe(S, "agent-4", parent={"session_id": S, "agent_id": "agent-2"})
    child.plain_turn("child of a rollout")
    lost = rollout("a", "agent-1", attempt=1)
    await store_logs(home, [main, lost, rollout("a", "agent-2", attempt=2), other, child])
    summaries = tuple(
        AttemptSummary(
            attempt=n, seed=n, status="completed", stop="completed", usage=Usage(input=5, output=n), cost_usd=0.5
        )
        for n in (1, 2)
    )
    row = row_of(
        "a", attempt=2, session_id=S, agent_id="agent-2", attempts=summaries, cost_usd=0.5, seed=2,
        scores={"right": 1.0}, output={"value": [1]}, usage=Usage(input=5, output=2), tags={"k": "ü"},
    )  # fmt: skip
    run = run_directory(tmp_path / "run", home, [row])
    (told,) = frames.rows(run).to_pylist()
    assert (told["attempt"], told["attempts"], told["total_tokens"], told["cost_usd"], told["total_cost_usd"]) == (
        2,
        2,
        13,
        0.5,
        1.0,
    )
    assert json.loads(told["scores"]) == {"right": 1.0} and json.loads(told["item"]) == {"name": "a"}
    assert json.loads(told["output"]) == {"value": [1]} and json.loads(told["tags"]) == {"k": "ü"}
    # all attempts of the run and what is below them; neither main nor another run of the session
    assert pylist(frames.steps(run), "agent_id", "parent_agent_id", "item_id", "attempt") == [
        ("agent-1", "main", "a", 1),
        ("agent-2", "main", "a", 2),
        ("agent-4", "agent-2", None, None),
    ]
    # named twice, it comes once; the session adds what the run has not
    assert frames.steps([run, str(run), "run_a"], home=home).num_rows == 3
    assert frames.steps([run, S], home=home).num_rows == 5
    both = frames.rows([run, S], home=home)
    assert sorted(pylist(both, "agent_id", "source")) == [
        ("agent-1", "log"), ("agent-2", "results"), ("agent-3", "log"), ("agent-4", "log"), ("main", "log"),
    ]  # fmt: skip
    assert frames.tables([run, S], home=home)["rows"].num_rows == 5
    assert frames.tables(run, home=home)["rows"].num_rows == 1


async def test_a_run_without_its_directory(tmp_path: Path) -> None:
    await store_logs(tmp_path, [rollout("a", "agent-1"), rollout("a", "agent-2", attempt=2), rollout("b", "agent-3")])
    found = frames.rows("run_a", home=tmp_path)
    assert pylist(found, "item_id", "attempt", "attempts", "agent_id", "total_tokens", "status") == [
        ("a", 2, 2, "agent-2", 44, "completed"),
        ("b", 1, 1, "agent-3", 22, "completed"),
    ]


async def test_several_runs_with_one_key(tmp_path: Path) -> None:
    home = tmp_path / "home"
    one, two = rollout("a", "agent-1"), rollout("a", "agent-1", run="run_b", session="session_two")
    await store_logs(home, [one, two])
    runs = [
        run_directory(tmp_path / name, home, [row_of("a", run=name, session_id=session, agent_id="agent-1")], run=name)
        for name, session in (("run_a", S), ("run_b", "session_two"))
    ]
    assert pylist(frames.rows(runs), "run_id", "item_id") == [("run_a", "a"), ("run_b", "a")]
    assert pylist(frames.steps(runs), "run_id", "item_id", "session_id") == [
        ("run_a", "a", S),
        ("run_b", "a", "session_two"),
    ]


def test_rows_without_logs(tmp_path: Path) -> None:
    rows = [row_of("a", session_id=S, agent_id="agent-1"), row_of("b", status="not_started", stop="fail_on", attempt=0)]
    run = run_directory(tmp_path / "run", tmp_path / "gone", rows)
    assert pylist(frames.rows(run), "item_id", "status") == [("a", "completed"), ("b", "not_started")]
    with pytest.raises(KimiRayError) as caught:
        frames.steps(run)
    assert caught.value.code == "store.not_found" and str(run) in caught.value.message
    skipped = frames.steps(run, on_damage="skip")
    assert skipped.num_rows == 0 and [one["code"] for one in frames.problems(skipped)] == ["store.not_found"]


async def test_a_log_that_is_gone_from_its_home(tmp_path: Path) -> None:
    await store_logs(tmp_path / "home", [rollout("a", "agent-1")])
    rows = [row_of("a", session_id=S, agent_id="agent-1"), row_of("b", 1, session_id=S, agent_id="agent-2")]
    run = run_directory(tmp_path / "run", tmp_path / "home", rows)
    with pytest.raises(KimiRayError, match="1 logs that"):
        frames.tool_calls(run)
    table = frames.steps(run, on_damage="skip")
    assert pylist(table, "agent_id") == ["agent-1"]
    assert frames.problems(table)[0]["details"]["logs"] == [f"{S}/agent-2"]


def test_damaged_rows(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", None, [row_of("a"), row_of("b", 1)])
    results = run / "results.jsonl"
    results.write_bytes(results.read_bytes() + b'{"v":1}\n' + row_of("c", 2).to_line() + b'{"torn":')
    with pytest.raises(KimiRayError) as caught:
        frames.rows(run)
    assert (caught.value.code, caught.value.details["line"]) == ("run.bad_row", 3)
    table = frames.rows(run, on_damage="skip")
    assert pylist(table, "item_id") == ["a", "b", "c"]
    assert [(one["code"], one["details"]["line"]) for one in frames.problems(table)] == [("run.bad_row", 3)]


# -- damage in logs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=str)
async def test_a_damaged_log_ends_where_it_is_damaged(tmp_path: Path, backend: tuple[str, str]) -> None:
    long = Scribe(S, "agent-1")
    for n in range(400):
        long.plain_turn(f"turn {n} {'x' * 50}")
    whole = Scribe()
    whole.plain_turn()
    await store_logs(tmp_path, [whole, long], backend)
    (file,) = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and path.parent.name == "agent-1" and path.stat().st_size > 9000
    ]
    raw = bytearray(file.read_bytes())
    raw[len(raw) * 2 // 3] ^= 0x55
    file.write_bytes(bytes(raw))
    with pytest.raises(KimiRayError) as caught:
        frames.steps(S, home=tmp_path)
    assert caught.value.code == "store.corrupt"
    assert (caught.value.details["session_id"], caught.value.details["agent_id"]) == (S, "agent-1")
    table = frames.steps(S, home=tmp_path, on_damage="skip")
    counts = pylist(table, "agent_id").count("agent-1")
    assert pylist(table, "agent_id").count("main") == 1 and 0 < counts < 400
    (problem,) = frames.problems(table)
    assert problem["details"]["ends_here"] is True and problem["details"]["agent_id"] == "agent-1"
    # an archive of it has as much, and knows
    manifest = await export_session(open_store(tmp_path), S, tmp_path / "a.zip")
    assert not manifest["ok"]
    kept = frames.steps(tmp_path / "a.zip", on_damage="skip")
    assert kept.to_pylist() == table.to_pylist()
    assert [one["details"]["agent_id"] for one in frames.problems(kept)] == ["agent-1"]
    raw = bytearray((tmp_path / "a.zip").read_bytes())
    raw[len(raw) // 3] ^= 0x55  # in the middle of what is packed
    (tmp_path / "b.zip").write_bytes(bytes(raw))
    broken = frames.steps(tmp_path / "b.zip", on_damage="skip")
    assert any(one["code"] == "store.corrupt" and "b.zip" in one["message"] for one in frames.problems(broken))


async def test_an_event_of_another_shape_is_passed_over(tmp_path: Path) -> None:
    log = Scribe()
    log.plain_turn("one")
    log.turn()
    log.step()
    log.raw("llm/response", {"turn": "?", "step": {}, "attempt": 1, "timing": 7})
    log.raw("tool/call", {"turn": 1, "step": 0, "call_id": "c9", "name": "Read", "arguments": "{}"})
    log.end()
    log.plain_turn("two")
    await store_logs(tmp_path, [log])
    with pytest.raises(KimiRayError, match=r"log\.bad_payload|frames\.bad_value"):
        frames.model_calls(S, home=tmp_path)
    table = frames.model_calls(S, home=tmp_path, on_damage="skip")
    assert table.num_rows >= 2 and frames.problems(table)
    assert pylist(frames.tool_calls(S, home=tmp_path), "call_id", "status") == [("c9", "open")]


async def test_an_archive_that_spells_its_events_otherwise(tmp_path: Path) -> None:
    await store_logs(tmp_path / "home", [eventful()])
    await export_session(open_store(tmp_path / "home"), S, tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as made, zipfile.ZipFile(tmp_path / "b.zip", "w") as spelled:
        for name in made.namelist():
            content = made.read(name)
            if name.endswith(".jsonl"):
                header, *lines = content.splitlines()
                odd = [json.dumps(dict(reversed(json.loads(line).items()))).encode() for line in lines]
                content = b"\n".join([header, odd[0], b"no event", *odd[1:]]) + b"\n"
            spelled.writestr(name, content)
    table = frames.tool_calls(tmp_path / "b.zip", on_damage="skip")
    assert table.to_pylist() == frames.tool_calls(tmp_path / "a.zip").to_pylist()
    assert [one["code"] for one in frames.problems(table)] == ["log.not_json"]


async def test_a_value_of_another_type_is_null_and_told(tmp_path: Path) -> None:
    log = Scribe()
    log.turn()
    log.step()
    log.response(http_status="many", finish_reason="stop")
    log.end()
    await store_logs(tmp_path, [log])
    table = frames.model_calls(S, home=tmp_path, on_damage="skip")
    assert pylist(table, "http_status", "finish_reason") == [(None, "stop")]
    assert [one["details"]["column"] for one in frames.problems(table)] == ["http_status"]


async def test_blobs_and_huge_texts(tmp_path: Path) -> None:
    huge = "🦆" * 300_000
    log = Scribe()
    log.turn()
    log.step()
    log.user([{"type": "text", **log.blob(huge)}, {"type": "text", "text": "and this"}, {"type": "image", "url": "x"}])
    log.response(finish_reason="tool_calls")
    log.answer("", ("c1", "Read", "{}"))
    log.call("c1", "Read", log.blob('{"a":1}'))
    log.result("c1", "a preview", full=log.blob("z" * 20_000))
    log.user({"$blob": "sha256:" + "0" * 64, "bytes": 3})
    log.end()
    await store_logs(tmp_path, [log])
    with pytest.raises(KimiRayError, match=r"store\.blob_missing"):
        frames.messages(S, home=tmp_path)
    table = frames.messages(S, home=tmp_path, on_damage="skip")
    assert pylist(table, "text", "images") == [(f"{huge}\nand this", 1), (None, 0), ("a preview", 0), (None, 0)]
    assert [one["code"] for one in frames.problems(table)] == ["store.blob_missing"]
    assert pylist(frames.tool_calls(S, home=tmp_path), "arguments", "result", "result_bytes") == [
        ("{}", "a preview", 20_000)
    ]


# -- forks, cuts, recovery, imports -----------------------------------------------------------------------------------


async def test_a_fork_counts_its_own_events(tmp_path: Path) -> None:
    source = Scribe()
    source.bind()
    source.plain_turn("one")
    fork = Scribe("session_two", "main", seed_length=len(source.events) + 1, origin="fork",
                  forked_from={"session_id": S, "agent_id": "main"}, bind={"model": "large"})  # fmt: skip
    for event in source.events:
        fork.adopt(event)
    fork.add("log/end-seed")
    fork.plain_turn("two")
    await store_logs(tmp_path, [source, fork])
    both = [S, "session_two"]
    assert pylist(frames.steps(both, home=tmp_path), "session_id", "copied", "model", "turn") == [
        (S, False, "small", 0),
        ("session_two", False, "large", 1),
    ]
    with_copies = frames.model_calls("session_two", home=tmp_path, copied=True)
    assert pylist(with_copies, "copied", "model", "turn") == [(True, "small", 0), (False, "large", 1)]
    assert frames.messages("session_two", home=tmp_path, copied=True).num_rows == 4
    (row,) = frames.rows("session_two", home=tmp_path).to_pylist()
    assert (row["turns"], row["model"]) == (1, "large")


async def test_what_the_model_sees_no_more(tmp_path: Path) -> None:
    log = Scribe()
    log.plain_turn("one")
    first, last = log.log.surface.seqs
    log.user("a summary", kind="compaction", surface={"replace": [first, last]}, sources=[first, last])
    at = log.log.surface.seqs[0]
    log.log.append("surface/cut", {"reason": "undo", "prompts": []}, surface={"replace": [at, at]}, sources=[at])
    await store_logs(tmp_path, [log])
    table = frames.messages(S, home=tmp_path)
    assert pylist(table, "role", "source", "replaces") == [
        ("user", "user", None),
        ("assistant", "model", None),
        ("user", "compaction", [first, last]),
        ("cut", "undo", [at]),
    ]
    gone = {seq for one in pylist(table, "replaces") if one for seq in one}
    assert [row["role"] for row in table.to_pylist() if row["seq"] not in gone] == ["cut"]


async def test_a_log_whose_process_was_lost(tmp_path: Path) -> None:
    log = Scribe()
    log.turn()
    log.step()
    log.response(finish_reason="tool_calls")
    log.answer("", ("c1", "Bash", "{}"), ("c2", "Bash", "{}"))
    log.call("c1", "Bash", "{}")
    log.result("c1", "interrupted", error="tool.interrupted", recovered_at=5)
    log.result("c2", "interrupted", error="tool.interrupted", recovered_at=5)
    log.step_end(recovered_at=5)
    log.end("interrupted", recovered_at=5)
    log.turn()
    log.step()
    log.answer("", ("c3", "Bash", "{}"))
    log.call("c3", "Bash", "{}")
    await store_logs(tmp_path, [log])
    assert pylist(frames.steps(S, home=tmp_path), "state", "ended")[1] == ("open", None)
    assert pylist(frames.steps(S, home=tmp_path), "state") == ["recovered", "open"]
    assert pylist(frames.tool_calls(S, home=tmp_path), "call_id", "status", "recovered") == [
        ("c1", "error", True), ("c2", "not_started", True), ("c3", "open", None),
    ]  # fmt: skip
    (row,) = frames.rows(S, home=tmp_path).to_pylist()
    assert (row["status"], row["interruptions"]) == ("open", 1)


async def test_a_log_without_responses_and_a_compaction(tmp_path: Path) -> None:
    log = Scribe()
    log.turn()
    log.step()
    log.answer("hi", usage={"input": 3, "output": 4})
    log.end()
    log.add("compaction/start", compaction_id="k")
    log.add("compaction/summary", compaction_id="k", summary=[], shadowed_range={}, shadowed_seqs=[], shadowed_tokens=1,
            model="sum", usage={"input": 9, "output": 2})  # fmt: skip
    log.add("compaction/end", compaction_id="k")
    failure = {"code": "provider.overloaded", "message": "busy", "retryable": True}
    for attempt, told in ((1, {"error": failure}), (2, {"finish_reason": "stop", "usage": {"input": 8, "output": 1}})):
        asked = {"compaction_id": "n", "attempt": attempt, "provider": "openai", "model": "sum-wire", "message": {}}
        log.raw("compaction/request", asked)
        log.raw("compaction/response", {"compaction_id": "n", "attempt": attempt, "timing": {"total_ms": 3}, **told})
    log.raw("compaction/summary", {"compaction_id": "n", "model": "sum", "usage": {"input": 8, "output": 1}})
    await store_logs(tmp_path, [log])
    table = frames.model_calls(S, home=tmp_path)
    assert pylist(table, "purpose", "outcome", "turn", "input_tokens", "request_attempt", "model") == [
        ("step", "answered", 0, 3, None, None),
        ("compaction", "answered", None, 9, None, "sum"),
        ("compaction", "failed", None, None, 1, None),
        ("compaction", "answered", None, 8, 2, None),
    ]
    assert pylist(table, "request_model", "total_ms")[2:] == [("sum-wire", 3)] * 2
    assert pylist(frames.steps(S, home=tmp_path), "requests", "output_tokens") == [(1, 4)]
