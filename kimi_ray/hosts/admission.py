"""Admission: the calls of one handle take effect in the order in which it made them.

Calls to an actor may overtake each other, so a handle numbers its calls to an agent 0, 1, 2, ... and the host admits
them in that order.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.agent.specs import PromptSpec
from kimi_ray.errors import AgentError
from kimi_ray.store.seam import Stream

WAIT_S = 30.0
"""How long a call waits for those before it."""

MAX_CALLERS = 100_000


@dataclass(slots=True)
class _Line:
    next: int = 0
    waiting: dict[int, asyncio.Future[None]] = field(default_factory=dict[int, "asyncio.Future[None]"])


class Admission:
    """One line for each (caller, agent)."""

    def __init__(self) -> None:
        self._lines: OrderedDict[tuple[str, Stream], _Line] = OrderedDict()

    @asynccontextmanager
    async def turn(self, caller: str, stream: Stream, number: int) -> AsyncGenerator[None]:
        """Enter when all smaller numbers of the caller have been here. A negative number does not stand in line.

        A number that was here before (a call sent twice) enters at once.

        Raises:
            AgentError: ``agent.order_lost`` when the earlier calls did not come within ``WAIT_S``.
        """
        if number < 0:
            yield
            return
        line = self._line(caller, stream)
        if number > line.next:
            future = line.waiting.setdefault(number, asyncio.get_running_loop().create_future())
            try:
                async with asyncio.timeout(WAIT_S):
                    await asyncio.shield(future)
            except TimeoutError:
                raise AgentError(
                    f"call {number} to {stream} came, call {line.next} did not within {WAIT_S:g} s",
                    code="agent.order_lost",
                    hint="submit again",
                    retryable=True,
                ) from None
        try:
            yield
        finally:
            if number == line.next:
                line.next += 1
                following = line.waiting.pop(line.next, None)
                if following is not None and not following.done():
                    following.set_result(None)

    def _line(self, caller: str, stream: Stream) -> _Line:
        key = (caller, stream)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
            if len(self._lines) > MAX_CALLERS:
                self._lines.popitem(last=False)
        else:
            self._lines.move_to_end(key)
        return line


def take_each(agent: LiveAgent, prompts: tuple[PromptSpec, ...]) -> dict[int, dict[str, Any]]:
    """Give an agent the prompts of a call, in their order. Callers that know nothing of each other may have made them:
    one that is refused takes none with it.

    Returns:
        Why some were refused, by their places.

    Raises:
        KimiRayError: the agent takes nothing any more.
    """
    refused: dict[int, dict[str, Any]] = {}
    for place, prompt in enumerate(prompts):
        try:
            agent.submit((prompt,))
        except AgentError as error:
            if not error.code.startswith("prompt."):
                raise
            refused[place] = error.to_data()
    return refused
