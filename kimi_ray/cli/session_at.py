"""``sessions show --at``: what the model saw at a point of a log, and the request that was made there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kimi_ray.cli.printing import counted, print_json, safe, say, tell

if TYPE_CHECKING:
    from kimi_ray.replay import RecordedAgent
    from kimi_ray.store.open import ReadStore


def show_at(store: ReadStore, text: str, agent: str | None, at: str, *, as_json: bool) -> None:
    """Print the messages at a point, with the last request of a step that is named.

    Args:
        store: The home.
        text: The session or agent that a person means.
        agent: An agent of it.
        at: The point.
        as_json: As one JSON document.

    Raises:
        ConfigError: ``request.invalid``; SessionError: ``session.fork_point_not_found``, ``session.not_found``.
    """
    found = asyncio.run(_collect(store, text, agent, at))
    if as_json:
        print_json(found)
    else:
        _print(found)


async def _collect(store: ReadStore, text: str, named: str | None, at: str) -> dict[str, Any]:
    from kimi_ray.cli.lookup import find_stream
    from kimi_ray.replay import HomeSource, rebuild_session
    from kimi_ray.session.time_travel import seq_at

    stream = await find_stream(store, text, named)
    source = HomeSource(store)
    seq = await seq_at(source, stream, at)
    agent = (await rebuild_session(source, *stream, whole=True)).agent(stream.agent_id)
    return {
        "session_id": stream.session_id,
        "agent_id": stream.agent_id,
        "at": at,
        "seq": seq,
        "messages": await agent.messages(seq),
        "request": await _request(agent, at),
    }


async def _request(agent: RecordedAgent, at: str) -> dict[str, Any] | None:
    """The last request that was made in the step that a point names; None for a point that names none."""
    from kimi_ray.session import parse_fork_point

    point = parse_fork_point(at)
    found: dict[str, Any] | None = None
    if point is None or point.kind != "step":
        return None
    async for one in agent.requests():
        request = one.request
        if (request.turn, request.step) == (point.turn, point.step):
            place = {"turn": request.turn, "step": request.step, "attempt": request.attempt, "seq": one.seq}
            found = {**place, "header": one.header, "messages": request.messages}
    return found


def _print(found: dict[str, Any]) -> None:
    request, messages = found["request"], found["messages"]
    tell(f"{found['session_id']}/{found['agent_id']} at {found['at']}: {counted(len(messages), 'message')}")
    asked: list[dict[str, Any]] = messages if request is None else request["messages"]
    if request is not None:
        header = request["header"]
        if header.get("system"):
            say(f"[system]\n{safe(header['system'])}\n")
        tools = ", ".join(str(tool["name"]) for tool in header.get("tools") or ())
        tell(f"model {header.get('model')}, tools {tools or 'none'}")
    for message in asked:
        _print_message(message)
    if request is None:
        return
    known = {message["id"] for message in asked}
    say(f"---- so far step {request['step']} of turn {request['turn']} was asked; what came of it:\n")
    for message in messages:
        if message["id"] not in known:
            _print_message(message)


def _print_message(message: dict[str, Any]) -> None:
    for block in message["content"]:
        kind = block["type"]
        if kind == "tool-call":
            say(f"[{message['role']} calls {safe(block['name'])}]\n{safe(block['arguments'])}\n")
        elif kind == "tool-result":
            state = "error" if block.get("is_error") else "result"
            texts = [_text(part) for part in block["content"]]
            say(f"[tool {state}]\n{safe(chr(10).join(texts))}\n")
        else:
            name = message["role"] if kind == "text" else f"{message['role']}: {kind}"
            say(f"[{name}]\n{safe(_text(block))}\n")


def _text(block: dict[str, Any]) -> str:
    return str(block.get("text", f"({block['type']})"))
