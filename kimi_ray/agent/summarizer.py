"""Who writes the summary of a compaction: a service that a Feature can replace, and the one that is there.

``ModelSummarizer`` asks the agent's own model, with the system prompt and the tools of its last request and the very
messages, so that what the server has cached of them is used. What it sends is in the log (``compaction/request``), and
what comes back (``compaction/response``).
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.model_in_use import ModelInUse
from kimi_ray.agent.response_facts import response_facts
from kimi_ray.errors import AgentError, ProviderError
from kimi_ray.ids import new_message_id
from kimi_ray.llm.assemble import Assembled, Assembler
from kimi_ray.llm.chat import ChatRequest, ToolSpec
from kimi_ray.llm.faults import answer_fault
from kimi_ray.llm.slots import slots_of
from kimi_ray.log import Message, message_tokens
from kimi_ray.log.meter import header_tokens
from kimi_ray.settings import Sampling
from kimi_ray.store.seam import Stream

MAX_ATTEMPTS = 5
"""Attempts that fail for reasons that pass."""
KEPT_SHARES = (0.7, 0.5, 0.35)
"""What is still sent of the messages, once the request for the summary is itself too long."""
_LEAST_SUMMARY = 256
_SLACK = 64
_WORDS, _WORDS_AGAIN, _LEAST_WORDS = 0.5, 0.2, 10
"""The words that are asked for, of the tokens that there is room for: at first, and once it was cut off."""

INSTRUCTION = """\
Stop here: the conversation above is about to be replaced by a summary, and you write it. Whoever goes on, goes on
with your summary alone. Call no tool. Write Markdown with exactly these eight sections, terse bullets in each, and
"(none)" where there is nothing:

## Request and intent
## Concepts and decisions
## Files and places
## Errors and fixes
## Open work
## Current work
## Next step
## What must not be lost

Keep paths, names, commands, numbers and messages of errors word for word. If the conversation begins with an earlier
summary, merge it into yours: what still matters of it, not all of it."""


@dataclass(frozen=True, slots=True)
class SummaryTask:
    """What is to be summarized."""

    compaction_id: str
    messages: list[Message]
    """All of them, oldest first, every call answered, every blob in place."""
    instruction: str | None = None
    """What the user wants of the summary."""
    max_tokens: int = 8_192
    """How long it may be."""
    window: int | None = None
    """The model's, in tokens; None: not known."""
    scale: float = 1.0
    """What a token of ``kimi_ray.log.estimate`` is by the count of the model's server."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary: text blocks, not all blank."""

    content: list[dict[str, Any]]
    model: str | None = None
    usage: dict[str, Any] | None = None


class Summarizer(ABC):
    """Writes summaries for one agent. A Feature replaces it with a provider of its own (``override=True``)."""

    @abstractmethod
    async def summarize(self, task: SummaryTask) -> Summary:
        """The summary of a conversation.

        Raises:
            KimiRayError: there is none; the compaction ends with that error and changes nothing, as it does for
                whatever else is raised, and for what is no summary.
        """


class ModelSummarizer(Summarizer):
    """Asks the agent's model.

    Args:
        journal: The agent's log: what is asked and answered is kept there.
        in_use: Its model.
        stream: Whose it is.
        jitter_seed: For the waits between attempts.
    """

    def __init__(self, journal: Journal, in_use: ModelInUse, stream: Stream, jitter_seed: str) -> None:
        self._journal = journal
        self._in_use = in_use
        self._stream = stream
        self._rng = random.Random(f"{jitter_seed}-summary")

    async def summarize(self, task: SummaryTask) -> Summary:
        """See ``Summarizer.summarize``.

        1. An attempt that fails for a reason that passes is made again, after a wait.
        2. A request that is too long is made again with less of the oldest messages.
        3. A summary that was cut off is asked for once more, shorter.

        Raises:
            ProviderError: the last attempt's.
            AgentError: ``compaction.summary``: the answer was cut off, or there was no request yet.
        """
        header = await self._journal.header()
        if header is None:
            raise _no_summary("no request was made yet: there is no system prompt to go on from")
        attempt, failures, shares, left_out, words = 0, 0, iter(KEPT_SHARES), 0, _WORDS
        while True:
            attempt += 1
            try:
                return await self._ask(task, header, left_out, attempt, words)
            except _CutOffError as error:
                if words < _WORDS:
                    raise _no_summary(str(error), error.hint) from None
                words = _WORDS_AGAIN
            except ProviderError as error:
                share = next(shares, None) if error.code == "context.overflow" else None
                if share is not None:
                    left_out = _left_out(task.messages, share)
                    continue
                failures += 1
                delay_ms = self._in_use.model.retry.delay_ms(failures, error, self._rng)
                if delay_ms is None or failures >= MAX_ATTEMPTS:
                    raise
                await asyncio.sleep(delay_ms / 1000)

    async def _ask(
        self, task: SummaryTask, header: dict[str, Any], left_out: int, attempt: int, words: float
    ) -> Summary:
        model, provider = self._in_use.model, self._in_use.provider
        room = _room(task, header, [*task.messages[left_out:], _instruction(task, task.max_tokens)])
        message = _instruction(task, max(_LEAST_WORDS, round(room * words)))
        messages = [*task.messages[left_out:], message]
        sampling = Sampling.model_validate(header.get("sampling") or {}).model_copy(
            update={"stop": None, "max_output_tokens": room, "tool_choice": None}
        )
        request = ChatRequest(
            model=model.model,
            system=header.get("system"),
            messages=messages,
            tools=tuple(ToolSpec(**tool) for tool in header.get("tools", ())),
            sampling=sampling,
            session_id=self._stream.session_id,
            agent_id=self._stream.agent_id,
            attempt=attempt,
            purpose="compaction",
        )
        asked: dict[str, Any] = {
            "compaction_id": task.compaction_id,
            "attempt": attempt,
            "provider": provider.name,
            "model": model.model,
            "sampling": sampling.said(),
            "message": message,
        }
        if left_out:
            asked["left_out"] = left_out
        self._journal.append("compaction/request", asked)
        assembler, began = Assembler(), time.monotonic()
        try:
            with await self._place():
                async for chunk in provider.stream(request):
                    assembler.add(chunk)
                answer = assembler.result()
                fault = answer_fault(empty=answer.empty, finish=answer.finish, raw_finish=answer.raw_finish)
                if fault is not None:
                    raise fault
        except ProviderError as error:
            self._respond(task, attempt, assembler, began, error=error)
            raise
        self._respond(task, attempt, assembler, began, answer=answer)
        if answer.finish == "max-tokens":
            raise _CutOffError(room, task.max_tokens)
        text = [block for block in answer.content if block["type"] == "text" and block["text"].strip()]
        if not text:
            raise _no_summary("the model wrote none")
        usage = assembler.usage
        return Summary(text, model.model, None if usage is None else usage.said())

    async def _place(self) -> AbstractContextManager[object]:
        slots = slots_of(self._in_use.provider)
        if slots is None:
            return nullcontext()
        return slots.take_now() or await slots.take()

    def _respond(
        self,
        task: SummaryTask,
        attempt: int,
        assembler: Assembler,
        began: float,
        *,
        answer: Assembled | None = None,
        error: ProviderError | None = None,
    ) -> None:
        data: dict[str, Any] = {"compaction_id": task.compaction_id, "attempt": attempt}
        data |= response_facts(assembler, answer, error)
        if error is not None:
            data["error"] = error.to_data()
        data["timing"] = {"total_ms": round((time.monotonic() - began) * 1000)}
        self._journal.append("compaction/response", data)


def _room(task: SummaryTask, header: dict[str, Any], messages: list[Message]) -> int:
    """The tokens that the summary may have, beside the request for it."""
    if task.window is None:
        return task.max_tokens
    asked = round((header_tokens(header) + sum(map(message_tokens, messages))) * task.scale) + _SLACK
    return max(min(task.max_tokens, task.window - asked), min(_LEAST_SUMMARY, task.max_tokens))


def _left_out(messages: list[Message], share: float) -> int:
    """How many of the oldest messages go, for this share of the tokens to be left; no result goes without its call."""
    prices = list(map(message_tokens, messages))
    wanted, at = sum(prices) * share, len(messages)
    while at > 0 and prices[at - 1] <= wanted:
        at -= 1
        wanted -= prices[at]
    while at < len(messages) and _is_result(messages[at]):
        at += 1
    if at == len(messages):  # something must be left: the last message, with the calls if it is a result
        at -= 1
        while at > 0 and _is_result(messages[at]):
            at -= 1
    return at


def _is_result(message: Message) -> bool:
    return message.get("source", {}).get("kind") == "tool"


class _CutOffError(Exception):
    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(f"it was cut off at {tokens} tokens, and so was a second one that was to be shorter")
        self.hint = "raise summary_tokens in [models.X.compaction]"
        if tokens < most:
            self.hint = (
                "the window had room for no more: compact earlier, with a lower threshold_ratio in"
                " [models.X.compaction]"
            )


def _instruction(task: SummaryTask, words: int) -> Message:
    """What is asked, behind the conversation."""
    said = f"{INSTRUCTION}\n\nStay below {words} words in all."
    if task.instruction:
        said = f"{said}\n\nThe user asks of it: {task.instruction}"
    return {
        "id": new_message_id(),
        "role": "user",
        "content": [{"type": "text", "text": said}],
        "source": {"kind": "compaction_request", "compaction_id": task.compaction_id},
    }


def _no_summary(why: str, hint: str = "the log has what was asked") -> AgentError:
    return AgentError(f"there is no summary: {why}", code="compaction.summary", hint=hint)
