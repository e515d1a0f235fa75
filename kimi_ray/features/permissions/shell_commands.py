"""What a command line would run, as rules see it: each command by itself, whatever stands around or before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kimi_ray.features.permissions.shell_words import CommandLine, SimpleCommand, Word, split_commands

SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash", "fish", "csh", "tcsh", "mksh"})
PREFIXES = frozenset(
    {
        "sudo", "doas", "pkexec", "gosu", "su-exec", "env", "nohup", "nice", "ionice", "time", "timeout", "stdbuf",
        "setsid", "setpriv", "setarch", "prlimit", "cpulimit", "taskset", "numactl", "chrt", "xargs", "parallel",
        "watch", "command", "builtin", "exec", "coproc", "function", "noglob", "chroot", "unshare", "nsenter",
        "firejail", "bwrap", "strace", "ltrace", "perf", "valgrind", "catchsegv", "busybox", "toybox",
        "systemd-run", "flock", "unbuffer", "rlwrap", "sshpass", "proxychains", "torsocks", "tini", "dumb-init",
        "xvfb-run",
    }
)  # fmt: skip
"""Programs that run the command behind them."""
RUNNERS = frozenset(
    {
        "find", "fd", "fdfind", "script", "su", "runuser", "ssh", "docker", "podman", "kubectl", "tmux", "screen",
        "trap", "entr", "expect", "at", "batch", "gdb", "uv", "poetry", "pipenv", "conda", "nix", "nix-shell",
        "npx", "bundle",
    }
)  # fmt: skip
"""Programs that may run a command that is somewhere among their arguments."""
_USERS = frozenset({"sudo", "doas", "su", "runuser"})
"""Programs that begin a shell when no command is behind them."""
_EXEC = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_MAX_WORDS = 200
_MAX_NESTED = 6
_MAX_COMMANDS = 2000
"""Looked at in one line: what may be behind programs that run others can grow with every one of them."""
_BRACKETS = ("[", "[[")


@dataclass(slots=True)
class Commands:
    """The commands of a line, each as its words; ``unseen``: why there may be others."""

    commands: list[list[Word]] = field(default_factory=list[list[Word]])
    unseen: str | None = None

    def hide(self, why: str | None) -> None:
        """There may be commands that are not in the list."""
        if self.unseen is None:
            self.unseen = why

    def is_full(self) -> bool:
        """Whether no more is looked at; what is left is unseen."""
        if len(self.commands) < _MAX_COMMANDS:
            return False
        self.hide(f"it may run more than {_MAX_COMMANDS} commands")
        return True


def commands_of(text: str) -> Commands:
    """Every command that a line would run, or might: also behind ``sudo``, ``env``, ``xargs``, in ``sh -c '...'``."""
    found = Commands()
    _line(text, found, 0)
    return found


def only_commands(text: str) -> list[list[Word]] | None:
    """The commands of a line that is nothing but plainly written commands; None for any other."""
    line = split_commands(text)
    if line.unseen is not None or not line.plain or not line.commands:
        return None
    if any(_is_clouded(command) for command in line.commands):
        return None
    return [command.words for command in line.commands]


def name_of(word: Word) -> str:
    """The name of a program, without its directory."""
    return word.text.rsplit("/", 1)[-1]


def _is_clouded(command: SimpleCommand) -> bool:
    words = command.words
    return (
        not words
        or command.assigns
        or command.redirects
        or any(word.expands for word in words)
        or (words[0].globs and words[0].text not in _BRACKETS)
    )


def _line(text: str, found: Commands, nested: int) -> CommandLine | None:
    if nested > _MAX_NESTED:
        found.hide("it is nested too deeply")
        return None
    line = split_commands(text)
    found.hide(line.unseen)
    for command in line.commands:
        if found.is_full():
            break
        if command.words:
            _command(command.words, found, nested)
    return line


def _command(words: list[Word], found: Commands, nested: int) -> None:
    if nested > _MAX_NESTED:
        found.hide("it is nested too deeply")
        return
    head, rest = words[0], words[1:]
    if head.expands or (head.globs and head.text not in _BRACKETS):
        found.hide(f"the name of a command is not written out: {head.text[:100]}")
    found.commands.append(words)
    name = name_of(head).casefold()
    if name in SHELLS:
        _shell(rest, found, nested)
    elif name == "eval":
        if any(word.expands for word in rest):
            found.hide("eval of what only the shell knows")
        _line(" ".join(word.text for word in _operands(rest)), found, nested + 1)
    elif name in (".", "source"):
        if operands := _operands(rest):
            found.commands.append(operands)
        else:
            found.hide("commands are read from elsewhere")
    elif name == "command" and rest and rest[0].text in ("-v", "-V"):
        pass  # it only asks where a program is
    elif name in PREFIXES or name in RUNNERS:
        if name == "env" and any(word.text.startswith("-") and "s" in word.text.casefold() for word in rest):
            found.hide("env takes a text apart")
        if name in _USERS and not any(_begins(word) for word in rest):
            found.hide("a shell reads its commands from elsewhere")
        _behind(rest, found, nested, prefix=name in PREFIXES)


def _operands(rest: list[Word]) -> list[Word]:
    """Without the ``--`` that ends options."""
    return rest[1:] if rest and rest[0].text == "--" else rest


def _begins(word: Word) -> bool:
    """Whether a command may begin with this word: it is neither an option nor sets a variable."""
    return not word.text.startswith("-") and _ASSIGNMENT.match(word.text) is None


def _shell(rest: Sequence[Word], found: Commands, nested: int) -> None:
    """``sh``: what ``-c`` gives it, or a script; without one it runs what it reads."""
    operands = [word for word in rest if not word.text.startswith(("-", "+"))]
    takes_text = any(word.text.startswith("-") and not word.text.startswith("--") and "c" in word.text for word in rest)
    reads = any(word.text.startswith("-") and not word.text.startswith("--") and "s" in word.text for word in rest)
    if takes_text:
        for word in operands:
            if word.expands:
                found.hide("a shell is given what only the shell knows")
            _line(word.text, found, nested + 1)
        return
    if operands:
        found.commands.append(operands)  # a script is a command by another name
    if not operands or reads or operands[0].expands or operands[0].text.startswith(("/dev/", "/proc/")):
        only_asks = any(word.text in ("--version", "--help") for word in rest)
        if not only_asks:
            found.hide("a shell reads its commands from elsewhere")


def _behind(rest: list[Word], found: Commands, nested: int, *, prefix: bool) -> None:
    """The command behind a program's own arguments may begin with any of these words."""
    if len(rest) > _MAX_WORDS:
        found.hide(f"a command has more than {_MAX_WORDS} words")
        rest = rest[:_MAX_WORDS]
    first = True
    for index, word in enumerate(rest):
        if found.is_full():
            return
        executes = index > 0 and rest[index - 1].text in _EXEC
        if any(char.isspace() or char in ";&|" for char in word.text):
            _line(word.text, found, nested + 1)
        elif not _begins(word):
            if word.expands and prefix and first and word.text.startswith("-"):
                found.hide("options that only the shell knows")
            continue
        if ((first and prefix) or executes) and (word.expands or word.globs):
            found.hide(f"the name of a command is not written out: {word.text[:100]}")
        first = False
        if not word.expands:
            name = name_of(word).casefold()
            if name in SHELLS or name == "eval" or name in (".", "source"):
                _command(rest[index:], found, nested + 1)
            else:
                found.commands.append(rest[index:])
