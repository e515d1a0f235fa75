"""One attempt of a rollout while it runs, and its row when it has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from kimi_ray.agent.specs import RolloutCall
from kimi_ray.errors import AgentError, KimiRayError
from kimi_ray.events import LogHeader, ParentRef, WriterRef
from kimi_ray.hosts.specs import AgentProgress, AgentSpec, AgentTotals, Outcome, PromptSpec, RunRequest
from kimi_ray.hosts.swarm_words import GoingOn, Rollout, SwarmSpec
from kimi_ray.ids import MAIN, new_message_id, new_ulid
from kimi_ray.log import epoch_ms
from kimi_ray.runs.items import RolloutKey
from kimi_ray.runs.outcomes import RowStatus, error_of, status_of
from kimi_ray.runs.rows import AttemptRow, RowModel, Timing
from kimi_ray.runs.schedule import Spent
from kimi_ray.settings import Sampling
from kimi_ray.store.seam import Stream
from kimi_ray.version import __version__


@dataclass(eq=False, slots=True)
class Attempt:
    """An attempt on its way. ``number`` counts from 1 over all runs of its key."""

    rollout: Rollout
    number: int
    seed: int
    request: RunRequest
    queued_s: float
    host: str = ""
    accepted: bool = False
    """The prompt is durable in the agent's log."""
    cancelling: bool = False
    ended: bool = False
    adopted: bool = False
    """Another host of its session began it."""
    told: bool = False
    """The log of the agent that the swarm belongs to tells its end already."""
    lost: bool = False
    """Its host was lost once, accepted or not: what its log holds is open."""
    revivals: int = 0
    resends: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def stream(self) -> Stream:
        """The agent's log."""
        return self.request.agent.stream

    @property
    def agent_id(self) -> str:
        """The agent."""
        return self.request.agent.stream.agent_id

    @property
    def prompt_id(self) -> str:
        """The rollout's one prompt."""
        return self.request.prompts[0].prompt_id

    @property
    def wait_key(self) -> tuple[Stream, str]:
        """What is waited for."""
        return (self.stream, self.prompt_id)


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, before it is a row. ``stop`` as in a row; ``outcome`` None: the agent told nothing."""

    stop: str
    outcome: Outcome | None = None
    error: dict[str, Any] | None = None
    status: RowStatus | None = None


def labels_of(spec: SwarmSpec, key: RolloutKey) -> dict[str, str]:
    """The labels of a rollout's agent: its item, and the agent that it belongs to unless that is main."""
    return {"item": key.item_id} | ({"parent_agent_id": spec.parent} if spec.parent != MAIN else {})


def run_request(
    spec: SwarmSpec, rollout: Rollout, agent_id: str, number: int, seed: int, send_seed: bool
) -> RunRequest:
    """The call that runs an attempt: a new agent with its own log, one prompt, let go of at its end."""
    sampling = rollout.sampling or Sampling()
    if sampling.seed is None:
        sampling = sampling.model_copy(update={"seed": seed})
    header = LogHeader(
        session_id=spec.session_id,
        agent_id=agent_id,
        created_at=epoch_ms(),
        cwd=spec.cwd,
        parent=ParentRef(session_id=spec.session_id, agent_id=spec.parent),
        origin="subagent",
        delegation_depth=spec.depth,
        profile=spec.profile.name,
        labels=labels_of(spec, rollout.key),
        run_id=spec.run_id,
        item_id=rollout.key.item_id,
        repeat=rollout.key.repeat,
        attempt=number,
        writer=WriterRef(name="kimi-ray", version=__version__),
    )
    agent = AgentSpec(
        stream=Stream(spec.session_id, agent_id),
        nonce=new_ulid(),
        profile=spec.profile,
        model=spec.model,
        header=header.to_data(),
        sampling=sampling,
        limits=rollout.limits,
        workdir=rollout.workdir,
        keep_workdir=spec.keep_workdirs,
        user_tools=spec.user_tools,
        rollout=_call_of(spec, rollout, number, int(sampling.seed or 0)),
        item=rollout.item,
        denied_paths=spec.denied_paths,
        send_seed=send_seed,
        permission_mode=spec.permission_mode,
        claim=spec.claim,
        models=spec.models,
    )
    prompt = PromptSpec(
        prompt_id=new_message_id(),
        text=rollout.prompt,
        # A function has no middle from which it could go on.
        on_interrupt="continue" if spec.on_interrupted == "continue" and spec.rollout is None else "fail",
        source=None if spec.rollout is None else {"kind": "rollout", "function": spec.rollout.name},
        output_schema=spec.output_schema if spec.rollout is None else None,
    )
    return RunRequest(agent, (prompt,), release=True)


def _call_of(spec: SwarmSpec, rollout: Rollout, number: int, seed: int) -> RolloutCall | None:
    if spec.rollout is None:
        return None
    return RolloutCall(
        function=spec.rollout,
        item_id=rollout.key.item_id,
        repeat=rollout.key.repeat,
        attempt=number,
        seed=seed,
        run_id=spec.run_id,
        tags=rollout.tags,
        output_schema=spec.output_schema,
    )


def going_on_request(request: RunRequest, one: GoingOn) -> RunRequest:
    """The same for an attempt whose log exists: it is opened, and its prompt is the one that it has."""
    prompt = request.prompts[0]
    if one.prompt_id is not None:
        prompt = replace(prompt, prompt_id=one.prompt_id)
    # It may have ended already: let go of at once, it could not be asked for its end.
    return RunRequest(replace(request.agent, header=None), (prompt,), release=False)


def ending_of(outcome: Outcome) -> Ending:
    """How the agent says it ended."""
    result = outcome.result
    return Ending(result.stop or result.state, outcome, result.error)


def failed(error: KimiRayError) -> Ending:
    """An attempt that failed outside of its agent's log."""
    return Ending("failed", None, error.to_data())


def host_lost(attempt: Attempt) -> Ending:
    """The end of an attempt that is not brought back after its host was lost."""
    error = AgentError(
        f"the host of {attempt.stream} was lost",
        code="turn.interrupted",
        details={"host": attempt.host, "revivals": attempt.revivals},
        retryable=True,
    )
    return Ending("interrupted", None, error.to_data())


def attempt_row(spec: SwarmSpec, attempt: Attempt, ending: Ending) -> AttemptRow:
    """The row of an attempt that has ended."""
    outcome = ending.outcome
    known = outcome is not None and outcome.seq >= 0
    totals = outcome.totals if outcome is not None else AgentTotals()
    elapsed_ms = round((time.monotonic() - attempt.began) * 1000)
    status = ending.status or status_of(ending.stop)
    return AttemptRow(
        run_id=spec.run_id,
        item_id=attempt.rollout.key.item_id,
        index=attempt.rollout.index,
        repeat=attempt.rollout.key.repeat,
        attempt=attempt.number,
        seed=attempt.seed,
        session_id=spec.session_id,
        agent_id=attempt.agent_id,
        last_seq=outcome.seq - 1 if outcome is not None and known else None,
        status=status,
        stop=ending.stop,
        error=error_of(ending.stop, ending.error),
        text=outcome.result.text if outcome is not None and known else None,
        output=outcome.result.output if outcome is not None and known else None,
        scores=outcome.result.scores if outcome is not None and known else {},
        usage=totals.usage,
        cost_usd=totals.cost_usd,
        price_date=spec.price_date if totals.cost_usd is not None else None,
        turns=totals.turns,
        steps=totals.steps,
        tool_calls=totals.tool_calls,
        interruptions=max(totals.interruptions, attempt.revivals),
        timing=Timing(
            queued_ms=round(attempt.queued_s * 1000) + totals.queued_ms,
            limiter_ms=totals.limiter_ms,
            model_ms=totals.model_ms,
            tools_ms=totals.tools_ms,
            store_ms=totals.store_ms,
            retry_wait_ms=totals.retry_wait_ms,
            wall_ms=totals.wall_ms or elapsed_ms,
        ),
        model=RowModel(
            name=spec.model.name,
            served=outcome.served_model if outcome is not None else None,
            fingerprint=outcome.fingerprint if outcome is not None else None,
        ),
        node_id=outcome.node_id if outcome is not None else None,
    )


def spent_of(totals: AgentTotals) -> Spent:
    """What an attempt used in all."""
    return Spent(
        turns=totals.turns,
        steps=totals.steps,
        tool_calls=totals.tool_calls,
        output_tokens=totals.usage.output,
        total_tokens=totals.usage.total,
        cost_usd=totals.cost_usd or 0.0,
        working_s=(totals.model_ms + totals.tools_ms) / 1000,
    )


def spent_so_far(progress: AgentProgress) -> Spent:
    """What a running attempt has used: turns, steps and calls count when they begin."""
    return Spent(
        turns=progress.turns,
        steps=progress.steps,
        tool_calls=progress.tool_calls,
        output_tokens=progress.output_tokens,
        total_tokens=progress.total_tokens,
        cost_usd=progress.cost_usd,
    )
