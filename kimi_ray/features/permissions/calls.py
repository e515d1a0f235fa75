"""What a tool call is about, for rules: a command, files, or its arguments."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kimi_ray.agent.slots import ToolGate
from kimi_ray.features.permissions.shell_commands import Commands, commands_of, only_commands
from kimi_ray.features.permissions.shell_words import Word
from kimi_ray.tools.contract import Environment, KnowsFiles

_SHOWN = 2000


@dataclass(frozen=True, slots=True)
class FileNames:
    """One file or directory that a call touches: its names as they are written and where links lead, all absolute."""

    written: str
    real: tuple[str, ...]
    """Without links; the first is what it is opened by."""
    writes: bool

    @property
    def all(self) -> tuple[str, ...]:
        """Every name."""
        return tuple(dict.fromkeys((self.written, *self.real)))


@dataclass(frozen=True)
class Call:
    """A call as rules see it."""

    tool: str
    arguments: Mapping[str, Any]
    root: str
    files: tuple[FileNames, ...] = ()
    command: str | None = None

    @cached_property
    def commands(self) -> Commands:
        """What its command line would run, or might."""
        return commands_of(self.command or "")

    @cached_property
    def plain_commands(self) -> list[list[Word]] | None:
        """Its commands, if it is nothing but plainly written ones."""
        return only_commands(self.command or "")

    @cached_property
    def about(self) -> str:
        """What it is about, as text."""
        if self.command is not None:
            return self.command
        if self.files:
            return ", ".join(self.inside(names.written) for names in self.files)
        return json.dumps(dict(self.arguments), ensure_ascii=False, default=str)

    @property
    def shown(self) -> str:
        """The beginning of what it is about."""
        return self.about if len(self.about) <= _SHOWN else self.about[:_SHOWN] + " ..."

    @cached_property
    def exactly(self) -> str:
        """The rule that an approval for the session stands for: this command, these files, or this tool."""
        if self.command is not None:
            where = self.arguments.get("cwd")
            # a command ends with its bracket, a directory with its quote: no command is another one somewhere else
            return f"{self.tool}({self.command}){'' if where is None else f' in {json.dumps(where)}'}"
        files = ", ".join(self.inside(names.real[0]) for names in self.files)
        return f"{self.tool}({files})" if files else self.tool

    def inside(self, path: str) -> str:
        """The path relative to the working directory, if it is in it."""
        if path == self.root:
            return "."
        below = self.root.rstrip("/") + "/"
        return path[len(below) :] if path.startswith(below) else path


async def call_of(gate: ToolGate, environment: Environment) -> Call:
    """What the gate asks about."""
    root = environment.root or "/"
    accesses = gate.accesses
    command = gate.arguments.get("command")
    if accesses.everything and isinstance(command, str):
        return Call(gate.name, gate.arguments, root, command=command)
    written = [posixpath.normpath(posixpath.join(root, access.path)) for access in accesses.paths]
    real: list[tuple[str, ...]]
    if written and isinstance(environment, KnowsFiles):
        real = [tuple(names) for names in await environment.names_of([access.path for access in accesses.paths])]
    else:
        real = [(path,) for path in written]
    files = tuple(
        FileNames(path, names or (path,), access.mode == "write")
        for path, names, access in zip(written, real, accesses.paths, strict=True)
    )
    return Call(gate.name, gate.arguments, root, files)
