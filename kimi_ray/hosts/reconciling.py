"""What the end of main's log tells the document of its session: the log wins for the last prompt and the last turn.

After a resume, and after turns that no driver watched.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.specs import EventPage
from kimi_ray.ids import MAIN
from kimi_ray.session import Activity, TurnReasonKind, last_prompt, turn_reason
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.hosts.live_session import LiveSession

_CALL_S = 60.0
_TAIL_EVENTS = 400
_TAIL_BYTES = 4 << 20
_TRIES = 7
_PAUSE_S = 0.05


async def reconcile(live: LiveSession) -> None:
    """Bring the document's last prompt, last turn's reason and ``updated_at`` up to main's log.

    Raises:
        KimiRayError: main cannot be reached, or not be brought back.
    """
    for attempt in range(_TRIES):
        try:
            await _reconcile(live)
            return
        except KimiRayError as error:
            if attempt == _TRIES - 1 or error.code != "agent.not_found":
                raise
        # Its host lets go of it just now, for a node that is to be empty.
        await asyncio.sleep(_PAUSE_S * 2**attempt)
        await live.agent_host(MAIN, live.agents[MAIN].host, None)


async def _reconcile(live: LiveSession) -> None:
    prompt: str | None = None
    earliest: str | None = None
    reason: TurnReasonKind | None = None
    at = 0
    async with aclosing(_tail(live)) as lines:
        async for line in lines:
            event: dict[str, Any] = from_json(line)
            if event["type"] == "prompt/submitted" and isinstance(event["data"].get("content"), list):
                prompt, at = last_prompt(event["data"]["content"]), event["time"]
                earliest = earliest or prompt
            elif event["type"] == "turn/end":
                ended = event["data"]["reason"]
                reason = turn_reason(ended["kind"])
                # A turn that was closed at a recovery moves no time: bringing a session back is no activity.
                at = at if "recovered_at" in ended else event["time"]
    value = live.document.snapshot()
    known = (value.get("last_prompt"), value.get("last_turn_reason"))
    updated_at = int(value["updated_at"])
    if at > updated_at or (prompt or known[0], reason or known[1]) != known:
        live.document.note(Activity(live.id, max(at, updated_at), prompt, reason, earliest))


async def _tail(live: LiveSession) -> AsyncGenerator[bytes]:
    """The last events of main's log, durable; large ones take several calls."""
    main = live.agents[MAIN]
    stream, peer = Stream(live.id, MAIN), live.services.cluster.peer(main.host)
    positions: list[tuple[int, int]] = await peer.call("flush", [stream], timeout_s=_CALL_S, group="store")
    end = positions[0][0]
    seq = max(0, end - _TAIL_EVENTS)
    while seq < end:
        page: EventPage = await peer.call(
            "read_events", stream, seq, end - seq, _TAIL_BYTES, 0.0, timeout_s=_CALL_S, group="wait"
        )
        if not page.lines:
            return
        for line in page.lines:
            yield line
        seq += len(page.lines)
