"""Turns of main agents that no driver watches: the documents of their sessions hear of them, too.

Once a second each agent host that has main agents of this host's sessions is asked where they stand, all in one call.
A session whose main has done something that its driver did not tell of reads the end of main's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.boundary import noted
from kimi_ray.hosts.live_session import LiveSession
from kimi_ray.hosts.ports import Cluster
from kimi_ray.hosts.specs import AgentProgress
from kimi_ray.ids import MAIN
from kimi_ray.log import epoch_ms
from kimi_ray.store.seam import Stream

LOOK_S = 1.0
_ASK_S = 5.0
_SETTLED_MS = 2000
"""A driver that waits for a turn tells of its end within a second: only what is quiet for longer is looked at."""
_JITTER_MS = 100


class MainWatch:
    """Looks after the main agents of the sessions in ``sessions``, which changes under its eyes."""

    def __init__(self, cluster: Cluster, sessions: Mapping[str, LiveSession], *, every_s: float = LOOK_S) -> None:
        self._cluster = cluster
        self._sessions = sessions
        self._every_s = every_s
        self._known: dict[str, int] = {}
        """When each session's main was last found to have got anywhere, as the document knows it."""
        self._task: asyncio.Task[None] | None = None
        self.last_error: KimiRayError | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._look_again_and_again(), name="main watch")

    async def close(self) -> None:
        """Stop. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def catch_up(self, live: LiveSession) -> None:
        """Tell a session's document now, without waiting for main to be quiet: it is about to be closed.

        Main's host may be lost; its log then tells when the session is resumed.
        """
        await self._look([live], settled_ms=1)
        self._known.pop(live.id, None)

    async def _look_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._look(list(self._sessions.values()), settled_ms=_SETTLED_MS)
            except Exception as error:  # noqa: BLE001  kept; the other sessions are looked after all the same
                self.last_error = noted(error, "the watch of main agents")
            for gone in self._known.keys() - self._sessions.keys():
                del self._known[gone]

    async def _look(self, sessions: list[LiveSession], *, settled_ms: int) -> None:
        by_host: dict[str, list[LiveSession]] = {}
        for live in sessions:
            host = live.host_of(MAIN)
            if host is not None:
                by_host.setdefault(host, []).append(live)
        await asyncio.gather(*(self._look_at(host, there, settled_ms) for host, there in by_host.items()))

    async def _look_at(self, host: str, sessions: list[LiveSession], settled_ms: int) -> None:
        try:
            told: list[AgentProgress] = await self._cluster.peer(host).call(
                "progress", [Stream(live.id, MAIN) for live in sessions], timeout_s=_ASK_S, group="control"
            )
            by_id = {Stream(*one.stream).session_id: one for one in told}
            for live in sessions:
                seen = by_id.get(live.id)
                if seen is not None and self._is_news(live, seen, settled_ms):
                    await live.reconcile()
        except KimiRayError as error:
            # Whoever uses the agent next finds out what became of it; its log has it all.
            self.last_error = error

    def _is_news(self, live: LiveSession, seen: AgentProgress, settled_ms: int) -> bool:
        # An agent that did nothing in this life has moved just now, whenever it is asked.
        if seen.turn is not None or seen.since_ms < settled_ms:
            return False
        moved_at = epoch_ms() - seen.since_ms
        if moved_at <= self._known.get(live.id, 0) + _JITTER_MS:
            return False
        self._known[live.id] = moved_at
        return int(live.document.snapshot()["updated_at"]) < moved_at
