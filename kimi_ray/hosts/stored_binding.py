"""How a stored agent was bound: the profile, model and settings that its log says."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from kimi_ray.errors import StoreError
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.store.seam import Stream

_FIRST_EVENTS = 50


async def read_binding(store: StoreCalls, stream: Stream) -> dict[str, Any] | None:
    """The data of the log's first ``profile/bind``, or None when there is no such log.

    The log of an imported session has none among its events; its header says how the agent is to be bound.
    """
    try:
        page = await store.read_from(stream, 0, _FIRST_EVENTS)
    except StoreError as error:
        if error.code != "store.not_found":
            raise
        return None
    for line in page.lines:
        event: dict[str, Any] = from_json(line)
        if event["type"] == "profile/bind":
            return event["data"]
    for log in await store.list_logs(stream.session_id):
        if log.stream == stream and log.header is not None:
            bind: dict[str, Any] | None = log.header.get("bind")
            return bind
    return None
