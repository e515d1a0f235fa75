"""What the commands have in common that shorten an agent's conversation: ``sessions compact``, ``sessions undo``.

They look at the stored log first. Where there is nothing to do for them, the session is not opened, and nothing is
written.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kimi_ray.cli.session_resume import resume_session

if TYPE_CHECKING:
    from kimi_ray.events import SessionEvent
    from kimi_ray.handles import Agent
    from kimi_ray.store.open import ReadStore
    from kimi_ray.store.seam import Stream

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredContext:
    """What an agent's model would see now, by the stored log."""

    surface: list[SessionEvent]
    asked: bool
    """A request was made already."""


@dataclass(frozen=True, slots=True)
class ContextCommand(Generic[T]):
    """What is to be done to which agent, and where.

    Attributes:
        act: Does it.
        is_needless: Whether there is nothing to do, by the stored log; may raise what ``act`` would. The command then
            gives None.
    """

    session: str
    agent: str | None
    home: str | None
    address: str | None
    namespace: str | None
    tools: list[str] | None
    act: Callable[[Agent], Awaitable[T]]
    is_needless: Callable[[StoredContext], bool]
    model: str | None = None
    base_url: str | None = None

    def run(self) -> tuple[Stream, T | None]:
        """Do it; gives the agent and what came of it.

        Raises:
            KimiRayError: what ``act`` and ``is_needless`` raise; why the session is not found, or cannot be opened.
        """
        from kimi_ray.cli.lookup import open_home

        store, place = open_home(self.home, self.session)
        return asyncio.run(self._run(store, place))

    async def _run(self, store: ReadStore, home: str) -> tuple[Stream, T | None]:
        from kimi_ray.cli.logs_read import is_live
        from kimi_ray.cli.lookup import find_stream
        from kimi_ray.cli.settings_of import operation_config
        from kimi_ray.cli.swarm_arguments import split_names
        from kimi_ray.cli.swarm_plan import find_model, make_importable
        from kimi_ray.runtime import Runtime

        stream = await find_stream(store, self.session, self.agent)
        config = operation_config(home, self.address, self.namespace)
        cwd, names = os.getcwd(), split_names(self.tools)
        make_importable((*(names or ()), self.model or ""), cwd)
        is_other = self.model is not None or self.base_url is not None
        other: Any = find_model(config, self.model, self.base_url) if is_other else None
        # Of one that lives the newest may not be stored yet, and it is not opened by this.
        if not is_other and not is_live(home, stream.session_id):
            context = await _stored_context(store, stream)
            if context is not None and self.is_needless(context):
                return stream, None
        async with Runtime.connect(config=config) as runtime:
            session = await resume_session(runtime.workspace(cwd), stream.session_id, other, names)
            return stream, await self.act(session.agent(stream.agent_id))


async def _stored_context(store: ReadStore, stream: Stream) -> StoredContext | None:
    """None where a turn or a prompt is open: its end changes what there is."""
    from kimi_ray.cli.logs_read import lines_from, next_seq
    from kimi_ray.events import parse_event
    from kimi_ray.log import Surface

    surface, is_open, asked, waiting = Surface(), False, False, set[str]()
    async for line in lines_from(store, stream, 0, await next_seq(store, stream)):
        event = parse_event(line)
        if event.type in ("turn/start", "turn/end"):
            is_open = event.type == "turn/start"
        elif event.type == "prompt/submitted":
            waiting.add(event.data["prompt_id"])
        elif event.type == "prompt/completed":
            waiting.discard(event.data["prompt_id"])
        elif event.type == "log/end-seed":
            is_open = False
            waiting.clear()
        elif event.type == "request/header":
            asked = True
        plan = surface.check(event)
        if plan is not None:
            surface.apply(plan)
    return None if is_open or waiting else StoredContext(list(surface), asked)
