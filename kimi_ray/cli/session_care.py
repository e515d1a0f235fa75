"""``sessions verify|salvage|sweep``: is everything there, what can be saved, what nobody needs. Without Ray."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kimi_ray.cli.exits import FAILED
from kimi_ray.cli.options import Home, Json
from kimi_ray.cli.printing import one_line, print_json, say, table, tell, terminal_width
from kimi_ray.cli.sessions import AgentOption, SessionArgument
from kimi_ray.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from kimi_ray.store.checkup import SessionCheck
    from kimi_ray.store.open import ReadStore
    from kimi_ray.store.salvage import SalvageReport
    from kimi_ray.store.seam import Store, SweepReport

_PROBLEMS_SHOWN = 200

OptionalSession = Annotated[
    str | None,
    typer.Argument(metavar="[SESSION]", help="@last, an id or its end, RUN, SESSION/AGENT, or RUN:ITEM[#REPEAT]."),
]


def verify(
    session: OptionalSession = None,
    every: Annotated[bool, typer.Option("--all", help="All sessions of the home.")] = False,
    agent: AgentOption = None,
    json: Json = False,
    home: Home = None,
) -> None:
    """Check a session, or all: its document, every checksum of its logs, every blob that they name. Changes nothing.

    Exit code 1 if anything is wrong. With --json: {"ok", "home", "sessions": [{"session_id", "ok", "document", "logs":
    [{"agent_id", "ok", "events", "bytes", "torn_bytes", "problems", ...}], "blobs", "problems": [{"code", "message",
    "details": {"file", "offset", "seq", ...}}]}]}.
    """
    from kimi_ray.cli.lookup import open_home

    if (session is None) == (not every):
        raise ConfigError(
            "name a session, or ask for --all", code="request.bad_usage", hint="kimi-ray sessions verify @last"
        )
    if every and agent is not None:
        raise ConfigError("--agent is for one session", code="request.bad_usage", hint="leave out --all or --agent")
    store, place = open_home(home, session or "")
    checks = asyncio.run(_collect(store, session, agent))
    bad = any(not check.ok for check in checks)
    if json:
        print_json({"ok": not bad, "home": place, "sessions": [check.to_data() for check in checks]})
    else:
        _print_checks(checks)
    if bad:
        raise typer.Exit(FAILED)


def salvage(session: SessionArgument, agent: AgentOption = None, json: Json = False, home: Home = None) -> None:
    """Make a new session of everything in a damaged one that verifies. The damaged one stays as it is.

    What is lost is marked in the new logs (log/salvaged), what referred to it is mended. With --json: {"source",
    "session_id", "workspace_id", "document", "logs": [{"agent_id", "header", "events", "survived", "lost":
    [{"after_seq", "count", "file", "offset"}], "repairs", "repaired", "duplicates", "missing_blobs", "problems"}],
    "removed"}.
    """
    from kimi_ray.cli.lookup import open_home

    reading, place = open_home(home, session)
    report = asyncio.run(_salvage(reading, place, session, agent))
    if json:
        print_json(report.to_data())
    else:
        _print_salvage(report)


async def _salvage(reading: ReadStore, place: str, session: str, agent: str | None) -> SalvageReport:
    from kimi_ray.cli.lookup import find_session, find_stream, is_run
    from kimi_ray.store.salvage import salvage_session

    agents: list[str] | None = None
    if agent is not None or (not is_run(session) and (":" in session or "/" in session)):
        stream = await find_stream(reading, session, agent)
        session_id, agents = stream.session_id, [stream.agent_id]
    else:
        session_id = await find_session(reading, session)
    store = await _writing(reading, place)
    try:
        report = await salvage_session(store, session_id, agents=agents)
    finally:
        await store.close()
    await _check_new(reading, report.session_id)
    return report


async def _check_new(reading: ReadStore, session_id: str) -> None:
    """What was saved is read back: the same disk, or a database whose pages are damaged, may have taken it badly.

    Raises:
        StoreError: ``store.corrupt``.
    """
    from kimi_ray.store.checkup import check_session

    check = await check_session(reading, session_id)
    # Contents that the old session lacks already are in the report.
    wrong = [problem for problem in check.problems if "digest" not in cast("dict[str, Any]", problem["details"])]
    if check.ok or not wrong:
        return
    raise StoreError(
        f"the new session {session_id} does not verify either: {wrong[0]['message']}",
        code="store.corrupt",
        hint="copy the home to a sound disk, or restore its database from a backup, and salvage there",
        details={"session_id": session_id, "problems": wrong},
    )


async def _writing(reading: ReadStore, place: str) -> Store:
    """The same home for writing, beside whatever else writes there."""
    from kimi_ray.config import load_config
    from kimi_ray.store.backend import open_store_for_writing
    from kimi_ray.store.seam import StoreOptions
    from kimi_ray.store.session_index_marks import distrust

    found = reading.identity
    options = StoreOptions(
        backend=found.backend,
        compression=found.compression,
        shards=found.shards,
        network_home=load_config(place).network_home,
        expected_home_id=found.home_id,
    )
    store = await open_store_for_writing(place, options)
    await asyncio.to_thread(distrust, place)
    return store


def _print_salvage(report: SalvageReport) -> None:
    rows = [
        [
            log.agent_id,
            str(log.survived),
            str(len(log.lost)),
            str(log.repairs),
            str(log.events),
            "nothing survived" if not log.events else "" if log.header == "kept" else "header rebuilt",
        ]
        for log in report.logs
    ]
    head = ["agent", "survived", "gaps", "repairs", "events", ""]
    say(table(head, rows, width=terminal_width(sys.stdout), right=".rrrr"))
    say()
    for log in report.logs:
        for lost in log.lost:
            count: Any = lost.get("count")
            what = "events up to the end" if count is None else f"{count} event{'s' * (count != 1)}"
            place = ", ".join(f"{name} {lost[name]}" for name in ("file", "offset", "rowid") if name in lost)
            say(
                one_line(
                    f"{log.agent_id}: lost {what} after seq {lost['after_seq']}" + (f" [{place}]" if place else "")
                )
            )
        for blob in log.missing_blobs:
            say(one_line(f"{log.agent_id}: {blob['code']}: {blob['digest']}, which seq {blob['seq']} refers to"))
    if report.document == "rebuilt":
        say("the document could not be read and was made anew: title and tags are gone")
    for session_id in report.removed:
        tell(f"removed {session_id}, which an earlier salvage had not finished")
    say(f"new session: {report.session_id}")


def sweep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, delete nothing.")] = False,
    grace_h: Annotated[
        float, typer.Option("--grace-h", metavar="HOURS", min=0, help="Keep what was touched within so many hours.")
    ] = 24.0,
    json: Json = False,
    home: Home = None,
) -> None:
    """Delete large contents (blobs) that no log refers to any more, such as those of removed sessions.

    With --json: {"home", "logs", "kept", "young", "deleted", "deleted_bytes", "held_back", "dry_run", "problems"}. Exit
    code 1 when something could not be read, so that nothing was deleted.
    """
    from kimi_ray.cli.lookup import open_home

    reading, place = open_home(home)
    report = asyncio.run(_sweep(reading, place, grace_h * 3600, dry_run))
    if json:
        print_json({"home": place, **report.to_data()})
    else:
        what = "would go" if report.dry_run else "deleted"
        say(f"{report.deleted} blobs {what} ({report.deleted_bytes} bytes)")
        say(f"{report.kept} are referred to by {report.logs} logs, {report.young} are younger than {grace_h:g} h")
        for problem in report.problems[:_PROBLEMS_SHOWN]:
            tell(one_line(f"{problem['code']}: {problem['message']}"))
        if report.held_back:
            tell(f"nothing was deleted, as not everything could be read; {report.held_back} blobs are held back")
    if report.held_back:
        raise typer.Exit(FAILED)


async def _sweep(reading: ReadStore, place: str, grace_s: float, dry_run: bool) -> SweepReport:
    from kimi_ray.store.fs import RealFs, names_in
    from kimi_ray.store.owners import is_held
    from kimi_ray.store.sweep import check_grace

    if not dry_run:
        fs, directory = RealFs(), f"{place}/writers"
        check_grace(grace_s, sum(is_held(fs, f"{directory}/{name}") for name in names_in(fs, directory)))
    store = await _writing(reading, place)
    try:
        return await store.sweep_blobs(grace_s=grace_s, dry_run=dry_run)
    finally:
        await store.close()


async def _collect(store: ReadStore, session: str | None, agent: str | None) -> list[SessionCheck]:
    return [check async for check in _checks(store, session, agent)]


async def _checks(store: ReadStore, session: str | None, agent: str | None) -> AsyncIterator[SessionCheck]:
    from kimi_ray.cli.lookup import find_session, find_stream, is_run
    from kimi_ray.store.checkup import Blobs, all_sessions, check_session

    blobs = Blobs()
    if session is None:
        for session_id in await all_sessions(store):
            yield await check_session(store, session_id, blobs=blobs)
    elif agent is not None or (not is_run(session) and (":" in session or "/" in session)):
        stream = await find_stream(store, session, agent)
        yield await check_session(store, stream.session_id, agents=[stream.agent_id], blobs=blobs)
    else:
        yield await check_session(store, await find_session(store, session), blobs=blobs)


def _print_checks(checks: list[SessionCheck]) -> None:
    from kimi_ray.store.verify import NO_DAMAGE

    rows = [
        [
            check.session_id,
            log.agent_id,
            str(log.events),
            str(log.bytes),
            _state(log.ok, log.torn_bytes),
        ]
        for check in checks
        for log in check.logs
    ]
    if rows:
        head = ["session", "agent", "events", "bytes", "state"]
        say(table(head, rows, width=terminal_width(sys.stdout), right="..rr"))
        say()
    problems = [(check.session_id, problem) for check in checks for problem in check.problems]
    for session_id, problem in problems[:_PROBLEMS_SHOWN]:
        say(_problem_line(session_id, problem))
    if len(problems) > _PROBLEMS_SHOWN:
        say(f"... and {len(problems) - _PROBLEMS_SHOWN} more: --json has all")
    for check in checks:
        if check.document == "missing":
            say(f"{check.session_id}: no document: being made, or what is left of it; sessions salvage makes a new one")
    logs, blobs = sum(len(check.logs) for check in checks), sum(check.blobs for check in checks)
    references = "1 reference to a blob" if blobs == 1 else f"{blobs} references to blobs"
    what = f"{_count(len(checks), 'session')}, {_count(logs, 'log')}, {references}"
    damage = sum(problem["code"] not in NO_DAMAGE for _, problem in problems)
    if damage:
        say(f"{what}: {_count(damage, 'problem')}")
        say("hint: kimi-ray sessions salvage SESSION makes a new session of everything that verifies")
    else:
        notes = f"; {_count(len(problems), 'note')} of what the next writer mends" if problems else ""
        say(f"{what}: all of it verifies{notes}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _state(ok: bool, torn: int) -> str:
    if not ok:
        return "damaged"
    return f"ok, {torn} bytes torn" if torn else "ok"


def _problem_line(session_id: str, problem: dict[str, Any]) -> str:
    details: dict[str, Any] = problem.get("details") or {}
    agent = details.get("agent_id")
    place = ", ".join(f"{name} {details[name]}" for name in ("file", "offset", "rowid", "seq") if name in details)
    who = session_id if agent is None else f"{session_id}/{agent}"
    return one_line(f"{who}: {problem['code']}: {problem['message']}" + (f" [{place}]" if place else ""))
