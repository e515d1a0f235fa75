"""The commands that Features bring, made only when the line names one, or asks for all."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import typer
from typer.main import get_command

from kimi_ray.errors import ConfigError


def feature_commands(builtin: Collection[str]) -> dict[str, Any]:
    """The commands of installed Features and of those that the settings name, by name.

    Args:
        builtin: The commands that there are.

    Raises:
        ConfigError: ``config.*``; ``config.feature`` for one that cannot be loaded, or brings a command that is there.
    """
    from importlib.metadata import entry_points

    from kimi_ray.config import load_config

    config = load_config()
    if not config.features and not entry_points(group="kimi_ray.features"):
        return {}
    from kimi_ray.hosts.features import load_features

    brought = load_features(config).commands
    taken = sorted(set(brought).intersection(builtin))
    if taken:
        raise ConfigError(
            f"a feature brings the command {taken[0]!r}, which kimi-ray has itself",
            code="config.feature",
            hint="give it another name",
            details={"kind": "command", "name": taken[0]},
        )
    if not brought:
        return {}
    group = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    group.callback()(_nothing)  # so that it stays a group with one command
    for name, command in brought.items():
        if isinstance(command, typer.Typer):
            group.add_typer(command, name=name)
        else:
            group.command(name)(command)
    made: Any = get_command(group)
    return dict(made.commands)


def _nothing() -> None:
    pass
