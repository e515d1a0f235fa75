"""One step's tool calls: checked, scheduled by what they touch, each answered exactly once, in the model's order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from pydantic_core import from_json

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.slots import AgentSlots, ToolDone, ToolGate
from kimi_ray.agent.turn_signal import TurnSignal
from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import KimiRayError, LogError, ToolError
from kimi_ray.events import freeze
from kimi_ray.ids import new_message_id
from kimi_ray.log import tool_message
from kimi_ray.settings import Checkpoint
from kimi_ray.tools.contract import Accesses, Environment, Tool, ToolContext, ToolOutput
from kimi_ray.tools.previews import KeptResults, preview, whole_text
from kimi_ray.tools.results import check_output, error_output
from kimi_ray.tools.scheduling import ScheduledCall, by_file, run_calls

REFUSED = "This tool call was not started: {why}"
EMPTY_OUTPUT = "(no output)"


class ToolRuns:
    """Runs the calls of one agent.

    Args:
        journal: Where calls and results are written.
        tools: The agent's tools by name.
        environment: Where they work.
        checkpoint: With ``request``, a call is durable before its body runs.
        session_id: For the tools' context.
        agent_id: For the tools' context.
        item: The data of the rollout's item.
        slots: Whom to ask before a call starts and when it has its output.
    """

    def __init__(
        self,
        journal: Journal,
        tools: Mapping[str, Tool],
        environment: Environment,
        checkpoint: Checkpoint,
        *,
        session_id: str,
        agent_id: str,
        item: Any = None,
        slots: AgentSlots | None = None,
    ) -> None:
        self.slots = slots if slots is not None else AgentSlots()
        self._journal = journal
        self._tools = tools
        self._environment = environment
        self._checkpoint = checkpoint
        self._session_id = session_id
        self._agent_id = agent_id
        self._item = item
        self._state: dict[str, Any] = {}
        self._seen_environment = cast("Environment", KeptResults(environment, self._whole_result))

    async def admit(
        self, calls: list[dict[str, Any]], turn: int, step: int, signal: TurnSignal, *, offered: Sequence[str]
    ) -> list[ToolRun]:
        """Check the calls of one answer, and let those that are sound pass the gates, one after the other.

        Args:
            calls: As the model made them.
            turn: Whose.
            step: Whose.
            signal: What may stop the turn.
            offered: The names of the tools in the turn's requests, for who asked for another.

        Raises:
            TurnStopped: at a gate; no call was started, and none has its result.
        """
        runs = [ToolRun(self, call, turn, step, offered) for call in calls]
        if self.slots.tool:
            earlier: dict[str, ToolRun] = {}
            with signal.interruptible():
                for run in runs:
                    await run.gate(len(runs), earlier)
                    earlier[run.call_id] = run
        return runs

    async def run(self, runs: list[ToolRun], signal: TurnSignal) -> dict[str, Any] | None:
        """Run the calls of one answer, side by side where they may; every one has its result in the log afterwards.

        Returns:
            The reason for which somebody wants the turn to end after this step, or None.

        Raises:
            StoreError: a call could not be made durable; it was not started.
        """
        accesses = [run.accesses for run in runs]
        if len(runs) > 1:
            with signal.interruptible():
                accesses = await by_file(accesses, self._environment)
        await run_calls(
            [ScheduledCall(known, partial(run.body, signal)) for known, run in zip(accesses, runs, strict=True)],
            cancelled=signal.stopped,
            stopped=signal.stopping,
            on_start=lambda index: runs[index].start(),
            commit=lambda index, output: runs[index].commit(output),
            root=self._environment.root,
        )
        for run in runs:
            if run.store_error is not None:
                raise run.store_error
        causes = [run.stop_cause for run in runs if run.stop_turn]
        if not causes:
            return None
        # One for whom the work is done counts more than one who gives it up.
        return {"kind": "completed"} if None in causes else {"kind": "completed", "cause": causes[0]}

    def refuse(self, call_id: str, reason: dict[str, Any]) -> None:
        """Answer a call that will not be run because the turn ends (a limit, a cancel, an error), or its step."""
        order = self._journal.log.order
        seq = order.pending_calls.get(call_id)
        why = {
            "limit": f"the limit {reason.get('name')} is reached",
            "cancelled": "the turn was cancelled",
            "step": "the user interrupted it",
        }.get(reason["kind"], "the turn ended")
        self.write_result(
            call_id,
            ToolOutput(REFUSED.format(why=why), is_error=True, error_code="tool.not_started"),
            turn=cast("int", order.open_turn),
            step=cast("int", order.open_step),
            call_seq=seq,
        )

    def write_result(
        self,
        call_id: str,
        output: ToolOutput,
        *,
        turn: int,
        step: int,
        call_seq: int | None,
        tool: str = "",
        queued_ms: int | None = None,
        run_ms: int | None = None,
    ) -> None:
        """Append the ``tool/result`` of a call; an output that cannot be stored, or that no request could be made of,
        becomes an error result. Of a long one the model is shown the preview; the event has the whole as a blob."""
        full: Any = None
        try:
            check_output(output)
            whole = whole_text(output)
            if whole is not None:
                full = self._journal.value(whole, inline_bytes=0)
                readable = not {"Read", "Grep"}.isdisjoint(self._tools)
                output = replace(output, content=preview(whole, tool=tool, call_id=call_id, readable=readable))
            content = self._content(output)
            meta = freeze(output.meta) if output.meta is not None else None
        except (LogError, ToolError) as error:
            message = f"the tool returned something that cannot be stored: {error.message}"
            output = ToolOutput(message, is_error=True, error_code="tool.bad_result")
            content, meta = self._content(output), None
        message = tool_message(new_message_id(), call_id, content, is_error=output.is_error)
        data: dict[str, Any] = {"turn": turn, "step": step, "message": message}
        if output.is_error:
            data["error"] = {"code": output.error_code or "tool.failed"}
        facts = {"meta": meta, "full": full, "queued_ms": queued_ms, "run_ms": run_ms, "exit_code": output.exit_code}
        data |= {key: value for key, value in facts.items() if value is not None}
        sources = None if call_seq is None else [call_seq]
        self._journal.append("tool/result", data, surface="append", sources=sources)

    def _content(self, output: ToolOutput) -> list[dict[str, Any]]:
        if isinstance(output.content, str):
            text = (
                output.content.encode("utf-8", "replace").decode() if not output.content.isascii() else output.content
            )
            blocks: list[dict[str, Any]] = [{"type": "text", "text": text or EMPTY_OUTPUT}]
        else:
            blocks = freeze(output.content)
        return [self._journal.block(block) for block in blocks]

    async def _whole_result(self, call_id: str) -> bytes | None:
        kept = self._journal.fold.kept_results.get(call_id)
        if kept is None:
            return None
        [message] = await self._journal.resolve([{"content": [{"type": "text", **from_json(kept)}]}])
        return str(message["content"][0]["text"]).encode()

    def context(self, call_id: str, signal: TurnSignal) -> ToolContext:
        """What a call is given."""
        return ToolContext(
            environment=self._seen_environment,
            session_id=self._session_id,
            agent_id=self._agent_id,
            call_id=call_id,
            cancelled=signal.stopped,
            item=self._item,
            state=self._state,
        )

    def tool(self, name: str, offered: Sequence[str]) -> Tool:
        """The tool of that name; ``offered`` are those that the model knows of.

        Raises:
            ToolError: ``tool.unknown``.
        """
        found = self._tools.get(name)
        if found is None:
            known = ", ".join(offered) or "none"
            raise ToolError(f"there is no tool {name!r}; the tools are: {known}", code="tool.unknown")
        return found

    @property
    def journal(self) -> Journal:
        """The agent's journal."""
        return self._journal

    @property
    def durable_before_body(self) -> bool:
        """Whether a call waits for durability before its body."""
        return self._checkpoint == "request"


class ToolRun:
    """One call on its way: preflight, body, result."""

    __slots__ = (
        "_arguments",
        "_began",
        "_call",
        "_call_seq",
        "_owner",
        "_queued",
        "_refusal",
        "_result",
        "_shares",
        "_step",
        "_tool",
        "_turn",
        "accesses",
        "call_id",
        "stop_cause",
        "stop_turn",
        "store_error",
    )

    def __init__(self, owner: ToolRuns, call: dict[str, Any], turn: int, step: int, offered: Sequence[str]) -> None:
        self._owner = owner
        self._call = call
        self.call_id: str = call["id"]
        self._turn = turn
        self._step = step
        self._call_seq: int | None = None
        self._refusal: ToolOutput | None = None
        self._queued = time.monotonic()
        self._began: float | None = None
        self._tool: Tool | None = None
        self._arguments: dict[str, Any] = {}
        self._result: asyncio.Future[ToolOutput] | None = None
        """Its result, for the calls that share it."""
        self._shares: ToolRun | None = None
        self.stop_turn = False
        self.stop_cause: str | None = None
        self.accesses = Accesses.none()
        self.store_error: KimiRayError | None = None
        try:
            parsed = _parse(call["arguments"])
            if isinstance(parsed, dict):
                self._arguments = cast("dict[str, Any]", parsed)
            self._tool = owner.tool(call["name"], offered)
            self._arguments = self._tool.check(parsed)
            self.accesses = self._tool.accesses(self._arguments)
        except BaseException as error:  # noqa: BLE001  a user's tool may raise anything; it becomes the call's result
            self._refusal = error_output(error)

    async def gate(self, batch: int, earlier: Mapping[str, ToolRun]) -> None:
        """Ask whether it may start, or has the result of one of the calls before it."""
        if self._refusal is not None or self._tool is None:
            return
        asked = ToolGate(
            self.call_id, self._tool.name, self._arguments, self._tool, self.accesses, self._turn, self._step, batch
        )
        try:
            await self._owner.slots.tool.run(asked)
            if asked.same_as is not None:
                other = self._shares = earlier[asked.same_as]
                other._result = other._result or asyncio.get_running_loop().create_future()
        except BaseException as error:
            if ends_this_task(error):
                raise
            self._refusal = error_output(error)
        if asked.veto is not None:
            self._refusal = asked.veto
        if self._refusal is not None or self._shares is not None:
            self.accesses = Accesses.none()

    def start(self) -> None:
        """Write ``tool/call``."""
        journal = self._owner.journal
        self._began = time.monotonic()
        arguments = journal.value(self._call["arguments"], inline_bytes=16 << 10)
        data: dict[str, Any] = {
            "turn": self._turn,
            "step": self._step,
            "call_id": self._call["id"],
            "name": self._call["name"],
            "arguments": arguments,
        }
        if self._refusal is not None and self._refusal.is_error:
            data["refused"] = self._refusal.error_code or "tool.failed"
        self._call_seq = journal.append("tool/call", data).seq

    async def body(self, signal: TurnSignal) -> ToolOutput:
        """Its output: of the tool, or of whoever kept the call from starting; then of those who look at it."""
        if self._shares is not None and self._shares._result is not None:
            output = await asyncio.shield(self._shares._result)
            return replace(output, meta={**(output.meta or {}), "same_as": self._shares.call_id})
        output = self._refusal if self._refusal is not None else await self._execute(signal)
        slot = self._owner.slots.tool_done
        if not slot or self.store_error is not None:
            return output
        done = ToolDone(
            self.call_id,
            self._call["name"],
            self._arguments,
            output,
            self._turn,
            self._step,
            executed=self._refusal is None,
        )
        try:
            await slot.run(done)
        except BaseException as error:  # noqa: BLE001  nothing that a handler does costs a call its result
            # The tool has done its work: what it said is its result, also when nobody has the time to look at it.
            return output if ends_this_task(error) else error_output(error)
        self.stop_turn, self.stop_cause = done.stop_turn, done.stop_cause
        return done.output

    async def _execute(self, signal: TurnSignal) -> ToolOutput:
        """Make the call durable, and room for its result, then run it."""
        assert self._tool is not None
        journal = self._owner.journal
        try:
            await journal.durable.wait_for_room()
            if self._owner.durable_before_body:
                await journal.flush()
        except KimiRayError as error:
            self.store_error = error
            return ToolOutput(REFUSED.format(why="the log could not be stored"), is_error=True, error_code=error.code)
        if signal.fenced:
            return ToolOutput(REFUSED.format(why="another writer took over"), is_error=True, error_code="store.fenced")
        self._began = time.monotonic()
        try:
            return await self._tool.run(self._arguments, self._owner.context(self.call_id, signal))
        except BaseException as error:
            if ends_this_task(error):
                raise
            return error_output(error)

    def commit(self, output: ToolOutput) -> None:
        """Write ``tool/result``."""
        now = time.monotonic()
        began = self._began if self._began is not None else now
        if self._result is not None:
            self._result.set_result(output)
        self._owner.write_result(
            self.call_id,
            output,
            turn=self._turn,
            step=self._step,
            call_seq=self._call_seq,
            tool=self._call["name"],
            queued_ms=round((began - self._queued) * 1000),
            run_ms=round((now - began) * 1000),
        )


def _parse(arguments: str) -> Any:
    """The model's raw argument text as JSON; text that is not JSON goes to the tool's own check as it is."""
    if not arguments.strip():
        return {}
    try:
        return from_json(arguments)
    except ValueError:
        return arguments
