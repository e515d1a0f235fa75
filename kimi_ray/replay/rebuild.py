"""A session in memory, made of its events alone: the same messages, the same requests, nothing alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from kimi_ray.errors import KimiRayError, LogError, error_from_data
from kimi_ray.events import LogHeader, thaw
from kimi_ray.ids import MAIN
from kimi_ray.llm.chat import ChatRequest, ToolSpec
from kimi_ray.log import Message
from kimi_ray.replay.malformed import shape_of
from kimi_ray.replay.messages import MovingSurface
from kimi_ray.replay.recording import Attempt, RecordedTurn, Recording, SummaryAsked
from kimi_ray.replay.sources import Blobs, LogSource, load_recording
from kimi_ray.session.refusals import no_agent, no_session
from kimi_ray.session.time_travel import point_of
from kimi_ray.settings import Sampling
from kimi_ray.store.seam import Stream


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a log, in full, and what came of it.

    Attributes:
        index: Its place among all requests of its log, from 0; of one for a summary, among those.
        seq: Everything that it was made of stands below.
        time: When what came of it was recorded, epoch milliseconds.
        request: What was asked, as the provider was given it.
        header: The ``request/header`` that counted, with everything in place; it also says what ``request`` cannot.
        answer: The blocks of the answer; empty where there was none.
        error: How it failed, as data, or None.
    """

    index: int
    seq: int
    time: int
    request: ChatRequest
    header: dict[str, Any]
    answer: list[dict[str, Any]]
    error: dict[str, Any] | None = None


class RecordedAgent:
    """One agent, from its log."""

    def __init__(self, source: LogSource, stream: Stream, recording: Recording) -> None:
        """Use ``rebuild_session`` or ``Runtime.replay``."""
        self.stream = stream
        self.recording = recording
        self._source = source
        self._blobs = Blobs(source, stream.session_id)

    def __repr__(self) -> str:
        return f"RecordedAgent({self.stream})"

    @property
    def id(self) -> str:
        """Its id in the session."""
        return self.stream.agent_id

    @property
    def header(self) -> LogHeader:
        """Its log's header."""
        return self.recording.header

    @property
    def turns(self) -> list[RecordedTurn]:
        """Its turns, a seed's left out unless it was rebuilt with them."""
        return self.recording.turns

    async def messages(self, at: str | None = None, *, seq: int | None = None) -> list[Message]:
        """What the model would see at the end of the log, or saw earlier, as it goes over the wire.

        Args:
            at: A fork point: ``"3"``, ``"3.2"``, ``"^3"``, the messages that a fork there begins with.
            seq: In place of a point: of the first event that does not count, 0 up to the number of events.

        Raises:
            ConfigError: ``request.invalid``, ``request.conflict``, ``request.out_of_range`` {seq, next_seq};
                SessionError: ``session.fork_point_not_found``.
            LogError: ``log.bad_payload``: an event shows no message.
            StoreError: why a blob cannot be read.
        """
        until = await point_of(self._source, self.stream, at, seq)
        surface = MovingSurface(self.recording.surface)
        surface.advance(self.recording.next_seq if until is None else until)
        return [await self._blobs.message(message) for message in surface.messages()]

    async def requests(self) -> AsyncIterator[RecordedRequest]:
        """Every request that was made, in order, retries too.

        Raises:
            LogError: ``log.bad_payload``: what a request was made of is of another shape than its type's.
            StoreError: why a blob cannot be read.
        """
        surface = MovingSurface(self.recording.surface)
        known: list[Message] = []  # those that are settled, with everything in place
        generation = 0
        for index, (turn, place, attempt) in enumerate(self._attempts()):
            surface.advance(attempt.seq)
            if surface.generation != generation:
                known, generation = [], surface.generation
            fresh = [await self._blobs.message(message) for message in surface.messages()[len(known) :]]
            asked = [*known, *fresh]
            known += fresh[: surface.settled - len(known)]
            header = await self._blobs.header(turn.header or {})
            request = request_of(self.stream, header, asked, turn=turn.number, step=place, attempt=attempt.number)
            error = None if attempt.response is None else attempt.response.get("error")
            yield RecordedRequest(index, attempt.seq, attempt.time, request, header, attempt.content, error)

    async def summary_requests(self) -> AsyncIterator[RecordedRequest]:
        """Every request for the summary of a compaction, in order, retries too. The answer is the summary.

        Raises as ``requests``.
        """
        surface = MovingSurface(self.recording.surface)
        for index, asked in enumerate(self.recording.summaries):
            surface.advance(asked.event.seq)
            with shape_of(f"event {asked.event.seq} ({asked.event.type})", seq=asked.event.seq, type=asked.event.type):
                made = await self._summary_request(index, asked, surface)
            yield made

    async def _summary_request(self, index: int, asked: SummaryAsked, surface: MovingSurface) -> RecordedRequest:
        data = asked.event.data
        found = surface.between(asked.first, asked.last)[data.get("left_out", 0) :]
        messages = [await self._blobs.message(message) for message in [*found, data["message"]]]
        header = await self._blobs.header(asked.header or {})
        header |= {"model": data["model"], "sampling": data.get("sampling")}
        made = request_of(self.stream, header, messages, turn=0, step=0, attempt=data["attempt"])
        response, summary = asked.response, asked.summary
        answer: list[dict[str, Any]] = [] if summary is None else thaw(summary.data["summary"])
        return RecordedRequest(
            index,
            asked.event.seq,
            (asked.event if response is None else response).time,
            replace(made, purpose="compaction"),
            header,
            await self._blobs.blocks(answer),
            None if response is None else response.data.get("error"),
        )

    def _attempts(self) -> Iterator[tuple[RecordedTurn, int, Attempt]]:
        for turn in self.recording.turns:
            for _, step, attempt in turn.attempts:
                yield turn, step.number, attempt


class RecordedSession:
    """A session, from its logs."""

    def __init__(
        self, session_id: str, agents: dict[str, RecordedAgent], unreadable: dict[str, KimiRayError] | None = None
    ) -> None:
        """Use ``rebuild_session`` or ``Runtime.replay``."""
        self.id = session_id
        self.agents = agents
        """By id, main first."""
        self.unreadable = unreadable or {}
        """Why a log is not among ``agents``, by agent id."""

    def __repr__(self) -> str:
        return f"RecordedSession({self.id!r})"

    @property
    def main(self) -> RecordedAgent:
        """The main agent. Raises as ``agent``."""
        return self.agent(MAIN)

    def agent(self, agent_id: str) -> RecordedAgent:
        """One agent.

        Raises:
            AgentError: ``agent.not_found``; KimiRayError: why its log cannot be read.
        """
        found = self.agents.get(agent_id)
        if found is None:
            raise self.unreadable.get(agent_id) or no_agent(Stream(self.id, agent_id))
        return found


async def rebuild_session(
    source: LogSource,
    session_id: str,
    agent_id: str | None = None,
    *,
    whole: bool = False,
    until: int | None = None,
) -> RecordedSession:
    """A session in memory. Nothing is written, and no agent lives.

    Args:
        source: Where its logs are.
        session_id: Which.
        agent_id: Only this agent.
        whole: With the requests of the logs that its own began as copies of.
        until: The seq up to which logs are read; what stands from there on may be damaged.

    Raises:
        SessionError: ``session.not_found``; AgentError: ``agent.not_found``.
    """
    logs = {log.stream.agent_id: log for log in await source.list_logs(session_id)}
    if not logs:
        raise no_session(session_id)
    if agent_id is not None and agent_id not in logs:
        raise no_agent(Stream(session_id, agent_id))
    agents: dict[str, RecordedAgent] = {}
    unreadable: dict[str, KimiRayError] = {}
    for found in sorted([agent_id] if agent_id is not None else logs, key=agent_order):
        stream = Stream(session_id, found)
        try:
            broken = logs[found].error
            if broken is not None and logs[found].header is None:
                raise error_from_data(broken)
            recording = await load_recording(source, stream, logs, whole=whole, until=until)
        except KimiRayError as error:
            unreadable[found] = error
            continue
        agents[found] = RecordedAgent(source, stream, recording)
        await asyncio.sleep(0)
    return RecordedSession(session_id, agents, unreadable)


def agent_order(agent_id: str) -> tuple[int, str]:
    """Sorts main first, then agents by number."""
    digits = agent_id.rpartition("-")[2]
    return (-1, "") if agent_id == MAIN else (int(digits) if digits.isdigit() else 1 << 60, agent_id)


def request_of(
    stream: Stream, header: dict[str, Any], messages: list[Message], *, turn: int, step: int, attempt: int
) -> ChatRequest:
    """The request that a header and messages make.

    Raises:
        LogError: ``log.bad_payload`` for a header that is none.
    """
    tools: Any = header.get("tools") or ()
    listed = cast("list[Any]", tools) if isinstance(tools, list) else []
    try:
        sampling = Sampling.model_validate(header.get("sampling") or {})
        specs = tuple(
            ToolSpec(tool["name"], tool.get("description", ""), tool.get("parameters", {})) for tool in listed
        )
    except (ValueError, TypeError, KeyError) as error:
        raise LogError(
            f"the request header of {stream} in turn {turn} is none of ours: {error}",
            code="log.bad_payload",
            details={"turn": turn},
        ) from error
    return ChatRequest(
        model=str(header.get("model") or ""),
        system=header.get("system"),
        messages=messages,
        tools=specs,
        sampling=sampling,
        session_id=stream.session_id,
        agent_id=stream.agent_id,
        turn=turn,
        step=step,
        attempt=attempt,
    )
