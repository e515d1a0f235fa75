"""What ``replay`` calls things: a rollout by its run and item, and the directory that a recording's tools had."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from kimi_ray.cli.printing import safe

if TYPE_CHECKING:
    from pathlib import Path

    from kimi_ray.replay import AgentReplay

_LISTED = 20
"""Of so many tools the names are told."""
_ELLIPSIS = "…"
_PRIVATE = {"shared": "a copy of it", "copy": "a copy of it", "git": "a worktree of it", "factory": "what that makes"}
"""What tools can work in without touching what the recorded ones worked in, by the kind of that."""


class AgentNames:
    """How a person names the agents of a replay.

    Args:
        directory: The run directory that was named, for its items; None, or one whose rows cannot be read: items have
            the ids that the logs say.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._run_id, self._items = ("", {}) if directory is None else _items_of(directory)

    def rollout(self, one: AgentReplay) -> str | None:
        """``RUN:ITEM[#REPEAT]`` as a command takes it; None when it is no rollout's agent."""
        if one.run_id is None or one.item_id is None:
            return None
        here = self._directory is not None and one.run_id == self._run_id
        run, item = (str(self._directory), self._items.get(one.item_id)) if here else (one.run_id, None)
        return safe(shlex.quote(f"{run}:{item or one.item_id}" + (f"#{one.repeat}" if one.repeat else "")))

    def short(self, one: AgentReplay) -> str:
        """The rollout, or session and agent."""
        return self.rollout(one) or f"{one.session_id}/{one.agent_id}"

    def full(self, one: AgentReplay) -> str:
        """The rollout where it is one, and session and agent."""
        rollout, stream = self.rollout(one), f"{one.session_id}/{one.agent_id}"
        return stream if rollout is None else f"{rollout} ({stream})"


def _items_of(directory: Path) -> tuple[str, dict[str, str]]:
    """A run's id, and how its items may be named, by their ids: by their text, where that is short and of one only."""
    from kimi_ray.cli.results import name_of
    from kimi_ray.errors import RunError
    from kimi_ray.runs.run_directory import read_manifest, read_rows

    try:
        named = {row.item_id: name_of(row) for row in read_rows(directory)}
    except RunError:  # who needs the rows says so; here they only give nicer names
        named = {}
    often = Counter(named.values())
    usable = {item_id: name for item_id, name in named.items() if _ELLIPSIS not in name and often[name] == 1}
    return str(read_manifest(directory)["run_id"]), usable


def absent_tools(names: Sequence[str], *, run_tools: bool) -> list[str]:
    """What is told of tools that were not here to be compared or run, and how to bring them.

    Args:
        names: Theirs.
        run_tools: The others were run.
    """
    of_servers = [name for name in names if name.startswith("mcp__")]
    own = [name for name in names if name not in of_servers]
    bring = "--tools module:function brings your own"
    bring += "; of a Feature: KIMI_RAY_FEATURES=module:Class or `features` in config.toml"
    ask = "`mcp_servers` in config.toml names their servers" if run_tools else "--run-tools asks their servers"
    told: list[str] = []
    for group, hint in ((own, bring), (of_servers, ask)):
        listed = safe(", ".join(group[:_LISTED])) + (", ..." if len(group) > _LISTED else "")
        form = f"form of {listed} taken from the recording"
        if group:
            told.append(f"{'not here, and so not run: ' + listed + '; ' if run_tools else ''}{form} ({hint})")
    return told


def workdir_hint(refused: Sequence[AgentReplay]) -> str:
    """Which ``--workdir`` to say, for agents whose tools had no directory and refused. Never the recorded directory
    itself: a replay must not write there unasked.
    """
    recorded = list(dict.fromkeys(said for one in refused if (said := _recorded(one.workdir)) is not None))
    if not recorded:
        return "tools ran without a working directory: --workdir shared runs them here, --workdir copy in a copy of it"
    kind, where = recorded[0]
    private = shlex.quote(f"{'copy' if kind == 'shared' else kind}:{where}")
    others = f"; there were {len(recorded)} directories, this is the first" if recorded[1:] else ""
    return safe(
        f"tools ran without a working directory, when it was recorded they worked in {kind}:{where}: "
        f"--workdir {private} runs them in {_PRIVATE[kind]}{others}"
    )


def _recorded(workdir: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """Kind and place of a directory that was bound, as the command line has them."""
    kind, path = (workdir or {}).get("kind"), (workdir or {}).get("path")
    if kind not in _PRIVATE or not isinstance(path, str):
        return None
    ref = cast("Mapping[str, Any]", workdir).get("ref")
    return str(kind), f"{path}@{ref or 'HEAD'}" if kind == "git" else path
