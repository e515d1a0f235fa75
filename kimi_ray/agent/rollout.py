"""What a rollout function is given: its item, its agent, and ways to score and to remark.

The function runs on the host of its agent, beside the agent's loop: each ``ask`` is a prompt like any other, with a
turn of its own. Whoever runs the function (``rollout_agent``) lends what is here its powers, as a ``RolloutPowers``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from pydantic_core import PydanticSerializationError, to_jsonable_python

from kimi_ray.agent.specs import PromptResult, PromptSpec, RolloutCall
from kimi_ray.errors import AgentError, ConfigError, LogError, RunError
from kimi_ray.events import freeze, thaw
from kimi_ray.ids import new_message_id
from kimi_ray.log import Message
from kimi_ray.settings import Limits, Sampling, check_settings
from kimi_ray.tools.contract import Environment
from kimi_ray.tools.output_schema import schema_of

_T = TypeVar("_T")

MAX_NOTE_CHARS = 100_000


class RolloutPowers(Protocol):
    """What a rollout function may have done, by the agent that runs it."""

    def record(self, type: str, data: dict[str, Any]) -> None:
        """Append an event. Raises ``agent.closed`` once the rollout is over."""
        ...

    async def turn(self, spec: PromptSpec) -> PromptResult:
        """Have a turn and wait for its end, durably."""
        ...

    async def messages(self) -> list[Message]:
        """What the model would see now."""
        ...


class RolloutAgent:
    """The agent of a rollout, for the function that drives it."""

    def __init__(self, powers: RolloutPowers, prompt_id: str) -> None:
        self._powers = powers
        self._prompt_id = prompt_id

    async def ask(
        self,
        text: str,
        *,
        output_schema: Any = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        check: bool = True,
    ) -> PromptResult:
        """A turn of the agent: the prompt, the model's answer, the tools it asks for, until it asks for none.

        Args:
            text: The prompt.
            output_schema: A pydantic model or a JSON schema that the answer must fit; it is in ``result.output``.
            sampling: On top of the rollout's.
            limits: On top of the rollout's; what earlier turns have used counts.
            check: Raise what the turn failed with. False: it is in the result, for you to look at.

        Raises:
            KimiRayError: with ``check``, what the turn ended with unless it completed: ``provider.*``, ``limit.*``,
                ``output.invalid`` ... Raised on out of the function, it is what the row tells, with its own class.
            ConfigError: ``output.bad_schema``, ``request.bad_argument``.
            AgentError: ``prompt.empty``.
        """
        _check_text(text)
        check_settings(sampling=(Sampling, sampling), limits=(Limits, limits))
        schema = None if output_schema is None else schema_of(output_schema)
        return await self._turn(
            PromptSpec(new_message_id(), text, sampling=sampling, limits=limits, output_schema=schema), check
        )

    async def continue_turn(self, *, check: bool = True) -> PromptResult:
        """A turn without a new message: the model goes on from what is there. Raises as ``ask``."""
        return await self._turn(PromptSpec(new_message_id(), continuation=True), check)

    async def messages(self) -> list[Message]:
        """The conversation as the model would see it now."""
        return await self._powers.messages()

    async def _turn(self, spec: PromptSpec, check: bool) -> PromptResult:
        source = {"kind": "rollout", "prompt_id": self._prompt_id}
        result = await self._powers.turn(replace(spec, source=source))
        return result.raise_for_state() if check else result


@dataclass(slots=True)
class RolloutContext:
    """What a rollout function is given.

    All of it may be used from the function's own task; ``score``, ``note`` and ``run`` also from threads.
    """

    item: Any
    """The item's data: its columns, or a bare string."""
    prompt: str
    """The swarm's prompt for this item."""
    agent: RolloutAgent
    environment: Environment
    """The place where the agent's tools work."""
    rng: random.Random
    """Seeded with ``seed``: the same for the same run seed, item, repeat and attempt."""
    item_id: str
    repeat: int
    """From 0."""
    attempt: int
    """From 1."""
    seed: int
    run_id: str
    tags: dict[str, str]
    cancelled: asyncio.Event
    """Set when the rollout is to end; an async function is cancelled at the same time, a plain one should look."""
    _powers: RolloutPowers
    _loop: asyncio.AbstractEventLoop

    def score(self, name: str, value: Any) -> None:
        """Record a score: in the log, and in the row's ``scores``. The last one of a name counts.

        Args:
            name: Not empty.
            value: A number, a bool, text, or other JSON.

        Raises:
            RunError: ``swarm.bad_output`` for what JSON cannot hold.
            AgentError: ``agent.closed`` once the rollout is over.
        """
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RunError("a score needs a name", code="swarm.bad_output", hint='ctx.score("exact", 1.0)')
        data = {"name": name, "value": plain(value, f"the score {name}"), "by": "rollout"}
        self._on_loop(lambda: self._powers.record("score/recorded", data))

    def note(self, text: str) -> None:
        """Leave a remark in the log.

        Raises:
            RunError: ``swarm.bad_output`` above ``MAX_NOTE_CHARS``.
            AgentError: ``agent.closed`` once the rollout is over.
        """
        if len(text) > MAX_NOTE_CHARS:
            raise RunError(
                f"a note of {len(text)} characters is too long",
                code="swarm.bad_output",
                hint=f"it may have {MAX_NOTE_CHARS}; write what is large into a file of the working directory",
            )
        data = {"text": plain(text, "the note"), "by": "rollout"}
        self._on_loop(lambda: self._powers.record("note/added", data))

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """For a plain function: wait for something asynchronous, such as ``ctx.agent.ask(...)``.

        Raises:
            RunError: ``swarm.bad_rollout`` on the event loop's own thread, which would wait for itself.
        """
        if _running_loop() is self._loop:
            work.close()
            raise RunError(
                "ctx.run would wait for itself", code="swarm.bad_rollout", hint="in an async function, use await"
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _on_loop(self, work: Callable[[], None]) -> None:
        if _running_loop() is self._loop:
            work()
        else:
            asyncio.run_coroutine_threadsafe(_later(work), self._loop).result()


def context_of(
    call: RolloutCall, *, item: Any, prompt: str, prompt_id: str, environment: Environment, powers: RolloutPowers
) -> RolloutContext:
    """The context of one attempt, for the running loop."""
    return RolloutContext(
        item=thaw(item),
        prompt=prompt,
        agent=RolloutAgent(powers, prompt_id),
        environment=environment,
        rng=random.Random(call.seed),
        item_id=call.item_id,
        repeat=call.repeat,
        attempt=call.attempt,
        seed=call.seed,
        run_id=call.run_id,
        tags=dict(call.tags),
        cancelled=asyncio.Event(),
        _powers=powers,
        _loop=asyncio.get_running_loop(),
    )


def plain(value: Any, what: str) -> Any:
    """A value as JSON: models and dataclasses become objects, dates and paths text.

    Raises:
        RunError: ``swarm.bad_output``.
    """
    try:
        return thaw(freeze(to_jsonable_python(value)))
    except (PydanticSerializationError, LogError, ValueError, RecursionError) as error:
        why = error.message if isinstance(error, LogError) else str(error)
        raise RunError(
            f"{what} cannot be stored as JSON: {why}",
            code="swarm.bad_output",
            hint="return what JSON can hold, a pydantic model, or a dataclass",
            details={"type": type(value).__qualname__},
        ) from None


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ConfigError(
            f"the text of a prompt must be a str, not {type(text).__name__}",
            code="request.bad_argument",
            hint="write it out, json.dumps(...) for data: the model reads text",
            details={"argument": "text"},
        )
    if not text.strip():
        raise AgentError("the prompt is empty", code="prompt.empty", hint="give it some text")


def is_over() -> AgentError:
    """Why a function that was given up can do nothing any more."""
    return AgentError("the rollout is over", code="agent.closed", hint="let the function end when it is cancelled")


async def _later(work: Callable[[], None]) -> None:
    work()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
