"""Putting what came from outside into the log of a replay, where it stood in the recording."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from kimi_ray.agent.journal import Journal
from kimi_ray.errors import LogError
from kimi_ray.events import thaw
from kimi_ray.replay.recording import Entry


def put_entry(journal: Journal, entry: Entry) -> None:
    """Append a recorded event anew, in the place of the nodes that stand now where those stood that it replaced.

    Raises:
        LogError: ``log.bad_surface``: those places are not there, or hold something else.
    """
    event = entry.event
    data: dict[str, Any] = thaw(event.data)
    surface = journal.log.surface
    if entry.span is None:
        if event.type == "user/message":
            journal.append(event.type, data, surface="append")
            return
        with _inside(journal, step=True) as (turn, step):
            data |= {"turn": turn, "step": step}
            journal.append(event.type, data, surface="append")
        return
    start, end = entry.span
    if end > len(surface) or start >= end:
        raise LogError(
            f"the recorded event {event.seq} replaced what stood at {start} to {end}; the replay has {len(surface)}",
            code="log.bad_surface",
            details={"seq": event.seq, "start": start, "end": end, "size": len(surface)},
        )
    shadowed = [surface[index] for index in range(start, end)]
    if event.type == "tool/result":
        body: dict[str, Any] = thaw(shadowed[0].data)
        body["message"]["content"][0]["content"] = data["message"]["content"][0]["content"]
        data = body
    seqs = [node.seq for node in shadowed]
    with _inside(journal, turn=event.type != "surface/cut", step=event.type == "assistant/message"):
        journal.append(event.type, data, surface={"replace": [seqs[0], seqs[-1]]}, sources=seqs)


@contextmanager
def _inside(journal: Journal, *, turn: bool = True, step: bool = False) -> Generator[tuple[int, int]]:
    """A turn, and a step, around an event that may stand only there."""
    order = journal.log.order
    opens_turn = turn and order.open_turn is None
    if opens_turn:
        journal.append("turn/start", {"turn": order.next_turn, "prompts": [], "continuation": "replay"})
    number = order.open_turn or 0
    opens_step = step and order.open_step is None
    if opens_step:
        journal.append("step/start", {"turn": number, "step": order.next_step})
    place = order.open_step or 0
    yield number, place
    if opens_step:
        journal.append("step/end", {"turn": number, "step": place})
    if opens_turn:
        journal.append("turn/end", {"turn": number, "reason": {"kind": "completed"}})
