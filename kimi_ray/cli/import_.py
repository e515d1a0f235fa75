"""``import dsh``: sessions of DeepSeek Harness, read into this home."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.cli import exits
from kimi_ray.cli.options import Home, Json
from kimi_ray.cli.printing import one_line, print_json, say, table, tell, terminal_width

if TYPE_CHECKING:
    from kimi_ray.exchange.dsh.importer import Imported
    from kimi_ray.exchange.dsh.model import Reading
    from kimi_ray.store.seam import StoreOptions

imports = typer.Typer(name="import", help="Read sessions of other programs into this home.", no_args_is_help=True)

_BAD = frozenset({"refused", "failed"})
_ID_COLUMNS = 60


@imports.callback()
def _root() -> None:
    pass


@imports.command("dsh")
def dsh(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A root of session logs, a session's directory, a log file or a sessions database."
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is there; nothing is written.")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Import sessions of DeepSeek Harness (plain, Zstandard or SQLite). The source is never changed.

    With --json: {"sessions": [{"id", "header", "stored", "after_repair", "repairs", "error": null | {"class":
    "unsupported" | "corrupt", "message", "at"}}]}; without --dry-run each also has "outcome" and "imported": null |
    {"session_id", "agent_id", "events", "conversions"}. Exit code 1 when an import was refused.
    """
    if dry_run:
        _look(path, as_json=json)
        return
    done = asyncio.run(_import(path, home, quiet=json))
    if json:
        print_json({"home": _home(home), "sessions": [_plain(one.to_data()) for one in done]})
    else:
        _tell_import(done)
    if any(one.outcome in _BAD for one in done):
        raise typer.Exit(exits.FAILED)


def _look(path: str, *, as_json: bool) -> None:
    from kimi_ray.exchange.dsh import read_source

    if as_json:
        print_json({"sessions": [_plain(reading.to_data()) for reading in read_source(path)]})
        return
    rows = [_row(reading) for reading in read_source(path)]
    head = ["session", "stored", "after repair", "left out", "error"]
    say(table(head, rows, width=terminal_width(sys.stdout), right=".rr"))


async def _import(path: str, home: str | None, *, quiet: bool) -> list[Imported]:
    from kimi_ray.config import load_config
    from kimi_ray.exchange.dsh.importer import import_sessions
    from kimi_ray.hosts.store_host import store_options
    from kimi_ray.store.backend import open_store_for_writing
    from kimi_ray.store.session_index_marks import distrust

    config = load_config(home)
    store = await open_store_for_writing(config.home, _for_home(config.home, store_options(config)))
    await asyncio.to_thread(distrust, config.home)
    done: list[Imported] = []
    try:
        async for one in import_sessions(store, path):
            done.append(one)
            if not quiet:
                tell(f"{one_line(one.report['id'] or one.source, _ID_COLUMNS)}: {one.outcome}")
    finally:
        await store.close()
    return done


def _for_home(home: str, options: StoreOptions) -> StoreOptions:
    """A home that exists says itself how it is stored."""
    from kimi_ray.store.fs import RealFs
    from kimi_ray.store.identity import read_identity

    identity = read_identity(RealFs(), home)
    if identity is not None:
        options.backend, options.compression, options.shards = identity.backend, identity.compression, identity.shards
    return options


def _row(reading: Reading) -> list[str]:
    data = reading.to_data()
    left_out = ", ".join(
        f"{size} {'rows' if kind == 'rows' else 'bytes'} {kind}" for kind, size in reading.set_aside.items()
    )
    return [
        one_line(data["id"] or reading.source, _ID_COLUMNS),
        _count(data["stored"]),
        _count(data["after_repair"]),
        left_out,
        "" if reading.error is None else one_line(f"{reading.error.kind}: {reading.error.message}"),
    ]


def _count(number: int | None) -> str:
    return "" if number is None else str(number)


def _tell_import(done: list[Imported]) -> None:
    rows = [
        [
            one_line(one.report["id"] or one.source, _ID_COLUMNS),
            one.outcome,
            one.session_id or "",
            str(one.events) if one.session_id else "",
            _why(one),
        ]
        for one in done
    ]
    head = ["session", "outcome", "here", "events", "note"]
    say(table(head, rows, width=terminal_width(sys.stdout), right="...r"))
    counts = Counter(one.outcome for one in done)
    tell(", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))


def _why(one: Imported) -> str:
    if one.error is not None:
        return one_line(f"{one.error.code}: {one.error.message}")
    refusal = one.report["error"]
    if refusal is not None:
        return one_line(f"{refusal['class']}: {refusal['message']}")
    if one.outcome == "changed":
        if one.earlier is not None and one.earlier != one.source:
            return one_line(f"another session of this id came from {one.earlier}; --home OTHER takes both")
        return "the source has changed since it was imported; what was imported stays as it is"
    changes = {rule: count for rule, count in (one.conversions or {}).items() if ":" not in rule}
    return ", ".join(f"{count} {rule}" for rule, count in changes.items())


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """A report as JSON that everybody can read: ids and paths may hold halves of surrogate pairs."""
    from kimi_ray.exchange.dsh.lossless import within_rule

    return within_rule(data, Counter())


def _home(home: str | None) -> str:
    from kimi_ray.config import load_config

    return load_config(home).home
