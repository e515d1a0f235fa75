"""A user's code on its way: what a tool says of itself as data, its code sealed until a host of agents uses it.

A warm process keeps the modules that it has imported, so the same name may mean old code. Who only passes a tool on (a
session's host) therefore never imports it, and every tool tells a digest of the code that it needs, as does the factory
of a working directory; hosts are chosen by that. The digest covers the modules that a tool or a factory comes from and
those of the user's that they import, as they stand in their files; installed packages count as part of the environment.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import pickle
import sys
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from kimi_ray.errors import ToolError
from kimi_ray.settings import Workdir
from kimi_ray.tools.contract import Accesses, Tool, ToolContext, ToolOutput
from kimi_ray.tools.workdirs.factory import load_factory

NEUTRAL = ""
"""The fingerprint of who needs no code of the user's: every host serves it."""


class CarriedTool:
    """A user's tool that can be sent without being imported where it passes. Behaves as the tool itself.

    Args:
        tool: The tool.
        digest: Of its code; None computes it.
    """

    def __init__(self, tool: Tool, digest: str | None = None) -> None:
        self.name = tool.name
        self.writes = tool.writes
        self.digest = digest if digest is not None else code_digest(tool)
        self._tool: Tool | None = tool
        self._sealed: bytes | None = None

    def __repr__(self) -> str:
        return f"CarriedTool({self.name})"

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return arrived, (self.name, self.writes, self.digest, self.sealed(pickle.dumps))

    def sealed(self, dumps: Any) -> bytes:
        """The tool pickled with ``dumps``, once: whoever passes it on sends the same bytes."""
        if self._sealed is None:
            self._sealed = cast("bytes", dumps(self._tool))
        return self._sealed

    def opened(self) -> Tool:
        """The tool itself; imports its code if it came from elsewhere.

        Raises:
            ToolError: ``tool.not_importable`` {tool}.
        """
        if self._tool is None:
            assert self._sealed is not None
            try:
                self._tool = cast("Tool", pickle.loads(self._sealed))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                # Its module may raise anything; a SystemExit would end a host with all of its agents.
                raise ToolError(
                    f"the tool {self.name} cannot be imported: {type(error).__name__}: {error}",
                    code="tool.not_importable",
                    hint="the code of a tool must be importable on every node: install its package there, or connect"
                    ' with runtime_env={"py_modules": [...]}',
                    details={"tool": self.name, "exception": type(error).__name__},
                ) from error
        return self._tool

    @property
    def description(self) -> str:
        """See ``Tool.description``."""
        return self.opened().description

    @property
    def parameters(self) -> dict[str, Any]:
        """See ``Tool.parameters``."""
        return self.opened().parameters

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        """See ``Tool.accesses``."""
        return self.opened().accesses(arguments)

    def check(self, arguments: Any) -> dict[str, Any]:
        """See ``Tool.check``."""
        return self.opened().check(arguments)

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        """See ``Tool.run``."""
        return await self.opened().run(arguments, context)


def carried(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """The tools, fit to be sent through processes that must not import them."""
    return tuple(tool if isinstance(tool, CarriedTool) else CarriedTool(tool) for tool in tools)


def carried_workdir(workdir: Workdir) -> Workdir:
    """The directory, with the digest of its code if a factory makes it.

    Raises:
        ToolError: ``workdir.invalid`` for a factory that cannot be imported here.
    """
    if workdir.kind != "factory":
        return workdir
    reference = workdir.path or ""
    function, module = load_factory(reference), reference.partition(":")[0]
    if not _is_the_users(module):
        return workdir
    code = getattr(function, "__code__", None)
    return workdir.with_code(_digest({module}, [code] if code is not None else []))


def fingerprint_of(tools: Iterable[Tool], workdir: Workdir | None = None) -> str:
    """What code an agent with these tools in this directory needs; ``NEUTRAL`` without any. Imports nothing."""
    digests = sorted({tool.digest for tool in tools if isinstance(tool, CarriedTool)})
    if workdir is not None and workdir.code:
        digests.append(workdir.code)
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16] if digests else NEUTRAL


def check_importable(tools: Iterable[Tool], node_id: str) -> None:
    """Import the tools here.

    Raises:
        ToolError: ``tool.not_importable`` {tool, node_id}.
    """
    for tool in tools:
        try:
            _ = tool.parameters
        except ToolError as error:
            raise ToolError(
                f"on the node {node_id}: {error.message}",
                code=error.code,
                hint=error.hint,
                details={**error.details, "node_id": node_id},
            ) from error


def code_digest(tool: Tool) -> str:
    """A digest of the code behind a tool: the files of its modules and of the user's modules that they use.

    Code that is in no file (an interactive session) travels by value, and its digest is of what is sent.
    """
    return _digest(_modules_of(tool), _functions_of(tool))


def _digest(names: set[str], functions: list[Any]) -> str:
    digest = hashlib.sha256()
    files = {name: text for name in sorted(_with_imports(names)) if (text := _source(name)) is not None}
    for name, text in files.items():
        digest.update(f"{name} {len(text)} ".encode())
        digest.update(text)
    if not names & set(files):
        for function in functions:
            digest.update(function.co_code + repr(function.co_consts).encode() + repr(function.co_names).encode())
    return digest.hexdigest()[:32]


def arrived(name: str, writes: bool, digest: str, sealed: bytes) -> CarriedTool:
    """A tool as it comes out of a pickle: closed until somebody uses it."""
    made = CarriedTool.__new__(CarriedTool)
    made.name, made.writes, made.digest = name, writes, digest
    made._tool, made._sealed = None, sealed  # pyright: ignore[reportPrivateUsage]
    return made


def _modules_of(tool: Tool) -> set[str]:
    """Where a tool's class and its function are defined."""
    found = {type(tool).__module__, str(getattr(getattr(tool, "function", None), "__module__", "") or "")}
    return {name for name in found if name and _is_the_users(name)}


def _functions_of(tool: Tool) -> list[Any]:
    function = getattr(tool, "function", None) or type(tool).run
    code = getattr(function, "__code__", None)
    return [code] if code is not None else []


def _with_imports(names: set[str]) -> set[str]:
    """These modules and the user's modules that they use, their packages among them, transitively."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found or not _is_the_users(name):
            continue
        found.add(name)
        waiting += [name.rsplit(".", 1)[0]] if "." in name else []
        waiting += _used_by(name)
    return found


def _used_by(name: str) -> set[str]:
    """What a module imports anywhere in its text, and where the objects among its globals come from."""
    module = sys.modules.get(name)
    used: set[str] = set()
    for value in list(vars(module).values()) if module is not None else []:
        if isinstance(value, ModuleType):
            # Python puts a module into its package's globals whoever imported it: that is no use of it.
            used |= set() if value.__name__.rpartition(".")[0] == name else {value.__name__}
        else:
            other = getattr(value, "__module__", None)
            used |= {other} if isinstance(other, str) else set()
    text = _source(name)
    package = name if module is not None and hasattr(module, "__path__") else name.rpartition(".")[0]
    used |= _imports_in(text, package) if text is not None else set()
    return {one for one in used if one and _is_there(one)}


@lru_cache(maxsize=4096)
def _imports_in(text: bytes, package: str) -> frozenset[str]:
    """What may be modules among the names that a module's text imports; nothing for text that is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return frozenset()  # it was edited since it was loaded, and is in the middle of that
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def _is_there(name: str) -> bool:
    """Whether there is such a module, without importing anything for the answer."""
    if name in sys.modules:
        return True
    parent = name.rpartition(".")[0]
    return (not parent or parent in sys.modules) and _file(name) is not None


def _is_the_users(name: str) -> bool:
    """Whether a module is neither of Python, nor ours, nor installed."""
    if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__":
        return False
    if name.partition(".")[0] == "kimi_ray":
        return False
    file = _file(name)
    return file is None or not any(file.is_relative_to(place) for place in _installed())


def _installed() -> set[str]:
    paths = sysconfig.get_paths()
    return {paths[key] for key in ("purelib", "platlib", "stdlib", "platstdlib")}


def _file(name: str) -> Path | None:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None and module is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            return None
        file = spec.origin if spec is not None else None
    return Path(file) if isinstance(file, str) and file.endswith(".py") else None


def _source(name: str) -> bytes | None:
    file = _file(name)
    try:
        return file.read_bytes() if file is not None else None
    except OSError:
        return None
