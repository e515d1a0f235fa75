"""``sessions archive|restore|delete``: by id, without opening anything; without Ray unless ``--address`` is given."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.cli.exits import FAILED
from kimi_ray.cli.options import Address, Home, Json, Namespace
from kimi_ray.cli.printing import clock_time, counted, one_line, print_json, say, tell
from kimi_ray.cli.settings_of import operation_config
from kimi_ray.errors import ConfigError, KimiRayError

if TYPE_CHECKING:
    from kimi_ray.runtime import Runtime
    from kimi_ray.store.seam import Document

Ids = Annotated[
    list[str],
    typer.Argument(metavar="SESSION...", help="@last, an id or its end, or RUN (the newest session of a run)."),
]


def archive(
    ids: Ids, json: Json = False, home: Home = None, address: Address = None, namespace: Namespace = None
) -> None:
    """Hide sessions from listings. One that is live there is closed first; its directory and model are not needed.

    With --json: {"sessions": [{"session_id", "ok", "error"?}]}.
    """
    _each(ids, "archived", lambda runtime, one: runtime.archive(one), json, home, address, namespace)


def restore(
    ids: Ids, json: Json = False, home: Home = None, address: Address = None, namespace: Namespace = None
) -> None:
    """Take sessions out of the archive, without opening them.

    With --json: {"sessions": [{"session_id", "ok", "error"?}]}.
    """
    _each(ids, "restored", lambda runtime, one: runtime.restore(one), json, home, address, namespace)


def delete(
    ids: Ids,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
    home: Home = None,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """Delete sessions for good: documents, logs of all their agents, private working directories.

    With --json: {"sessions": [{"session_id", "ok", "error"?}]}.
    """
    _each(
        ids,
        "deleted",
        lambda runtime, one: runtime.delete(one),
        json,
        home,
        address,
        namespace,
        before=None if yes else _ask,
    )


def _each(
    ids: list[str],
    done: str,
    operation: Callable[[Runtime, str], Awaitable[Any]],
    json: bool,
    home: str | None,
    address: str | None,
    namespace: str | None,
    *,
    before: Callable[[list[Document]], None] | None = None,
) -> None:
    documents, place = _documents(ids, home)
    if before is not None:
        before(documents)
    rows = asyncio.run(_run([one.session_id for one in documents], operation, place, address, namespace))
    failed = [row for row in rows if not row["ok"]]
    if len(rows) == 1 and failed:
        raise failed[0]["raised"]
    if json:
        print_json({"sessions": [{key: item for key, item in row.items() if key != "raised"} for row in rows]})
    for row in rows:
        error: dict[str, Any] = row.get("error") or {}
        if error:
            tell(one_line(f"{row['session_id']}: {error['code']}: {error['message']} ({error.get('hint') or ''})"))
        elif not json:
            say(f"{done} {row['session_id']}")
    if failed:
        raise typer.Exit(FAILED)


def _documents(ids: list[str], home: str | None) -> tuple[list[Document], str]:
    """The documents of what was named, each once; nothing is done when one of them cannot be found."""
    from kimi_ray.cli.lookup import find_session, open_home
    from kimi_ray.store.seam import Document

    store, place = open_home(home, ids[0])

    async def find() -> list[Document]:
        found = [await find_session(store, text) for text in ids]
        by_id = {document.session_id: document for document in await store.list_documents()}
        return [by_id.get(one) or Document(one, "", 0, {}) for one in dict.fromkeys(found)]

    return asyncio.run(find()), place


async def _run(
    ids: list[str],
    operation: Callable[[Runtime, str], Awaitable[Any]],
    home: str,
    address: str | None,
    namespace: str | None,
) -> list[dict[str, Any]]:
    from kimi_ray.runtime import Runtime

    rows: list[dict[str, Any]] = []
    async with Runtime.connect(config=operation_config(home, address, namespace)) as runtime:
        for session_id in ids:
            try:
                await operation(runtime, session_id)
            except KimiRayError as error:
                told = _with_way_out(error)
                rows.append({"session_id": session_id, "ok": False, "error": told.to_data(), "raised": told})
            else:
                rows.append({"session_id": session_id, "ok": True})
    return rows


def _with_way_out(error: KimiRayError) -> KimiRayError:
    if error.code == "session.in_use":
        error.hint = "close it there, or reach the runtime that has it with --address HOST:PORT (see kimi-ray status)"
    return error


def _ask(documents: list[Document]) -> None:
    """What would go, and whether it may.

    Raises:
        ConfigError: ``request.needs_yes`` without a terminal to answer at.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{counted(len(documents), 'session')} would be deleted for good, and nobody can be asked here",
            code="request.needs_yes",
            hint="--yes deletes without asking",
            details={"sessions": [document.session_id for document in documents]},
        )
    tell("to be deleted for good, with all logs:")
    for document in documents:
        value = document.value
        title = one_line(str(value.get("title") or value.get("last_prompt") or ""), 60)
        agents, at = value.get("agent_count"), value.get("updated_at")
        facts = [title, counted(agents, "agent") if agents else "", clock_time(at, "%Y-%m-%d %H:%M") if at else ""]
        tell(f"  {document.session_id}  {'  '.join(fact for fact in facts if fact)}")
    tell("delete? [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        tell("nothing was deleted")
        raise typer.Exit(FAILED)
