"""How an agent is bound: the profile, model and settings that its log is told, and says later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from kimi_ray.errors import StoreError
from kimi_ray.events import parse_header, type_key
from kimi_ray.hosts.specs import AgentSpec
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.log.slicing import WHOLE, LogScanner
from kimi_ray.session.fork_plan import bind_at
from kimi_ray.session.log_reader import scan
from kimi_ray.settings import Workdir
from kimi_ray.store.seam import Stream

_FIRST_EVENTS = 50
_LAST_EVENTS = 500
_HEAD_BYTES = 96
_ACTIVATED = type_key("runtime/activated")


def binding_of(spec: AgentSpec, workdir_path: str | None, *, created: bool) -> dict[str, Any]:
    """What ``profile/bind`` records of an activation: enough to bring the agent to life again."""
    bind: dict[str, Any] = {"profile": spec.profile.said(), "model": spec.model.name}
    if spec.sampling is not None:
        bind["sampling"] = spec.sampling.said()
    if spec.limits is not None:
        bind["limits"] = spec.limits.said()
    if spec.workdir is not None:
        bind["workdir"] = spec.workdir.said() | {"prepared": workdir_path, "created": created}
    return bind


def workdir_of(bind: Mapping[str, Any]) -> Workdir | None:
    """The working directory of a binding, without what the host noted about the prepared one."""
    value: dict[str, Any] | None = bind.get("workdir")
    if value is None:
        return None
    return Workdir.model_validate({key: said for key, said in value.items() if key in Workdir.model_fields})


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


async def node_of_directory(store: StoreCalls, stream: Stream, workdir: Workdir | None) -> str | None:
    """The node on which a stored agent's own directory is: where it lived last, as its log says.

    That of a fork that never lived was made before it was there, where its header says. None without a directory of
    its own, without a log, or when the log does not say.
    """
    if workdir is None or not workdir.is_private:
        return None
    try:
        view = await store.inspect(stream)
        seed: int = view.header.get("seed_length") or 0
        first, end = view.next_seq, view.next_seq
        while first > seed:
            first, end = max(seed, first - _LAST_EVENTS), first
            node = await _last_node(store, stream, first, end)
            if node is not None:
                return node
    except StoreError as error:
        if error.code != "store.not_found":
            raise
        return None
    bind: dict[str, Any] = view.header.get("bind") or {}
    bound: dict[str, Any] = bind.get("workdir") or {}
    return bound.get("node")


async def _last_node(store: StoreCalls, stream: Stream, first: int, end: int) -> str | None:
    """What the last ``runtime/activated`` among these events says, or None without one."""
    node: str | None = None
    while first < end:
        lines = (await store.read_from(stream, first, end - first)).lines
        if not lines:
            break
        for line in lines:
            if _ACTIVATED in line[:_HEAD_BYTES]:
                node = from_json(line)["data"].get("node")
        first += len(lines)
    return node
