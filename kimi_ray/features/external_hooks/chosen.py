"""Which hooks an event has: the ``[[hooks]]`` tables, their patterns compiled once a process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kimi_ray.settings import HookSettings


@dataclass(frozen=True, slots=True)
class Hook:
    """One configured hook. ``pattern`` None: it matches all; ``problem``: its matcher is no regular expression."""

    settings: HookSettings
    pattern: re.Pattern[str] | None
    problem: str | None = None

    def directory(self, cwd: str) -> str:
        """Where it runs for an agent that works in ``cwd``."""
        own = self.settings.cwd
        return cwd if own is None else os.path.normpath(os.path.join(cwd, os.path.expanduser(own)))


class HookTable:
    """All hooks by event, in the order of the config."""

    def __init__(self, settings: Iterable[HookSettings]) -> None:
        self._hooks: dict[str, list[Hook]] = {}
        for one in settings:
            self._hooks.setdefault(one.event, []).append(_compiled(one))

    def __contains__(self, event: str) -> bool:
        return event in self._hooks

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def matching(self, event: str, value: str, cwd: str) -> list[Hook]:
        """The hooks of an event whose pattern is found in ``value``; of the same command in the same directory one."""
        chosen: dict[tuple[str, str], Hook] = {}
        for hook in self._hooks.get(event, ()):
            if hook.problem is None and (hook.pattern is None or hook.pattern.search(value)):
                chosen.setdefault((hook.settings.command, hook.directory(cwd)), hook)
        return list(chosen.values())

    def broken(self, event: str) -> list[Hook]:
        """The hooks of an event that never run: their matcher is no regular expression."""
        return [hook for hook in self._hooks.get(event, ()) if hook.problem is not None]


def _compiled(settings: HookSettings) -> Hook:
    if not settings.matcher:
        return Hook(settings, None)
    try:
        return Hook(settings, re.compile(settings.matcher))
    except (re.error, RecursionError, OverflowError) as error:
        return Hook(settings, None, f"the matcher {settings.matcher[:200]!r} is no regular expression: {error}")
