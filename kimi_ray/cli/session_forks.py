"""``sessions fork|diff``: N sessions from a point of another, and where two sessions part. Without Ray unless asked."""

from __future__ import annotations

import asyncio
import json as json_text
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kimi_ray.cli.exits import FAILED, USAGE
from kimi_ray.cli.options import Address, Home, Json, Namespace
from kimi_ray.cli.printing import one_line, print_error, print_json, say, table, tell, terminal_width
from kimi_ray.cli.sessions import AgentOption, SessionArgument
from kimi_ray.cli.settings_of import operation_config
from kimi_ray.errors import ConfigError, KimiRayError

if TYPE_CHECKING:
    from kimi_ray.hosts.fork_words import ForkWorkdir
    from kimi_ray.session import Comparison
    from kimi_ray.session.comparison import Difference
    from kimi_ray.store.open import ReadStore
    from kimi_ray.store.seam import Stream

_MOST = 1000
_PLACES = ("shared", "copy", "git")
_VALUE_WIDTH = 300
_LEFT_OUT_SHOWN = 20


def fork(
    session: SessionArgument,
    agent: AgentOption = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="POINT",
            help="3: through turn 3; 0.17: through step 17 of turn 0; ^3: before turn 3. [the whole; it must be idle]",
        ),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", metavar="N", min=1, max=_MOST, help="So many forks: all of them or none.")
    ] = 1,
    workdir: Annotated[
        str,
        typer.Option(
            "--workdir",
            metavar="SPEC",
            help="shared: the source's; copy, git: one of it for each fork; none; copy:DIR and so on as for swarm.",
        ),
    ] = "shared",
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="BASE", min=0, help="Fork number i gets a seed made of BASE and i.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="[Fork: the source's title]")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="KEY=VALUE", help="Over the source's.")] = None,
    metadata: Annotated[
        str | None, typer.Option("--metadata", metavar="JSON", help="An object, over the source's.")
    ] = None,
    json: Json = False,
    home: Home = None,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """New sessions that begin as another was at a point. The source is only read, its model need not be known.

    The agent becomes main of each fork, and the agents below it come along as they stood then. With --json: {"source":
    {"session_id", "agent_id", "at", "seq"}, "fork_group", "home", "sessions": [{"session_id", "workspace_id", "title",
    "index", "seed", "workdir", "agents"}], "left_out": null | {"count", "agents": [{"agent_id", "parent", "reason"}]}}.
    """
    from kimi_ray.cli.lookup import open_home
    from kimi_ray.cli.swarm_arguments import parse_tags

    given: dict[str, Any] = {
        "at": at,
        "workdir": _place(workdir),
        "seeds": seed,
        "title": title,
        "tags": parse_tags(tag or []),
        "metadata": _metadata(metadata),
    }
    store, place = open_home(home, session)
    found = asyncio.run(_fork(store, place, session, agent, count, given, address, namespace))
    if json:
        print_json(found)
    else:
        _print_forks(found, address)


def diff(
    a: SessionArgument,
    b: Annotated[str, typer.Argument(metavar="OTHER", help="The other one, named likewise.")],
    agent: Annotated[
        str | None, typer.Option("--agent", metavar="ID", help="This agent of both, e.g. agent-3 or 3.")
    ] = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Where two sessions part: the first message that differs, then settings, then the agents below, pair by pair.

    Ids of messages, times, and where private directories lie are not compared. Exit code 0 when they are equal, 1 when
    they differ, 2 when they cannot be compared. With --json: {"a", "b": {"session_id", "agent_id", "messages"},
    "equal", "agents", "differences": [{"area", "agents", "path", "index"?, "places"?, "a"?, "b"?}]}.
    """
    from kimi_ray.cli.lookup import find_stream, open_home
    from kimi_ray.cli.settings_of import runtime_config
    from kimi_ray.hosts.features import load_features
    from kimi_ray.session import ColdReader, compare_sessions

    async def compare() -> Comparison:
        store, where = open_home(home, a)
        pair = [await find_stream(store, text, agent) for text in (a, b)]
        catalog = load_features(runtime_config(where)).catalog
        return await compare_sessions(ColdReader(store), pair[0], pair[1], catalog)

    try:
        found = asyncio.run(compare())
    except KimiRayError as error:
        # 1 says that they differ: whatever keeps them from being compared must not.
        print_error(error, as_json=json)
        raise typer.Exit(USAGE) from error
    if json:
        print_json(found.to_data())
    else:
        _print_comparison(found)
    if not found.equal:
        raise typer.Exit(FAILED)


async def _fork(
    store: ReadStore,
    home: str,
    session: str,
    agent: str | None,
    count: int,
    given: dict[str, Any],
    address: str | None,
    namespace: str | None,
) -> dict[str, Any]:
    from kimi_ray.cli.lookup import find_stream
    from kimi_ray.runtime import Runtime

    source = await find_stream(store, session, agent)
    async with Runtime.connect(config=operation_config(home, address, namespace)) as runtime:
        try:
            made = await runtime.forks.publish(source.session_id, count, agent_id=source.agent_id, **given)
        except KimiRayError as error:
            if error.code == "session.in_use":
                error.hint = "fork it at a point (--at), or reach the runtime that has it with --address HOST:PORT"
            raise
    rows = [await _made(store, one.id) for one in made]
    first: dict[str, Any] = rows[0][0]
    return {
        "source": _lineage(first, source),
        "fork_group": first.get("fork_group"),
        "home": home,
        "sessions": [row for _, row in rows],
        "left_out": first.get("fork_left_out"),
    }


async def _made(store: ReadStore, session_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A fork's document, and what is shown of it."""
    document = await store.read_document(session_id)
    value = document.value if document is not None else {}
    logs = await store.list(session_id)
    main = next((log for log in logs if log.stream.agent_id == "main"), None)
    header: dict[str, Any] = (main.header if main is not None else None) or {}
    bind: dict[str, Any] = header.get("bind") or {}
    workdir: dict[str, Any] = bind.get("workdir") or {}
    sampling: dict[str, Any] = bind.get("sampling") or {}
    return value, {
        "session_id": session_id,
        "workspace_id": value.get("workspace_id"),
        "title": value.get("title"),
        "index": value.get("fork_index"),
        "seed": sampling.get("seed"),
        "workdir": workdir.get("prepared") or workdir.get("path"),
        "agents": len(logs),
    }


def _lineage(value: dict[str, Any], source: Stream) -> dict[str, Any]:
    told = value.get("forked_from")
    lineage: dict[str, Any] = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    return {"session_id": source.session_id, "agent_id": source.agent_id, "at": None, "seq": None} | lineage


def _place(text: str) -> ForkWorkdir:
    """A form of the source's directory, or a working directory of the command line.

    Raises:
        ToolError: ``workdir.invalid``; ConfigError: ``workdir.not_found``.
    """
    from kimi_ray.cli.swarm_plan import find_workdir

    if text in _PLACES:
        return cast("ForkWorkdir", text)
    found = find_workdir(text, os.getcwd())
    assert found is not None
    return found


def _metadata(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value: Any = json_text.loads(text)
    except ValueError as error:
        raise _bad_metadata(str(error)) from None
    if not isinstance(value, dict):
        raise _bad_metadata("it is not an object")
    return cast("dict[str, Any]", value)


def _bad_metadata(why: str) -> ConfigError:
    return ConfigError(
        f"--metadata cannot be read: {why}", code="request.invalid", hint="""write --metadata '{"key": "value"}'"""
    )


def _print_forks(found: dict[str, Any], address: str | None) -> None:
    source, rows = found["source"], found["sessions"]
    where = "whole" if source["at"] is None else f"at {source['at']}"
    say(f"forked {source['session_id']}/{source['agent_id']} {where} ({source['seq']} events)")
    shown = [
        [
            row["session_id"],
            str(row["agents"]),
            "" if row["seed"] is None else str(row["seed"]),
            one_line(row["workdir"] or ""),
        ]
        for row in rows
    ]
    say(table(["session", "agents", "seed", "workdir"], shown, width=terminal_width(sys.stdout), right=".rr"))
    left_out: dict[str, Any] = found["left_out"] or {}
    for one in left_out.get("agents", ())[:_LEFT_OUT_SHOWN]:
        tell(f"left out {one['agent_id']} of {one['parent']}: {one['reason']}")
    if left_out.get("count", 0) > _LEFT_OUT_SHOWN:
        tell(f"left out {left_out['count']} agents in all; --json and the forks' documents have more")
    if address is None:
        _tell_gone(rows)
    home = shlex.quote(found["home"])
    tell(f"go on: kimi-ray run PROMPT --session {rows[0]['session_id']} --home {home}")


def _tell_gone(rows: list[dict[str, Any]]) -> None:
    """A shared directory that was a rollout's own went with it: nothing can go on there."""
    gone = next((row["workdir"] for row in rows if row["workdir"] and not os.path.isdir(row["workdir"])), None)
    if gone is not None:
        tell(f"the directory {one_line(gone)} is gone: to go on, fork with --workdir git, copy:DIR or none instead")


def _print_comparison(found: Comparison) -> None:
    if found.equal:
        pairs = "" if found.agents == 1 else f", {found.agents} pairs of agents"
        say(f"equal: {found.messages[0]} messages{pairs}")
        return
    say(f"a  {found.a}  {found.messages[0]} messages")
    say(f"b  {found.b}  {found.messages[1]} messages")
    for one in found.differences:
        say()
        say(_title(one))
        for name, value in (("a", one.a), ("b", one.b)):
            say(f"  {name}  {_value(value)}")


def _title(one: Difference) -> str:
    who = one.agents[0] if one.agents[0] == one.agents[1] else f"{one.agents[0]} and {one.agents[1]}"
    if one.index is None:
        what = one.path or "is there only once"
        return one_line(f"{who}: {what}")
    places = [f"{place[0]}.{place[1]}" for place in one.places if place is not None]
    where = f" (step {' and '.join(dict.fromkeys(places))})" if places else ""
    return one_line(f"{who}: message {one.index}{where}{': ' + one.path if one.path else ''}")


def _value(value: object) -> str:
    from kimi_ray.session.comparison import ABSENT

    if value is ABSENT:
        return "(absent)"
    text = value if isinstance(value, str) else json_text.dumps(value, ensure_ascii=False, default=str)
    return one_line(text, _VALUE_WIDTH)
