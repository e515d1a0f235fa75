"""Tools: what a model can call, the place where the calls work, and the order in which they run.

What enters here declares itself through ``contract.py`` and works through an ``Environment``. Nothing of agents,
sessions, models or Ray is known here. Import names from here; ``builtin`` has a module a tool.
"""

from kimi_ray.tools.contract import (
    Access,
    Accesses,
    DirectoryEntry,
    Environment,
    ExecResult,
    FileStat,
    KnowsFiles,
    RunningCommand,
    StartsCommands,
    Tool,
    ToolContext,
    ToolOutput,
    ToolSource,
)
from kimi_ray.tools.function import FunctionTool, as_tool, load_tool, tool
from kimi_ray.tools.local import LocalEnvironment
from kimi_ray.tools.registry import builtin_tools, select_tools
from kimi_ray.tools.results import error_output
from kimi_ray.tools.scheduling import ScheduledCall, run_calls
from kimi_ray.tools.workdirs import FactoryContext, PreparedWorkdir, check_workdir, parse_workdir, prepare_workdir

__all__ = [
    "Access",
    "Accesses",
    "DirectoryEntry",
    "Environment",
    "ExecResult",
    "FactoryContext",
    "FileStat",
    "FunctionTool",
    "KnowsFiles",
    "LocalEnvironment",
    "PreparedWorkdir",
    "RunningCommand",
    "ScheduledCall",
    "StartsCommands",
    "Tool",
    "ToolContext",
    "ToolOutput",
    "ToolSource",
    "as_tool",
    "builtin_tools",
    "check_workdir",
    "error_output",
    "load_tool",
    "parse_workdir",
    "prepare_workdir",
    "run_calls",
    "select_tools",
    "tool",
]
