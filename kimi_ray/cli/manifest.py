"""``kimi-ray manifest``: what the program is made of, for people, for programs and for ``docs/reference.md``."""

from __future__ import annotations

import asyncio
import inspect
import json as json_text
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from kimi_ray.cli.options import Home, Json
from kimi_ray.cli.printing import one_line, print_json, say, table, terminal_width
from kimi_ray.errors import ConfigError

if TYPE_CHECKING:
    from kimi_ray.hosts.features import Features

Rows = list[dict[str, Any]]

_TITLES = {
    "events": (
        "Events",
        "What a log may hold, and what each carries (\\*: always). Every payload may have `imported` besides.",
    ),
    "parts": ("Parts", "What payloads are made of."),
    "features": ("Features", "What is loaded, in the order of its handlers; see [features.md](features.md)."),
    "services": ("Services", "What the containers of a host build, by scope; a Feature's constructors may name them."),
    "state": ("State", "What is kept, by scope: of a home, of a session (`state.json`), of an agent (from its log)."),
    "tools": ("Tools", "What models can call, as they are told of it."),
    "slots": ("Slots", "Where a Feature has a say in an agent's work; see [features.md](features.md)."),
    "hooks": ("Hook events", "What a `[[hooks]]` table can name."),
    "errors": ("Error codes", "[errors.md](errors.md) says what each means."),
    "config": ("Settings", "Keys of `config.toml`; see [configuration.md](configuration.md)."),
    "commands": ("Commands", "`--help` of each says more."),
}


def manifest(
    section: Annotated[str | None, typer.Argument(help=f"One of: {', '.join(_TITLES)}.")] = None,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As docs/reference.md has it.")] = False,
    home: Home = None,
) -> None:
    """What kimi-ray is made of, from its code: events, services, state, tools, slots, error codes, settings, flags.

    Features count: those that are installed, and those that the settings name. With --json: an object of the sections.
    """
    from kimi_ray.cli.settings_of import runtime_config
    from kimi_ray.hosts.features import load_features

    if json and markdown:
        raise ConfigError("--json and --markdown exclude each other", code="request.conflict", hint="leave one out")
    if section is not None and section not in _TITLES:
        raise ConfigError(
            f"the manifest has no section {section[:60]!r}",
            code="request.bad_usage",
            hint=f"sections are {', '.join(_TITLES)}",
        )
    config = runtime_config(home)
    facts = collect(load_features(config), [section] if section else list(_TITLES), features=config.features)
    if json:
        print_json(facts)
    elif markdown:
        say(as_markdown(facts).rstrip("\n"))
    else:
        say(_as_text(facts))


def collect(
    loaded: Features, wanted: Sequence[str] = tuple(_TITLES), *, features: Sequence[str] = (), own: bool = False
) -> dict[str, Rows]:
    """The facts by section.

    Args:
        loaded: The Features that count.
        wanted: Names of sections.
        features: The setting of that name, by which they can be loaded again.
        own: Only what kimi-ray itself brings: no commands of installed Features.

    Raises:
        KimiRayError: why a Feature's tool cannot be had.
    """
    from kimi_ray.cli.manifest_facts import sections

    known = sections(loaded, features, of_features=not own)
    found: dict[str, Rows] = {}
    for name in wanted:
        rows = known[name]()
        found[name] = asyncio.run(_awaited(rows)) if inspect.isawaitable(rows) else rows
    return found


async def _awaited(rows: Any) -> Rows:
    return await rows


def as_markdown(facts: Mapping[str, Rows]) -> str:
    """The facts as a page."""
    lines = [
        "# Reference",
        "",
        "Made from the code by `kimi-ray manifest --markdown > docs/reference.md`; a test compares.",
        "",
    ]
    for name, rows in facts.items():
        title, says = _TITLES[name]
        lines += [f"## {title}", "", says, ""]
        inner = _INNER.get(name)
        if inner is None:
            lines += _markdown_table(_COLUMNS[name], rows)
        else:
            for row in rows:
                lines += [f"### `{row['name']}`", "", *_about(name, row)]
                if name == "tools":
                    lines += ["```json", json_text.dumps(row[inner], indent=2, ensure_ascii=False), "```", ""]
                elif row[inner]:
                    lines += _markdown_table(_COLUMNS[inner], row[inner])
    return "\n".join(lines).rstrip("\n") + "\n"


_INNER = {"events": "fields", "parts": "fields", "tools": "parameters", "slots": "fields", "commands": "flags"}
"""Sections whose rows have a part of their own."""
_COLUMNS: dict[str, tuple[str, ...]] = {
    "fields": ("name", "type", "doc"),
    "flags": ("name", "type", "default", "doc"),
    "features": ("name", "class", "doc", "tools", "profiles", "events", "commands", "services"),
    "services": ("scope", "name", "doc", "needs", "where"),
    "state": ("scope", "of", "name", "type", "doc"),
    "hooks": ("name", "doc"),
    "errors": ("name",),
    "config": ("name", "type", "default", "doc"),
}
_AS_CODE = frozenset({"name", "type", "default", "needs", "class", "tools", "profiles", "commands", "services"})


def _about(section: str, row: Mapping[str, Any]) -> list[str]:
    """The lines below a row's heading."""
    notes = [name for name in ("surface", "ignorable", "writes", "required") if row.get(name)]
    said = row.get("doc") or row.get("description") or ""
    if section == "slots":
        said = f"`kimi_ray.{row['event']}`: {said}"
    if notes:
        said = f"{said} ({', '.join(notes)})".strip()
    return [said.replace("``", "`"), ""] if said else []


def _markdown_table(columns: Sequence[str], rows: Rows) -> list[str]:
    shown = [column for column in columns if any(_cell(row, column) for row in rows)] or list(columns[:1])
    lines = [f"| {' | '.join(shown)} |", "|" + "---|" * len(shown)]
    for row in rows:
        cells: list[str] = []
        for column in shown:
            text = _cell(row, column).replace("|", "\\|").replace("``", "`")
            cells.append(f"`{text}`" if text and column in _AS_CODE else text)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _cell(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if column == "type" and row.get("required") is False and row.get("default") is None:
        text = str(value or "")
        return text.removesuffix(" | None")
    if column == "name" and row.get("required") and "default" in row:
        return f"{value} *"
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in cast("Sequence[Any]", value))
    return str(value)


def _as_text(facts: Mapping[str, Rows]) -> str:
    blocks: list[str] = []
    for name, rows in facts.items():
        flat = _flat(name, rows)
        columns = [
            column for column in _COLUMNS.get(name, _COLUMNS["fields"]) if any(_cell(row, column) for row in flat)
        ]
        cells = [[_plain(_cell(row, column)) for column in columns] for row in flat]
        shown = table([column.upper() for column in columns], cells, width=terminal_width(sys.stdout))
        blocks.append(f"{_TITLES[name][0]} ({len(rows)})\n{shown}")
    return "\n\n".join(blocks)


def _plain(text: str) -> str:
    """A cell on one line; what it is indented by stays."""
    return text[: len(text) - len(text.lstrip())] + one_line(text.replace("``", "`"))


def _flat(section: str, rows: Rows) -> Rows:
    """Rows with what they have within as further rows below them."""
    inner = _INNER.get(section)
    if inner is None:
        return rows
    found: Rows = []
    for row in rows:
        found.append({"name": row["name"], "doc": row.get("doc") or row.get("description") or ""})
        parts: Rows = row[inner]
        if section == "tools":
            schema: dict[str, dict[str, Any]] = row[inner].get("properties", {})
            parts = [
                {"name": name, "type": str(said.get("type", "")), "doc": said.get("description", "")}
                for name, said in schema.items()
            ]
        found += [{**part, "name": f"  {part['name']}"} for part in parts]
    return found
