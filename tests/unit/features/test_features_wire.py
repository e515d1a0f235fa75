"""What hooks, blocked and steered prompts, tasks and long results put on the wire is in the log, all of it."""

from __future__ import annotations

import asyncio
import json
from copy import copy
from pathlib import Path

import pytest

from kimi_ray.events import SessionEvent, thaw
from kimi_ray.llm.models import ModelSettings
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Profile
from kimi_ray.store import ReadStore, open_store
from kimi_ray.tools import tool
from tests.model_server import Body, CountingProxy, ModelServer, Reply, unpaired_calls
from tests.unit.runtime_fixtures import FAST
from tests.unit.test_runtime_wire import canonical, wire_bodies

WORKER = Profile(
    name="worker", tools=("Read", "Grep", "Write", "Bash", "TaskList", "TaskOutput", "TaskStop", "WaitFor", "TodoList")
)
GO_ON = '{"command": "echo in the background", "run_in_background": true, "description": "work"}'


@tool
def flood() -> str:
    """Say a lot."""
    return "a line of many, é\n" * 5000


def answer(body: Body, _times: int) -> Reply:
    """By what the last prompt says: calls at first, then a text."""
    messages = body["messages"]
    prompts = [at for at, one in enumerate(messages) if one["role"] == "user" and str(one["content"])[:1] == "!"]
    said = str(messages[prompts[-1]]["content"])
    answers = sum(one["role"] == "assistant" for one in messages[prompts[-1] :])
    calls = {
        "!long": [[("flood", "{}"), ("flood", "{}")], [("Read", '{"path": "result:call_0", "n_lines": 2}')]],
        "!task": [[("Bash", GO_ON), ("WaitFor", '{"timeout": 5}')], [("TaskList", '{"active_only": false}')]],
        "!guarded": [[("Bash", '{"command": "rm x"}'), ("Write", '{"path": "a", "content": "\\u0301\\u0000"}')], []],
        "!todo": [[("TodoList", '{"todos": [{"title": "one", "status": "done"}]}')] * 3, [("TodoList", "{}")]],
    }.get(said, [])
    return Reply(f"said {len(messages)}", calls[answers] if answers < len(calls) else [])


async def inlined(event: SessionEvent, store: ReadStore) -> SessionEvent:
    """The event with the tools of its request in place."""
    if event.type != "request/header" or "$blob" not in event.data["header"].get("tools", ()):
        return event
    data = thaw(event.data)
    data["header"]["tools"] = json.loads(await store.read_blob(data["header"]["tools"]["$blob"]))
    changed = copy(event)
    object.__setattr__(changed, "data", data)
    return changed


@pytest.mark.parametrize("backend", ["jsonl", "sqlite"])
async def test_all_that_features_put_on_the_wire_is_in_the_log(tmp_path: Path, backend: str) -> None:
    hooks = [
        {"event": "UserPromptSubmit", "command": "echo context", "matcher": "long|steered"},
        {"event": "UserPromptSubmit", "command": "echo never >&2; exit 2", "matcher": "forbidden"},
        {"event": "PreToolUse", "command": "grep -q 'rm x' && echo no rm >&2 && exit 2; exit 0"},
        {"event": "Stop", "command": "test -e stopped || { touch stopped; echo go on >&2; exit 2; }"},
    ]
    async with ModelServer(answer) as server, CountingProxy(server.url) as proxy:
        table = {"base_url": proxy.url}
        config = {**FAST, "models": {"tiny": table}, "hooks": hooks, "permission_mode": "manual", "backend": backend}
        async with Runtime.connect(tmp_path / "home", "in-process", config=config) as runtime:
            (tmp_path / "work").mkdir()
            workspace = runtime.workspace(tmp_path / "work")
            session = await workspace.create_session(model="tiny", profile=WORKER, tools=[*WORKER.tools, flood])
            await session.main.set_permission_mode("yolo")
            texts = ("!long", "!steered", "!forbidden and steered", "!forbidden", "!task", "!guarded", "!todo")
            prompts = [await session.main.submit(text) for text in texts]
            async with asyncio.timeout(10):
                while not proxy.bodies:  # the first turn runs, and has the hooks of its calls before it
                    await asyncio.sleep(0.001)
            await session.main.steer([prompts[1].id, prompts[2].id])
            states = [(await prompt.result(20)).state for prompt in prompts]
            assert states == ["completed"] * 2 + ["blocked"] * 2 + ["completed"] * 3
            await session.close()
            forked = await workspace.fork(session.id, tools=[flood])
            assert (await (await forked.main.submit("!long")).result(20)).state == "completed"
            again = await workspace.resume(session.id, tools=[flood])
            await again.main.set_permission_mode("manual")
            assert (await (await again.main.submit("!guarded")).result(20)).state == "completed"
            store = open_store(tmp_path / "home")
            logged: list[Body] = []
            kinds: set[str] = set()
            for one in (again, forked):
                [header] = [log.header for log in await store.list(one.id)]
                assert header is not None
                events = [await inlined(event, store) async for event in one.main.events()]
                kinds |= {event.type for event in events}
                logged += wire_bodies(header, events, ModelSettings(**table))
    assert kinds >= {"hook/result", "permission/decided", "task/ended", "task/reported", "todo/write", "prompt/steered"}
    on_the_wire, in_the_logs = canonical(proxy.bodies), canonical(logged)
    assert not on_the_wire - in_the_logs
    assert [wrong for body in proxy.bodies for wrong in unpaired_calls(body)] == []
