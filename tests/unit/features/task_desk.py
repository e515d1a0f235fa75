"""The background tasks of one agent without a host: its log in memory, and lives of it one after the other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kimi_ray.agent.background import TaskEnd
from kimi_ray.agent.fold import AgentFold
from kimi_ray.agent.inbox import Inbox
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.notices import Notices
from kimi_ray.agent.slots import AgentSlots
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.config import RuntimeConfig
from kimi_ray.events import CORE, LogHeader, SessionEvent, WriterRef, parse_event
from kimi_ray.events.header import Origin
from kimi_ray.features.tasks import TaskService
from kimi_ray.llm.models import ModelSettings, ResolvedModel
from kimi_ray.log import EventLog
from kimi_ray.settings import Profile
from kimi_ray.tools.contract import ToolContext
from kimi_ray.tools.local import LocalEnvironment
from tests.unit.agent.bench import STREAM, MemoryStore

FOLLOWING = ("Bash", "TaskList", "TaskOutput", "TaskStop", "WaitFor")


class Desk:
    """One life of an agent's tasks; ``events`` of an earlier one make it the next."""

    def __init__(
        self,
        root: Path,
        *,
        events: list[SessionEvent] | None = None,
        limit: int = 8,
        tools: tuple[str, ...] = FOLLOWING,
        run_id: str | None = None,
        origin: Origin = "main",
    ) -> None:
        header = LogHeader(
            session_id=STREAM.session_id,
            agent_id=STREAM.agent_id,
            created_at=1,
            run_id=run_id,
            origin=origin,
            writer=WriterRef(name="kimi-ray", version="test"),
        )
        self.store = MemoryStore()
        fold = AgentFold()
        for event in events or []:
            fold.apply(event)
            self.store.take(event)
        self.log = EventLog.restore(header, events or [])
        self.log.observe(self.store.take)
        self.journal = Journal(self.log, fold, self.store, self._no_blob)
        self.inbox = Inbox()
        self.slots = AgentSlots()
        model = ResolvedModel(name="m", provider="scripted", model="m", settings=ModelSettings(provider="scripted"))
        self.spec = AgentSpec(STREAM, "nonce", Profile(name="test", tools=tools), model)
        config = RuntimeConfig(home=str(root), max_background_tasks=limit)
        self.environment = LocalEnvironment(root)
        notices = Notices(self.journal)
        self.tasks = TaskService(self.journal, self.inbox, self.slots, notices, self.spec, config)
        self.context = ToolContext(self.environment, *STREAM, "call_1", asyncio.Event())

    async def _no_blob(self, digest: str) -> bytes:
        raise AssertionError(digest)

    @property
    def events(self) -> list[SessionEvent]:
        """The log, each event held against its payload."""
        events = [parse_event(line, at=seq) for seq, line in enumerate(self.store.lines)]
        for event in events:
            entry = CORE.get(event.type)
            assert entry is not None, event.type
            entry.payload.model_validate(event.data)
        return events

    def of(self, kind: str) -> list[Any]:
        """The data of all events of a type."""
        return [event.data for event in self.events if event.type == kind]

    def say(self) -> list[str]:
        """What a step would: put what waits in the inbox into the log; returns the texts."""
        texts: list[str] = []
        for number, note in enumerate(self.inbox.take()):
            data: dict[str, Any] = {"id": f"m{len(self.store.lines)}_{number}", "role": "user"}
            data |= {"content": note.content, "source": note.source}
            self.journal.append("user/message", data, surface="append")
            texts.append(str(note.content[0]["text"]))
        return texts

    async def ended(self, task_id: str, within_s: float = 10.0) -> Any:
        """The data of a task's end; waits for it."""
        async with asyncio.timeout(within_s):
            while True:
                for data in self.of("task/ended"):
                    if data["task_id"] == task_id:
                        return data
                await asyncio.sleep(0.005)

    def next_life(self, root: Path, **settings: Any) -> Desk:
        """The agent revived from what its log has now, as after a lost host."""
        return Desk(root, events=self.events, **settings)


class Work:
    """A task's work that does what the test says."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.end = TaskEnd("completed", output="last words")
        self.error: BaseException | None = None
        self.cancelled = asyncio.Event()
        self.stubborn: asyncio.Event | None = None
        """Set only when it may let itself be cancelled."""

    async def __call__(self, write: Any) -> TaskEnd:
        write("begun\n")
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            if self.stubborn is not None:
                while not self.stubborn.is_set():
                    try:
                        await self.stubborn.wait()
                    except asyncio.CancelledError:
                        continue
            raise
        if self.error is not None:
            raise self.error
        return self.end
