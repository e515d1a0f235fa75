"""Conversations for others: OpenAI messages, ShareGPT, ATIF; the last held against a validator that is not ours."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.exchange import Wanted, export_conversations
from kimi_ray.store import open_store
from tests.unit.frames.homes import BACKENDS, USAGE, Scribe, store_logs

S = "session_one"
TOOLS = [{"name": "Read", "description": "Reads.", "parameters": {"type": "object"}}]


def worked() -> Scribe:
    """Two turns with tools; a subagent; a long prompt and a system prompt that are kept as blobs."""
    log = Scribe()
    log._unsaid = {
        "provider": "openai", "model": "m-wire", "system": log.blob("You read. " * 80),
        "tools": log.blob(json.dumps(TOOLS)),
    }  # fmt: skip
    log.turn()
    log.step()
    log.user([{"type": "text", **log.blob("ü" * 20_000)}])
    log.response(1, error={"code": "provider.overloaded", "message": "busy", "retryable": True})
    log.response(2, finish_reason="tool_calls", usage=USAGE)
    thought = {"type": "reasoning", "text": "hm"}
    log.answer(
        [thought, {"type": "text", "text": "look"}], ("c1", "Read", '{"path":"a"}'), ("c2", "Read", "oops"), attempt=2
    )
    log.call("c1", "Read", '{"path":"a"}')
    log.add("subagent/spawned", agent_id="agent-1", call_id="c1")
    log.result("c1", "the file", run_ms=7)
    log.result("c2", "bad", error="tool.bad_arguments")
    log.step_end()
    log.step()
    log.response(finish_reason="stop", usage={"input": 1, "output": 2})
    log.answer("done", attempt=1)
    log.end()
    log.plain_turn("more")
    return log


def child() -> Scribe:
    log = Scribe(S, "agent-1", parent={"session_id": S, "agent_id": "main"}, origin="subagent")
    log.bind()
    log.plain_turn("a part")
    return log


async def lines(home: Path, format: Any, wanted: Any = S) -> tuple[list[Any], Any]:
    out = io.BytesIO()
    report = await export_conversations(open_store(home), wanted, format, out)
    return [json.loads(line) for line in out.getvalue().splitlines()], report


def valid(trajectory: Any) -> Any:
    atif = pytest.importorskip("atif")
    return atif.Trajectory.model_validate(trajectory)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
async def test_openai(tmp_path: Path, backend: tuple[str, str]) -> None:
    await store_logs(tmp_path, [worked(), child()], backend)
    (main, other), report = await lines(tmp_path, "openai")
    assert report.ok and report.conversations == 2
    assert [one["role"] for one in main["messages"]] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip
    system, user, asked, first, second, *_ = main["messages"]
    assert system["content"] == "You read. " * 80 and user["content"] == "ü" * 20_000
    assert asked["reasoning_content"] == "hm" and asked["content"] == "look"
    assert asked["tool_calls"][0]["function"] == {"name": "Read", "arguments": '{"path":"a"}'}
    assert json.loads(asked["tool_calls"][1]["function"]["arguments"]) == {"malformed_arguments": "oops"}
    assert first == {"role": "tool", "tool_call_id": "c1", "content": "the file"} and second["content"] == "ERROR: bad"
    assert main["tools"] == [{"type": "function", "function": TOOLS[0]}]
    assert main["metadata"] == {"session_id": S, "agent_id": "main", "model": "m-wire"}
    assert [one["content"] for one in other["messages"]] == ["a part", "did a part"] and "tools" not in other


async def test_sharegpt(tmp_path: Path) -> None:
    await store_logs(tmp_path, [worked()])
    (line,), _ = await lines(tmp_path, "sharegpt")
    assert line["id"] == f"{S}/main" and json.loads(line["tools"])[0]["function"]["name"] == "Read"
    turns = line["conversations"]
    assert [one["from"] for one in turns] == ["system", "human", "gpt", "tool", "gpt", "human", "gpt"]
    assert turns[2]["value"] == (
        '<think>\nhm\n</think>\nlook\n<tool_call>\n{"name":"Read","arguments":{"path":"a"}}\n</tool_call>\n'
        '<tool_call>\n{"name":"Read","arguments":{"malformed_arguments":"oops"}}\n</tool_call>'
    )
    assert turns[3]["value"].count("<tool_response>") == 2 and '"is_error":true' in turns[3]["value"]


async def test_atif(tmp_path: Path) -> None:
    await store_logs(tmp_path, [worked(), child()])
    (trajectory,), report = await lines(tmp_path, "atif")
    assert report.ok and report.conversations == 1
    steps = trajectory["steps"]
    assert [one["source"] for one in steps] == ["system", "user", "agent", "agent", "user", "agent"]
    agent = steps[2]
    assert agent["metrics"]["prompt_tokens"] == 15 and agent["metrics"]["cached_tokens"] == 4
    assert agent["extra"]["failed_attempts"] == 1 and agent["reasoning_content"] == "hm"
    first, second = agent["observation"]["results"]
    assert first["content"] == "the file" and first["subagent_trajectory_ref"][0]["trajectory_id"] == f"{S}/agent-1"
    assert second["extra"]["error"] == {"code": "tool.bad_arguments"}
    assert trajectory["final_metrics"]["total_completion_tokens"] == 7 + 2 + 7
    assert [one["trajectory_id"] for one in trajectory["subagent_trajectories"]] == [f"{S}/agent-1"]
    found = valid(trajectory)
    assert len(found.steps) == 6 and found.subagent_trajectories[0].steps[0].message == "a part"


async def test_the_tokens_of_summaries_stand_beside_those_of_the_steps(tmp_path: Path) -> None:
    log = Scribe()
    log.bind()
    log.plain_turn("one")
    usage = {"input": 100, "cached": 30, "output": 9}
    opened = {"trigger": "manual", "shadowed_range": {}, "tokens": 1}
    log.add("compaction/start", compaction_id="k", **opened)
    log.add("compaction/response", compaction_id="k", attempt=1, error={"code": "x"}, usage={"input": 1}, timing={})
    log.add("compaction/response", compaction_id="k", attempt=2, usage=usage, timing={})
    told = {"summary": [], "shadowed_range": {}, "shadowed_seqs": [], "shadowed_tokens": 1}
    log.add("compaction/summary", compaction_id="k", usage=usage, **told)
    log.add("compaction/end", compaction_id="k")
    log.add("compaction/start", compaction_id="other", **opened)
    log.add("compaction/summary", compaction_id="other", usage={"input": 5, "output": 2}, **told)
    await store_logs(tmp_path, [log])
    (trajectory,), _ = await lines(tmp_path, "atif")
    (step,) = [one for one in trajectory["steps"] if one["source"] == "agent"]
    found = trajectory["final_metrics"]
    assert found.get("total_completion_tokens") == step.get("metrics", {}).get("completion_tokens")
    paid = {"prompt_tokens": 136, "completion_tokens": 11, "cached_tokens": 30}
    assert found["extra"] == {"compactions": {"count": 2, **paid}}


async def test_the_system_prompt_comes_first(tmp_path: Path) -> None:
    log = Scribe()
    log.turn()
    first = log.user("an old prompt")
    log.user("the prompt", kind="compaction", surface={"replace": [first.seq, first.seq]}, sources=[first.seq])
    log._unsaid = {"provider": "openai", "model": "m", "system": "Be brief."}
    log.step()
    log.answer("yes")
    log.end()
    log._unsaid = {"provider": "openai", "model": "m", "system": "Be long."}
    log.plain_turn("more")
    await store_logs(tmp_path, [log])
    (trajectory,), _ = await lines(tmp_path, "atif")
    steps = valid(trajectory).steps
    assert [one.message for one in steps] == [
        "Be brief.", "an old prompt", "the prompt", "yes", "Be long.", "more", "did more",
    ]  # fmt: skip
    assert steps[2].extra["replaced_steps"] == [2]


async def test_atif_of_a_compaction_an_undo_and_a_fork(tmp_path: Path) -> None:
    source = Scribe()
    source.bind()
    source.plain_turn("one")
    fork = Scribe("session_two", "main", seed_length=len(source.events) + 1, origin="fork",
                  forked_from={"session_id": S, "agent_id": "main"})  # fmt: skip
    for event in source.events:
        fork.adopt(event)
    fork.add("log/end-seed")
    first, last = fork.log.surface.seqs
    fork.user("the summary", kind="compaction", surface={"replace": [first, last]}, sources=[first, last])
    fork.plain_turn("two")
    nodes = fork.log.surface.seqs[1:]
    fork.log.append(
        "surface/cut", {"reason": "undo", "prompts": []}, surface={"replace": [nodes[0], nodes[-1]]}, sources=nodes
    )
    fork.turn()
    fork.step()
    fork.user(
        [{"type": "image", "url": "https://x/y.png", "media_type": "image/png"}, {"type": "image", "data": "AA=="}]
    )
    fork.answer("so fa", ("c9", "Read", "{}"), attempt=1, interrupted=True)
    await store_logs(tmp_path, [fork])
    (trajectory,), report = await lines(tmp_path, "atif", "session_two")
    assert report.ok
    steps = valid(trajectory).steps
    assert [one.is_copied_context for one in steps] == [True, True, *[None] * 6]
    assert steps[2].source == "system" and steps[2].extra == {
        "kind": "compaction",
        "role": "user",
        "replaced_steps": [1, 2],
    }
    assert steps[5].extra == {"kind": "undo", "replaced_steps": [4, 5]}
    assert [part.type for part in steps[6].message] == ["image", "text"]
    assert steps[7].extra["interrupted"] and steps[7].observation is None
    assert trajectory["final_metrics"]["total_completion_tokens"] == 7
    # what the model sees is another thing: the summary, and what came behind the undo
    (openai,), _ = await lines(tmp_path, "openai", "session_two")
    assert next(one["content"] for one in openai["messages"] if isinstance(one["content"], str)) == "the summary"
    assert openai["messages"][-1]["role"] == "tool"  # the call that has no result says so, as on the wire


async def test_what_cannot_be_read_is_told_and_the_rest_is_there(tmp_path: Path) -> None:
    log = worked()
    del log.blobs[next(iter(log.blobs))]  # the system prompt
    await store_logs(tmp_path, [log, child()])
    wanted = [
        Wanted(session_id=S, agent_id="main", facts={"scores": {"right": 1}}),
        Wanted(session_id=S, agent_id="agent-9"),
    ]
    found, report = await lines(tmp_path, "openai", wanted)
    assert not report.ok and [one["code"] for one in report.problems] == ["store.blob_missing", "agent.not_found"]
    assert found[0]["messages"][0]["content"] == "(this content is lost)"
    assert found[0]["metadata"]["scores"] == {"right": 1}
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name == "agent-1"]
    raw = bytearray(file.read_bytes())
    raw[-200] ^= 0x55
    file.write_bytes(bytes(raw))
    for form in ("openai", "sharegpt", "atif"):
        found, report = await lines(tmp_path, form)
        assert found and not report.ok
        assert {one["details"].get("agent_id") for one in report.problems if one["code"] == "store.corrupt"} == {
            "agent-1"
        }


async def test_an_event_of_another_shape(tmp_path: Path) -> None:
    log = worked()
    log.raw("request/header", {"header": {"system": ["?"], "tools": "all", "model": 7}})
    odd = child()
    odd.raw("turn/start", {"turn": 1, "prompts": []})
    odd.raw("llm/response", {"usage": 7})
    odd.raw("request/header", {"header": "?"})
    await store_logs(tmp_path, [log, odd])
    found, report = await lines(tmp_path, "openai")
    assert len(found) == 1 and "tools" not in found[0]
    assert [(one["code"], one["details"]["agent_id"]) for one in report.problems] == [("log.bad_payload", "agent-1")]
    assert found[0]["messages"][0]["role"] == "user"
    ((trajectory,), report) = await lines(tmp_path, "atif")
    assert [one["code"] for one in report.problems] == ["log.bad_payload"]
    assert "subagent_trajectories" not in trajectory and "subagent_trajectory_ref" not in json.dumps(trajectory)
    valid(trajectory)


async def test_refusals(tmp_path: Path) -> None:
    await store_logs(tmp_path / "home", [child()])
    store = open_store(tmp_path / "home")
    for wanted, form, path, code in (
        (S, "csv", "a", "export.unknown_format"),
        ("session_two", "atif", "a", "session.not_found"),
        (S, "atif", "no/such/place", "export.failed"),
    ):
        with pytest.raises(KimiRayError) as caught:
            await export_conversations(store, wanted, form, tmp_path / path)  # type: ignore[arg-type]
        assert caught.value.code == code and caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    await export_conversations(store, S, "atif", tmp_path / "a")
    with pytest.raises(KimiRayError, match=r"export\.exists"):
        await export_conversations(store, S, "atif", tmp_path / "a")
    # without main, each agent stands by itself
    assert len((tmp_path / "a").read_bytes().splitlines()) == 1
