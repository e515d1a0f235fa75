"""An agent with a small window, for ``tests/unit/context``: the bench of agents, with the compaction services on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2

from kimi_ray.agent.live_agent import LiveAgent
from kimi_ray.agent.summarizer import ModelSummarizer, Summarizer, Summary, SummaryTask
from kimi_ray.events import SessionEvent, thaw
from kimi_ray.features.compaction import (
    CompactionEngine,
    CompactionResult,
    Compactor,
    ContextSize,
    ContextWindow,
    Pruner,
    WindowGuard,
)
from kimi_ray.llm.chat import ChatRequest, ToolSpec
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.script import Step
from kimi_ray.llm.wire import chat_body
from kimi_ray.log import EventLog, Message, complete_tools, derive_messages
from kimi_ray.settings import Sampling
from tests.unit.agent.bench import STREAM, AgentBench

WINDOW = 1_000
SUMMARY = "It went well."
_OPENAI = ModelSettings(reasoning_history="all")


def small(**options: Any) -> ModelSettings:
    """A model with a window of ``WINDOW`` tokens."""
    compaction: dict[str, Any] = {"prune_chars": 400, "prune_head_chars": 100, "prune_tail_chars": 50} | options.pop(
        "compaction", {}
    )
    given: dict[str, Any] = {"max_context_tokens": WINDOW, "retry_base_s": 0.0} | options
    return ModelSettings(provider="scripted", compaction=compaction, **given)


class Told(Summarizer):
    """A summarizer that says what it is told to, and can be waited for."""

    def __init__(self) -> None:
        self.tasks: list[SummaryTask] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.text = SUMMARY
        self.error: Exception | None = None
        self.during: Callable[[], None] | None = None

    async def summarize(self, task: SummaryTask) -> Summary:
        self.tasks.append(task)
        self.asked.set()
        if self.during is not None:
            self.during()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Summary([{"type": "text", "text": self.text}], "told")


class ContextBench(AgentBench):
    """``AgentBench`` with everything that keeps a window; what was asked of the model is in ``requests``."""

    def __init__(
        self,
        script: Any = None,
        *,
        summarizer: Summarizer | None = None,
        model: ModelSettings | None = None,
        **options: Any,
    ) -> None:
        self.requests: list[ChatRequest] = []
        self.wire: list[bytes] = []
        """The body of each, as ``OpenAIProvider`` would have sent it at that moment."""

        async def asked(request: ChatRequest) -> Any:
            self.requests.append(request)
            self.wire.append(body_of(request))
            if request.purpose == "compaction":
                found = script(request) if callable(script) and summarizer is None else SUMMARY
            else:
                found = script(request) if callable(script) else Step("fine")
            return await found if isinstance(found, Awaitable) else found

        super().__init__(asked, model=model or small(), system="Be brief.", **options)
        self.size = ContextSize(self.journal)
        self.summarizer = summarizer or ModelSummarizer(self.journal, self.in_use, STREAM, "seed")
        window = ContextWindow(self.journal, self.in_use)
        self.compactor = Compactor(
            self.journal, self.size, self.summarizer, self.in_use, self.slots, self.notices, window
        )
        self.engine = CompactionEngine(
            self.journal, self.size, Pruner(self.journal), self.compactor, self.in_use, window
        )
        self.guard = WindowGuard(self.engine, self.journal, self.in_use, self.slots)

    async def say(self, *texts: str, **options: Any) -> None:
        """Submit prompts and wait for the last."""
        await self.result(self.submit(*texts, **options)[-1])

    async def compact(self, instruction: str | None = None) -> CompactionResult | None:
        """As ``agent.compact`` does."""
        agent: LiveAgent = self.agent
        return await agent.maintain("compaction", lambda: self.engine.compact_now(instruction))

    @property
    def words(self) -> list[str]:
        """The texts of the surface, a checkpoint as "*"."""
        found: list[str] = []
        for message in self.log.messages():
            kind = message["source"].get("kind")
            found.append("*" if kind == "compaction" else _text(message))
        return found

    def again(self, script: Any = None, **options: Any) -> ContextBench:
        """The same log in another life."""
        return ContextBench(script, events=self.events, **options)


def _text(message: Message) -> str:
    block = message["content"][0]
    return str(block.get("text") or block.get("name") or "result")


def bare(request: ChatRequest) -> dict[str, Any]:
    """What a request is to the server, as plain data."""
    return {
        "model": request.model,
        "system": request.system,
        "messages": thaw(request.messages),
        "tools": [tool.to_data() for tool in request.tools],
        "sampling": request.sampling.said(),
        "purpose": request.purpose,
    }


def body_of(request: ChatRequest) -> bytes:
    """The bytes that go over the wire: what ``OpenAIProvider`` hands to its client, as that one encodes it."""
    return httpx2.Request("POST", "http://server/v1/chat/completions", json=chat_body(request, _OPENAI)).content


def rebuilt_bodies(events: list[SessionEvent], blobs: dict[str, bytes] | None = None) -> list[bytes]:
    """The same bytes, made of the log, and of its blobs, alone."""
    return [
        body_of(
            ChatRequest(
                model=found["model"],
                system=found["system"],
                messages=found["messages"],
                tools=tuple(ToolSpec(**tool) for tool in found["tools"]),
                sampling=Sampling.model_validate(found["sampling"]),
                purpose=found["purpose"],
            )
        )
        for found in rebuilt(events, blobs)
    ]


def rebuilt(events: list[SessionEvent], blobs: dict[str, bytes] | None = None) -> list[dict[str, Any]]:
    """Every request that a log tells of, made of the log, and of its blobs, alone."""
    log = EventLog.restore(_header(), [])
    header: dict[str, Any] = {}
    spans: dict[str, list[Message]] = {}
    found: list[dict[str, Any]] = []

    def request(messages: list[Message], sampling: Any, model: str, purpose: str) -> dict[str, Any]:
        return {
            "model": model,
            "system": _text_of(header.get("system"), blobs or {}),
            "messages": [_with_texts(thaw(message), blobs or {}) for message in messages],
            "tools": [ToolSpec(**tool).to_data() for tool in _tools_of(header.get("tools", []), blobs or {})],
            "sampling": Sampling.model_validate(sampling or {}).said(),
            "purpose": purpose,
        }

    for event in events:
        data = event.data
        if event.type == "llm/response":
            messages = complete_tools(derive_messages(log.surface))
            found.append(request(messages, header.get("sampling"), header["model"], "step"))
        elif event.type == "compaction/request":
            messages = [*spans[data["compaction_id"]][data.get("left_out", 0) :], data["message"]]
            found.append(request(messages, data.get("sampling"), data["model"], "compaction"))
        log.adopt(event)
        if event.type == "request/header":
            header = data["header"]
        elif event.type == "compaction/start":
            seqs = list(log.surface.seqs)
            first, last = (seqs.index(data["shadowed_range"][key]) for key in ("start", "end"))
            spans[data["compaction_id"]] = complete_tools(
                derive_messages(log.surface[at] for at in range(first, last + 1))
            )
    return found


def _text_of(value: Any, blobs: dict[str, bytes]) -> Any:
    return blobs[value["$blob"]].decode() if isinstance(value, dict) else value


def _tools_of(value: Any, blobs: dict[str, bytes]) -> Any:
    return json.loads(blobs[value["$blob"]]) if isinstance(value, dict) else value


def _with_texts(value: Any, blobs: dict[str, bytes]) -> Any:
    if isinstance(value, list):
        return [_with_texts(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    if "$blob" in value:
        kept = {key: item for key, item in value.items() if key not in ("$blob", "bytes")}
        return {**kept, "text": blobs[value["$blob"]].decode()}
    return {key: _with_texts(item, blobs) for key, item in value.items()}


def _header() -> Any:
    from tests.unit.log.scripts import HEADER

    return HEADER
