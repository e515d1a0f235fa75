"""``export_conversations``: sessions and runs as files of conversations or trajectories, written agent by agent."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Final, Literal

from pydantic import Field
from pydantic_core import to_json

from kimi_ray.errors import ConfigError, KimiRayError
from kimi_ray.exchange.archive import Sink, not_written, whole_file
from kimi_ray.exchange.atif import atif_trajectory
from kimi_ray.exchange.chat_formats import openai_conversation, sharegpt_conversation
from kimi_ray.exchange.conversations import MALFORMED, bad_payload, read_conversation
from kimi_ray.ids import MAIN
from kimi_ray.session.document_value import parent_of_log
from kimi_ray.settings import Settings
from kimi_ray.store.open import ReadStore
from kimi_ray.store.seam import ListedLog, Stream

ExportFormat = Literal["openai", "atif", "sharegpt"]
FORMATS: Final[tuple[ExportFormat, ...]] = ("openai", "atif", "sharegpt")
_PROBLEMS_KEPT: Final = 1000


class ExportReport(Settings):
    """What ``export_conversations`` wrote."""

    format: str
    conversations: int
    """Lines; of ATIF trajectories, those of subagents within them not counted."""
    ok: bool
    problems: tuple[dict[str, Any], ...] = Field(default=())

    def to_data(self) -> dict[str, Any]:
        """As plain JSON."""
        return self.model_dump(mode="json")


class Wanted(Settings):
    """An agent whose conversation is wanted, and what its line says about it besides."""

    session_id: str
    agent_id: str
    facts: dict[str, Any] = Field(default_factory=dict)


async def export_conversations(
    store: ReadStore,
    wanted: Sequence[Wanted] | str,
    format: ExportFormat,
    path: str | os.PathLike[str] | Sink,
    *,
    force: bool = False,
) -> ExportReport:
    """Write conversations, one JSON a line. Damage does not stop it: a log goes in as far as it verifies.

    ``openai`` and ``sharegpt`` hold what each model was last shown, and have a line for each agent. ``atif`` holds the
    whole course, with the agents below an agent embedded in its trajectory.

    Args:
        store: The home (``open_store``).
        wanted: Agents; or a session's id: all of its agents.
        format: Which format.
        path: The file to make, whole or not at all; or an open binary stream.
        force: Replace a file that is there.

    Raises:
        ConfigError: ``export.unknown_format``, ``export.exists``, ``export.failed``; SessionError:
            ``session.not_found``.
    """
    if format not in FORMATS:
        raise ConfigError(
            f"there is no format {str(format)[:40]!r}", code="export.unknown_format", hint=f"use {', '.join(FORMATS)}"
        )
    writer = _Writer(store, format)
    if isinstance(path, str | os.PathLike):
        with whole_file(os.fspath(path), force=force) as file:
            return await writer.run(wanted, file)
    try:
        return await writer.run(wanted, path)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise not_written("the export", error) from error


class _Writer:
    def __init__(self, store: ReadStore, format: ExportFormat) -> None:
        self._store = store
        self._format = format
        self._problems: list[KimiRayError] = []
        self._session_id = ""
        self._known: dict[Stream, ListedLog] = {}
        self._children: dict[str, list[ListedLog]] = {}

    async def run(self, wanted: Sequence[Wanted] | str, file: Sink) -> ExportReport:
        count = 0
        async with aclosing(self._values(wanted)) as values:
            async for value in values:
                file.write(to_json(value, inf_nan_mode="null") + b"\n")
                count += 1
        file.flush()
        told = [error.to_data() for error in self._problems[:_PROBLEMS_KEPT]]
        return ExportReport(
            format=self._format, conversations=count, ok=not self._problems, problems=tuple(map(_problem, told))
        )

    async def _values(self, wanted: Sequence[Wanted] | str) -> AsyncGenerator[dict[str, Any]]:
        for one in await self._agents(wanted):
            logs = await self._logs(one.session_id)
            log = logs.get(Stream(one.session_id, one.agent_id))
            if log is None:
                self._problems.append(_missing(one))
                continue
            try:
                yield await self._value(log, one.facts)
            except KimiRayError as error:
                self._problems.append(error.with_details(session_id=one.session_id, agent_id=one.agent_id))
            except MALFORMED as error:
                self._problems.append(bad_payload(log.stream, error))

    async def _agents(self, wanted: Sequence[Wanted] | str) -> Sequence[Wanted]:
        if not isinstance(wanted, str):
            return wanted
        logs = await self._logs(wanted)
        if not logs:
            from kimi_ray.session.refusals import no_session

            raise no_session(wanted)
        agents = [stream.agent_id for stream in logs]
        if self._format == "atif":
            # The others are in it; without main each stands by itself.
            agents = [MAIN] if MAIN in agents else agents
        return [Wanted(session_id=wanted, agent_id=agent_id) for agent_id in agents]

    async def _value(self, log: ListedLog, facts: dict[str, Any]) -> dict[str, Any]:
        if self._format == "atif":
            return await atif_trajectory(self._store, log, self._problems, children=self._children, facts=facts)
        conversation = await read_conversation(self._store, log)
        conversation.facts |= facts
        self._problems += conversation.problems
        make = openai_conversation if self._format == "openai" else sharegpt_conversation
        return make(conversation)

    async def _logs(self, session_id: str) -> dict[Stream, ListedLog]:
        """The logs of a session, main first; of the newest one asked for, for runs have thousands in one."""
        if self._session_id != session_id:
            listed = await self._store.list(session_id)
            ordered = sorted(listed, key=lambda log: (log.stream.agent_id != MAIN, *_number(log.stream.agent_id)))
            self._session_id, self._known = session_id, {log.stream: log for log in ordered}
            self._children = _below(self._known.values())
        return self._known


def _below(logs: Iterable[ListedLog]) -> dict[str, list[ListedLog]]:
    """The logs of a session by the agent that they are below; a circle of parents, which is damage, embeds nobody."""
    parents = {
        log.stream.agent_id: parent_of_log(log.header)
        for log in logs
        if log.header is not None and log.stream.agent_id != MAIN
    }
    found: dict[str, list[ListedLog]] = {}
    for log in logs:
        agent_id = log.stream.agent_id
        above, seen = parents.get(agent_id), {agent_id}
        while above is not None and above not in seen:
            seen.add(above)
            above = parents.get(above)
        if agent_id in parents and above is None:
            found.setdefault(parents[agent_id], []).append(log)
    return found


def _number(agent_id: str) -> tuple[int, str]:
    from kimi_ray.ids import agent_number

    return (agent_number(agent_id) or 1 << 60, agent_id)


def _problem(data: dict[str, Any]) -> dict[str, Any]:
    return {"code": data["code"], "message": data["message"], "details": data.get("details") or {}}


def _missing(one: Wanted) -> KimiRayError:
    from kimi_ray.session.refusals import no_agent

    return no_agent(Stream(one.session_id, one.agent_id))
