"""Logs as trajectories in the Agent Trajectory Interchange Format (ATIF) 1.8, subagents embedded.

A trajectory is the whole course of a log: also what a compaction or an undo took from the model later. Events that a
fork began with are marked as copied context.
"""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Final

from kimi_ray.errors import KimiRayError
from kimi_ray.events import SessionEvent, thaw
from kimi_ray.exchange.chat_formats import arguments_of, function_of
from kimi_ray.exchange.conversations import (
    MALFORMED,
    Asked,
    Contents,
    bad_payload,
    facts_of,
    log_events,
    readable_header,
    texts_of,
)
from kimi_ray.store.open import ReadStore
from kimi_ray.store.seam import ListedLog
from kimi_ray.version import __version__

SCHEMA: Final = "ATIF-v1.8"

Json = dict[str, Any]

_OF_USER: Final = frozenset({"user", "rollout", "subagent"})
"""Kinds of sources that are a user to the agent; what else speaks in the user's role is the system."""
_TOKENS: Final = ("prompt_tokens", "completion_tokens", "cached_tokens")
_MEDIA: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})


async def atif_trajectory(
    store: ReadStore,
    log: ListedLog,
    problems: list[KimiRayError],
    *,
    children: dict[str, list[ListedLog]] | None = None,
    facts: Json | None = None,
) -> Json:
    """The trajectory of a log.

    Args:
        store: The home.
        log: The agent's log.
        problems: Takes what could not be read; the trajectory goes as far as the log verifies.
        children: By agent, the logs of the agents below it: they are embedded, and theirs.
        facts: More of what is told under ``extra``.

    Raises:
        KimiRayError: its header cannot be read.
    """
    below = (children or {}).get(log.stream.agent_id, [])
    course = _Course(store, log, problems, {child.stream.agent_id: str(child.stream) for child in below})
    made = await course.run(facts or {})
    embedded: list[Json] = []
    for child in below:
        try:
            embedded.append(await atif_trajectory(store, child, problems, children=children))
        except (KimiRayError, *MALFORMED) as error:
            problems.append(error if isinstance(error, KimiRayError) else bad_payload(child.stream, error))
            course.forget(str(child.stream))
    if embedded:
        made["subagent_trajectories"] = embedded
    return made


class _Course:
    """Follows one log and writes its steps."""

    def __init__(self, store: ReadStore, log: ListedLog, problems: list[KimiRayError], below: dict[str, str]) -> None:
        self._header = readable_header(log)
        self._log = log
        self._store = store
        self._problems = problems
        self._contents = Contents(store, problems)
        self._below = below
        self._steps: list[Json] = []
        self._by_seq: dict[int, int] = {}
        self._asked = Asked()
        self._responses: list[SessionEvent] = []
        self._calls: dict[str, Json] = {}
        """The step that asks for each call."""
        self._refs: dict[str, list[Json]] = {}
        """By call, the trajectories of the subagents that it started."""
        self._copied = False
        self._compactions: dict[str, Json] = {}
        """By compaction, what its requests took: a summary is no step of the agent."""

    async def run(self, facts: Json) -> Json:
        async with aclosing(log_events(self._store, self._log.stream, self._problems)) as events:
            async for event in events:
                handler = _HANDLERS.get(event.type)
                if handler is not None:
                    self._copied = event.seq < (self._header.seed_length or 0)
                    await handler(self, event)
        self._refer()
        asked = self._asked
        agent: Json = {"name": "kimi-ray", "version": self._header.writer.version or __version__}
        if asked.model is not None:
            agent["model_name"] = asked.model
        if asked.tools:
            agent["tool_definitions"] = [function_of(tool) for tool in asked.tools]
        return {
            "schema_version": SCHEMA,
            "session_id": self._log.stream.session_id,
            "trajectory_id": str(self._log.stream),
            "agent": agent,
            "steps": self._steps,
            "final_metrics": self._totals(),
            "extra": facts_of(self._header) | facts,
        }

    def forget(self, trajectory_id: str) -> None:
        """A subagent's trajectory could not be made after all: nothing refers to it."""
        for step in self._steps:
            for result in step.get("observation", {}).get("results", []):
                refs = result.get("subagent_trajectory_ref", [])
                kept = [ref for ref in refs if ref["trajectory_id"] != trajectory_id]
                if refs and not kept:
                    del result["subagent_trajectory_ref"]
                elif refs:
                    result["subagent_trajectory_ref"] = kept

    def _step(self, event: SessionEvent, source: str, message: Any, **facts: Any) -> Json:
        step: Json = {
            "step_id": len(self._steps) + 1,
            "timestamp": datetime.fromtimestamp(event.time / 1000, UTC).isoformat(timespec="milliseconds"),
            "source": source,
            "message": message,
        }
        step |= {key: value for key, value in facts.items() if value is not None}
        if self._copied:
            step["is_copied_context"] = True
        self._steps.append(step)
        self._by_seq[event.seq] = step["step_id"]
        return step

    async def _asking(self, event: SessionEvent) -> None:
        before, self._asked = self._asked, await self._contents.asked(event.data["header"])
        if self._asked.system and self._asked.system != before.system:
            self._step(event, "system", self._asked.system, extra={"kind": "system_prompt"})
            if not any(step["source"] == "agent" for step in self._steps):
                self._to_the_front()

    def _to_the_front(self) -> None:
        """The first system prompt stands before the prompt that it was sent with, which the log has first."""
        self._steps.insert(0, self._steps.pop())
        moved = {step["step_id"]: place for place, step in enumerate(self._steps, 1)}
        self._by_seq = {seq: moved[number] for seq, number in self._by_seq.items()}
        for place, step in enumerate(self._steps, 1):
            step["step_id"] = place
            replaced = step.get("extra", {}).get("replaced_steps")
            if replaced:
                step["extra"]["replaced_steps"] = [moved[number] for number in replaced]

    async def _user(self, event: SessionEvent) -> None:
        message = await self._contents.message(event.data)
        source: Json = message.get("source") or {}
        kind = str(source.get("kind", "user"))
        extra: Json = {} if kind == "user" else {"kind": kind, "role": "user"}
        if event.replaced is not None:
            extra |= {"kind": kind, "replaced_steps": self._replaced(event)}
        whose = "user" if kind in _OF_USER and event.replaced is None else "system"
        self._step(event, whose, _content(message["content"]), extra=extra or None)

    async def _cut(self, event: SessionEvent) -> None:
        extra = {"kind": event.data["reason"], "replaced_steps": self._replaced(event)}
        self._step(event, "system", "", extra=extra)

    def _replaced(self, event: SessionEvent) -> list[int]:
        return [step for seq in event.sources or () if (step := self._by_seq.get(seq)) is not None]

    async def _response(self, event: SessionEvent) -> None:
        self._responses.append(event)

    async def _step_start(self, _event: SessionEvent) -> None:
        self._responses.clear()

    async def _answer(self, event: SessionEvent) -> None:
        data = event.data
        if event.replaced is not None:
            extra: Json = {"kind": "replacement", "replaced_steps": self._replaced(event)}
            message = await self._contents.message(data["message"])
            self._step(event, "system", texts_of(message["content"]), extra=extra)
            return
        message = await self._contents.message(data["message"])
        blocks: list[Json] = message["content"]
        calls = [
            {
                "tool_call_id": block["id"],
                "function_name": block["name"],
                "arguments": thaw(arguments_of(block["arguments"])),
            }
            for block in blocks
            if block["type"] == "tool-call"
        ]
        source: Json = message.get("source") or {}
        extra = {"turn": data["turn"], "step": data["step"]}
        failed = sum(1 for one in self._responses if one.data.get("error"))
        if failed:
            extra["failed_attempts"] = failed
        if data.get("interrupted"):
            extra["interrupted"] = True
        step = self._step(
            event,
            "agent",
            texts_of(blocks),
            model_name=source.get("model") or self._asked.model,
            reasoning_content=texts_of(blocks, "reasoning") or None,
            tool_calls=calls or None,
            metrics=self._metrics(data),
            llm_call_count=1,
            extra=extra,
        )
        for call in calls:
            self._calls[call["tool_call_id"]] = step

    async def _compacted(self, event: SessionEvent) -> None:
        data = event.data
        if not self._copied:
            self._pay(str(data["compaction_id"]), data.get("usage"))

    async def _summed(self, event: SessionEvent) -> None:
        """A summary that no request of the agent's own model brought tells its tokens itself."""
        data = event.data
        if not self._copied and data["compaction_id"] not in self._compactions:
            self._pay(str(data["compaction_id"]), data.get("usage"))

    def _pay(self, compaction_id: str, usage: Json | None) -> None:
        paid = self._compactions.setdefault(compaction_id, dict.fromkeys(_TOKENS, 0))
        for name, tokens in _tokens(usage or {}).items():
            paid[name] += tokens

    def _metrics(self, data: Json) -> Json | None:
        answered = next((one.data for one in reversed(self._responses) if not one.data.get("error")), data)
        usage: Json | None = answered.get("usage") or data.get("usage")
        if not usage:
            return None
        get = usage.get
        extra: Json = {key: get(key) for key in ("reasoning", "cache_write", "estimated") if get(key)}
        timing: Json = answered.get("timing") or {}
        extra |= {key: timing[key] for key in ("ttft_ms", "total_ms") if key in timing}
        metrics: Json = _tokens(usage)
        return metrics | ({"extra": extra} if extra else {})

    async def _result(self, event: SessionEvent) -> None:
        if event.replaced is not None:
            return  # a shorter one for the model; the result is what it was
        data = event.data
        message = await self._contents.message(data["message"])
        block = message["content"][0]
        call_id = str(block["tool_call_id"])
        step = self._calls.get(call_id)
        if step is None:
            return
        result: Json = {"source_call_id": call_id, "content": _content(block["content"])}
        extra: Json = {key: data[key] for key in ("run_ms", "exit_code") if data.get(key) is not None}
        if block.get("is_error"):
            extra |= {"is_error": True, **({"error": thaw(data["error"])} if data.get("error") else {})}
        if extra:
            result["extra"] = extra
        step.setdefault("observation", {"results": []})["results"].append(result)

    async def _spawned(self, event: SessionEvent) -> None:
        trajectory = self._below.get(str(event.data["agent_id"]))
        call_id = event.data.get("call_id")
        if trajectory is not None and call_id is not None:
            self._refs.setdefault(str(call_id), []).append(
                {"trajectory_id": trajectory, "session_id": self._log.stream.session_id}
            )

    def _refer(self) -> None:
        """A call may start its subagents before its result stands in the log: the references come at the end."""
        for call_id, refs in self._refs.items():
            step = self._calls.get(call_id)
            if step is None:
                continue
            results: list[Json] = step.setdefault("observation", {"results": []})["results"]
            result = next((one for one in results if one.get("source_call_id") == call_id), None)
            if result is None:
                result = dict[str, Any](source_call_id=call_id)
                results.append(result)
            result["subagent_trajectory_ref"] = refs

    def _totals(self) -> Json:
        own = [step for step in self._steps if not step.get("is_copied_context")]
        known = [step["metrics"] for step in own if "metrics" in step]
        totals: Json = {"total_steps": len(self._steps)}
        for name in _TOKENS:
            if known:
                totals[f"total_{name}"] = sum(one[name] for one in known)
        if self._compactions:
            paid = {name: sum(one[name] for one in self._compactions.values()) for name in _TOKENS}
            totals["extra"] = {"compactions": {"count": len(self._compactions), **paid}}
        return totals


def _tokens(usage: Json) -> Json:
    get = usage.get
    return {
        "prompt_tokens": get("input", 0) + get("cached", 0) + get("cache_write", 0),
        "completion_tokens": get("output", 0),
        "cached_tokens": get("cached", 0),
    }


def _content(blocks: list[Json]) -> str | list[Json]:
    """Text, or the parts of a message that has images that the format can name; of others it says that they were."""
    if all(block["type"] == "text" for block in blocks):
        return texts_of(blocks)
    return [_part(block) for block in blocks]


def _part(block: Json) -> Json:
    if block["type"] != "image":
        return {"type": "text", "text": str(block.get("text", f"[{block['type']}]"))}
    kind = str(block.get("media_type", "image/png"))
    url = block.get("url")
    if isinstance(url, str) and kind in _MEDIA:
        return {"type": "image", "source": {"media_type": kind, "path": url}}
    return {"type": "text", "text": f"[image, {kind}]"}


_HANDLERS: Final = {
    "request/header": _Course._asking,  # pyright: ignore[reportPrivateUsage]
    "user/message": _Course._user,  # pyright: ignore[reportPrivateUsage]
    "assistant/message": _Course._answer,  # pyright: ignore[reportPrivateUsage]
    "tool/result": _Course._result,  # pyright: ignore[reportPrivateUsage]
    "surface/cut": _Course._cut,  # pyright: ignore[reportPrivateUsage]
    "llm/response": _Course._response,  # pyright: ignore[reportPrivateUsage]
    "step/start": _Course._step_start,  # pyright: ignore[reportPrivateUsage]
    "compaction/response": _Course._compacted,  # pyright: ignore[reportPrivateUsage]
    "compaction/summary": _Course._summed,  # pyright: ignore[reportPrivateUsage]
    "subagent/spawned": _Course._spawned,  # pyright: ignore[reportPrivateUsage]
}


__all__ = ["SCHEMA", "atif_trajectory"]
