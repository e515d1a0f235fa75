"""The app: its commands by name, and the one place where an error becomes an exit code."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kimi_ray.cli import exits
from kimi_ray.cli.bench import bench
from kimi_ray.cli.demo import demo
from kimi_ray.cli.doctor import doctor
from kimi_ray.cli.feature_commands import feature_commands
from kimi_ray.cli.frames import frames
from kimi_ray.cli.import_ import imports
from kimi_ray.cli.manifest import manifest
from kimi_ray.cli.models import models
from kimi_ray.cli.printing import print_error, print_json, say, silence_stdout, tell
from kimi_ray.cli.replay import replay
from kimi_ray.cli.run import run
from kimi_ray.cli.runtime_commands import down, drain, logs, status
from kimi_ray.cli.session_care import salvage, sweep, verify
from kimi_ray.cli.session_compact import compact
from kimi_ray.cli.session_export import export
from kimi_ray.cli.session_forks import diff, fork
from kimi_ray.cli.session_lifecycle import archive, delete, restore
from kimi_ray.cli.session_list import list_sessions
from kimi_ray.cli.session_show import show
from kimi_ray.cli.session_undo import undo
from kimi_ray.cli.sessions import sessions, tail
from kimi_ray.cli.swarm import swarm
from kimi_ray.errors import ConfigError, KimiRayError, as_error
from kimi_ray.garbage import look_seldom


class _Interrupted(Exception):
    """Ctrl-C, under a name that Typer does not turn into an exit code before we can say something."""


class _ReaderGone(Exception):
    """Nobody reads our output any more (``| head``)."""


class _Commands(TyperGroup):
    _brought: dict[str, Any] | None = None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None
        except BrokenPipeError:
            raise _ReaderGone from None

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        try:
            return [*own, *self._of_features()]
        except KimiRayError as error:
            tell(f"(the commands of features are not shown: {error})")
            return own

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        return found if found is not None else self._of_features().get(cmd_name)

    def forget_features(self) -> None:
        """Ask again which commands features bring: another command line may have other settings."""
        self._brought = None

    def _of_features(self) -> dict[str, Any]:
        if self._brought is None:
            self._brought = feature_commands(self.commands)
        return self._brought


app = typer.Typer(
    name="kimi-ray",
    cls=_Commands,
    help="Swarms of LLM agents on Ray, with every agent's every event kept.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(run)
app.command()(swarm)
app.command()(replay)
sessions.command("list")(list_sessions)
sessions.command("show")(show)
sessions.command("tail")(tail)
sessions.command("fork")(fork)
sessions.command("diff")(diff)
sessions.command("compact")(compact)
sessions.command("undo")(undo)
sessions.command("export")(export)
sessions.command("archive")(archive)
sessions.command("restore")(restore)
sessions.command("delete")(delete)
sessions.command("verify")(verify)
sessions.command("salvage")(salvage)
sessions.command("sweep")(sweep)
app.add_typer(sessions, name="sessions")
app.command()(frames)
app.add_typer(imports, name="import")
app.add_typer(models, name="models")
app.add_typer(bench, name="bench")
app.command()(doctor)
app.command()(manifest)
app.command()(status)
app.command()(drain)
app.command()(down)
app.command()(logs)


def _show_version(asked: bool) -> None:
    if asked:
        from kimi_ray.version import __version__

        say(f"kimi-ray {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    look_seldom()
    sys.exit(run_command(sys.argv[1:]))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and give its exit code; nothing is raised and the process goes on.

    Every error is printed here: on stderr, or with ``--json`` as ``{"error": {...}}`` on stdout.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal whose encoding lacks a letter gets its number
    try:
        return _run_command(arguments)
    except BrokenPipeError:  # while an error was told
        silence_stdout()
        return exits.FAILED


def _run_command(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    try:
        code: Any = _commands().main(args=list(arguments), prog_name="kimi-ray", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else exits.DONE
    except KimiRayError as error:
        print_error(error, as_json=as_json)
        return exits.exit_code(error)
    except _USAGE_ERROR as error:
        return _bad_usage(error, as_json=as_json)
    except (_Interrupted, KeyboardInterrupt):
        if as_json:
            print_json({"error": {"code": "interrupted", "message": "interrupted"}})
        else:
            tell("interrupted")
        return exits.INTERRUPTED
    except (_ReaderGone, BrokenPipeError):
        silence_stdout()
        return exits.DONE
    except Exception as error:  # noqa: BLE001  the outermost place: told with its traceback and an exit code
        traceback.print_exc()
        print_error(as_error(error), as_json=as_json)
        return exits.FAILED


def _commands() -> _Commands:
    commands = _own_commands()
    commands.forget_features()
    return commands


@cache
def _own_commands() -> _Commands:
    commands = get_command(app)  # reads the signature of every command: a quarter of the start of a process
    assert isinstance(commands, _Commands)
    return commands


def _bad_usage(error: Any, *, as_json: bool) -> int:
    """A command line that cannot be read. Without any arguments the help is shown instead."""
    text = str(error.format_message())
    context: Any = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        tell(text)
        return exits.USAGE
    path = context.command_path if context is not None else "kimi-ray"
    hint = f"{path} --help shows how it is used"
    print_error(ConfigError(text, code="request.bad_usage", hint=hint), as_json=as_json)
    return exits.USAGE


_USAGE_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The root of Typer's own errors; its module is not public."""
