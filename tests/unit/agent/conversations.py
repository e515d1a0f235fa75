"""Scripted conversations, one for each way in which turns go, and their durable events as text that can be compared.

They are played through the public API on any runtime that has ``SETTINGS``: in one process and across actors, on each
backend, the transcripts must be the same, line for line, as those in ``tests/fixtures/transcripts``. There each line is
one event: its type, its data without what differs from run to run, and the types of its sources.

``KIMI_RAY_TEST_WRITE_TRANSCRIPTS=1 pytest tests/unit/agent/test_transcripts.py`` writes them anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dishka import Provider

from kimi_ray import (
    AgentSlots,
    Feature,
    Limits,
    Profile,
    PromptGate,
    Runtime,
    ToolContext,
    ToolGate,
    TurnStopping,
    Workdir,
)
from kimi_ray.events import SessionEvent, thaw
from kimi_ray.handles import PromptHandle
from kimi_ray.ids import new_ulid
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, ToolCall
from kimi_ray.session_handle import Session
from kimi_ray.tools import tool

TRANSCRIPTS = Path(__file__).parents[2] / "fixtures" / "transcripts"
WRITE = "KIMI_RAY_TEST_WRITE_TRANSCRIPTS"

_MODULE = "tests.unit.agent.conversations"
_MODEL: dict[str, Any] = {
    "provider": "scripted",
    "script": f"{_MODULE}:answer",
    "record_chunks": "all",
    "max_attempts": 3,
}
SETTINGS: dict[str, Any] = {
    "features": (f"{_MODULE}:Playing",),
    "models": {"quick": _MODEL, "slow": {**_MODEL, "chunk_chars": 4, "tokens_per_s": 200.0}},
}
_PROFILE = Profile(name="player", system_prompt="You play a part.")
_WITHIN_S = 60.0


# -- what the hosts play ---------------------------------------------------------------------------------------------


def _gate(session_id: str, name: str) -> Path:
    """A file that opens a gate: the host and the test may be in different processes, on one machine."""
    return Path(tempfile.gettempdir()) / f"kimi-ray-test-gates-{os.getuid()}" / session_id / name


async def _passed(session_id: str, name: str, cancelled: asyncio.Event | None = None) -> None:
    async with asyncio.timeout(_WITHIN_S):
        while not _gate(session_id, name).exists() and not (cancelled is not None and cancelled.is_set()):
            await asyncio.sleep(0.005)


_asked = Counter[str]()


async def answer(request: ChatRequest) -> Step:
    """The next answer of the case that is named in the session's id; one that begins with ``gate:`` waits first."""
    case = request.session_id.rsplit("-", 1)[0]
    number = _asked[request.session_id]
    _asked[request.session_id] += 1
    step = CASES[case].answers[number]
    if step.text.startswith("gate:"):
        name = step.text.removeprefix("gate:")
        await _passed(request.session_id, name)
        return Step(f"{name} was opened.")
    return step


@tool
async def look(what: str, context: ToolContext) -> str:
    """Look at something; a gate is looked at until it is open.

    Args:
        what: What to look at.
    """
    if what.startswith("gate"):
        await _passed(context.session_id, what, context.cancelled)
    return f"{what}: fine"


class Playing(Feature):
    """Whoever has a say in these conversations."""

    name: ClassVar[str] = "playing"

    def services(self) -> Sequence[Provider]:
        return ()

    def on_agent(self) -> Sequence[type]:
        return [Players]


class Players:
    """Blocks prompts that are forbidden, adds to those that want context, vetoes secrets, goes on when half done."""

    def __init__(self, slots: AgentSlots) -> None:
        slots.prompt.register("players", self._prompt)
        slots.tool.register("players", self._tool)
        slots.turn_stopping.register("players", self._stopping)

    async def _prompt(self, gate: PromptGate) -> None:
        if "context" in gate.text:
            gate.add("It is Tuesday.", kind="hook_result")
        if "forbidden" in gate.text:
            gate.add("That is forbidden here.", kind="hook_result")
            gate.block("forbidden here")

    async def _tool(self, gate: ToolGate) -> None:
        if gate.arguments.get("what") == "secret":
            gate.deny("secrets are not looked at", by="players")

    async def _stopping(self, event: TurnStopping) -> None:
        if "half" in event.text:
            event.go_on("And the other half?", kind="stop_hook")


# -- the conversations -----------------------------------------------------------------------------------------------


class Talk:
    """One session, and what a test does in it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.main = session.main

    async def say(self, prompt_id: str, text: str, **options: Any) -> PromptHandle:
        """Submit a prompt; it is durable when this returns."""
        return await self.main.submit(text, prompt_id=prompt_id, **options)

    async def until(self, kind: str, count: int = 1) -> None:
        """Wait until that many events of a type are durable."""
        seen = 0
        async with asyncio.timeout(_WITHIN_S):
            async with aclosing(self.main.events(follow=True)) as events:
                async for event in events:
                    seen += event.type == kind
                    if seen == count:
                        return

    def open(self, name: str) -> None:
        """Open a gate."""
        file = _gate(self.session.id, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


@dataclass(frozen=True)
class Case:
    """A conversation: what the model answers, in order, and what the user does."""

    answers: tuple[Step, ...]
    play: Callable[[Talk], Awaitable[object]]
    model: str = "quick"
    options: dict[str, Any] = field(default_factory=dict[str, Any])


def _calls(*what: str, text: str = "") -> Step:
    calls = tuple(ToolCall("look", json.dumps({"what": name}), f"call-{n}") for n, name in enumerate(what))
    return Step(text, tool_calls=calls)


async def _one(talk: Talk) -> None:
    await (await talk.say("p0", "hello")).result()


async def _two(talk: Talk) -> None:
    await (await talk.say("p0", "hello")).result()
    await (await talk.say("p1", "and again")).result()


def _says(text: str) -> Callable[[Talk], Awaitable[object]]:
    async def play(talk: Talk) -> None:
        await (await talk.say("p0", text)).result()
        await (await talk.say("p1", "thank you")).result()

    return play


async def _steer_two(talk: Talk) -> None:
    first = await talk.say("p0", "hello")
    await talk.until("tool/call")
    handles = [await talk.say(f"p{n}", f"also {n}") for n in range(1, 4)]
    await talk.main.steer(["p3", "p1"])
    talk.open("gate-1")
    for handle in (first, *handles):
        await handle.result()


async def _steer_at_the_end(talk: Talk) -> None:
    first = await talk.say("p0", "hello")
    await talk.until("request/header")
    second = await talk.say("p1", "one more thing", steer_if_active=True)
    talk.open("the door")
    await first.result()
    await second.result()


async def _steer_blocked(talk: Talk) -> None:
    first = await talk.say("p0", "hello")
    await talk.until("tool/call")
    second = await talk.say("p1", "something forbidden", steer_if_active=True)
    talk.open("gate-1")
    await first.result()
    await second.result()


async def _cancel_in_the_stream(talk: Talk) -> None:
    first = await talk.say("p0", "tell me a story")
    await talk.until("assistant/chunk")
    await talk.main.cancel("p0")
    await first.result()
    await (await talk.say("p1", "a shorter one")).result()


async def _cancel_queued(talk: Talk) -> None:
    first = await talk.say("p0", "hello")
    await talk.until("tool/call")
    second = await talk.say("p1", "never mind")
    await talk.main.cancel("p1")
    await second.result()
    talk.open("gate-1")
    await first.result()


async def _cancel_in_a_tool(talk: Talk) -> None:
    first = await talk.say("p0", "hello")
    await talk.until("tool/call", 2)
    await talk.main.cancel("p0")
    await first.result()


async def _cancel_step_in_the_stream(talk: Talk) -> None:
    first = await talk.say("p0", "tell me a story")
    await talk.until("assistant/chunk")
    second = await talk.say("p1", "a shorter one", steer_if_active=True)
    assert await talk.main.cancel_step()
    await first.result()
    await second.result()


async def _cancel_step_in_a_tool(talk: Talk) -> None:
    first = await talk.say("p0", "hello")
    await talk.until("tool/call", 2)
    second = await talk.say("p1", "look at c, too", steer_if_active=True)
    assert await talk.main.cancel_step()
    await first.result()
    await second.result()


async def _cancel_the_last_step(talk: Talk) -> None:
    first = await talk.say("p0", "hello")
    await talk.until("tool/call")
    assert await talk.main.cancel_step()
    await first.result()
    assert not await talk.main.cancel_step()
    await (await talk.say("p1", "never mind")).result()


async def _continue(talk: Talk) -> None:
    await _one(talk)
    await (await talk.main.continue_turn()).result()


async def _switch_model(talk: Talk) -> None:
    await _one(talk)
    await talk.main.set_model("slow")
    await (await talk.say("p1", "and now")).result()


_FAULT = Step.error("provider.server", 500, retry_after_ms=1)

CASES: dict[str, Case] = {
    "normal": Case((Step("Hello."), Step("Hello again.", reasoning="They are back.")), _two),
    "tool-calls": Case((_calls("a", "b", text="Let me look."), Step("Both are fine.")), _one),
    "steer": Case((_calls("gate-1"), Step("All of it."), Step("And the rest.")), _steer_two),
    "steer-at-the-end": Case((Step("gate:the door"), Step("Done.")), _steer_at_the_end),
    "steer-blocked": Case((_calls("gate-1"), Step("Done.")), _steer_blocked),
    "cancel-in-the-stream": Case((Step("Once upon a time. " * 200), Step("The end.")), _cancel_in_the_stream, "slow"),
    "cancel-queued": Case((_calls("gate-1"), Step("Done.")), _cancel_queued),
    "cancel-in-a-tool": Case((_calls("gate-1", "gate-2"), Step("Never said.")), _cancel_in_a_tool),
    "cancel-step-in-the-stream": Case(
        (Step("Once upon a time. " * 200), Step("The end.")), _cancel_step_in_the_stream, "slow"
    ),
    "cancel-step-in-a-tool": Case(
        (_calls("gate-1", "gate-2"), _calls("c"), Step("It is fine.")), _cancel_step_in_a_tool
    ),
    "cancel-the-last-step": Case((_calls("gate-1"), Step("As you like.")), _cancel_the_last_step),
    "failure": Case((_FAULT, _FAULT, _FAULT, Step("Better.")), _two),
    "refused": Case((Step.error("provider.auth", 401), Step("Better.")), _two),
    "retry": Case((Step.error("provider.rate_limit", 429, retry_after_ms=1), Step("Fine.")), _one),
    "filtered": Case((Step("Some of it", finish="filtered"), Step("Something else.")), _two),
    "truncated": Case((Step("Some of it", finish="max-tokens"),), _one),
    "max-steps": Case((_calls("a"), Step("Never said.")), _one, options={"limits": Limits(max_steps=1)}),
    "blocked": Case((Step("You are welcome."),), _says("something forbidden")),
    "context": Case((Step("Noted."), Step("You are welcome.")), _says("with context")),
    "vetoed": Case((_calls("secret", "a"), Step("Then not.")), _one),
    "goes-on": Case((Step("That is half of it."), Step("And the other half.")), _one),
    "repeated-calls": Case((_calls("a", "b", "a"), Step("Enough.")), _one),
    "continued": Case((Step("Hello."), Step("As I said.")), _continue),
    "model-switch": Case((Step("Hello."), Step("From another.")), _switch_model),
}


async def play(runtime: Runtime, workspace: Path, name: str) -> list[str]:
    """Play one conversation to its end; gives its transcript."""
    case = CASES[name]
    session = await runtime.workspace(workspace).create_session(
        f"{name}-{new_ulid().lower()}",
        model=case.model,
        profile=_PROFILE,
        tools=[look],
        workdir=Workdir.none(),
        **case.options,
    )
    talk = Talk(session)
    try:
        async with asyncio.timeout(_WITHIN_S):
            await case.play(talk)
            await session.main.flush()
        events = [event async for event in session.main.events()]
    finally:
        await session.close()
        gates = _gate(session.id, "x").parent
        for file in gates.iterdir() if gates.exists() else ():
            file.unlink()
        if gates.exists():
            gates.rmdir()
    return transcript(events)


async def play_all(runtime: Runtime, workspace: Path) -> dict[str, list[str]]:
    """Play all conversations side by side."""
    played = await asyncio.gather(*(play(runtime, workspace, name) for name in CASES))
    return dict(zip(CASES, played, strict=True))


# -- transcripts -----------------------------------------------------------------------------------------------------


def transcript(events: Iterable[SessionEvent]) -> list[str]:
    """The events as lines of JSON, without what differs from run to run.

    Ids that are made up are numbered as they come; milliseconds are 0; where a log lives and what was estimated is left
    out; the chunks of one attempt are one line, and how much of an answer was cut off is not told.
    """
    known: dict[str, str] = {}
    types = [event.type for event in events]
    lines: list[str] = []
    for event in events:
        data = thaw(event.data)
        if event.type == "runtime/activated":
            data = {"epoch": data["epoch"]}
        elif event.type == "assistant/chunk":
            data["chunk"] = {"type": data["chunk"]["type"]}
        elif event.type == "assistant/message" and data.get("interrupted") and data["message"]["content"]:
            for block in data["message"]["content"]:
                block["text"] = block["text"][:4] + "..."
        line: dict[str, Any] = {"type": event.type, "data": _plain(data, known)}
        if event.surface is not None:
            line["surface"] = event.surface
        if event.sources:
            line["sources"] = sorted({types[seq] for seq in event.sources})
        text = json.dumps(line, sort_keys=True, ensure_ascii=False)
        if event.type != "assistant/chunk" or text not in lines[-1:]:
            lines.append(text)
    return lines


def _plain(value: Any, known: dict[str, str]) -> Any:
    if isinstance(value, dict):
        if "estimated" in value:
            return {"estimated": value["estimated"]}
        return {key: 0 if key.endswith("_ms") else _plain(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, known) for item in value]
    if isinstance(value, str) and value.startswith("msg_"):
        return known.setdefault(value, f"message-{len(known)}")
    return value


def stored(name: str) -> list[str]:
    """The transcript in the fixtures."""
    return (TRANSCRIPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def store(name: str, lines: list[str]) -> None:
    """Write the transcript into the fixtures."""
    TRANSCRIPTS.mkdir(exist_ok=True)
    (TRANSCRIPTS / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
