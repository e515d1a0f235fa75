"""Scripted models and tools for runs that are disturbed: slow enough that a kill lands in the middle."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, tool_call

ONE_TOOL = "scripted:tests.actors.fault_models:one_tool"
SLOW_TOOL = "scripted:tests.actors.fault_models:slow_tool"
ECHO = "scripted:tests.actors.fault_models:echo"
HELD = "scripted:tests.actors.fault_models:held"
FAST_ECHO = "scripted:tests.actors.fault_models:fast_echo"
COMMAND = "scripted:tests.actors.fault_models:command"

LATENCY_S = 0.25


def said(request: ChatRequest) -> str:
    """The prompt of the turn."""
    users = [m for m in request.messages if m["role"] == "user" and m["source"]["kind"] != "tool"]
    return "".join(block.get("text", "") for block in users[-1]["content"])


def one_tool(request: ChatRequest) -> Step:
    """A turn: a model call that asks for one tool, the tool, a final model call."""
    last = request.messages[-1]["content"][0]
    if last["type"] == "tool-result":
        return Step(text=f"did {said(request)}", latency_s=LATENCY_S)
    return Step(tool_calls=(tool_call("look", {"what": said(request)}),), latency_s=LATENCY_S)


def slow_tool(request: ChatRequest) -> Step:
    """As ``one_tool``, slower, and each prompt by another time: whoever is told of a row finds others in the middle."""
    return replace(one_tool(request), latency_s=LATENCY_S * (2 + crc32(said(request).encode()) % 12))


def echo(request: ChatRequest) -> Step:
    """A turn is one slow model call."""
    return Step(text=f"did {said(request)}", latency_s=LATENCY_S)


async def held(request: ChatRequest) -> Step:
    """The prompt ``held FILE`` is answered once FILE is there; others as by ``echo``."""
    file = said(request).removeprefix("held ")
    while file != said(request) and not os.path.exists(file):
        await asyncio.sleep(0.05)
    return echo(request)


def fast_echo(request: ChatRequest) -> Step:
    """A turn is one model call."""
    return Step(text=f"did {said(request)}")


def command(request: ChatRequest) -> Step:
    """The prompt ``sleeper FILE`` runs a command for minutes, once, and has its process id in FILE; others echo."""
    last = request.messages[-1]["content"][0]
    text = said(request)
    if last["type"] != "tool-result" and text.startswith("sleeper "):
        file = text.removeprefix("sleeper ")
        line = f"[ -e {file} ] || {{ echo $$ > {file}; sleep 300; }}"
        return Step(tool_calls=(tool_call("Bash", {"command": line, "timeout": 290}),))
    return Step(text=f"did {text}", latency_s=LATENCY_S)


async def look(what: str) -> str:
    """Look at something.

    Args:
        what: What to look at.
    """
    return f"{what}: fine"


def running(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, within_s: float = 30.0):
    """The first true value of ``condition``; for tests that do not run in a loop."""
    ends = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < ends, "the condition did not come true in time"
        time.sleep(0.05)
    return value
