"""How a stored agent was bound: the profile, model and settings that its log says."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from kimi_ray.errors import StoreError
from kimi_ray.events import parse_header
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.log.slicing import WHOLE, LogScanner
from kimi_ray.session.fork_plan import bind_at
from kimi_ray.session.log_reader import scan
from kimi_ray.store.seam import Stream

_FIRST_EVENTS = 50


async def read_binding(store: StoreCalls, stream: Stream) -> dict[str, Any] | None:
    """How an agent is bound, as ``profile/bind`` says it, or None when there is no such log.

    Profile, sampling, limits and workdir never change in a log. The model may, anywhere in it: whoever brings the agent
    to life asks for the one that the whole log names (``AgentSpec.model_as_stored``).

    The log of a fork begins with its source's events: its header says how it is bound. So does that of an imported
    session, which has no ``profile/bind`` among its events.
    """
    try:
        header = (await store.inspect(stream)).header
    except StoreError as error:
        if error.code != "store.not_found":
            raise
        return None
    said: dict[str, Any] | None = header.get("bind")
    if said is not None and header.get("seed_length") is not None:
        return said
    for line in (await store.read_from(stream, 0, _FIRST_EVENTS)).lines:
        event: dict[str, Any] = from_json(line)
        if event["type"] == "profile/bind":
            return event["data"]
    return said


async def read_last_binding(store: StoreCalls, stream: Stream) -> dict[str, Any] | None:
    """As ``read_binding``, with the model that the whole log names: all of it is read."""
    try:
        header = parse_header((await store.inspect(stream)).header)
        found = (await scan(store, stream, LogScanner(WHOLE, header.seed_length or 0))).slice
    except StoreError as error:
        if error.code != "store.not_found":
            raise
        return None
    return None if found is None else bind_at(header, found)
