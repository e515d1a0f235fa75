"""The events of a whole session: its agents' logs as one stream, with those that come later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from kimi_ray.errors import ConfigError, KimiRayError, StoreError
from kimi_ray.events import Catalog, SessionEvent
from kimi_ray.hosts.courier import Courier
from kimi_ray.ids import agent_number
from kimi_ray.log_following import COLD_PAUSE_S, SessionPlace, follow_log, patiently
from kimi_ray.session.refusals import no_agent, no_session
from kimi_ray.store.seam import Stream

_LOOK_S = 5.0
_SPACING_S = 0.5
_COLD_READS_PER_S = 20
_QUEUE = 1000


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """An event of one of a session's agents."""

    agent_id: str
    event: SessionEvent

    @property
    def cursor(self) -> dict[str, int]:
        """What to put into the cursor to go on behind this event: ``cursor.update(found.cursor)``."""
        return {self.agent_id: self.event.seq + 1}


async def session_events(
    courier: Courier,
    session_id: str,
    cursor: Mapping[str, int] | None,
    types: Sequence[str] | None,
    agents: Sequence[str] | None,
    *,
    follow: bool,
    catalog: Catalog,
) -> AsyncGenerator[AgentEvent]:
    """See ``Session.events``."""
    wanted = _checked_types(types, catalog)
    begin = dict(cursor or {})
    known = await _agents_of(courier, session_id)
    _check_agents(session_id, known, [*(agents or ()), *begin])
    chosen = list(dict.fromkeys(agents)) if agents is not None else known
    if not follow:
        place = SessionPlace(courier, session_id)
        for agent_id in chosen:
            stream, first = Stream(session_id, agent_id), begin.get(agent_id, 0)
            try:
                async for event in follow_log(courier, stream, first, follow=False, place=place):
                    if wanted is None or event.type in wanted:
                        yield AgentEvent(agent_id, event)
            except StoreError as error:
                raise _of_session(session_id, error) from error
        return
    tree = _Following(courier, session_id, begin, wanted)
    tree.read(chosen)
    if agents is None:
        tree.look_for_more()
    try:
        while True:
            found = await tree.queue.get()
            if isinstance(found, StoreError):
                raise _of_session(session_id, found) from found
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        await tree.close()


class _Following:
    """The readers of a followed session, one for each agent, and the one that looks for new agents."""

    def __init__(self, courier: Courier, session_id: str, begin: dict[str, int], wanted: frozenset[str] | None) -> None:
        self.queue: asyncio.Queue[AgentEvent | BaseException] = asyncio.Queue(_QUEUE)
        self._courier = courier
        self._session_id = session_id
        self._place = SessionPlace(courier, session_id)
        self._begin = begin
        self._wanted = wanted
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._finder: asyncio.Task[None] | None = None
        self._spawned = asyncio.Event()

    def read(self, agent_ids: Sequence[str]) -> None:
        for agent_id in agent_ids:
            if agent_id not in self._readers:
                self._readers[agent_id] = asyncio.create_task(self._read(agent_id), name=f"events of {agent_id}")

    def look_for_more(self) -> None:
        self._finder = asyncio.create_task(self._find(), name=f"agents of {self._session_id}")

    async def close(self) -> None:
        tasks = [*self._readers.values(), *([self._finder] if self._finder is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, agent_id: str) -> None:
        stream, begin = Stream(self._session_id, agent_id), self._begin.get(agent_id, 0)
        try:
            events = follow_log(
                self._courier, stream, begin, follow=True, place=self._place, cold_pause_s=self._cold_pause_s
            )
            async for event in events:
                if event.type == "subagent/spawned":
                    self._spawned.set()
                if self._wanted is None or event.type in self._wanted:
                    await self.queue.put(AgentEvent(agent_id, event))
        except Exception as error:  # noqa: BLE001  raised where the events are read
            await self.queue.put(error)

    async def _find(self) -> None:
        """New agents are announced in their parents' logs, mostly; now and then it is looked for others."""
        try:
            while True:
                try:
                    # Not wait_for: it may swallow a cancel that comes together with the event.
                    async with asyncio.timeout(_LOOK_S):
                        await self._spawned.wait()
                except TimeoutError:
                    pass
                self._spawned.clear()
                self.read(await patiently(lambda: _agents_of(self._courier, self._session_id)))
                await asyncio.sleep(_SPACING_S)
        except Exception as error:  # noqa: BLE001  raised where the events are read
            await self.queue.put(error)

    def _cold_pause_s(self) -> float:
        """Thousands of ended agents must not keep the store busy."""
        return max(COLD_PAUSE_S, len(self._readers) / _COLD_READS_PER_S)


async def _agents_of(courier: Courier, session_id: str) -> list[str]:
    """The agents that have logs, main first.

    Raises:
        SessionError: ``session.not_found`` when there is none.
    """
    logs = await courier.store.list_logs(session_id)
    if not logs:
        raise no_session(session_id)
    return sorted((log.stream.agent_id for log in logs), key=lambda agent_id: agent_number(agent_id) or 0)


def _check_agents(session_id: str, known: Sequence[str], named: Sequence[str]) -> None:
    for agent_id in named:
        if agent_id not in known:
            raise no_agent(Stream(session_id, agent_id))


def _of_session(session_id: str, error: StoreError) -> KimiRayError:
    """What the end of a log means: that of a session which is deleted meanwhile goes with it."""
    return no_session(session_id) if error.code in ("store.deleted", "store.not_found") else error


def _checked_types(types: Sequence[str] | None, catalog: Catalog) -> frozenset[str] | None:
    if types is None:
        return None
    for name in (types,) if isinstance(types, str) else types:
        if name not in catalog:
            raise ConfigError(
                f"there is no type of event {name!r}",
                code="request.invalid",
                hint=f"types are {', '.join(sorted(entry.name for entry in catalog))}",
                details={"key": "types", "value": name},
            )
    return frozenset((types,) if isinstance(types, str) else types)
