"""A bench for one agent without a host: its log in memory, a store that can be told to fail, a scripted model."""

from __future__ import annotations

import asyncio
from typing import Any

from kimi_ray.agent.fold import AgentFold
from kimi_ray.agent.inbox import Inbox
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.limits import LimitMeter
from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.agent.loop import TurnLoop
from kimi_ray.agent.model_in_use import ModelInUse
from kimi_ray.agent.notices import Notices
from kimi_ray.agent.prompts import Prompts
from kimi_ray.agent.requester import Progress, Requester
from kimi_ray.agent.slots import AgentSlots
from kimi_ray.agent.specs import AgentSpec, Outcome, PromptSpec
from kimi_ray.agent.tool_runs import ToolRuns
from kimi_ray.errors import KimiRayError
from kimi_ray.events import CORE, LogHeader, SessionEvent, WriterRef
from kimi_ray.llm.models import ModelSettings, ResolvedModel
from kimi_ray.llm.scripted import ScriptedProvider
from kimi_ray.log import EventLog
from kimi_ray.settings import Checkpoint, Limits, Profile, Sampling
from kimi_ray.store.seam import Stream
from kimi_ray.tools.contract import Tool
from kimi_ray.tools.local import LocalEnvironment

STREAM = Stream("session_x", "main")


class MemoryStore:
    """A write controller's stand-in: durable up to the last flush."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.durable_seq = 0
        self.flushes: list[int] = []
        self.blobs: dict[str, bytes] = {}
        """Those that can be read."""
        self._attached: dict[str, bytes] = {}
        self.error: KimiRayError | None = None
        self.room = asyncio.Event()
        self.room.set()
        self.room_error: KimiRayError | None = None
        self.disk = asyncio.Event()
        self.disk.set()

    def take(self, event: SessionEvent) -> None:
        self.lines.append(event.line)

    def attach_blob(self, digest: str, data: bytes) -> None:
        self._attached[digest] = data

    async def flush(self) -> None:
        covered = dict(self._attached)
        await asyncio.sleep(0)
        await self.disk.wait()
        if self.error is not None:
            raise self.error
        self.blobs.update(covered)
        self.durable_seq = len(self.lines)
        self.flushes.append(self.durable_seq)

    async def wait_for_room(self) -> None:
        await self.room.wait()
        if self.room_error is not None:
            raise self.room_error


class AgentBench:
    """Builds a ``LiveAgent`` over a log; ``events`` of an earlier bench make it a revived one."""

    def __init__(
        self,
        script: Any,
        *,
        tools: tuple[Tool, ...] = (),
        root: str | None = None,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        model: ModelSettings | None = None,
        checkpoint: Checkpoint = "request",
        events: list[SessionEvent] | None = None,
        system: str | None = None,
        chunk_chars: int | None = None,
        tokens_per_s: float | None = None,
        price: Any = None,
    ) -> None:
        header = LogHeader(
            session_id=STREAM.session_id,
            agent_id=STREAM.agent_id,
            created_at=1,
            writer=WriterRef(name="kimi-ray", version="test"),
        )
        self.store = MemoryStore()
        fold = AgentFold()
        for event in events or []:
            fold.apply(event)
            self.store.take(event)
        self.log = EventLog.restore(header, events or [])
        self.log.observe(self.store.take)
        self.journal = Journal(self.log, fold, self.store, self._read_blob)
        settings = model or ModelSettings(provider="scripted", price=price)
        resolved = ResolvedModel(name="scripted", provider="scripted", model="scripted", settings=settings)
        self.provider = ScriptedProvider(script, chunk_chars=chunk_chars, tokens_per_s=tokens_per_s)
        profile = Profile(name="test", system_prompt=system, tools=tuple(tool.name for tool in tools))
        self.spec = AgentSpec(STREAM, "nonce", profile, resolved, limits=limits, sampling=sampling)
        environment = LocalEnvironment(root)
        progress = Progress()
        self.in_use = ModelInUse(resolved, self.provider)
        self.slots = AgentSlots()
        self.inbox = Inbox()
        notices = self.notices = Notices(self.journal)
        meter = LimitMeter(limits, fold, settings.price)
        runs = ToolRuns(
            self.journal,
            {tool.name: tool for tool in tools},
            environment,
            checkpoint,
            session_id=STREAM.session_id,
            agent_id=STREAM.agent_id,
            slots=self.slots,
        )
        loop = TurnLoop(
            self.journal,
            Requester(self.journal, "seed", progress, meter),
            runs,
            meter,
            checkpoint,
            progress,
            session_id=STREAM.session_id,
            agent_id=STREAM.agent_id,
            slots=self.slots,
            notices=notices,
            inbox=self.inbox,
        )
        self.outcomes: dict[str, Outcome] = {}
        self._ended = asyncio.Event()
        self.agent = LiveAgent(
            self.spec,
            1,
            self.journal,
            Prompts(self.journal, self.slots, notices),
            loop,
            meter,
            self.provider,
            environment,
            list(tools),
            progress,
            on_outcome=self._on_outcome,
            on_idle=lambda: None,
            slots=self.slots,
            notices=notices,
            inbox=self.inbox,
            in_use=self.in_use,
        )

    def _on_outcome(self, prompt_id: str, outcome: Outcome) -> None:
        self.outcomes[prompt_id] = outcome
        self._ended.set()

    async def _read_blob(self, digest: str) -> bytes:
        return self.store.blobs[digest]

    def submit(self, *texts: str, **options: Any) -> list[str]:
        """Submit prompts; ids are p0, p1, ... in order of submission."""
        first = sum(event.type == "prompt/submitted" for event in self.events)
        specs = tuple(PromptSpec(f"p{first + n}", text, **options) for n, text in enumerate(texts))
        self.agent.submit(specs)
        return [spec.prompt_id for spec in specs]

    async def result(self, prompt_id: str = "p0", *, within_s: float = 10.0) -> Outcome:
        """The outcome of a prompt; waits for it."""
        async with asyncio.timeout(within_s):
            while prompt_id not in self.outcomes:
                self._ended.clear()
                await self._ended.wait()
        return self.outcomes[prompt_id]

    async def until(self, event_type: str, *, count: int = 1, within_s: float = 10.0) -> None:
        """Wait until that many events of a type are in the log."""
        grown = asyncio.Event()
        stop = self.log.observe(lambda _event: grown.set())
        try:
            async with asyncio.timeout(within_s):
                while self.types.count(event_type) < count:
                    grown.clear()
                    await grown.wait()
        finally:
            stop()

    @property
    def events(self) -> list[SessionEvent]:
        """The log so far; every event is also checked against its payload model."""
        from kimi_ray.events import parse_event

        events = [parse_event(line, at=seq) for seq, line in enumerate(self.store.lines)]
        for event in events:
            entry = CORE.get(event.type)
            assert entry is not None, event.type
            entry.payload.model_validate(event.data)
            assert event.ignorable == entry.ignorable
        return events

    @property
    def types(self) -> list[str]:
        """The event types, in order."""
        return [event.type for event in self.events]

    def of(self, event_type: str) -> list[Any]:
        """The data of all events of a type."""
        return [event.data for event in self.events if event.type == event_type]
