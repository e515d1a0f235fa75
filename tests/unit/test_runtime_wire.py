"""A counting proxy between agents and their server: the log has all that was on the wire, and no call is unpaired."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from kimi_ray.events import SessionEvent, parse_header
from kimi_ray.llm.chat import ChatRequest, ToolSpec
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.wire import chat_body
from kimi_ray.log import EventLog, complete_tools
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Limits, Sampling
from kimi_ray.store import open_store
from kimi_ray.tools import tool
from tests.model_server import Body, CountingProxy, ModelServer, Reply, unpaired_calls
from tests.unit.runtime_fixtures import FAST

AGENTS = 60


@tool
async def weigh(thing: str, times: int) -> str:
    """Say how heavy a thing is.

    Args:
        thing: What.
        times: How often it is weighed.
    """
    if thing == "stone":
        raise RuntimeError("too heavy")
    await asyncio.sleep(0)
    return f"{thing} weighs {times * len(thing)}"


def answer(body: Body, times: int) -> Reply:
    """A conversation of three steps, with a fault for about a third of the requests, the same for equal bodies."""
    key = hashlib.sha256(json.dumps([body, times], sort_keys=True).encode()).digest()[0]
    asked = sum(message["role"] == "assistant" for message in body["messages"])
    good = '{"thing": "bread", "times": 1}'
    calls = [
        [("weigh", good), ("weigh", '{"thing": "stone", "times": 2}')],
        [("weigh", '{"thing": "water", "times": "often"}' if key % 2 else '{"thing": "wat')],
        [],
    ][min(asked, 2)]
    text = "All is weighed." if asked >= 2 else "I weigh."
    if key < 20:
        return Reply(status=429, headers={"retry-after": "0.02"})
    if key < 35:
        return Reply(status=503)
    if key < 50:
        return Reply(text, calls, cut=True)
    if key < 65:
        return Reply("Half a wo", cut=True)
    if key < 75:
        return Reply("")
    return Reply(text, calls)


def wire_bodies(header: dict[str, Any], events: list[SessionEvent], settings: ModelSettings) -> list[Body]:
    """The bodies of an agent's requests, from its log alone: one for each ``llm/response``."""
    log = EventLog(parse_header(header))
    bodies: list[Body] = []
    asked: dict[str, Any] = {}
    for event in events:
        if event.type == "request/header":
            asked = event.data["header"]
        if event.type == "llm/response":
            request = ChatRequest(
                asked["model"],
                asked.get("system"),
                complete_tools(log.messages()),
                tools=tuple(ToolSpec(**spec) for spec in asked.get("tools", ())),
                sampling=Sampling(**asked.get("sampling", {})),
            )
            bodies.append({"stream_options": {"include_usage": True}, "stream": True} | chat_body(request, settings))
        log.adopt(event)
    return bodies


def canonical(bodies: list[Body]) -> Counter[str]:
    return Counter(json.dumps(body, sort_keys=True) for body in bodies)


async def test_all_that_was_on_the_wire_is_in_the_logs_and_no_call_is_unpaired(tmp_path: Path) -> None:
    async with ModelServer(answer) as server, CountingProxy(server.url) as proxy:
        table = {"base_url": proxy.url, "retry_base_s": 0.01, "retry_max_s": 0.05, "max_attempts": 40}
        config = {**FAST, "models": {"tiny": table}}
        async with Runtime.connect(tmp_path / "home", "in-process", config=config) as runtime:
            session = await runtime.workspace(tmp_path).create_session(model="tiny", profile="bare")
            report = await session.swarm(
                "weigh for {{item}}",
                [f"item {number}" for number in range(AGENTS)],
                profile="bare",
                tools=[weigh],
                limits=Limits(max_steps=8),
                max_concurrency=30,
            )
            store = open_store(tmp_path / "home")
            headers = {log.stream.agent_id: log.header for log in await store.list(session.id)}
            logged: list[Body] = []
            responses: Counter[str] = Counter()
            for row in report.rows:
                events = [event async for event in session.agent(row.agent_id or "").events()]
                header = headers[row.agent_id or ""]
                assert header is not None
                logged += wire_bodies(header, events, ModelSettings(**table))
                told = (event.data for event in events if event.type == "llm/response")
                responses.update(one.get("error", {}).get("code", "fine") for one in told)
    assert report.totals["completed"] == AGENTS, (report.totals, report.rows[0].error)
    assert canonical(proxy.bodies) == canonical(logged)
    assert [wrong for body in proxy.bodies for wrong in unpaired_calls(body)] == []
    expected = {"fine", "provider.rate_limit", "provider.server", "provider.connection", "provider.empty_response"}
    assert set(responses) == expected, responses
    assert sum(responses.values()) == len(proxy.bodies)


async def test_the_proxy_and_the_check_of_calls_see_what_is_wrong() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks: Body = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    assert unpaired_calls({"messages": [asks, result]}) == []
    assert unpaired_calls({"messages": [asks]}) == ["the call a of f has no result"]
    assert unpaired_calls({"messages": [asks, {"role": "user", "content": "x"}, result]}) == [
        "the call a of f has no result",
        "a result of a without its call",
    ]
    assert unpaired_calls({"messages": [asks, result, result]}) == ["a result of a without its call"]
    assert unpaired_calls({"messages": [asks | {"tool_calls": [call, call]}, result]})
