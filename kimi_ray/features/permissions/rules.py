"""Rules: ``Name`` or ``Name(pattern)``, and whether a call is one that a rule means.

To forbid or to ask, it is enough that a call may be meant; to allow, all of it must be. So a pattern over commands
forbids a line in which any command matches or something cannot be seen, and allows one whose commands all match.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kimi_ray.errors import ConfigError, ToolError
from kimi_ray.features.permissions.calls import Call, FileNames
from kimi_ray.features.permissions.shell_commands import name_of
from kimi_ray.features.permissions.shell_words import Word
from kimi_ray.settings import PermissionRule
from kimi_ray.tools.builtin.patterns import PathPattern

_Scope = Literal["absolute", "inside", "anywhere"]
"""Where a pattern looks: at whole paths, at those in the working directory, at names in any directory."""
_FORM = re.compile(r"([^()\s]+)(?:\((.+)\))?", re.DOTALL)
_GLOBS = "*?["


@dataclass(frozen=True, slots=True)
class Match:
    """A rule that means a call; ``unseen``: only perhaps, for this reason."""

    rule: str
    unseen: str | None = None


class Rule:
    """One rule.

    Raises:
        ConfigError: ``config.invalid``: it is not of the form, or its pattern cannot be used.
    """

    def __init__(self, settings: PermissionRule) -> None:
        self.text = settings.tool
        self.decision: Literal["allow", "ask", "deny"] = settings.decision
        found = _FORM.fullmatch(settings.tool)
        if found is None:
            raise _bad(settings.tool, "it is neither Name nor Name(pattern)")
        self._tool = re.compile(fnmatch.translate(found.group(1)))
        pattern = found.group(2)
        self._commands = None if pattern is None else CommandPattern(pattern)
        self._files = None if pattern is None else FilePattern(pattern, settings.tool)
        self._text = None if pattern is None else re.compile(fnmatch.translate(pattern))
        self._all = pattern is None or pattern in ("*", "**")

    def means(self, call: Call) -> Match | None:
        """Whether the call, or any of it, is or may be meant: to forbid it, or to ask."""
        if self._tool.match(call.tool) is None:
            return None
        if self._all or self._commands is None or self._files is None or self._text is None:
            return Match(self.text)
        if call.command is not None:
            if self._commands.matches_line(call.command) or any(
                self._commands.may_match(words) for words in call.commands.commands
            ):
                return Match(self.text)
            return Match(self.text, call.commands.unseen) if call.commands.unseen is not None else None
        if call.files:
            hit = any(self._files.may_match(names, call) for names in call.files)
        else:
            hit = self._text.match(call.about) is not None
        return Match(self.text) if hit else None

    def covers_all(self, call: Call) -> bool:
        """Whether every call of the tool is allowed."""
        return self._all and self._tool.match(call.tool) is not None

    def covers_command(self, call: Call, words: Sequence[Word]) -> bool:
        """Whether this one command is allowed."""
        return self._commands is not None and self._tool.match(call.tool) is not None and self._commands.matches(words)

    def covers_file(self, call: Call, names: FileNames) -> bool:
        """Whether this one file is allowed."""
        return self._files is not None and self._tool.match(call.tool) is not None and self._files.matches(names, call)

    def covers_text(self, call: Call) -> bool:
        """Whether these arguments are allowed."""
        return (
            self._text is not None
            and self._tool.match(call.tool) is not None
            and self._text.match(call.about) is not None
        )


class CommandPattern:
    """A pattern over one command: ``git push *``; what follows a blank and a star may be missing."""

    def __init__(self, pattern: str) -> None:
        pattern = " ".join(pattern.split())
        pattern = f"{pattern[:-2]} *" if pattern.endswith(":*") else pattern
        exact = [pattern, *([pattern[:-2]] if pattern.endswith(" *") else [])]
        self._exact = [re.compile(fnmatch.translate(one)) for one in exact]
        loose = [*exact, *([] if pattern.endswith("*") else [f"{pattern} *"])]
        self._loose = [re.compile(fnmatch.translate(one.casefold())) for one in loose]
        self._begins = _beginning(pattern)

    def matches_line(self, line: str) -> bool:
        """Whether a whole line matches, as it is written."""
        return any(one.match(line) for one in self._exact)

    def matches(self, words: Sequence[Word]) -> bool:
        """Whether a plainly written command matches."""
        line = " ".join(word.text for word in words)
        return any(one.match(line) for one in self._exact)

    def may_match(self, words: Sequence[Word]) -> bool:
        """Whether a command may match, by its program's name in any directory, and whatever its variables hold."""
        rest = [word.text for word in words[1:]]
        for head in dict.fromkeys((words[0].text, name_of(words[0]))):
            line = " ".join((head, *rest)).casefold()
            if any(one.match(line) for one in self._loose):
                return True
            for expected, word, text in zip(self._begins, words, (head, *rest), strict=False):
                if word is not words[0] and (word.expands or word.globs):
                    return True
                if expected != text.casefold():
                    break
        return False


class FilePattern:
    """A pattern over paths: relative to the working directory, absolute, with ``~``; without a slash a name anywhere.

    A pattern that means a directory means all that is in it.
    """

    def __init__(self, pattern: str, rule: str) -> None:
        self._pattern = os.path.expanduser(pattern)
        self._rule = rule
        self._by_root: dict[str, tuple[_Scope, PathPattern, tuple[PathPattern, ...]]] = {}
        self._of("/")

    def matches(self, names: FileNames, call: Call) -> bool:
        """Whether the file itself, where links lead, is meant."""
        scope, exact, _ = self._of(call.root)
        return _hits(exact, _seen(names.real[0], call, scope))

    def may_match(self, names: FileNames, call: Call) -> bool:
        """Whether any of its names is meant, in any case of letters, or is the directory of all that is meant."""
        scope, _, loose = self._of(call.root)
        seen = (_seen(name, call, scope) for name in names.all)
        return any(name is not None and any(_hits(one, name.casefold()) for one in loose) for name in seen)

    def _of(self, root: str) -> tuple[_Scope, PathPattern, tuple[PathPattern, ...]]:
        found = self._by_root.get(root)
        if found is None:
            pattern = self._pattern
            scope: _Scope = "inside" if "/" in pattern or pattern in (".", "..") else "anywhere"
            if scope == "inside":
                pattern = os.path.normpath(pattern)
                if pattern.startswith(".."):
                    pattern = os.path.normpath(os.path.join(_escaped(root), pattern))
                if pattern.startswith("/"):
                    scope = "absolute"
                pattern = pattern.strip("/")
                pattern = "**" if pattern in ("", ".") else pattern
            anywhere = scope == "anywhere"
            directory, _, rest = pattern.casefold().rpartition("/")
            named = directory.rpartition("/")[2]
            # all in a directory that is named: a search of the directory itself looks into all of it
            whole = (directory,) if named and rest in ("*", "**") and not set(_GLOBS) & set(named) else ()
            try:
                exact = PathPattern(pattern, anywhere=anywhere)
                loose = tuple(PathPattern(one, anywhere=anywhere) for one in (pattern.casefold(), *whole))
            except ToolError as error:
                raise _bad(self._rule, error.message) from error
            found = self._by_root[root] = (scope, exact, loose)
        return found


class RuleBook:
    """All rules of the config, by decision, each in its order."""

    def __init__(self, settings: Iterable[PermissionRule]) -> None:
        rules = [Rule(one) for one in settings]
        self.deny = [rule for rule in rules if rule.decision == "deny"]
        self.ask = [rule for rule in rules if rule.decision == "ask"]
        self.allow = [rule for rule in rules if rule.decision == "allow"]

    @staticmethod
    def meaning(rules: Sequence[Rule], call: Call) -> Match | None:
        """The first rule that means the call; one that only may mean it comes after all others."""
        perhaps: Match | None = None
        for rule in rules:
            match = rule.means(call)
            if match is not None and match.unseen is None:
                return match
            perhaps = perhaps or match
        return perhaps

    def allowing(self, call: Call) -> str | None:
        """The rule that allows the call; several together may allow its parts, the first is named."""
        whole = next((rule for rule in self.allow if rule.covers_all(call)), None)
        if whole is not None:
            return whole.text
        used: list[Rule | None]
        if call.command is not None:
            commands = call.plain_commands
            if commands is None:
                return None
            used = [next((r for r in self.allow if r.covers_command(call, words)), None) for words in commands]
        elif call.files:
            used = [next((r for r in self.allow if r.covers_file(call, names)), None) for names in call.files]
        else:
            used = [next((r for r in self.allow if r.covers_text(call)), None)]
        first = used[0] if used else None
        return first.text if first is not None and all(rule is not None for rule in used) else None


def _beginning(pattern: str) -> tuple[str, ...]:
    """The words of a pattern up to the first one that holds a wildcard, and that one unless it is nothing but ``*``."""
    words: list[str] = []
    for word in pattern.casefold().split():
        if word == "*":
            break
        words.append(word)
        if any(char in word for char in _GLOBS):
            break
    return tuple(words)


def _seen(path: str, call: Call, scope: _Scope) -> str | None:
    """The path as a pattern sees it, without the leading slash; None: it is not where the pattern looks."""
    if scope == "absolute":
        return path.lstrip("/")
    inside = call.inside(path)
    return None if scope == "inside" and inside.startswith("/") else inside.lstrip("/")


def _hits(pattern: PathPattern, path: str | None) -> bool:
    """Whether the path, or a directory that it is in, matches."""
    if path is None:
        return False
    parts = path.split("/")
    return any(pattern.matches("/".join(parts[:end])) for end in range(len(parts), 0, -1))


def _escaped(root: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", root)


def _bad(rule: str, why: str) -> ConfigError:
    return ConfigError(
        f"the permission rule {rule!r} cannot be used: {why}",
        code="config.invalid",
        hint="write Tool or Tool(pattern), such as Bash(rm *) or Write(src/**)",
        details={"key": "permissions", "problem": why},
    )
