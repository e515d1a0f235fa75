"""Tools by name: the built-in ones, and the choice an agent makes among them and its user's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from kimi_ray.errors import ToolError
from kimi_ray.tools.builtin import Bash, Edit, Glob, Grep, Read, Write
from kimi_ray.tools.contract import Tool
from kimi_ray.tools.schema import check_name

FINAL_ANSWER = "final_answer"
"""The tool by which a model gives an answer whose form is checked (``output_schema``)."""


def builtin_tools() -> dict[str, Tool]:
    """A fresh set of the built-in tools that need nothing but an environment, by name."""
    tools: tuple[Tool, ...] = (Read(), Write(), Edit(), Glob(), Grep(), Bash())
    return {tool.name: tool for tool in tools}


def select_tools(
    names: Iterable[str], user_tools: Mapping[str, Tool] | Sequence[Tool] = (), *, elsewhere: Iterable[str] = ()
) -> list[Tool]:
    """The tools of these names, in this order, each once; a user's tool wins over a built-in one of its name.

    Args:
        names: What the agent is to have.
        user_tools: Further tools, those of features and of the user: a mapping by name, or a sequence.
        elsewhere: Names of tools that are made where the agent lives: they are passed over.

    Raises:
        ToolError: ``tool.unknown``, with near names in the hint; ``tool.bad_signature`` for a name that no server
            takes; ``tool.duplicate`` when two user tools have one name, or one has that of checked answers.
    """
    own: list[Tool] = list(user_tools.values()) if isinstance(user_tools, Mapping) else list(user_tools)
    known = builtin_tools()
    seen: set[str] = set()
    for tool in own:
        name = check_name(tool.name)
        if name in seen or name == FINAL_ANSWER:
            raise ToolError(
                f"two tools are named {name}" if name in seen else f"the name {name} is that of checked answers",
                code="tool.duplicate",
                hint="give one of them another name",
                details={"name": name},
            )
        seen.add(name)
        known[name] = tool
    selected: dict[str, Tool] = {}
    passed = frozenset(elsewhere).difference(seen)
    for name in names:
        if name in passed:
            continue
        if name not in known:
            there = sorted({*known, *passed})
            lower = {candidate.lower(): candidate for candidate in there}
            near = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.6)]
            raise ToolError(
                f"there is no tool named {name[:80]!r}",
                code="tool.unknown",
                hint=f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(there)}",
                details={"name": name[:200], "known": there},
            )
        selected[name] = known[name]
    return list(selected.values())
