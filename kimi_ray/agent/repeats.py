"""The guard against a model that makes the same tool call again and again.

Of two equal calls in one answer only the first runs, and both get its result. A call that is repeated step after step
is answered with a reminder at certain counts, and at ``STOP_AT`` the turn ends, for the cause ``repeated``. What it did
is in the meta of the results: ``{"repeated": {"times", "stopped"?}}``, and ``same_as`` for a shared one. Agents of a
run are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kimi_ray.agent.slots import AgentSlots, ToolDone, ToolGate
from kimi_ray.agent.turn_ends import REPEATED
from kimi_ray.tools.contract import ToolOutput

NAME = "repeated_calls"
REMIND_AT = (3, 5, 8)
STOP_AT = 12


class RepeatedCalls:
    """Registers itself in an agent's slots.

    Args:
        slots: Of the agent.
    """

    def __init__(self, slots: AgentSlots) -> None:
        self._turn = self._step = -1
        self._running: list[tuple[str, dict[str, Any], str]] = []
        """The calls of this step that may run: what is called, and the id."""
        self._streaks: list[_Streak] = []
        self._before: list[_Streak] = []
        slots.tool.register(NAME, self._before_call)
        slots.tool_done.register(NAME, self._after_call)

    async def _before_call(self, gate: ToolGate) -> None:
        if gate.batch == 1:
            return
        self._enter(gate.turn, gate.step)
        for name, arguments, call_id in self._running:
            if name == gate.name and arguments == gate.arguments:
                gate.share(call_id)
                return
        self._running.append((gate.name, gate.arguments, gate.call_id))

    async def _after_call(self, done: ToolDone) -> None:
        self._enter(done.turn, done.step)
        # What could not be read of bad arguments shows in what was said about them.
        call = (done.name, done.arguments, None if done.executed else done.output.content)
        times = 1 + next((streak.times for streak in self._before if streak.call == call), 0)
        self._streaks.append(_Streak(call, times))
        if times >= STOP_AT:
            done.stop_turn, done.stop_cause = True, REPEATED
            done.output = _reminded(done.output, times, stopped=True)
        elif times in REMIND_AT:
            done.output = _reminded(done.output, times, stopped=False)

    def _enter(self, turn: int, step: int) -> None:
        if turn == self._turn and step == self._step:
            return
        self._before = self._streaks if (turn, step - 1) == (self._turn, self._step) else []
        self._turn, self._step = turn, step
        self._streaks, self._running = [], []


@dataclass(frozen=True, slots=True)
class _Streak:
    """A call, and in how many steps in a row it was made by now."""

    call: tuple[str, dict[str, Any], Any]
    times: int


def _reminded(output: ToolOutput, times: int, *, stopped: bool) -> ToolOutput:
    repeated: dict[str, Any] = {"times": times}
    if stopped:
        repeated["stopped"] = True
        said = f"This very call was made {times} times in a row. The turn ends here."
    else:
        said = (
            f"This very call was made {times} times in a row. Do not make it again: use what it said, call something"
            " else, or say why you cannot go on."
        )
    text = f"<system-reminder>\n{said}\n</system-reminder>"
    content = output.content
    longer = f"{content}\n\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return replace(output, content=longer, meta={**(output.meta or {}), "repeated": repeated})
