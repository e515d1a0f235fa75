"""A damaged log made into one that restores: new seqs, mended references, marked gaps. Pure and deterministic.

The rules:

1. Every event that verifies stays, in its order; type, data and time are untouched. Where nothing is lost the event is
   the same to the byte. Behind a loss it has the next free seq.
2. In the place of each loss stands a ``log/salvaged`` that says after which seq of the source, how many, and where.
3. ``sources`` are translated; those that were lost are left out (an empty rest is left out whole).
4. A ``replace`` takes from the first to the last node that is still on the surface of those it took before, with all
   that stands between. If none is left it becomes an ``append``; a ``surface/cut`` is then left out, and reported.
5. A tool call whose result was lost is answered with an error that says so; a result whose call was lost gets an
   assistant message in front that makes the call again, with the name and arguments that a ``tool/call`` still tells.
   An open step at the end is left to the usual repair of an interrupted turn.
6. A prompt that was submitted before a loss and has no end is ended as ``failed`` with ``prompt.lost``, unless its turn
   is there: whether it ran is not known, and nothing may run twice unasked.
7. A row that verifies but is no event counts as lost.

Where nothing is lost none of 2 to 7 applies: the result is the source, event by event.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.errors import AgentError, LogError
from kimi_ray.events import SURFACE_TYPES, SessionEvent, SurfaceOp, event_from_data, make_event, parse_event
from kimi_ray.events.envelope import envelope
from kimi_ray.log.messages import complete_tools, derive, tool_message
from kimi_ray.log.order import Order
from kimi_ray.log.surface import Surface
from kimi_ray.store.seam import Stream

LOST_RESULT = (
    "The result of this tool call was lost with a damaged part of the log: whether it took effect is unknown. Look at "
    "the state of things before you repeat it."
)
UNKNOWN_TOOL = "unknown"
_BOUNDARIES = frozenset({"step/start", "step/end", "turn/start", "turn/end"})
_READ = {
    "assistant/message": ("turn", "step"),
    "tool/result": ("turn", "step"),
    "tool/call": ("name", "arguments"),
    "prompt/submitted": ("prompt_id",),
    "prompt/started": ("prompt_id", "turn"),
    "prompt/steered": ("prompt_ids", "turn"),
    "prompt/completed": ("prompt_id",),
}
"""What is read of an event besides what the folds read."""
_LISTED = 1_000

JsonObject = dict[str, Any]


@dataclass(slots=True)
class _Asked:
    """A tool call on the surface that has no result yet."""

    new_seq: int
    source_seq: int
    losses: int
    data: JsonObject


@dataclass(slots=True)
class _OpenPrompt:
    losses: int
    turn: int | None = None


@dataclass(slots=True)
class Counts:
    """What became of a log."""

    survived: int = 0
    """Events of the source that are in the new log."""
    lost: list[JsonObject] = field(default_factory=list[JsonObject])
    repaired: list[JsonObject] = field(default_factory=list[JsonObject])
    repairs: int = 0
    """How many there were; ``repaired`` lists the first thousand."""


class Rebuild:
    """Turns the surviving events of one log into a new one.

    Give it the surviving rows with rising seqs (``take``), and the damage that was passed over (``damaged``); each call
    returns the events that the new log goes on with. ``finish`` returns the last ones.

    Args:
        source: The damaged log.
        created_at: The time for what is added before the first surviving event, in epoch milliseconds.
    """

    def __init__(self, source: Stream, created_at: int) -> None:
        self.counts = Counts()
        self.next_seq = 0
        self._source = {"session_id": source.session_id, "agent_id": source.agent_id}
        self._expected = 0
        self._losses = 0
        self._time = created_at
        self._damage: list[tuple[int, JsonObject]] = []
        self._runs = _Runs()
        self._surface = Surface()
        self._order = Order()
        self._partners: dict[int, list[int]] = {}
        self._asked: dict[str, _Asked] = {}
        self._answered: set[str] = set()
        self._calls: dict[str, JsonObject] = {}
        self._prompts: dict[str, _OpenPrompt] = {}
        self._out: list[SessionEvent] = []

    def damaged(self, found: Iterable[JsonObject]) -> None:
        """Note damage (``KimiRayError.to_data()``) that lies before the next events."""
        for one in found:
            details: JsonObject = one.get("details") or {}
            seq = details.get("seq")
            self._damage.append((seq if type(seq) is int else -1, details))

    def take(self, seq: int, line: bytes) -> list[SessionEvent]:
        """The new log's events for a surviving row; ``seq`` is above all that came before."""
        try:
            event = parse_event(line, at=seq)
            _try_out(event)
        except (LogError, LookupError, TypeError, AttributeError, ValueError) as error:
            why = error.message if isinstance(error, LogError) else f"its data has another shape ({error!r})"
            self._report(seq, None, f"left out: {why}")
            self._damage.append((seq, {}))
            return []
        if seq > self._expected:
            self._loss(seq)
        self._time = event.time
        self._expected = seq + 1
        self._add(event)
        return self._taken()

    def finish(self) -> list[SessionEvent]:
        """The last events of the new log."""
        if any(seq < 0 or seq >= self._expected for seq, _ in self._damage):
            self._loss(None)
        if self._losses:
            self._answer_lost(at_end=True)
            self._close_step()
            self._end_prompts()
        if self.counts.repaired:
            data: JsonObject = {"source": self._source, "lost": [], "repaired": list(self.counts.repaired)}
            self._put(self._made("log/salvaged", data, ignorable=True))
        return self._taken()

    # -- one event ---------------------------------------------------------------------------------------------------

    def _add(self, event: SessionEvent) -> None:
        answer = event.type == "tool/result"
        if self._losses and (event.type in _BOUNDARIES or (event.type in SURFACE_TYPES and not answer)):
            self._answer_lost()
        moved, change = self._moved(event)
        if moved is None:
            self._report(event.seq, None, change)
            return
        if self._losses and answer and moved.replaced is None and self._ask_again(event):
            moved, change = self._moved(event)
            assert moved is not None
        if change:
            self._report(event.seq, moved.seq, change)
        self._runs.add(event.seq, moved.seq)
        shadowed = self._shadowed(moved)
        self._put(moved)
        self._follow(moved, shadowed)
        self.counts.survived += 1

    def _moved(self, event: SessionEvent) -> tuple[SessionEvent | None, str]:
        """The event at its new place, or None when it cannot have one; and what was changed."""
        if not self._losses and event.seq == self.next_seq and self._fits(event):
            return event, ""
        if event.type not in SURFACE_TYPES:
            plain = event.surface is None and event.sources is None
            return self._at(event, None, None), "" if plain else "its surface and sources are left out"
        sources = self._sources(event)
        span = event.replaced
        change = ""
        if span is not None:
            covered = self._covered(event, span)
            if covered:
                cited = list(sources or ())
                known = set(cited)
                moved = self._at(
                    event,
                    {"replace": [covered[0], covered[-1]]},
                    cited + [seq for seq in covered if seq not in known],
                )
                if self._fits(moved):
                    same = (self._runs.find(span[0]), self._runs.find(span[1])) == (covered[0], covered[-1])
                    return moved, "" if same else "replaces what is left of its span"
            change = "appended: what it replaced was lost"
        if event.type == "surface/cut":
            return None, "left out: what it took off the surface was lost"
        if not sources and not (event.type == "assistant/message" and event.sources == ()):
            sources = None
        return self._at(event, "append", sources), change

    def _at(self, event: SessionEvent, surface: SurfaceOp | None, sources: list[int] | None) -> SessionEvent:
        seqs = None if sources is None else tuple(sources)
        value = envelope(self.next_seq, event.time, event.type, event.data, surface, seqs, event.ignorable)
        return event_from_data(value)

    def _fits(self, event: SessionEvent) -> bool:
        try:
            self._surface.check(event)
        except (LogError, LookupError, TypeError, AttributeError):
            return False
        return True

    def _sources(self, event: SessionEvent) -> list[int] | None:
        if event.sources is None:
            return None
        return [new for old in event.sources if (new := self._runs.find(old)) is not None]

    def _covered(self, event: SessionEvent, span: tuple[int, int]) -> list[int]:
        """The nodes of the surface that the replace takes now, from the first to the last that it took before."""
        nodes = self._surface.seqs
        places = {seq: index for index, seq in enumerate(nodes)}

        def place(old: int) -> int | None:
            new = self._runs.find(old)
            return None if new is None else places.get(new)

        cited = [at for old in event.sources or () if (at := place(old)) is not None]
        start, end = place(span[0]), place(span[1])
        mended = start is None or end is None or start > end
        partners = self._all_partners() if mended else self._partners
        if end is None:
            end = max(cited, default=start)
        if end is None:
            return []
        if start is None:
            start = min([at for at in cited if at <= end], default=end)
        start, end = min(start, end), max(start, end)
        # What was put on the surface for an event goes where that event goes, and a mended span parts no call from its
        # result.
        todo = list(range(start, end + 1)) if event.type != "tool/result" else []
        while todo:
            for seq in partners.get(nodes[todo.pop()], ()):
                other = places.get(seq, start)
                todo.extend([*range(other, start), *range(end + 1, other + 1)])
                start, end = min(start, other), max(end, other)
        return list(nodes[start : end + 1])

    def _all_partners(self) -> dict[int, list[int]]:
        """Which nodes of the surface belong together: calls and results, and what was added for either."""
        found = {seq: list(others) for seq, others in self._partners.items()}
        calls: dict[str, int] = {}
        for node in self._surface:
            if node.type == "assistant/message":
                blocks = node.data["message"]["content"]
                calls |= {block["id"]: node.seq for block in blocks if block["type"] == "tool-call"}
            elif node.type == "tool/result":
                call = calls.get(node.data["message"]["source"]["call_id"])
                if call is not None:
                    found.setdefault(call, []).append(node.seq)
                    found.setdefault(node.seq, []).append(call)
        return found

    def _pair(self, one: int, other: int) -> None:
        self._partners.setdefault(one, []).append(other)
        self._partners.setdefault(other, []).append(one)

    def _shadowed(self, event: SessionEvent) -> set[int]:
        if event.replaced is None or event.type == "tool/result":
            return set()
        nodes = self._surface.seqs
        first, last = event.replaced
        return set(nodes[nodes.index(first) : nodes.index(last) + 1])

    def _put(self, event: SessionEvent) -> None:
        plan = self._surface.check(event)
        self._order.apply(event)
        if plan is not None:
            self._surface.apply(plan)
        self.next_seq += 1
        self._out.append(event)

    def _made(self, kind: str, data: JsonObject, surface: SurfaceOp | None = None, **how: Any) -> SessionEvent:
        return make_event(self.next_seq, self._time, kind, data, surface, **how)

    def _taken(self) -> list[SessionEvent]:
        out, self._out = self._out, []
        return out

    def _report(self, seq: int, new_seq: int | None, change: str) -> None:
        self.counts.repairs += 1
        if len(self.counts.repaired) < _LISTED:
            entry: JsonObject = {"seq": seq, "change": change}
            self.counts.repaired.append(
                entry if new_seq is None else {"seq": seq, "new_seq": new_seq, "change": change}
            )

    # -- what an event says about calls and prompts ------------------------------------------------------------------

    def _follow(self, event: SessionEvent, shadowed: set[int]) -> None:
        kind, data = event.type, event.data
        if shadowed:
            self._asked = {call: asked for call, asked in self._asked.items() if asked.new_seq not in shadowed}
        if kind == "assistant/message":
            for block in data["message"]["content"]:
                if block["type"] == "tool-call":
                    self._asked[block["id"]] = _Asked(event.seq, self._expected - 1, self._losses, data)
        elif kind == "tool/result":
            if event.replaced is None:
                call_id = data["message"]["source"]["call_id"]
                self._asked.pop(call_id, None)
                self._answered.add(call_id)
        elif kind == "tool/call":
            self._calls[data["call_id"]] = {"name": data["name"], "arguments": data["arguments"]}
        elif kind == "turn/end":
            self._calls.clear()
            for prompt_id in [one for one, prompt in self._prompts.items() if prompt.turn == data["turn"]]:
                del self._prompts[prompt_id]
        elif kind == "prompt/submitted":
            self._prompts[data["prompt_id"]] = _OpenPrompt(self._losses)
        elif kind == "prompt/started":
            self._join([data["prompt_id"]], data["turn"])
        elif kind == "prompt/steered":
            self._join(data["prompt_ids"], data["turn"])
        elif kind == "prompt/completed":
            self._prompts.pop(data["prompt_id"], None)

    def _join(self, prompt_ids: Iterable[str], turn: int) -> None:
        for prompt_id in prompt_ids:
            prompt = self._prompts.get(prompt_id)
            if prompt is not None:
                prompt.turn = turn

    # -- what is put in the place of what was lost -------------------------------------------------------------------

    def _loss(self, until: int | None) -> None:
        """Mark that the events from the expected seq up to ``until`` (None: to the end) are missing."""
        first = self._expected
        places = [
            details
            for seq, details in self._damage
            if (seq < 0 and until is None) or (seq >= first and (until is None or seq <= until))
        ]
        self._damage = [] if until is None else [one for one in self._damage if one[0] > until or one[0] < 0]
        lost: JsonObject = {"after_seq": first - 1}
        if until is not None:
            lost["count"] = until - first
        empty: JsonObject = {}
        place = next((details for details in places if details), empty)
        lost |= {name: place[name] for name in ("file", "offset", "rowid") if name in place}
        self._losses += 1
        self.counts.lost.append(lost)
        self._put(self._made("log/salvaged", {"source": self._source, "lost": [lost]}, ignorable=True))

    def _answer_lost(self, *, at_end: bool = False) -> None:
        """Answer the calls that were made before the last loss and have no result.

        At the end: every call without one, but those that the repair of an interrupted turn answers.
        """
        order = self._order
        repairable = order.pending_calls if order.open_turn is not None and order.open_step is not None else {}
        for call_id, asked in list(self._asked.items()):
            if call_id in repairable if at_end else asked.losses == self._losses:
                continue
            del self._asked[call_id]
            self._answered.add(call_id)
            message_id = f"salvaged-result-{call_id}-{self.next_seq}"
            content = [{"type": "text", "text": LOST_RESULT}]
            data: JsonObject = {
                "turn": asked.data["turn"],
                "step": asked.data["step"],
                "message": tool_message(message_id, call_id, content, is_error=True),
                "error": {"code": "tool.outcome_unknown"},
                "recovered_at": self._time,
            }
            self._pair(asked.new_seq, self.next_seq)
            self._report(asked.source_seq, self.next_seq, "answered a call whose result was lost")
            self._put(self._made("tool/result", data, "append"))

    def _ask_again(self, event: SessionEvent) -> bool:
        """Make the call of a result whose own was lost; whether there was one to make."""
        data = event.data
        call_id = data["message"]["source"]["call_id"]
        if call_id in self._asked or call_id in self._answered:
            return False
        call = self._calls.get(call_id) or {"name": UNKNOWN_TOOL, "arguments": "{}"}
        message = {
            "id": f"salvaged-call-{call_id}-{self.next_seq}",
            "role": "assistant",
            "content": [{"type": "tool-call", "id": call_id, **call}],
            "source": {"kind": "salvage"},
        }
        self._pair(self.next_seq, self.next_seq + 1)
        self._report(event.seq, self.next_seq, "made a lost call again, for its result")
        asked: JsonObject = {"turn": data["turn"], "step": data["step"], "message": message}
        self._put(self._made("assistant/message", asked, "append"))
        return True

    def _close_step(self) -> None:
        order = self._order
        if order.open_turn is None and order.open_step is not None:
            data: JsonObject = {"turn": order.next_turn, "step": order.open_step, "recovered_at": self._time}
            self._report(self._expected - 1, self.next_seq, "closed a step whose turn was lost")
            self._put(self._made("step/end", data))

    def _end_prompts(self) -> None:
        for prompt_id, prompt in self._prompts.items():
            if prompt.losses == self._losses or (prompt.turn is not None and prompt.turn == self._order.open_turn):
                continue
            error = AgentError(
                f"whether the prompt {prompt_id} ran was lost with a damaged part of the log",
                code="prompt.lost",
                hint="look at what the agent did after it, and submit it again if it is still needed",
                details={"prompt_id": prompt_id},
            )
            data: JsonObject = {"prompt_id": prompt_id, "state": "failed", "error": error.to_data()}
            self._report(self._expected - 1, self.next_seq, f"ended the prompt {prompt_id}")
            self._put(self._made("prompt/completed", data))


class _Runs:
    """Where the events of the source are in the new log: runs of consecutive seqs."""

    __slots__ = ("_lengths", "_news", "_olds")

    def __init__(self) -> None:
        self._olds: list[int] = []
        self._news: list[int] = []
        self._lengths: list[int] = []

    def add(self, old: int, new: int) -> None:
        """The source's ``old`` is ``new`` now; both rise."""
        if self._olds and (old, new) == (self._olds[-1] + self._lengths[-1], self._news[-1] + self._lengths[-1]):
            self._lengths[-1] += 1
            return
        self._olds.append(old)
        self._news.append(new)
        self._lengths.append(1)

    def find(self, old: int) -> int | None:
        """The new seq, or None when the event was lost."""
        at = bisect_right(self._olds, old) - 1
        if at < 0 or old - self._olds[at] >= self._lengths[at]:
            return None
        return self._news[at] + old - self._olds[at]


def _try_out(event: SessionEvent) -> None:
    """Whether the folds can read the event; they raise what Python raises."""
    for key in _READ.get(event.type, ()):
        event.data[key]
    Order().apply(event)
    message = derive(event)
    if message is not None:
        complete_tools([message])
    if event.type == "tool/result":
        event.data["message"]["content"][0]["tool_call_id"]
