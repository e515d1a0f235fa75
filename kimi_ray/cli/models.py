"""``models list`` and ``models check``: which models there are, and what one can do."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.cli import exits
from kimi_ray.cli.options import BaseUrl, Home, Json
from kimi_ray.cli.printing import clip, one_line, print_json, safe, say, table, tell, terminal_width

if TYPE_CHECKING:
    from kimi_ray.app import ModelCatalogue
    from kimi_ray.llm.check import Finding, ModelCheck
    from kimi_ray.llm.models import ResolvedModel

models = typer.Typer(name="models", help="The models that are configured, and what they can do.", no_args_is_help=True)


@models.command("list")
def list_models(json: Json = False, home: Home = None) -> None:
    """List the [models.X] tables: where each is reached, and whether its key is there.

    With --json: {"default": name | null, "models": [{"name", "provider", "model", "base_urls", "key", "has_key",
    "is_default", "error": null | {...}}]}.
    """
    from kimi_ray.app import ModelCatalogue
    from kimi_ray.config import load_config

    catalogue = ModelCatalogue(load_config(home))
    found = [_row(name, catalogue) for name in catalogue]
    if json:
        print_json({"default": catalogue.default, "models": found})
        return
    if not found:
        tell("no model is configured; `--model scripted` needs none, a [models.X] table in config.toml makes one")
        return
    head = ["model", "provider", "name on the wire", "server", "key"]
    rows = [
        [
            safe(row["name"]) + (" (default)" if row["is_default"] else ""),
            row["provider"],
            one_line(row["model"] or ""),
            one_line(", ".join(row["base_urls"])),
            _key_word(row),
        ]
        for row in found
    ]
    say(table(head, rows, width=terminal_width(sys.stdout)))


@models.command("check")
def check(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="As for --model. [default_model]")] = None,
    base_url: BaseUrl = None,
    probe_s: Annotated[
        float, typer.Option("--probe-s", min=0.1, metavar="SECONDS", help="Longest wait for each answer.")
    ] = 60.0,
    json: Json = False,
    home: Home = None,
) -> None:
    """Ask a model what it can do, and print the [models.X] table for it.

    Each question is a small request: chat, stream, usage, tools (one call, results, parallel calls), reasoning,
    structured output, seed, log-probabilities, token ids. Each answer is printed as it is known. Exit code 1 when plain
    chat does not work, 130 when interrupted, with what is known until then.
    With --json: {"name", "model", "server", "works", "served", "findings": [{"name", "verdict", "told", "ms",
    "error"}], "settings", "configured", "table"}; interrupted: {"error", "findings"}.
    """
    from kimi_ray.cli.swarm_plan import find_model
    from kimi_ray.config import load_config
    from kimi_ray.llm.check import check_model

    resolved = find_model(load_config(home), model, base_url)
    course = _Course(quiet=json)
    if not json:
        tell(f"asking {_described(resolved)}")
    try:
        found = asyncio.run(check_model(resolved, probe_s=probe_s, on_question=course.asking, on_finding=course.known))
    except KeyboardInterrupt:
        course.interrupted()
        raise typer.Exit(exits.INTERRUPTED) from None
    if json:
        print_json(found.model_dump(mode="json") | {"table": found.table})
    else:
        _show_advice(found)
    if not found.works:
        raise typer.Exit(exits.FAILED)


class _Course:
    """Shows a check while it goes on: a table that grows on stdout, what is being asked on stderr."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._findings: list[Finding] = []
        self._question = ""
        self._left = 0
        self._passing = sys.stderr.isatty()
        """Whether the line about what is being asked can be taken back."""

    def asking(self, name: str, left: int) -> None:
        self._question, self._left = name, left
        if self._quiet:
            return
        line = f"asking: {name}, {left} left"
        if self._passing:
            print(line, end="", file=sys.stderr, flush=True)
        else:
            tell(line)

    def known(self, finding: Finding) -> None:
        self._findings.append(finding)
        self._question = ""
        if self._quiet:
            return
        self._take_back()
        if len(self._findings) == 1:
            self._row("question", "answer", "time", "seen")
        spent = "" if finding.ms is None else f"{finding.ms} ms"
        self._row(finding.name, finding.verdict, spent, one_line(finding.told))

    def interrupted(self) -> None:
        """Tell what is known; the rows of the table are there already."""
        if self._quiet:
            known = [finding.model_dump(mode="json") for finding in self._findings]
            print_json({"error": {"code": "interrupted", "message": "interrupted"}, "findings": known})
            return
        self._take_back()
        unasked = f", {self._left} not asked" if self._left else ""
        tell(f"interrupted{f' while asking: {self._question}' if self._question else ''}{unasked}")

    def _take_back(self) -> None:
        if self._passing:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _row(self, name: str, verdict: str, spent: str, told: str) -> None:
        width = terminal_width(sys.stdout)
        line = f"{name:<17}  {verdict:<10}  {spent:>8}  {told}".rstrip()
        say(line if width is None else clip(line, width))
        sys.stdout.flush()


def _described(resolved: ResolvedModel) -> str:
    where = f" at {', '.join(resolved.base_urls)}" if resolved.base_urls else ""
    name = safe(resolved.name)
    if resolved.provider == "chaos":
        return f"{name}, which spoils the answers of {safe(resolved.model)}{where}"
    return f"{safe(resolved.model)}{where}" if where else f"{name}, a script without a server"


def _show_advice(found: ModelCheck) -> None:
    say()
    if not found.works:
        say("This model does not answer.")
        hint = next((one.error["hint"] for one in found.findings if one.error and one.error.get("hint")), None)
        if hint is not None:
            say(f"hint: {safe(hint)}")
        return
    say("For config.toml:")
    say()
    say(safe(found.table))


def _row(name: str, catalogue: ModelCatalogue) -> dict[str, Any]:
    from kimi_ray.errors import KimiRayError

    settings = catalogue.settings(name)
    assert settings is not None
    row: dict[str, Any] = {
        "name": name,
        "provider": settings.provider,
        "model": settings.model or name,
        "base_urls": [],
        "key": settings.api_key_env,
        "has_key": False,
        "is_default": name == catalogue.default,
        "error": None,
    }
    try:
        resolved = catalogue.resolve(name)
    except KimiRayError as error:
        return row | {"error": error.to_data()}
    return row | {
        "model": resolved.model,
        "base_urls": list(resolved.base_urls),
        "key": resolved.key_env or None,
        "has_key": resolved.api_key is not None,
    }


def _key_word(row: dict[str, Any]) -> str:
    if row["error"] is not None:
        return one_line(row["error"]["message"])
    if row["has_key"]:
        return f"{row['key']} is set"
    return "none needed"
