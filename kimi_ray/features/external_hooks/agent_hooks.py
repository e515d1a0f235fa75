"""The hooks of one agent: handlers in its slots, each run of a hook recorded in its log.

What can be blocked waits for its hooks, and so do the first turn and a subagent for those of their start. Everything
else is told in the background, so that a slow hook holds nobody up; what still runs when the agent leaves has a few
seconds, and is then killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, TypeVar

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.slots import (
    AgentAwake,
    AgentLeaving,
    AgentSlots,
    ChildEnded,
    ChildStarting,
    Compacted,
    Compacting,
    PromptGate,
    PromptQueued,
    TaskChanged,
    ToolDone,
    ToolGate,
    TurnEnded,
    TurnStarted,
    TurnStopping,
)
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.errors import KimiRayError
from kimi_ray.events import SessionEvent, thaw
from kimi_ray.features.external_hooks.chosen import Hook, HookTable
from kimi_ray.features.external_hooks.process import CommandEnd, HookProcesses
from kimi_ray.features.external_hooks.session_hooks import SessionHooks
from kimi_ray.features.external_hooks.verdict import (
    CLIENT,
    TOOL_OUTPUT_CHARS,
    Verdict,
    hook_input,
    result_block,
    verdict_of,
)
from kimi_ray.ids import MAIN
from kimi_ray.tools.commands import scrubbed_environment

NAME = "external_hooks"
MAX_PENDING = 64
"""Events of one agent whose hooks run in the background; at that many the agent waits for one of them."""
_FAILED = frozenset({"failed", "timeout", "limit"})
_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class AgentHooks:
    """Registers a handler for every event that has hooks; without hooks it does nothing.

    Args:
        table: The configured hooks.
        processes: Runs their commands.
        session: Of the agent's session on this host.
        spec: Of the agent.
        journal: Its log.
        slots: Where it is asked and told.
        root: The directory in which it works, or None.
        leaving_s: Seconds that hooks have when the agent is closed.
    """

    def __init__(
        self,
        table: HookTable,
        processes: HookProcesses,
        session: SessionHooks,
        spec: AgentSpec,
        journal: Journal,
        slots: AgentSlots,
        root: str | None,
        *,
        leaving_s: float = 10.0,
    ) -> None:
        self._table = table
        self._processes = processes
        self._session = session
        self._spec = spec
        self._journal = journal
        self._leaving_s = leaving_s
        self._root = root
        self._is_main = spec.stream.agent_id == MAIN
        self._pending: set[asyncio.Task[None]] = set()
        self._told_broken: set[str] = set()
        self._went_on_in: int | None = None
        self._asked: dict[str, str] = {}
        if table:
            self._register(slots)

    def _register(self, slots: AgentSlots) -> None:
        table = self._table
        for slot, handler, events in (
            (slots.prompt, self._prompt, ("UserPromptSubmit",)),
            (slots.prompt_queued, self._queued, ("UserPromptQueued",)),
            (slots.tool, self._tool, ("PreToolUse",)),
            (slots.tool_done, self._tool_done, ("PostToolUse", "PostToolUseFailure")),
            (slots.turn_started, self._turn_started, ("TurnStarted",)),
            (slots.turn_stopping, self._turn_stopping, ("Stop",)),
            (slots.turn_ended, self._turn_ended, ("StopFailure", "Interrupt")),
            (slots.child_starting, self._child_starting, ("SubagentStart",)),
            (slots.child_ended, self._child_ended, ("SubagentStop",)),
            (slots.task, self._task, ("TaskStarted", "Notification")),
            (slots.compacting, self._compacting, ("PreCompact",)),
            (slots.compacted, self._compacted, ("PostCompact",)),
        ):
            if any(event in table for event in events):
                slot.register(NAME, handler)  # pyright: ignore[reportArgumentType]  each handler is of its slot
        if self._is_main and "SessionStart" in table:
            slots.awake.register(NAME, self._awake)
        if self._is_main and "SessionHeartbeat" in table:
            self._session.beat(self._beat)
        slots.leaving.register(NAME, self._leaving)
        if "PermissionRequest" in table or "PermissionResult" in table:
            self._journal.log.observe(self._seen)

    async def close(self) -> None:
        """Kill what runs. Idempotent."""
        for task in self._pending:
            task.cancel()
        if self._pending:
            await asyncio.wait(self._pending)

    # -- asked ------------------------------------------------------------------------------------------------------

    async def _prompt(self, gate: PromptGate) -> None:
        text = await self._text_of(gate.content)
        fields = {"prompt_id": gate.prompt_id, "prompt": text, "is_steer": gate.steered}
        verdicts = await self._ask("UserPromptSubmit", text, fields, about=gate.prompt_id)
        reason = _reason(verdicts)
        messages = [found.message for found in verdicts if found.message and found.blocked == (reason is not None)]
        if messages:
            blocks = [result_block("UserPromptSubmit", message) for message in messages]
            gate.before.append({"content": blocks, "source": {"kind": "hook_result"}})
        if reason is not None:
            gate.block(reason)

    async def _tool(self, gate: ToolGate) -> None:
        fields = {"tool_name": gate.name, "tool_input": gate.arguments, "tool_call_id": gate.call_id}
        reason = _reason(await self._ask("PreToolUse", gate.name, fields, about=gate.call_id))
        if reason is not None:
            gate.deny(reason, code="tool.denied", by="hook")

    async def _turn_stopping(self, event: TurnStopping) -> None:
        if self._went_on_in == event.turn:
            return
        fields = {"turn_id": event.turn, "stop_hook_active": False}
        reason = _reason(await self._ask("Stop", "", fields, about=str(event.turn)))
        if reason is not None:
            self._went_on_in = event.turn
            event.go_on(reason, kind="stop_hook")

    async def _child_starting(self, event: ChildStarting) -> None:
        fields = {"agent_name": event.profile, "child_agent_id": event.agent_id, "prompt": event.prompt}
        await self._ask("SubagentStart", event.profile, fields, about=event.agent_id)

    async def _compacting(self, event: Compacting) -> None:
        fields = {"trigger": event.trigger, "token_count": event.tokens, "instruction": event.instruction}
        await self._ask("PreCompact", event.trigger, {key: said for key, said in fields.items() if said is not None})

    async def _awake(self, event: AgentAwake) -> None:
        fields = {"source": event.source, "model": self._spec.model.name, "profile": self._spec.profile.name}
        await self._ask("SessionStart", event.source, fields)

    # -- told -------------------------------------------------------------------------------------------------------

    async def _queued(self, event: PromptQueued) -> None:
        text = await self._text_of(event.content)
        fields = {"prompt_id": event.prompt_id, "prompt": text, "queue_length": event.queue_length}
        await self._tell("UserPromptQueued", text, fields, about=event.prompt_id)

    async def _tool_done(self, done: ToolDone) -> None:
        if not done.executed:
            return  # kept from starting: nothing was used
        fields: dict[str, Any] = {
            "tool_name": done.name,
            "tool_input": done.arguments,
            "tool_call_id": done.call_id,
        }
        said = _output_text(done.output.content)[:TOOL_OUTPUT_CHARS]
        if done.output.is_error:
            fields["error"] = {"code": done.output.error_code, "message": said}
            await self._tell("PostToolUseFailure", done.name, fields, about=done.call_id)
        else:
            fields["tool_output"] = said
            await self._tell("PostToolUse", done.name, fields, about=done.call_id)

    async def _turn_started(self, event: TurnStarted) -> None:
        fields = {"turn_id": event.turn, "origin_kind": event.origin, "prompt": event.prompt}
        await self._tell("TurnStarted", event.origin, fields, about=str(event.turn))

    async def _turn_ended(self, event: TurnEnded) -> None:
        reason = event.reason
        if reason["kind"] in _FAILED:
            error: Mapping[str, Any] = reason.get("error") or {}
            limit = f"limit.{reason.get('name')}"
            kind = str(error.get("code") or (limit if reason["kind"] == "limit" else reason["kind"]))
            text = str(error.get("message") or f"the {reason.get('scope', 'agent')}'s limit was reached")
            fields = {"turn_id": event.turn, "error_type": kind, "error_message": text}
            await self._tell("StopFailure", kind, fields, about=str(event.turn))
        elif reason["kind"] == "cancelled" and reason.get("cause") == "user":
            fields = {"turn_id": event.turn, "reason": "cancelled"}
            await self._tell("Interrupt", "", fields, about=str(event.turn))

    async def _child_ended(self, event: ChildEnded) -> None:
        fields = {"agent_name": event.profile, "child_agent_id": event.agent_id, "response": event.response}
        await self._tell("SubagentStop", event.profile, fields, about=event.agent_id)

    async def _task(self, event: TaskChanged) -> None:
        record = self._journal.fold.tasks.get(event.task_id)
        fields: dict[str, Any] = {
            "task_id": event.task_id,
            "kind": event.kind,
            "description": event.description,
            "status": event.status,
        }
        if event.status == "running":
            started_at = None if record is None else record.started_at
            fields |= {"detached": True, "started_at": started_at}
            await self._tell("TaskStarted", event.kind, fields, about=event.task_id)
        else:
            kind = f"task.{event.status}"
            fields |= {"notification_type": kind, "title": f"{event.description or event.task_id}: {event.status}"}
            await self._tell("Notification", kind, fields, about=event.task_id)

    async def _compacted(self, event: Compacted) -> None:
        fields = {"trigger": event.trigger, "estimated_token_count": event.tokens}
        await self._tell("PostCompact", event.trigger, fields, about=event.compaction_id)

    async def _beat(self) -> None:
        await self._tell("SessionHeartbeat", "", {"uptime_ms": self._session.uptime_ms})

    async def _leaving(self, event: AgentLeaving) -> None:
        if self._is_main:
            await self._session.close()
            reason = "exit" if event.reason == "closed" else event.reason
            await self._tell("SessionEnd", reason, {"reason": reason})
        if self._pending:
            await asyncio.wait(self._pending, timeout=self._leaving_s)
            await self.close()

    def _seen(self, event: SessionEvent) -> None:
        """Of questions the log tells: nobody who asks one need know of hooks."""
        if event.type not in ("permission/asked", "permission/decided"):
            return
        data: dict[str, Any] = thaw(event.data)
        call_id = str(data.pop("call_id"))
        if event.type == "permission/asked":
            name = self._asked[call_id] = str(data.pop("name"))
            kind = "PermissionRequest"
        else:
            known = self._asked.pop(call_id, None)
            if known is None:
                return
            name, kind = known, "PermissionResult"
        self._spawn(kind, name, {"tool_name": name, "tool_call_id": call_id, **data}, call_id)

    # -- running ----------------------------------------------------------------------------------------------------

    async def _tell(self, event: str, value: str, fields: Mapping[str, Any], *, about: str | None = None) -> None:
        """Run the hooks of an event in the background."""
        while len(self._pending) >= MAX_PENDING:
            await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
        self._spawn(event, value, fields, about)

    def _spawn(self, event: str, value: str, fields: Mapping[str, Any], about: str | None) -> None:
        if event in self._table:
            task = asyncio.get_running_loop().create_task(
                self._told(event, value, fields, about), name=f"hooks {event}"
            )
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def _told(self, event: str, value: str, fields: Mapping[str, Any], about: str | None) -> None:
        try:
            await self._ask(event, value, fields, about=about, background=True)
        except KimiRayError as error:
            # The log is somebody else's by now, or cannot be stored: nobody waits for this, and its writer is told.
            _logger.warning("%s: the hooks of %s left no record: %s", self._spec.stream, event, error)

    async def _ask(
        self,
        event: str,
        value: str,
        fields: Mapping[str, Any],
        *,
        about: str | None = None,
        background: bool = False,
    ) -> list[Verdict]:
        """Run the hooks of an event that match, side by side; what each said, in the order of the config."""
        if event not in self._table:
            return []
        self._record_broken(event)
        cwd = self._cwd()
        hooks = self._table.matching(event, value, cwd)
        if not hooks:
            return []
        return await _all(self._one(event, hook, cwd, fields, about, background=background) for hook in hooks)

    async def _one(
        self, event: str, hook: Hook, cwd: str, fields: Mapping[str, Any], about: str | None, *, background: bool
    ) -> Verdict:
        said: dict[str, Any] = {"event": event, "command": hook.settings.command}
        if about is not None:
            said["about"] = about
        invoked = self._journal.append("hook/invoked", said)
        try:
            end = await self._run(event, hook, cwd, fields, background=background)
        except asyncio.CancelledError:
            self._record_killed(said, invoked.seq)
            raise
        verdict = verdict_of(event, end)
        result = {
            "event": event,
            "blocked": verdict.blocked,
            "message": verdict.message,
            "error": verdict.problem,
            "timed_out": end.timed_out or None,
            "exit_code": end.exit_code,
            "duration_ms": end.duration_ms,
            "about": about,
            "invoked": invoked.seq,
            "command": hook.settings.command,
        }
        data = {key: found for key, found in result.items() if found is not None}
        self._journal.append("hook/result", data)
        return verdict

    async def _run(
        self, event: str, hook: Hook, cwd: str, fields: Mapping[str, Any], *, background: bool
    ) -> CommandEnd:
        stream = self._spec.stream
        base = {
            "session_id": stream.session_id,
            "agent_id": stream.agent_id,
            "cwd": cwd,
            "client_type": CLIENT,
        }
        try:
            stdin = hook_input(event, base, fields)
        except ValueError as error:
            return CommandEnd(None, error=f"its input cannot be written as JSON: {error}")
        return await self._processes.run(
            hook.settings.command,
            stdin,
            cwd=hook.directory(cwd),
            env=scrubbed_environment(hook.settings.env),
            timeout_s=hook.settings.timeout_s,
            background=background,
        )

    def _record_broken(self, event: str) -> None:
        """A hook that can never run is told once, at its first moment."""
        if event in self._told_broken:
            return
        self._told_broken.add(event)
        for hook in self._table.broken(event):
            data = {"event": event, "command": hook.settings.command, "blocked": False, "error": hook.problem}
            self._journal.append("hook/result", data)

    def _record_killed(self, said: Mapping[str, Any], seq: int) -> None:
        try:
            killed = "it was killed: the turn or the agent ended"
            self._journal.append("hook/result", {**said, "invoked": seq, "blocked": False, "error": killed})
        except KimiRayError as error:
            _logger.warning("%s: a hook that was killed left no record: %s", self._spec.stream, error)

    def _cwd(self) -> str:
        """The agent's directory; without one that of its session, if this node has it.

        One that is gone is none: an agent that moves its own away is still guarded.
        """
        for place in (self._root, self._journal.log.header.cwd):
            if place is not None and os.path.isdir(place) and os.access(place, os.X_OK):
                return place
        return tempfile.gettempdir()

    async def _text_of(self, content: list[dict[str, Any]]) -> str:
        [whole] = await self._journal.resolve([{"content": content}])
        return "\n".join(str(block.get("text", "")) for block in whole["content"] if block.get("type") == "text")


def _reason(verdicts: list[Verdict]) -> str | None:
    reasons = [found.message for found in verdicts if found.blocked and found.message]
    return "\n".join(reasons) or None


def _output_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(block.get("text", "")) for block in content if block.get("type") == "text")


async def _all(work: Iterable[Awaitable[_T]]) -> list[_T]:
    """All to their ends, side by side; then the first failure, if there is one."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return [one for one in found if not isinstance(one, BaseException)]
