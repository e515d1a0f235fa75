"""The working directories of forks, made before the forks are there: the source's own, copies of it, or others."""

from __future__ import annotations

import asyncio
from typing import Any

from kimi_ray.errors import KimiRayError, ToolError
from kimi_ray.hosts.fork_words import ForkSpec
from kimi_ray.hosts.live_session import HostServices
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.ids import MAIN
from kimi_ray.session.fork_plan import ForkPlan
from kimi_ray.settings import Workdir
from kimi_ray.store.seam import Stream
from kimi_ray.tools.carried import fingerprint_of
from kimi_ray.tools.workdirs import workdir_name

_ASK_S = 60.0
_WORKDIRS_S = 600.0
_PLACES = 3
"""So many hosts are asked for directories, when one is lost after the other."""


class ForkWorkdirs:
    """The directories of the forks of one call.

    Args:
        services: The session host's.
    """

    def __init__(self, services: HostServices) -> None:
        self._services = services
        self._place: PlaceAgent | None = None
        self._host = ""

    async def make(self, spec: ForkSpec, plan: ForkPlan) -> list[dict[str, Any]] | None:
        """For each target what its binding says of its directory; None when it is the source's own as it is.

        Raises:
            ToolError: ``workdir.lost`` when the node of the source's directory is gone; ``workdir.*``.
        """
        bound: dict[str, Any] = (plan.main.bind or {}).get("workdir") or {}
        if spec.workdir == "shared":
            if not bound.get("prepared") or bound.get("kind") == "shared":
                return None
            node = bound.get("node") or plan.main.node
            return [{**bound, **({} if node is None else {"node": node})} for _ in spec.targets]
        if isinstance(spec.workdir, Workdir):
            wanted, node = spec.workdir, spec.node_id
            if wanted.kind in ("none", "shared"):
                return [wanted.said() for _ in spec.targets]
        else:
            wanted = _of_the_source(spec.workdir, bound, spec)
            node = bound.get("node") or plan.main.node
            node = await self._living_node(node, bound, spec.node_id)
        return await self._make(spec, wanted, node)

    async def _make(self, spec: ForkSpec, wanted: Workdir, node: str | None) -> list[dict[str, Any]]:
        services, stream = self._services, Stream(spec.targets[0], MAIN)
        free = services.config.workspace_shared and wanted.kind != "factory"
        self._place = PlaceAgent(stream, None, None if free else node, fingerprint_of((), wanted))
        for again in range(_PLACES):
            (self._host,) = await services.registry.place_agents([self._place])
            try:
                return await self._make_at(spec, wanted, again)
            except KimiRayError as error:
                if not is_lost(error.code):
                    raise
                if not await services.registry.report_lost(self._host) or again == _PLACES - 1:
                    raise _maker_lost(self._host) from error  # or the caller would take its callee for lost
            finally:
                await asyncio.shield(services.registry.released(self._host))
        raise AssertionError

    async def _make_at(self, spec: ForkSpec, wanted: Workdir, again: int) -> list[dict[str, Any]]:
        nonce = f"{spec.group}{spec.attempt}{again}"
        wishes = [(wanted, workdir_name(session_id, MAIN, nonce), list(spec.leave_out)) for session_id in spec.targets]
        peer = self._services.cluster.peer(self._host)
        if spec.attempt or again:
            # What a host that was lost has made is nobody's, and no sweep would take it from sessions that are there.
            await peer.call("drop_workdirs", list(spec.targets), timeout_s=_WORKDIRS_S)
        made: list[dict[str, Any]] = await peer.call("make_workdirs", wishes, timeout_s=_WORKDIRS_S)
        told: dict[str, Any] = await peer.call("ping", timeout_s=_ASK_S, group="control")
        said = wanted.said() | {"node": told["node_id"]}
        return [said | {"prepared": one["path"], "created": one["created"]} for one in made]

    async def drop(self, spec: ForkSpec) -> None:
        """Remove what was made; when its host is lost, by another one of the node."""
        if self._place is None:
            return
        registry, targets = self._services.registry, list(spec.targets)
        try:
            for _ in range(_PLACES):
                try:
                    peer = self._services.cluster.peer(self._host)
                    await peer.call("drop_workdirs", targets, timeout_s=_WORKDIRS_S)
                    return
                except KimiRayError as error:
                    if not is_lost(error.code) or not await registry.report_lost(self._host):
                        raise
                (self._host,) = await registry.place_agents([self._place])
                await asyncio.shield(registry.released(self._host))
        except KimiRayError:
            pass  # the node's next host of agents sweeps; the failure itself is what the caller hears

    async def _living_node(self, node: str | None, bound: dict[str, Any], own: str | None) -> str | None:
        alive = [one.node_id for one in await self._services.cluster.nodes() if one.alive]
        if node in alive:
            return node
        if bound.get("kind") == "shared":
            return own if own in alive else None
        if len(alive) == 1:
            return alive[0]  # its id is another after each start of the cluster
        raise ToolError(
            f"the directory {bound.get('prepared')} was on the node {node}, which is gone",
            code="workdir.lost",
            hint="fork with workdir='shared' of another directory, or Workdir.copy(path)",
            details={"path": bound.get("prepared"), "node_id": node},
        )


def _maker_lost(host: str) -> ToolError:
    return ToolError(
        f"the host {host} was lost while it made directories",
        code="workdir.failed",
        hint="try again; nothing was made",
        details={"host": host},
        retryable=True,
    )


def _of_the_source(kind: str, bound: dict[str, Any], spec: ForkSpec) -> Workdir:
    """A copy or a worktree of the directory in which the source works."""
    if kind == "git" and bound.get("kind") == "git":
        return Workdir.git(str(bound["path"]), str(bound.get("ref") or "HEAD"))
    directory = bound.get("prepared") or (bound.get("path") if bound.get("kind") == "shared" else None)
    if not directory:
        raise ToolError(
            f"{Stream(*spec.source)} has no working directory to make a {kind} of",
            code="workdir.invalid",
            hint="say which with workdir=Workdir.copy(path), or take workdir='shared'",
            details={"workdir": kind},
        )
    return Workdir.copy(str(directory)) if kind == "copy" else Workdir.git(str(directory))
