"""Bringing one agent to life on some host, however many hosts are lost on the way."""

from __future__ import annotations

from dataclasses import replace

from kimi_ray.errors import KimiRayError, RuntimeFault, error_from_data
from kimi_ray.hosts.ports import Cluster, is_lost
from kimi_ray.hosts.specs import Ack, AgentSpec, PlaceAgent, PromptSpec, RunRequest
from kimi_ray.hosts.steady_calls import RegistryCalls, StoreCalls
from kimi_ray.hosts.stored_binding import node_of_directory
from kimi_ray.ids import new_ulid
from kimi_ray.settings import Isolation
from kimi_ray.tools.carried import fingerprint_of

ACTIVATION_S = 60.0
ACTIVATION_TRIES = 4


async def activate_agent(
    cluster: Cluster,
    registry: RegistryCalls,
    store: StoreCalls,
    spec: AgentSpec,
    *,
    prompts: tuple[PromptSpec, ...] = (),
    isolation: Isolation | None = None,
    node_id: str | None = None,
    at: str | None = None,
) -> str:
    """Place an agent and bring it to life; gives the name of its host.

    Each try has a nonce of its own, so that a host that was only thought lost is fenced. A new log whose creation was
    answered by nobody may exist: it is then opened as it is.

    An agent that has a directory of its own goes where it lived last, while there is that node.

    ``at`` is a host on which the agent was seen alive: it is taken over there, if it still lives.

    Raises:
        KimiRayError: what the activation raised; ``infra.*`` when hosts were lost again and again. The place is given
            back then.
    """
    wish = PlaceAgent(spec.stream, isolation, node_id, fingerprint_of(spec.code, spec.workdir))
    may_exist = False
    last: KimiRayError | None = None
    for _ in range(ACTIVATION_TRIES):
        seen, at = at, None
        if seen is None and spec.header is None:
            wish = replace(wish, near=await node_of_directory(store, spec.stream, spec.workdir))
        host = seen or (await registry.place_agents([wish]))[0]
        placed = 0 if seen is not None else 1
        try:
            acks: list[Ack] = await cluster.peer(host).call(
                "run_many", [RunRequest(spec, prompts)], timeout_s=ACTIVATION_S
            )
        except KimiRayError as error:
            if not is_lost(error.code):
                await registry.released(host, placed)
                raise
            if not await registry.report_lost(host):
                await registry.released(host, placed)
            last = error
            may_exist = spec.header is not None
            spec = replace(spec, nonce=new_ulid())
            continue
        failure = acks[0].error
        if failure is None:
            return host
        await registry.released(host, placed)
        if seen is not None:
            last = error_from_data(failure)
            continue
        if may_exist and failure["code"] == "store.exists":
            spec = replace(spec, header=None, nonce=new_ulid())
            may_exist = False
            continue
        raise error_from_data(failure)
    raise last or RuntimeFault(f"agent {spec.stream} found no host", code="infra.unschedulable", retryable=True)
