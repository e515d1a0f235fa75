"""Forks from a driver: N copies of a session that appear together or not at all; cold, or brought to life."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kimi_ray.app import SessionSummary, summary_of
from kimi_ray.errors import ConfigError, KimiRayError
from kimi_ray.hosts.courier import Courier
from kimi_ray.hosts.fork_words import MAX_FORKS, ForkedSession, ForkSpec, ForkWorkdir
from kimi_ray.ids import MAIN, is_path_safe_id, new_session_id, new_ulid
from kimi_ray.runs.seeds import fork_seed
from kimi_ray.session import checked_metadata, checked_tags, checked_title
from kimi_ray.session_lifecycle import Lifecycle, as_text, checked_id
from kimi_ray.session_link import Notes, ask_host_of
from kimi_ray.settings import Sampling, Workdir, check_settings
from kimi_ray.store.seam import Document, Stream
from kimi_ray.tools.carried import carried_workdir

FORK_S = 900.0
"""Longest wait for a call that forks: directories may have to be copied."""

_UNDO_AT_ONCE = 8
_MAX_SEED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Home:
    """The workspace that forks come into."""

    workspace_id: str
    path: str


class Forks:
    """The forks of one driver.

    Args:
        courier: The driver's.
        notes: What it saw and has not told yet: the fork's document is to have it.
        lifecycle: Deletes forks that came to nothing.
    """

    def __init__(self, courier: Courier, notes: Notes, lifecycle: Lifecycle) -> None:
        self._courier = courier
        self._notes = notes
        self._lifecycle = lifecycle

    async def publish(
        self,
        session_id: str,
        count: int = 1,
        *,
        agent_id: str = MAIN,
        at: str | None = None,
        turn_index: int | None = None,
        new_session_id: str | None = None,
        title: str | None = None,
        workdir: ForkWorkdir = "shared",
        sampling: Sampling | None = None,
        seeds: int | Sequence[int] | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        child: bool = False,
    ) -> list[SessionSummary]:
        """Fork a session without bringing the forks to life: no model need be known. In the source's workspace.

        Args:
            session_id: The source, of any workspace, live or cold, archived or not.
            count: How many, at most 1,000; all of them or none.
            agent_id: The agent that becomes ``main``; those below it come along.
            at: The point, see ``Workspace.fork``; None is the whole, and the source must be idle.
            turn_index: The same as ``at=str(turn_index)``.
            new_session_id: Of a single fork; None makes one.
            title: None makes one that a prompt may replace.
            workdir: See ``Workspace.fork``.
            sampling: Over the source's.
            seeds: See ``Workspace.fork_many``.
            metadata: Over the source's.
            tags: Over the source's.
            child: Whether the forks are children of the source.

        Raises:
            KimiRayError: as ``Workspace.fork``. Nothing is left then.
        """
        spec = fork_spec(
            session_id,
            count,
            agent_id=agent_id,
            at=at,
            turn_index=turn_index,
            new_session=new_session_id,
            title=title,
            workdir=workdir,
            sampling=sampling,
            seeds=seeds,
            metadata=metadata,
            tags=tags,
            child=child,
        )
        made = await self.make(spec)
        return [summary_of(Document(one.session_id, one.workspace_id, 1, one.document)) for one in made]

    async def make(self, spec: ForkSpec) -> list[ForkedSession]:
        """Make the forks, cold. If this is cancelled, they are taken back."""
        courier = self._courier
        self.check_open()
        await self._notes.flush()
        workdir = carried_workdir(spec.workdir) if isinstance(spec.workdir, Workdir) else spec.workdir
        spec = replace(spec, workdir=workdir, node_id=courier.cluster.node_id, leave_out=(courier.config.home,))
        work = asyncio.ensure_future(self._ask(spec))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            courier.afterwards(self._withdraw(work))
            raise

    def check_open(self) -> None:
        """Refuse when the runtime was closed, or another event loop asks.

        Raises:
            RuntimeFault: ``runtime.closed``, ``runtime.wrong_loop``.
        """
        self._courier.check_open()

    async def undo(self, session_ids: Sequence[str]) -> None:
        """Delete forks that came to nothing, as far as they can be reached."""
        gate = asyncio.Semaphore(_UNDO_AT_ONCE)

        async def delete(session_id: str) -> None:
            async with gate:
                try:
                    await self._lifecycle.delete(session_id)
                except KimiRayError as error:
                    # Why they came to nothing is what the caller hears.
                    self._courier.last_error = error

        await asyncio.gather(*map(delete, session_ids))

    async def _withdraw(self, work: asyncio.Future[list[ForkedSession]]) -> None:
        try:
            made = await work
        except KimiRayError:
            return
        await self.undo([one.session_id for one in made])

    async def _ask(self, spec: ForkSpec) -> list[ForkedSession]:
        """Ask the source's host for the forks; asked again it is for the same ones."""
        courier = self._courier

        async def ask(host: str, attempt: int) -> list[ForkedSession]:
            asked = replace(spec, attempt=attempt)
            return await courier.cluster.peer(host).call("fork_sessions", asked, timeout_s=FORK_S)

        return await ask_host_of(courier, spec.source.session_id, ask)


def fork_spec(
    session_id: str,
    count: int,
    *,
    agent_id: str = MAIN,
    at: str | None = None,
    turn_index: int | None = None,
    new_session: str | None = None,
    title: str | None = None,
    workdir: ForkWorkdir = "shared",
    sampling: Sampling | None = None,
    seeds: int | Sequence[int] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    child: bool = False,
    home: Home | None = None,
) -> ForkSpec:
    """What a caller asks for, checked as far as it can be without the source. The point is the source's host's to read.

    Args:
        new_session: The id of a single fork; None makes one for each.
        home: The workspace of the forks; None is the source's, which may be any.

    Raises:
        ConfigError: ``request.invalid`` {count}, {seeds}, {agent_id}, or {workdir}; ``request.bad_argument``.
        SessionError: ``session.bad_id``, ``session.bad_metadata``.
    """
    check_settings(sampling=(Sampling, sampling))
    checked_id(session_id)
    if not isinstance(agent_id, str) or not is_path_safe_id(agent_id):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _invalid("agent_id", agent_id, "kimi-ray sessions show lists the agents of a session")
    if type(count) is not int or not 1 <= count <= MAX_FORKS:
        raise _invalid("count", count, f"give 1 to {MAX_FORKS:,}")
    if not isinstance(workdir, Workdir) and workdir not in ("shared", "copy", "git"):
        raise _invalid("workdir", workdir, "use 'shared', 'copy', 'git', or a Workdir")
    if new_session is not None:
        checked_id(new_session)
    targets = (new_session,) if new_session is not None else tuple(new_session_id() for _ in range(count))
    return ForkSpec(
        group=new_ulid(),
        source=Stream(session_id, agent_id),
        targets=targets,
        at=at,
        turn_index=turn_index,
        workspace_id=None if home is None else home.workspace_id,
        cwd=None if home is None else home.path,
        title=checked_title(title),
        child=child,
        workdir=workdir,
        sampling=sampling,
        seeds=_seeds(seeds, count),
        metadata=checked_metadata(metadata),
        tags=checked_tags(tags),
    )


def _seeds(seeds: int | Sequence[int] | None, count: int) -> tuple[int, ...] | None:
    if seeds is None:
        return None
    if type(seeds) is int:
        if not 0 <= seeds < 2**63:
            raise _invalid("seeds", seeds, "give an integer from 0 to 2^63-1, or one seed for each fork")
        return tuple(fork_seed(seeds, index) for index in range(count))
    given = list(seeds) if isinstance(seeds, list | tuple) else None
    if given is None or len(given) != count or any(type(s) is not int or not 0 <= s <= _MAX_SEED for s in given):
        raise _invalid("seeds", seeds, f"give exactly {count} integers from 0 to 2^31-1, one for each fork")
    return tuple(given)


def _invalid(what: str, given: object, hint: str) -> ConfigError:
    shown = given if isinstance(given, int | float | bool) else as_text(given)[:200]
    return ConfigError(f"{what} cannot be {shown!r}", code="request.invalid", hint=hint, details={what: shown})
