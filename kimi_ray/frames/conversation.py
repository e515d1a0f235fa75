"""The frame ``messages``: one row for each message of a log, those too that the model sees no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from kimi_ray.frames.batches import Batches
from kimi_ray.frames.log_facts import LogFacts, as_json
from kimi_ray.frames.reading import Event, Handler


class MessagesFold:
    """Follows the messages of one log."""

    def __init__(self, facts: LogFacts, table: Batches) -> None:
        self._facts = facts
        self._table = table
        self._turn: int | None = None
        self._step: int | None = None

    def handlers(self) -> Mapping[str, Handler]:
        """See ``Fold``."""
        return {
            "turn/start": self._turn_start,
            "turn/end": self._turn_end,
            "step/start": self._step_start,
            "step/end": self._step_end,
            "user/message": self._user,
            "assistant/message": self._assistant,
            "tool/result": self._result,
            "surface/cut": self._cut,
        }

    def finish(self, last_seq: int) -> None:
        """See ``Fold``."""

    def _turn_start(self, event: Event) -> None:
        self._turn, self._step = event["data"]["turn"], None

    def _turn_end(self, _event: Event) -> None:
        self._turn = self._step = None

    def _step_start(self, event: Event) -> None:
        self._step = event["data"]["step"]

    def _step_end(self, _event: Event) -> None:
        self._step = None

    def _user(self, event: Event) -> None:
        place = self._facts.place(event["seq"])
        if place is not None:
            data = event["data"]
            content = data["content"]
            self._add(place, event, data, (self._turn, self._step), "user", self._facts.texts(content), content=content)

    def _cut(self, event: Event) -> None:
        place = self._facts.place(event["seq"])
        if place is not None:
            cut = {"source": {"kind": event["data"].get("reason")}}
            self._add(place, event, cut, (self._turn, self._step), "cut", None, content=None)

    def _assistant(self, event: Event) -> None:
        place = self._facts.place(event["seq"])
        if place is None:
            return
        data = event["data"]
        message = data["message"]
        content = message["content"]
        reasoning = [text for one in content if one["type"] == "reasoning" and (text := self._facts.text(one))]
        calls = [
            {"id": one["id"], "name": one["name"], "arguments": one["arguments"]}
            for one in content
            if one["type"] == "tool-call"
        ]
        self._add(
            place,
            event,
            message,
            (data.get("turn"), data.get("step")),
            "assistant",
            self._facts.texts(content),
            content=content,
            reasoning="\n".join(reasoning) if reasoning else None,
            calls=as_json(calls) if calls else None,
            interrupted=bool(data.get("interrupted")),
        )

    def _result(self, event: Event) -> None:
        place = self._facts.place(event["seq"])
        if place is None:
            return
        data = event["data"]
        message = data["message"]
        block = message["content"][0]
        self._add(
            place,
            event,
            message,
            (data.get("turn"), data.get("step")),
            "tool",
            self._facts.texts(block["content"]),
            content=block["content"],
            call_id=block["tool_call_id"],
            is_error=bool(block.get("is_error")),
        )

    def _add(
        self,
        place: tuple[Any, ...],
        event: Event,
        message: dict[str, Any],
        where: tuple[int | None, int | None],
        role: str,
        text: str | None,
        *,
        content: Any,
        reasoning: str | None = None,
        calls: str | None = None,
        call_id: str | None = None,
        is_error: bool | None = None,
        interrupted: bool = False,
    ) -> None:
        blocks = cast("list[dict[str, Any]]", content) if isinstance(content, list) else []
        source: dict[str, Any] = message.get("source") or {}
        replaces = event.get("sources") if isinstance(event.get("surface"), dict) else None
        row = (
            *place,
            *where,
            event["seq"],
            event["time"],
            message.get("id"),
            role,
            source.get("kind"),
            text,
            reasoning,
            calls,
            call_id,
            is_error,
            sum(one["type"] == "image" for one in blocks),
            interrupted,
            replaces,
        )
        self._table.add(row, len(text or "") + len(reasoning or "") + len(calls or ""))
