"""The tool contract: what a tool declares, what it is given, what it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

AccessMode = Literal["read", "write"]


@dataclass(frozen=True, slots=True)
class Access:
    """A path that a call touches, relative to the working directory or absolute. A directory means its whole tree."""

    mode: AccessMode
    path: str


@dataclass(frozen=True, slots=True)
class Accesses:
    """What a call touches; decides what may run beside it.

    ``everything`` conflicts with all calls (a shell command). No paths and not everything: conflicts with none.
    """

    paths: tuple[Access, ...] = ()
    everything: bool = False

    @classmethod
    def none(cls) -> Accesses:
        """Touches nothing that another call could see."""
        return cls()

    @classmethod
    def all(cls) -> Accesses:
        """May touch anything: runs alone."""
        return cls(everything=True)

    @classmethod
    def reads(cls, *paths: str) -> Accesses:
        """Reads these paths."""
        return cls(tuple(Access("read", path) for path in paths))

    @classmethod
    def writes(cls, *paths: str) -> Accesses:
        """Writes these paths."""
        return cls(tuple(Access("write", path) for path in paths))


@dataclass(frozen=True, slots=True)
class ExecResult:
    """A finished command.

    ``output`` is stdout and stderr in the order they came, decoded with U+FFFD for undecodable bytes;
    ``truncated_bytes`` counts what was cut from its middle.
    """

    exit_code: int
    output: str
    timed_out: bool = False
    truncated_bytes: int = 0
    duration_ms: int = 0


@dataclass(frozen=True, slots=True)
class FileStat:
    """What ``Environment.stat`` tells. ``mtime_ns`` is 0 where the environment has none."""

    kind: Literal["file", "directory", "other"]
    size: int
    mtime_ns: int = 0


@dataclass(frozen=True, slots=True)
class DirectoryEntry:
    """One entry of ``Environment.list``; ``path`` is relative to the listed directory, with ``/``."""

    path: str
    kind: Literal["file", "directory", "other"]
    size: int = 0
    mtime_ns: int = 0


class Environment(Protocol):
    """The place where tools work: a local directory, later a container. Tools never touch ``os`` themselves.

    Relative paths are relative to ``root``. All methods raise ``ToolError`` (``environment.*``).
    """

    @property
    def root(self) -> str | None:
        """The working directory as an absolute path inside the environment, or None (``Workdir.none()``)."""
        ...

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a command (a string goes through the shell) to its end; its whole process group dies with the caller."""
        ...

    async def read_bytes(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        """The bytes of a file from ``offset``, at most ``limit``."""
        ...

    async def write_bytes(self, path: str, data: bytes, *, append: bool = False) -> None:
        """Write a whole file (atomically) or append to it; parent directories are created."""
        ...

    async def stat(self, path: str) -> FileStat | None:
        """What is at ``path``, or None when nothing is."""
        ...

    async def list(self, path: str, *, recursive: bool = False, limit: int = 100_000) -> list[DirectoryEntry]:
        """The entries of a directory in name order, at most ``limit``; links are not followed into directories."""
        ...

    async def close(self) -> None:
        """End running commands and let go. Idempotent."""
        ...


class RunningCommand(Protocol):
    """A command that goes on by itself until it ends or is ended."""

    async def wait(self) -> int:
        """Its exit code, once it has ended. A cancelled wait leaves it running."""
        ...

    def terminate(self) -> None:
        """Ask it to end: a signal that it may catch."""
        ...

    async def end(self) -> int:
        """Kill whatever is left of it, and give its exit code: to be called in any case. Idempotent."""
        ...


@runtime_checkable
class StartsCommands(Protocol):
    """An ``Environment`` whose commands can also run in the background."""

    async def start(
        self,
        command: Sequence[str] | str,
        *,
        on_output: Callable[[bytes], None],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RunningCommand:
        """Start a command and return; it dies with this process, and with the environment's ``close``.

        Args:
            on_output: Called with stdout and stderr as they come.

        Raises:
            ToolError: ``environment.*``.
        """
        ...


@runtime_checkable
class KnowsFiles(Protocol):
    """An ``Environment`` that knows which names mean one file."""

    async def names_of(self, paths: Sequence[str]) -> list[tuple[str, ...]]:
        """For each path the names by which it is the same file or directory as another: absolute, without links.

        A path that cannot be used (outside, denied) has its plain absolute form.
        """
        ...


@dataclass(slots=True)
class ToolContext:
    """What a running call is given."""

    environment: Environment
    session_id: str
    agent_id: str
    call_id: str
    cancelled: asyncio.Event
    """Set when the turn is cancelled; the call is cancelled as a task after a grace of 2 s."""
    item: Any = None
    """The data of the item of this rollout, when there is one."""
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    """Lives as long as the agent's scope; shared by the tools of one agent (e.g. files read so far)."""


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a call returns to the model.

    ``content`` is text, or a list of content blocks. ``meta`` is JSON kept in the log and not shown to the model.
    ``bounded``: the tool keeps its results short by itself and says what it left out; the model sees all of it.
    ``stop_batch``: later calls of the same answer that have not started are not (``tool.not_started``); those that
    must not have started by then are kept waiting by the call's ``accesses``.
    """

    content: str | list[dict[str, Any]]
    is_error: bool = False
    error_code: str | None = None
    exit_code: int | None = None
    meta: dict[str, Any] | None = None
    bounded: bool = False
    stop_batch: bool = False


class Tool(Protocol):
    """Something a model can call."""

    @property
    def name(self) -> str:
        """Unique in an agent; ``[A-Za-z0-9_-]{1,64}``."""
        ...

    @property
    def description(self) -> str:
        """What the model reads."""
        ...

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments, an object."""
        ...

    @property
    def writes(self) -> bool:
        """Whether a call may change the working directory (Bash, Write, Edit): left out of swarms by default."""
        ...

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        """What a call with these (checked) arguments touches."""
        ...

    def check(self, arguments: Any) -> dict[str, Any]:
        """The arguments checked against the schema, defaults filled in.

        Raises:
            ToolError: ``tool.bad_arguments``; its message goes back to the model.
        """
        ...

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        """Do it. A raised ``ToolError`` becomes an error result; any other exception ``tool.user_code``."""
        ...


class ToolSource(Protocol):
    """Offers tools whose names are known only once it is asked: those of a server, for one."""

    async def tools(self, names: Sequence[str]) -> list[Tool]:
        """The tools that these names mean (a name, or a pattern with ``*``); what means none of its own is ignored.

        Raises:
            ToolError: nothing can be offered, and the agent is not to live without it.
        """
        ...
