"""Comparing what a replay asks with what was asked, and saying where it differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from kimi_ray.agent.journal import Journal
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.header import describe_request
from kimi_ray.log import Message
from kimi_ray.replay.difference import ABSENT, Found, first_difference, messages_difference
from kimi_ray.replay.messages import MovingSurface
from kimi_ray.replay.naming import named_field, named_message
from kimi_ray.replay.recording import Attempt, RecordedStep, RecordedTurn, Recording, Shortening, SummaryAsked
from kimi_ray.replay.report import Divergence, DivergenceKind
from kimi_ray.replay.sources import Blobs
from kimi_ray.store.seam import Stream

_FIRST = ("model", "system", "sampling", "tools")
"""In which order the parts of a header are looked at; others follow."""


class Judge:
    """Goes along with a replay and knows what was there at the same place of the recording.

    Args:
        stream: Whose.
        recording: The script.
        blobs: Its session's.
        ignored: Fields that may differ.

    Attributes:
        requests: Requests that were found equal so far.
        imported: The recording is another program's: its headers say nothing of ours.
        skipped: By field, how many differences were ignored: one a turn, and of messages one each.
    """

    def __init__(self, stream: Stream, recording: Recording, blobs: Blobs, ignored: Sequence[str]) -> None:
        self.requests = 0
        self.skipped: Counter[str] = Counter()
        self.imported = "imported" in (recording.header.model_extra or {})
        self._stream = stream
        self._blobs = blobs
        self._ignored = ignored
        self._then = MovingSurface(recording.surface)
        self._equal = 0
        self._generations = (0, 0)
        self._named = ""
        """What stands at the field that was found last."""

    def advance(self, seq: int) -> None:
        """The replay stands where the event ``seq`` was about to come."""
        self._then.advance(seq)

    def compare_header(self, recorded: dict[str, Any], today: dict[str, Any]) -> Found | None:
        """The first difference of what a turn's requests are made with, beside their messages.

        Nothing is compared with a recording that says nothing of it: another program's, or one without any header.
        """
        if self.imported or not recorded:
            return None
        skipped: list[str] = []
        for key in dict.fromkeys([*_FIRST, *recorded, *today]):
            if key == "context":
                continue  # is not sent; what comes of it is compared where it does
            then = {key: recorded[key]} if key in recorded else {}
            now = {key: today[key]} if key in today else {}
            found = first_difference(then, now, ignored=self._ignored, skipped=skipped)
            if found is not None:
                self._named = named_field(found[0], recorded, today)
                return found
        self.skipped.update(skipped)
        return None

    async def compare_messages(self, replayed: list[Message], journal: Journal) -> Found | None:
        """The first difference of the messages. Those that were equal before are not looked at again."""
        recorded = self._then.messages()
        generations = (self._then.generation, journal.log.surface.generation)
        if generations != self._generations:
            self._equal, self._generations = 0, generations
        start = self._equal
        skipped: list[str] = []
        found = messages_difference(recorded, replayed, start, ignored=self._ignored, skipped=skipped)
        if found is not None:
            # What is kept by reference is not another text: only now is it read.
            full = [*recorded[:start], *[await self._blobs.message(one) for one in recorded[start:]]]
            mine = [*replayed[:start], *await journal.resolve(replayed[start:])]
            skipped = []
            found = messages_difference(full, mine, start, ignored=self._ignored, skipped=skipped)
            if found is not None:
                self._named = named_message(found[0], full, mine)
        if found is None:
            self._equal = len(recorded)
            self.skipped.update(skipped)
        return found

    @property
    def ignores_size(self) -> bool:
        """Whether how large a request is may differ: something of its header may."""
        return bool(self._ignored)

    async def compare_summary(self, request: ChatRequest, asked: SummaryAsked) -> Found | None:
        """The first difference of a request for a summary."""
        self._then.advance(asked.event.seq)
        data = asked.event.data
        listed = self._then.between(asked.first, asked.last)[data.get("left_out", 0) :]
        recorded = [await self._blobs.message(one) for one in [*listed, data["message"]]]
        if asked.header is not None:
            header = await self._blobs.header(asked.header)
            then = {key: header[key] for key in ("system", "tools") if key in header} | {"model": data["model"]}
            if data.get("sampling"):
                then["sampling"] = data["sampling"]
            today = describe_request(request, provider="")
            del today["provider"]
            found = self.compare_header(then, today)
            if found is not None:
                return found
        skipped: list[str] = []
        found = messages_difference(recorded, request.messages, ignored=self._ignored, skipped=skipped)
        if found is None:
            self.skipped.update(skipped)
        else:
            self._named = named_message(found[0], recorded, request.messages)
        return found

    def summary_differs(
        self, found: Found, asked: SummaryAsked, turn: RecordedTurn | None, step: RecordedStep | None
    ) -> Divergence:
        """A request for a summary is not what was recorded."""
        what = f"the request for the summary of a compaction {_where(turn, step)} differs at {found[0]}"
        return self._of_shortening("request", found, asked.event.seq, asked.event.time, what, turn, step, self._named)

    def shortened(
        self, found: Found, recorded: Shortening, turn: RecordedTurn | None, step: RecordedStep | None
    ) -> Divergence:
        """The conversation is not shortened as it was recorded."""
        field, then, now = found
        where, verb = _where(turn, step), "prunes a result" if field.startswith("prunes") else "compacts"
        if then == ABSENT:
            what = f"today's code {verb} {where}, and the recording does not"
        elif now == ABSENT or (isinstance(now, dict) and "code" in now):
            what = f"the recording {verb} {where}, and today's code does not"
        else:
            what = f"what shortens the conversation {where} differs at {field}"
        seq = recorded.seq or (0 if turn is None else turn.end)
        time = recorded.time or (0 if turn is None else turn.time)
        return self._of_shortening("compaction", found, seq, time, what, turn, step, "")

    def _of_shortening(
        self,
        kind: DivergenceKind,
        found: Found,
        seq: int,
        time: int,
        what: str,
        turn: RecordedTurn | None,
        step: RecordedStep | None,
        named: str,
    ) -> Divergence:
        return Divergence(
            kind=kind,
            session_id=self._stream.session_id,
            agent_id=self._stream.agent_id,
            request=self.requests,
            turn=0 if turn is None else turn.number,
            step=None if step is None else step.number,
            seq=seq,
            time=time,
            field=found[0],
            what=named,
            recorded=found[1],
            replayed=found[2],
            message=f"{self._stream}: {what}" + (f": {named}" if named else ""),
        )

    def different(
        self,
        kind: Literal["request", "messages"],
        found: Found,
        turn: RecordedTurn,
        step: RecordedStep | None,
        attempt: Attempt | None,
    ) -> Divergence:
        """A request, or what stands behind a turn's last one, is not what was recorded."""
        field, recorded, replayed = found
        if field == "reason.kind":
            self._named = "why it ended"
        what = self._place(turn, step) if kind == "request" else f"what stands at the end of turn {turn.number}"
        return self._divergence(
            kind,
            turn,
            step,
            attempt,
            f"{what} differs at {field}" + (f": {self._named}" if self._named else ""),
            field,
            recorded,
            replayed,
            behind=kind == "messages",
            what_differs=self._named,
        )

    def extra(self, request: ChatRequest, turn: RecordedTurn) -> Divergence:
        """One request more than was recorded."""
        at = f"step {request.step} (counted from 0), attempt {request.attempt}"
        return self._divergence(
            "extra_request",
            turn,
            None,
            None,
            f"the replay makes one more request in turn {turn.number} than was recorded: {at}",
            "request",
            ABSENT,
            f"{len(request.messages)} messages",
        )

    def missing(
        self, turn: RecordedTurn, step: RecordedStep, attempt: Attempt, reason: dict[str, Any] | None
    ) -> Divergence:
        """A recorded request is not made; ``reason`` is that of the replayed turn's end, if it has ended."""
        what = f"{self._place(turn, step)}, attempt {attempt.number}, is not made"
        ended = ABSENT if reason is None else {"turn ended": reason}
        return self._divergence("missing_request", turn, step, attempt, what, "request", "made", ended)

    def failed(self, turn: RecordedTurn | None, error: dict[str, Any], next_seq: int) -> Divergence:
        """The replay cannot go on."""
        return Divergence(
            kind="failed",
            session_id=self._stream.session_id,
            agent_id=self._stream.agent_id,
            request=self.requests,
            turn=0 if turn is None else turn.number,
            seq=next_seq if turn is None else turn.end,
            time=0 if turn is None else turn.time,
            field="error",
            recorded=ABSENT,
            replayed=error,
            message=f"{self._stream}: the replay failed: {error['code']}: {error['message']}",
        )

    def _place(self, turn: RecordedTurn, step: RecordedStep | None) -> str:
        at = f"turn {turn.number}" + (f", step {step.number}" if step is not None else "")
        return f"request {self.requests} ({at})"

    def _divergence(
        self,
        kind: DivergenceKind,
        turn: RecordedTurn,
        step: RecordedStep | None,
        attempt: Attempt | None,
        what: str,
        field: str,
        recorded: Any,
        replayed: Any,
        *,
        behind: bool = False,
        what_differs: str = "",
    ) -> Divergence:
        return Divergence(
            kind=kind,
            session_id=self._stream.session_id,
            agent_id=self._stream.agent_id,
            request=max(0, self.requests - behind),
            turn=turn.number,
            step=None if step is None else step.number,
            attempt=None if attempt is None else attempt.number,
            seq=turn.end if attempt is None or behind else attempt.seq,
            time=turn.time if attempt is None or behind else attempt.time,
            field=field,
            what=what_differs,
            recorded=recorded,
            replayed=replayed,
            message=f"{self._stream}: {what}",
        )


def _where(turn: RecordedTurn | None, step: RecordedStep | None) -> str:
    if turn is None:
        return "behind the last turn"
    return f"before turn {turn.number}" if step is None else f"in turn {turn.number}, step {step.number}"
