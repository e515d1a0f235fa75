"""Random logs with everything that a surface can do: compaction, pruning, undo, interrupted answers, lost children."""

from __future__ import annotations

from random import Random
from typing import Any

from kimi_ray.events import SessionEvent, parse_header
from kimi_ray.log import EventLog
from kimi_ray.log.messages import tool_message
from tests.unit.store.rescue_homes import AT, header_of


class LogMaker:
    """Plays turns on a real ``EventLog``, so that every log it makes is one that the product could have made."""

    def __init__(self, dice: Random, *, prunes: bool = True) -> None:
        self.dice = dice
        self.prunes = prunes
        self.events: list[SessionEvent] = []
        self.now = AT
        self.log = EventLog(parse_header(header_of()), clock=self._tick)
        self.log.observe(self.events.append)
        self._calls = 0
        self._prompts = 0

    def _tick(self) -> int:
        self.now += 1
        return self.now

    def add(self, kind: str, data: dict[str, Any], **how: Any) -> SessionEvent:
        return self.log.append(kind, data, **how)

    def play(self, turns: int) -> list[SessionEvent]:
        """So many turns; the last one may be left open."""
        for turn in range(turns):
            self.turn(leave_open=turn == turns - 1 and self.dice.random() < 0.4)
            if self.dice.random() < 0.3:
                self.cut()
            if self.dice.random() < 0.3:
                self.compact()
            if self.dice.random() < 0.2:
                self.add("note/added", {"text": "n"})
        return self.events

    def turn(self, *, leave_open: bool = False) -> None:
        dice, turn = self.dice, self.log.order.next_turn
        prompt_id = f"p{self._prompts}"
        self._prompts += 1
        self.add("prompt/submitted", {"prompt_id": prompt_id, "content": [{"type": "text", "text": prompt_id}]})
        self.add("turn/start", {"turn": turn, "prompts": [prompt_id]})
        self.add("prompt/started", {"prompt_id": prompt_id, "turn": turn})
        for step in range(dice.randint(1, 3)):
            self.add("step/start", {"turn": turn, "step": step})
            if step == 0:
                content = [{"type": "text", "text": prompt_id}]
                user = {"id": prompt_id, "role": "user", "content": content, "source": {"kind": "user"}}
                self.add("user/message", user, surface="append")
                self.add("request/header", {"header": {"model": "m"}, "reason": "initial"})
            if leave_open and dice.random() < 0.3:
                return
            calls = self.answer(turn, step)
            dice.shuffle(calls)
            for call_id in calls:
                if leave_open and dice.random() < 0.3:
                    return
                self.call(turn, step, call_id)
            if self.prunes and dice.random() < 0.3:
                self.prune()
            self.add("step/end", {"turn": turn, "step": step})
        if leave_open:
            return
        self.add("turn/end", {"turn": turn, "reason": {"kind": "completed"}})
        self.add("prompt/completed", {"prompt_id": prompt_id, "state": "completed", "turn": turn})

    def answer(self, turn: int, step: int) -> list[str]:
        dice = self.dice
        where = {"turn": turn, "step": step, "attempt": 1}
        chunks = [
            self.add("assistant/chunk", {**where, "chunk": {"type": "text-delta", "index": 0, "text": f"t{n}"}}).seq
            for n in range(dice.choice((0, 0, 2, 4)))
        ]
        calls: list[str] = []
        content: list[dict[str, Any]] = [{"type": "text", "text": "thinking"}]
        for _ in range(dice.choice((0, 1, 1, 2, 3))):
            calls.append(f"c{self._calls}")
            self._calls += 1
            content.append({"type": "tool-call", "id": calls[-1], "name": "Read", "arguments": "{}"})
        message = {"id": f"a{self.log.next_seq}", "role": "assistant", "content": content}
        sources = chunks or dice.choice((None, []))
        self.add(
            "assistant/message", {"turn": turn, "step": step, "message": message}, surface="append", sources=sources
        )
        return calls

    def call(self, turn: int, step: int, call_id: str) -> None:
        facts = {"turn": turn, "step": step, "call_id": call_id, "name": "Read", "arguments": "{}"}
        started = self.add("tool/call", facts).seq if self.dice.random() < 0.8 else None
        content = [{"type": "text", "text": f"result of {call_id}"}]
        message = tool_message(f"r{call_id}", call_id, content, is_error=False)
        data = {"turn": turn, "step": step, "message": message}
        self.add("tool/result", data, surface="append", sources=None if started is None else [started])

    def prune(self) -> None:
        """Replace one tool result by a shorter one."""
        results = [node for node in self.log.surface if node.type == "tool/result"]
        if not results:
            return
        old = self.dice.choice(results)
        call_id = old.data["message"]["source"]["call_id"]
        message = tool_message(old.data["message"]["id"], call_id, [{"type": "text", "text": "cut"}], is_error=False)
        data = {"turn": old.data["turn"], "step": old.data["step"], "message": message}
        self.add("tool/result", data, surface={"replace": [old.seq, old.seq]}, sources=[old.seq])

    def cut(self) -> None:
        """Take the surface from some prompt on away, if that is possible now."""
        if self.log.order.open_turn is not None:
            return
        nodes = list(self.log.surface)
        starts = [node.seq for node in nodes if node.type == "user/message"]
        if not starts:
            return
        start = self.dice.choice(starts)
        span = [node.seq for node in nodes if nodes.index(node) >= self.log.surface.seqs.index(start)]
        data = {"reason": "undo", "prompts": []}
        self.add("surface/cut", data, surface={"replace": [span[0], span[-1]]}, sources=span)

    def compact(self) -> None:
        """Replace the head of the surface, at most up to where every call has its result, by a summary."""
        nodes = list(self.log.surface)
        ends: list[int] = []
        open_calls = 0
        for index, node in enumerate(nodes):
            if node.type == "assistant/message":
                blocks = node.data["message"]["content"]
                open_calls += sum(1 for block in blocks if block["type"] == "tool-call")
            elif node.type == "tool/result":
                open_calls -= 1
            if open_calls == 0:
                ends.append(index)
        if not ends:
            return
        last = self.dice.choice(ends)
        first = self.dice.choice([end + 1 for end in ends if end < last] + [0])
        span = [node.seq for node in nodes[first : last + 1]]
        content = [{"type": "text", "text": f"summary of {span}"}]
        summary = {"id": f"s{self.log.next_seq}", "role": "user", "content": content, "source": {"kind": "compaction"}}
        self.add("user/message", summary, surface={"replace": [span[0], span[-1]]}, sources=span)


def random_log(dice: Random, *, turns: int = 4, prunes: bool = True) -> list[SessionEvent]:
    """The events of a random log."""
    return LogMaker(dice, prunes=prunes).play(turns)
