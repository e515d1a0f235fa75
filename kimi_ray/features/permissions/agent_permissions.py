"""The permissions of one agent: its mode, what was approved, the question that waits, the handler of its calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.slots import AgentSlots, ToolGate
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.errors import KimiRayError, ToolError
from kimi_ray.features.permissions.calls import Call, call_of
from kimi_ray.features.permissions.policy import Decision, decide
from kimi_ray.features.permissions.rules import RuleBook
from kimi_ray.features.permissions.words import Answer, AnswerScope, Approval, forbidden, refused, unanswered
from kimi_ray.ids import MAIN
from kimi_ray.settings import PermissionModeName
from kimi_ray.tools.contract import Environment
from kimi_ray.wall_clock import epoch_ms

NAME = "permissions"


@dataclass(slots=True)
class _Reply:
    decision: str
    by: str
    rule: str | None = None
    scope: AnswerScope = "once"
    feedback: str | None = None


@dataclass(slots=True)
class _Question:
    approval: Approval
    call: Call
    reply: asyncio.Future[_Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class AgentPermissions:
    """Decides about the calls of one agent. In mode ``auto`` without a rule that denies it does nothing.

    Args:
        rules: The configured ones.
        spec: The agent's; its mode counts for a log that names none.
        journal: The agent's log: it has the mode, and what was approved for the session.
        slots: Where it is asked.
        environment: Where the tools work.
        default: The mode where nothing else names one.
        wait_s: Seconds that a question waits for its answer; 0: it is denied at once.
    """

    def __init__(
        self,
        rules: RuleBook,
        spec: AgentSpec,
        journal: Journal,
        slots: AgentSlots,
        environment: Environment,
        *,
        default: PermissionModeName,
        wait_s: float,
    ) -> None:
        self._rules = rules
        self._journal = journal
        self._slot = slots.tool
        self._environment = environment
        self._default: PermissionModeName = default
        self._wait_s = wait_s
        self._asks_user = "AskUserQuestion" in spec.profile.tools
        self._agent_id = spec.stream.agent_id
        self._questions: dict[str, _Question] = {}
        self._asked_for: PermissionModeName | None = spec.permission_mode
        self._listen()

    @property
    def mode(self) -> PermissionModeName:
        """The mode now."""
        return self._journal.fold.permission_mode or self._asked_for or self._default

    @property
    def questions(self) -> list[Approval]:
        """The calls that wait for an answer."""
        return [question.approval for question in self._questions.values()]

    def set_mode(self, mode: PermissionModeName) -> None:
        """Another mode, from the next decision on; a question that it answers is answered."""
        if mode != self._journal.fold.permission_mode:
            self._journal.append("permission/mode", {"mode": mode})
        self._listen()
        for question in self._questions.values():
            found = self._decide(question.call)
            if found.decision != "ask" and not question.reply.done():
                self._settle(question, _Reply(found.decision, found.by, found.rule))

    def answer(self, call_id: str, decision: Answer, scope: AnswerScope = "once", feedback: str | None = None) -> None:
        """Answer a question; the answer is in the log when this returns, and stands.

        Raises:
            ToolError: ``tool.not_asked``: no such call waits for an answer (any more).
            LogError: it cannot be recorded; the question still waits.
        """
        question = self._questions.get(call_id)
        if question is None or question.reply.done():
            raise ToolError(
                f"the call {call_id} does not wait for an answer",
                code="tool.not_asked",
                hint="session.approvals() lists the calls that do",
                details={"call_id": call_id},
            )
        self._settle(question, _Reply(decision, "user", question.approval.rule, scope, feedback))

    def _settle(self, question: _Question, reply: _Reply) -> None:
        lasting = reply.scope == "session" and reply.decision == "allow"
        self._record(
            question.approval.call_id,
            reply.decision,
            reply.by,
            question.call.exactly if lasting else reply.rule,
            scope="session" if lasting else None,
            feedback=reply.feedback,
        )
        question.reply.set_result(reply)

    def _listen(self) -> None:
        if self.mode != "auto" or self._rules.deny or self._asks_user:
            self._slot.register(NAME, self._gate)
        else:
            self._slot.remove(NAME)

    def _decide(self, call: Call) -> Decision:
        return decide(call, self.mode, self._rules, self._journal.fold.approved_calls)

    async def _gate(self, gate: ToolGate) -> None:
        call = await call_of(gate, self._environment)
        found = await asyncio.to_thread(self._decide, call)
        subagent = self._agent_id != MAIN
        if found.decision == "ask":
            await self._ask(gate, call, found, subagent=subagent)
            return
        if found.recorded:
            self._record(gate.call_id, found.decision, found.by, found.rule)
        if found.decision == "deny":
            gate.deny(forbidden(found, subagent=subagent), code="tool.denied", by=found.by)

    async def _ask(self, gate: ToolGate, call: Call, found: Decision, *, subagent: bool) -> None:
        reply = await self._reply(gate, call, found) if self._wait_s > 0 else None
        if reply is None:
            self._record(gate.call_id, "deny", "nobody", found.rule)
            gate.deny(unanswered(found, self._wait_s, subagent=subagent), code="tool.denied", by="nobody")
        elif reply.decision == "deny":
            gate.deny(refused(reply.feedback, subagent=subagent), code="tool.denied", by=reply.by)

    async def _reply(self, gate: ToolGate, call: Call, found: Decision) -> _Reply | None:
        """The answer, or None when nobody gave one in time."""
        approval = Approval(
            agent_id=self._agent_id,
            call_id=gate.call_id,
            tool=gate.name,
            about=call.shown,
            arguments=dict(gate.arguments),
            by=found.by,
            rule=found.rule,
            asked_at=epoch_ms(),
            wait_s=self._wait_s,
        )
        question = self._questions[gate.call_id] = _Question(approval, call)
        asked: dict[str, Any] = {
            "call_id": gate.call_id,
            "name": gate.name,
            "about": call.shown,
            "by": found.by,
            "rule": found.rule,
            "wait_s": self._wait_s,
        }
        try:
            self._journal.append("permission/asked", {key: said for key, said in asked.items() if said is not None})
            async with asyncio.timeout(self._wait_s):
                return await question.reply
        except TimeoutError:
            return _given(question)  # it may have come in the last moment
        except asyncio.CancelledError:
            if _given(question) is None:
                self._record_cancelled(gate)
            raise
        finally:
            del self._questions[gate.call_id]

    def _record_cancelled(self, gate: ToolGate) -> None:
        try:
            self._record(gate.call_id, "cancelled", "turn", None)
        except KimiRayError:
            pass  # the log is another's by now: the turn ends for that

    def _record(
        self,
        call_id: str,
        decision: str,
        by: str,
        rule: str | None,
        *,
        scope: str | None = None,
        feedback: str | None = None,
    ) -> None:
        said = {
            "call_id": call_id,
            "decision": decision,
            "rule": rule,
            "by": by,
            "scope": scope,
            "feedback": feedback,
        }
        self._journal.append("permission/decided", {key: value for key, value in said.items() if value is not None})


def _given(question: _Question) -> _Reply | None:
    reply = question.reply
    return reply.result() if reply.done() and not reply.cancelled() else None
