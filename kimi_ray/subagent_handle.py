"""A subagent that a program starts: what ``session.start_subagent`` gives.

A program has none of a model's bounds and comforts: no list of allowed profiles, no git context, no second question
after a short answer unless it asks for one. The depth of the tree and the session's limits bind it like a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, cast

from kimi_ray.agent.subagents import DEFAULT_PROFILE, SubagentResult, SummaryPolicy
from kimi_ray.errors import AgentError, ConfigError
from kimi_ray.handles import Agent, SessionServices
from kimi_ray.hosts.courier import Route
from kimi_ray.hosts.subagent_calls import RunWish, SubagentCalls
from kimi_ray.hosts.subagent_words import SpawnSubagent
from kimi_ray.ids import MAIN, new_ulid
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.session_link import SessionLink
from kimi_ray.settings import Profile


class SubagentOptions(TypedDict, total=False):
    """What ``Session.run_subagent`` takes beyond the prompt; it says what each means."""

    profile: str | Profile | None
    agent_id: str
    model: str | ResolvedModel | None
    fork: bool
    resume: str | None
    description: str | None
    labels: Mapping[str, str] | None
    timeout_s: float | None
    summary: SummaryPolicy | None


class SubagentHandle:
    """A subagent at work for a program."""

    def __init__(self, agent: Agent, work: asyncio.Task[SubagentResult], stop: asyncio.Event) -> None:
        """Use ``session.start_subagent``."""
        self.agent = agent
        self._work = work
        self._stop = stop

    def __repr__(self) -> str:
        return f"SubagentHandle({self.agent.stream})"

    @property
    def id(self) -> str:
        """The subagent's agent id."""
        return self.agent.id

    async def result(self) -> SubagentResult:
        """Wait for its end. Cancelling this await cancels the subagent's turn.

        Raises:
            AgentError: ``agent.already_running``. A subagent that failed does not raise: see ``SubagentResult.status``.
            KimiRayError: its end cannot be told to its caller's log.
        """
        try:
            return await asyncio.shield(self._work)
        except asyncio.CancelledError:
            self._stop.set()
            raise

    async def cancel(self) -> SubagentResult:
        """Cancel its turn; what it had answered is kept. Returns how it ended."""
        self._stop.set()
        return await asyncio.shield(self._work)


async def start_subagent(
    agent: Callable[[str], Agent],
    link: SessionLink,
    services: SessionServices,
    prompt: str,
    *,
    profile: str | Profile | None = None,
    agent_id: str = MAIN,
    model: str | ResolvedModel | None = None,
    fork: bool = False,
    resume: str | None = None,
    description: str | None = None,
    labels: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    summary: SummaryPolicy | None = None,
) -> SubagentHandle:
    """See ``Session.start_subagent``."""
    _check(prompt, labels, timeout_s)
    if not prompt.strip():
        raise AgentError("the prompt is empty", code="prompt.empty", hint="give it some text")
    if (fork or resume is not None) and (profile is not None or model is not None or (fork and resume is not None)):
        what = "a fork is what its caller is" if fork else "a resumed subagent is what it was"
        raise ConfigError(
            f"{what}: neither a profile nor a model can be said" + (", nor whom to resume" if fork else ""),
            code="request.conflict",
            hint="leave them out",
        )

    def route(child: str, host: str | None) -> Route:
        found = agent(child).route
        if found.host is None and found.resolving is None:
            found.host = host
        return found

    calls = SubagentCalls(services.courier, link, agent_id, services.resolve_model, by_agent=False, route=route)
    if resume is not None:
        await calls.check(resume)
        chosen = resume
    else:
        bound = services.features.profile(profile if profile is not None else DEFAULT_PROFILE)
        said = model if model is not None else bound.model
        spec = SpawnSubagent(
            agent_id,
            new_ulid(),
            bound,
            None if said is None or fork else services.resolve_model(said),
            fork=fork,
            labels=dict(labels or {}),
            about={} if description is None else {"description": description},
        )
        chosen = (await calls.spawn(spec)).agent_id
    stop = asyncio.Event()
    wish = RunWish(timeout_s or None, summary, stop)
    work = services.courier.spawn(calls.run(chosen, prompt, wish))
    work.add_done_callback(lambda done: done.cancelled() or done.exception())
    return SubagentHandle(agent(chosen), work, stop)


def _check(prompt: Any, labels: Any, timeout_s: Any) -> None:
    """What the annotations say, for callers who do not look at them.

    Raises:
        AgentError: ``prompt.invalid``.
        ConfigError: ``request.bad_argument`` {argument}.
    """
    if not isinstance(prompt, str):
        raise AgentError(
            f"a task cannot be a {type(prompt).__name__}", code="prompt.invalid", hint="give the task as text"
        )
    if labels is not None and not _is_text_to_text(labels):
        raise _bad_argument("labels", labels, "labels map text to text")
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
        raise _bad_argument("timeout_s", timeout_s, "seconds, 0 or more; None waits as long as it takes")


def _is_text_to_text(labels: Any) -> bool:
    return isinstance(labels, Mapping) and all(
        isinstance(one, str) for pair in cast("Mapping[Any, Any]", labels).items() for one in pair
    )


def _bad_argument(name: str, given: Any, hint: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be {given!r:.80}", code="request.bad_argument", hint=hint, details={"argument": name}
    )
