"""The calls by which users shorten an agent's conversation: a compaction, an undo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.errors import AgentError
from kimi_ray.features.compaction import CompactionEngine, CompactionResult, Undo, UndoResult
from kimi_ray.features.compaction.words import busy, cancelled
from kimi_ray.hosts.host_scopes import HostScopes
from kimi_ray.hosts.ports import Group
from kimi_ray.store.seam import Stream


class ContextCalls:
    """What an ``AgentHost`` does to the context of its agents.

    Args:
        scopes: Where the agents' services are.
        agent: An agent that lives there; raises ``agent.not_found``.
    """

    PORT: ClassVar[dict[str, Group]] = {"compact": "wait", "undo": "store"}

    def __init__(self, scopes: HostScopes, agent: Callable[[Stream], LiveAgent]) -> None:
        self._scopes = scopes
        self._agent = agent
        self._compacting: dict[tuple[Stream, str], asyncio.Event] = {}

    async def compact(self, stream: Stream, instruction: str | None, command_id: str) -> CompactionResult | None:
        """Compact an agent's conversation while it stands still; durable when it returns.

        Args:
            stream: Whose.
            instruction: What the user wants of the summary.
            command_id: The caller's name for it: asked again, it waits for the one that is under way, and answers
                what came of one that the log has, whatever happened since.

        Raises:
            AgentError: ``compaction.*`` (``CompactionEngine.compact_now``), ``agent.not_found``.
        """
        agent = self._agent(stream)
        engine = await self._scopes.service(agent.stream, CompactionEngine)
        key = (agent.stream, command_id)
        while (under_way := self._compacting.get(key)) is not None:
            await under_way.wait()
        done = self._compacting[key] = asyncio.Event()
        try:
            found = await engine.outcome(command_id)
            if found is not None:
                return found
            return await agent.maintain("compaction", lambda: engine.compact_now(instruction, command_id))
        except AgentError as error:
            if error.code == "agent.busy":
                raise busy(error.message.removeprefix("compaction: "), **error.details) from error
            if error.code == "agent.cancelled":
                raise cancelled() from error
            raise
        finally:
            del self._compacting[key]
            done.set()

    async def undo(self, stream: Stream, count: int, undo_id: str) -> UndoResult:
        """Take back the last prompts of an agent while it stands still (``Undo.undo``); durable when it returns.

        One that the log has already by this ``undo_id`` is answered, whatever happened since.

        Raises:
            AgentError: ``agent.busy``, ``agent.undo_unavailable``, ``agent.not_found``.
        """
        agent = self._agent(stream)
        undo = await self._scopes.service(agent.stream, Undo)
        async with undo.turn:
            done = await undo.done(undo_id)
            if done is not None:
                return done
            return await agent.maintain("undo", lambda: undo.undo(count, undo_id))
