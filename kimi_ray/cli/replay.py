"""``replay``: a recording against the code of today, without a model, without Ray, writing nothing."""

from __future__ import annotations

import asyncio
import json as json_text
import os
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.cli import exits
from kimi_ray.cli.options import Home, Json
from kimi_ray.cli.printing import clip, columns, counted, print_json, safe, say, tell
from kimi_ray.cli.replay_words import AgentNames, absent_tools, workdir_hint
from kimi_ray.cli.sessions import AgentOption

if TYPE_CHECKING:
    from pathlib import Path

    from kimi_ray.errors import KimiRayError
    from kimi_ray.replay import AgentReplay, ReplayOptions, ReplayReport
    from kimi_ray.store.open import ReadStore

_VALUE_COLUMNS = 160
_LEAD_CHARS = 40
"""So much of what is the same is shown before the first difference."""
_NAMED = 20
_IGNORED_SHOWN = 8
_OTHERS = 5
_MARKED_COLUMNS = 30
"""Where values differ over more than that, only the first difference is marked."""


def replay(
    session: Annotated[
        str,
        typer.Argument(
            metavar="SESSION|RUN",
            help="@last, an id or its end, SESSION/AGENT, a rollout RUN:ITEM[#REPEAT], or RUN: all of a run.",
        ),
    ],
    agent: AgentOption = None,
    run_tools: Annotated[
        bool,
        typer.Option(
            "--run-tools",
            help="Run the tools again, but for those that start agents. [their results are the recorded ones]",
        ),
    ] = False,
    tools: Annotated[
        list[str] | None,
        typer.Option("--tools", metavar="MODULE:FUNCTION,...", help="Your own tools. [those that the run names]"),
    ] = None,
    workdir: Annotated[
        str | None,
        typer.Option("--workdir", metavar="SPEC", help="Where tools of --run-tools work, as for swarm. [none]"),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="FIELD", help="What may differ: system, tools, tools[2].description, ..."),
    ] = None,
    answers: Annotated[
        str | None,
        typer.Option(
            "--answers", metavar="FILE", help="Only write the model's answers into FILE, for --model recorded:FILE."
        ),
    ] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Run a recording again: the model's answers by position, everything else made by the code of today.

    The first request that is not the recorded one is named, with both values; the exit code is then 1. With --json:
    {"ok", "unfinished": agents, "divergence": null | {"kind", "session_id", "agent_id", "request", "turn", "step",
    "attempt", "seq", "time", "field", "what", "recorded", "replayed", "message"}, "requests", "ignored": {field:
    differences}, "tools_absent": those whose form was taken from the recording, "agents": [{"session_id", "agent_id",
    "turns", "ends", "ends_where", "requests", "recorded_requests",
    "summary_requests", "shortenings", "shortenings_taken", "tool_calls", "tools_run", "tools_absent", "ignored",
    "divergence", "error", "run_id", "item_id", "repeat", "workdir"}], "home"}; with --answers {"answers", "file"}.
    """
    from kimi_ray.cli.lookup import open_home, run_directory_of
    from kimi_ray.replay import ReplayOptions, ReplayReport

    directory = run_directory_of(session)
    options = ReplayOptions(
        tools="real" if run_tools else "recorded",
        own_tools=_own_tools(tools, directory),
        workdir=_workdir(workdir, run_tools=run_tools),
        ignore=tuple(name.strip() for text in ignore or () for name in text.split(",") if name.strip()),
    )
    store, place = open_home(home, session)
    recorded = _sessions_of(session, directory) if agent is None else []
    if answers is not None:
        _write_answers(store, session, agent, recorded, answers, as_json=json)
        return
    names = AgentNames(directory)
    done = asyncio.run(_replay(store, place, session, agent, recorded, options, None if json else names))
    report = ReplayReport(agents=tuple(done))
    if json:
        found = report.divergence
        agents = [one.model_dump(mode="json") for one in report.agents]
        said = None if found is None else found.model_dump(mode="json")
        told = {
            "ok": report.ok,
            "unfinished": len(report.unfinished),
            "divergence": said,
            "requests": report.requests,
            "ignored": report.ignored,
            "tools_absent": report.tools_absent,
        }
        print_json({**told, "agents": agents, "home": place})
    else:
        _tell(report, names, run_tools=run_tools)
        refused = [one for one in report.agents if _has_no_directory(one)]
        if run_tools and workdir is None and refused:
            tell(workdir_hint(refused))
    if not report.ok:
        raise typer.Exit(exits.FAILED)


def _write_answers(
    store: ReadStore, text: str, agent: str | None, recorded: list[str], target: str, *, as_json: bool
) -> None:
    from kimi_ray.errors import ConfigError
    from kimi_ray.exchange.archive import whole_file
    from kimi_ray.replay import HomeSource, answers_of, rebuild_session

    async def collect() -> list[bytes]:
        streams = await _streams(store, text, agent, recorded)
        if len(streams) > 1:
            raise ConfigError(
                f"{text} has {len(streams)} sessions, whose agents have the same ids",
                code="request.conflict",
                hint="name one of its sessions, or a rollout",
            )
        session = await rebuild_session(HomeSource(store), *streams[0])
        for error in session.unreadable.values():
            raise error
        return [
            answer.to_line(one.id) + b"\n" for one in session.agents.values() for answer in answers_of(one.recording)
        ]

    lines = asyncio.run(collect())
    try:
        with whole_file(target, force=False) as file:
            file.writelines(lines)
    except ConfigError as error:
        hint = "name another file with --answers" + (", or remove that one" if error.code == "export.exists" else "")
        raise ConfigError(error.message, code=error.code, hint=hint, details=error.details) from error
    if as_json:
        print_json({"answers": len(lines), "file": target})
    else:
        tell(f"{counted(len(lines), 'answer')} in {target}: --model recorded:{target}")


async def _replay(
    store: ReadStore,
    home: str,
    text: str,
    agent: str | None,
    recorded: list[str],
    options: ReplayOptions,
    names: AgentNames | None,
) -> list[AgentReplay]:
    from kimi_ray.config import load_config
    from kimi_ray.hosts.features import load_features
    from kimi_ray.replay import HomeSource, replay_agents

    config = load_config(home)
    features = load_features(config)
    done: list[AgentReplay] = []
    for session_id, agent_id in await _streams(store, text, agent, recorded):
        agents = replay_agents(
            HomeSource(store), session_id, agent_id, options=options, config=config, features=features
        )
        async for one in agents:
            done.append(one)
            if names is not None and one.divergence is None and one.error is None and len(done) <= _NAMED:
                tell(f"{names.full(one)}: {counted(one.requests, 'request')}{_again(one)} as recorded")
    return done


def _sessions_of(text: str, directory: Path | None) -> list[str]:
    """The sessions of a whole run, by its rows and attempts; none when it is not a run that is meant."""
    from kimi_ray.cli.lookup import is_run
    from kimi_ray.runs.run_directory import read_attempts, read_rows

    if directory is None or not is_run(text):
        return []
    rows = [*read_rows(directory), *read_attempts(directory)]
    return list(dict.fromkeys(str(row.session_id) for row in rows if row.session_id))


async def _streams(store: ReadStore, text: str, agent: str | None, recorded: list[str]) -> list[tuple[str, str | None]]:
    """The sessions that a person means, each with the one agent that is meant, or None for its whole tree."""
    from kimi_ray.cli.lookup import find_session, find_stream, is_run
    from kimi_ray.errors import SessionError

    if recorded:
        return [(one, None) for one in recorded]
    try:
        if agent is not None or (not is_run(text) and (":" in text or "/" in text)):
            stream = await find_stream(store, text, agent)
            return [(stream.session_id, stream.agent_id)]
        return [(await find_session(store, text), None)]
    except SessionError as error:
        if error.code == "session.not_found" and await asyncio.to_thread(_is_path, text):
            raise _no_recording(text) from error
        raise


def _is_path(text: str) -> bool:
    return os.path.exists(text) or "/" in text or text.endswith(".zip")


def _no_recording(text: str) -> KimiRayError:
    """What looks like a path, and is no run directory: also an archive."""
    from kimi_ray.errors import RunError

    run = text.rpartition("/")[0] if not os.path.exists(text) else ""
    there = f"{text} is no run directory" if os.path.exists(text) else f"there is no run directory {text}"
    if text.endswith(".zip") or os.path.isfile(text):
        there, run = f"{text} is no run directory, and a replay takes no archives", ""
    return RunError(
        there + (f", and no session {run!r}" if run and "/" not in run else ""),
        code="run.not_found",
        hint="name a session of the home (kimi-ray sessions list), SESSION/AGENT, or the directory of a run",
        details={"run_dir": text},
    )


def _own_tools(said: list[str] | None, directory: Path | None) -> tuple[Any, ...]:
    """The user's tools: those that were said, else those that a run directory names.

    Raises:
        ToolError: ``tool.not_importable``, ``tool.bad_signature``.
    """
    from kimi_ray.cli.swarm_arguments import split_names
    from kimi_ray.cli.swarm_plan import make_importable
    from kimi_ray.runs.run_directory import read_manifest
    from kimi_ray.tools import as_tool

    names = split_names(said)
    if names is None and directory is not None:
        arguments: dict[str, Any] = read_manifest(directory).get("arguments") or {}
        names = tuple(str(name) for name in arguments.get("tools") or ())
    own = tuple(name for name in names or () if ":" in name)
    make_importable(own, os.getcwd())
    return tuple(as_tool(name) for name in own)


def _workdir(text: str | None, *, run_tools: bool) -> Any:
    from kimi_ray.cli.swarm_plan import find_workdir
    from kimi_ray.errors import ConfigError

    if text is not None and not run_tools:
        raise ConfigError(
            "--workdir is where tools work, and no tool is run", code="request.conflict", hint="say --run-tools, too"
        )
    return find_workdir(text, os.getcwd())


def _again(*agents: AgentReplay) -> str:
    """How often conversations were shortened again."""
    places = sum(one.shortenings for one in agents)
    return f", {counted(places, 'shortening')} done again:" if places else ""


def _tell(report: ReplayReport, names: AgentNames, *, run_tools: bool) -> None:
    agents, first = report.agents, report.divergence
    broken = [(one, one.error) for one in agents if one.error is not None]
    for one, error in broken:
        say(f"{names.full(one)}: cannot be replayed: {safe(error['message'])}")
    for hint in dict.fromkeys(error["hint"] for _, error in broken if error.get("hint")):
        tell(f"hint: {safe(hint)}")
    for one in report.unfinished[:_NAMED]:
        tell(f"{names.full(one)}: the recording is not complete, {safe(one.ends_where)}")
    taken = sum(one.shortenings_taken for one in agents)
    if taken and not report.ignored.get("compaction"):
        tell(
            f"{counted(taken, 'compaction')} taken from the recording: with which settings they were made is not known"
        )
    for line in absent_tools(report.tools_absent, run_tools=run_tools):
        tell(line)
    ignored = ""
    if report.ignored:
        fields = [f"{field} {count}" for field, count in report.ignored.items()]
        more = ", ..." if len(fields) > _IGNORED_SHOWN else ""
        total = counted(sum(report.ignored.values()), "difference")
        ignored = f"{total} ignored ({', '.join(fields[:_IGNORED_SHOWN])}{more})"
    if first is not None:
        differ, stream = report.diverged, f"{first.session_id}/{first.agent_id}"
        say(safe(f"{names.full(differ[0])}{first.message.removeprefix(stream)}"))
        for line in compared(first.recorded, first.replayed):
            say(line)
        if differ[1:]:
            others = counted(len(differ) - 1, "other agent") + (" differs" if len(differ) == 2 else " differ")
            shown = ", ".join(names.short(one) for one in differ[1 : 1 + _OTHERS])
            more = ", ..." if len(differ) > 1 + _OTHERS else ""
            tell(f"{others} too, later in the recording: {shown}{more}")
        if ignored:
            tell(ignored)
    else:
        same = len(agents) - len(broken)
        if not same:
            say("nothing could be replayed")
            return
        but = f", but for {ignored}" if ignored else ""
        open_ends = len(report.unfinished)
        but += f" (as far as they go: {counted(open_ends, 'recording')} without an end)" if open_ends else ""
        but += f"; {counted(len(broken), 'other agent')} cannot be replayed" if broken else ""
        say(f"{counted(same, 'agent')}, {counted(report.requests, 'request')}{_again(*agents) or ':'} as recorded{but}")


def _has_no_directory(one: AgentReplay) -> bool:
    """Whether a tool of today refused because it works nowhere."""
    return one.divergence is not None and "no working directory" in str(one.divergence.replayed)


def compared(recorded: Any, replayed: Any) -> list[str]:
    """Both values, a line each, and below them marks under the characters that differ, or the first that do."""
    one, other = _text(recorded), _text(replayed)
    same = _same(one, other)
    start = max(0, same - _LEAD_CHARS)
    ends = _same(one[same:][::-1], other[same:][::-1])
    shown = [_shown(text, start) for text in (one, other)]
    lead = columns(_shown(one[:same], start))
    differing = [text[same : len(text) - ends] for text in (one, other)]
    marked = max(columns(_shown(text, 0)) for text in differing)
    if marked > _MARKED_COLUMNS:
        words = [text.split(maxsplit=1)[0] if text[:1].strip() else "" for text in differing]
        marked = min(_MARKED_COLUMNS, max(columns(_shown(word, 0)) for word in words))
    marks = "^" * max(1, min(marked, _VALUE_COLUMNS - lead))
    return [f"  recorded: {shown[0]}", f"  replayed: {shown[1]}", f"            {' ' * lead}{marks}"]


def _same(one: str, other: str) -> int:
    """How many characters at the beginning are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False)


def _shown(text: str, start: int) -> str:
    """A part of a text on one line, its line breaks and tabs as they are written in Python."""
    part = safe(text[start : start + 8 * _VALUE_COLUMNS]).replace("\n", "\\n").replace("\t", "\\t")
    return clip(("..." if start else "") + part, _VALUE_COLUMNS)
