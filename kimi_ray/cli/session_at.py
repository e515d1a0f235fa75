"""``sessions show --at``: what the model saw at a point of a log, and the request that was made there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kimi_ray.cli.printing import counted, print_json, safe, say, tell

if TYPE_CHECKING:
    from kimi_ray.replay import HomeSource, RecordedAgent
    from kimi_ray.store.open import ReadStore
    from kimi_ray.store.seam import Stream

_GAP = "\n\n"
"""Between the blocks of a message."""


def show_at(store: ReadStore, text: str, agent: str | None, at: str | None, seq: int | None, *, as_json: bool) -> None:
    """Print the messages at a point, with the last request of a step that is named.

    Args:
        store: The home.
        text: The session or agent that a person means.
        agent: An agent of it.
        at: The point.
        seq: In place of a point: that of the event that would come next.
        as_json: As one JSON document.

    Raises:
        ConfigError: ``request.invalid``, ``request.conflict``, ``request.out_of_range``.
        SessionError: ``session.fork_point_not_found``, ``session.not_found``.
    """
    found = asyncio.run(_collect(store, text, agent, at, seq))
    if as_json:
        print_json(found)
    else:
        _print(found)


async def _collect(store: ReadStore, text: str, named: str | None, at: str | None, seq: int | None) -> dict[str, Any]:
    from kimi_ray.cli.lookup import find_stream
    from kimi_ray.replay import HomeSource, rebuild_session
    from kimi_ray.session.time_travel import point_of

    stream = await find_stream(store, text, named)
    source = HomeSource(store)
    until = await point_of(source, stream, at, seq)
    agent = (await rebuild_session(source, *stream, whole=True, until=until)).agent(stream.agent_id)
    return {
        "session_id": stream.session_id,
        "agent_id": stream.agent_id,
        "at": at,
        "seq": until,
        "messages": await agent.messages(seq=until),
        "request": None if at is None else await _request(agent, at),
        "damage": await _damage(source, stream, until),
    }


async def _damage(source: HomeSource, stream: Stream, seq: int | None) -> dict[str, Any] | None:
    """Why the log cannot be read from a seq on to its end, or None."""
    from kimi_ray.errors import StoreError
    from kimi_ray.session.log_reader import PAGE_BYTES, PAGE_EVENTS

    at, end = seq or 0, None
    try:
        while end is None or at < end:
            page = await source.read_from(stream, at, PAGE_EVENTS, PAGE_BYTES)
            end = page.next_seq if end is None else end
            if not page.lines:
                break
            at += len(page.lines)
    except StoreError as error:
        if error.code != "store.corrupt":
            raise
        return error.to_data()
    return None


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
    place = f"at {found['at']}" if found["at"] is not None else f"before the event {found['seq']}"
    say(f"{found['session_id']}/{found['agent_id']} {place}: {counted(len(messages), 'message')}\n")
    damage = found["damage"]
    if damage is not None:
        tell(safe(f"the log cannot be read to its end: {damage['message']}"))
        if damage.get("hint"):
            tell(f"hint: {safe(damage['hint'])}")
    asked: list[dict[str, Any]] = messages if request is None else request["messages"]
    if request is not None:
        header = request["header"]
        tools = ", ".join(str(tool["name"]) for tool in header.get("tools") or ())
        say(f"model {safe(str(header.get('model')))}, tools {safe(tools) or 'none'}\n")
        if header.get("system"):
            say(f"[system]\n{safe(header['system'])}\n")
    for message in asked:
        print_message(message)
    if request is None:
        return
    known = {message["id"] for message in asked}
    say(f"======== above: the request of step {request['step']} of turn {request['turn']}; below: what came of it\n")
    for message in messages:
        if message["id"] not in known:
            print_message(message)


def print_message(message: dict[str, Any]) -> None:
    """One heading a message, however many blocks it has."""
    parts = [_part(block) for block in message["content"]]
    say(f"[{safe(_heading(message))}]\n{safe(_GAP.join(parts))}\n")


def _heading(message: dict[str, Any]) -> str:
    results = [block for block in message["content"] if block["type"] == "tool-result"]
    if results:
        return "tool error" if any(block.get("is_error") for block in results) else "tool result"
    source: dict[str, Any] = message.get("source") or {}
    kind = source.get("kind")
    if kind == "compaction":
        return f"{message['role']}: stands for what was compacted"
    return f"{message['role']}: {kind}" if message["role"] == "user" and kind not in ("user", None) else message["role"]


def _part(block: dict[str, Any]) -> str:
    if block["type"] == "tool-call":
        return f"calls {block['name']}({block['arguments']})"
    if block["type"] == "tool-result":
        return "\n".join(_text(part) for part in block["content"])
    return _text(block) if block["type"] == "text" else f"({block['type']}) {block.get('text', '')}".rstrip()


def _text(block: dict[str, Any]) -> str:
    return str(block.get("text", f"({block['type']})"))
