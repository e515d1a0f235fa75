"""Command lines of all kinds, made up by chance: a shell runs ``zap`` in some, and it is not easy to see in which."""

from __future__ import annotations

import random

LONGEST = 500
_SLIPS = ["'", '"', "\\", "(", ")", "\n", "E", "<<E\n", "$(", "`", ";", "#", " ", "$", ";;"]


class LineMaker:
    """Makes lines.

    Args:
        chance: Decides.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def line(self) -> str:
        """A line, sometimes with a slip or two of the pen."""
        made = self._line(3)
        for _ in range(self._chance.choice([0, 0, 0, 1, 1, 2])):
            at = self._chance.randint(0, len(made))
            drop = self._chance.random() < 0.4
            made = made[:at] + ("" if drop else self._chance.choice(_SLIPS)) + made[at + drop :]
        return made[:LONGEST]

    def _of(self, *choices: str) -> str:
        return self._chance.choice(choices)

    def _word(self, depth: int) -> str:
        kinds = 1 if depth <= 0 else 10
        match self._chance.randrange(kinds):
            case 1:
                return f"$({self._line(depth - 1)})"
            case 2:
                return f'"$({self._line(depth - 1)})"'
            case 3:
                return f"`{self._simple(depth - 1).replace('`', '')}`"
            case 4:
                return f"<({self._line(depth - 1)})"
            case 5:
                return "$((1<<2))"
            case 6:
                return f'"a\n{self._of("E", "b", "zap")}"'
            case 7:
                return "'" + self._of("a\nE\nzap\n", "#", ";zap", "$(") + "'"
            case _:
                return self._of("a", "b", "-x", "x=1", "E", "'q'", '"d q"', "$x", "${x}", "*", "1")

    def _simple(self, depth: int) -> str:
        before = self._of("", "", "", "A=1 ", "env ", "! ", "time ", "command ", ">o ", "2>&1 ", "<o ")
        name = self._of("true", "echo", "ok", "zap", "zap", ":", "x", "bash -c", "eval")
        if name in ("bash -c", "eval"):
            return f"{before}{name} '{self._of('zap', 'true; zap', 'echo zap')}'"
        words = "".join(" " + self._word(depth - 1) for _ in range(self._chance.randint(0, 2)))
        return before + name + words + self._of("", "", "", "", " >o", " 2>&1", " </dev/null", " # c", " &>o")

    def _statement(self, depth: int) -> str:
        if depth <= 0:
            return self._simple(depth)
        inner = self._line(depth - 1)
        match self._chance.randrange(18):
            case 0 | 1:
                return f"({inner})"
            case 2:
                return f"{{ {inner}\n}}"
            case 3:
                return f"if {self._statement(depth - 1)}; then {inner}\nfi"
            case 4:
                return f"for i in a b; do {inner}\ndone"
            case 5:
                second = self._of("*)", "(b|c)", "b | *)")
                return f"case {self._word(depth - 1)} in a) {inner}\n;;\n{second} {self._line(depth - 1)}\n;; esac"
            case 6:
                return f"f() {{ {inner}\n}}\nf"
            case 7:
                return "[[ a == " + self._of("a", "(a)", "#", "'b'") + " ]]"
            case 8:
                return "((x=1<<2))"
            case 9 | 10:
                return self._document()
            case _:
                return self._simple(depth)

    def _document(self) -> str:
        parts = ["zap", "a", "$(zap)", "E ", "  E", "$x", "`true`", "a\\", "'", '"', "EE", "E)"]
        body = "".join(self._chance.choice(parts) + "\n" for _ in range(self._chance.randint(0, 3)))
        begin = self._of("cat ", "", "x ") + self._of("<<", "<<-", "<< ") + self._of("E", "'E'", "\\E", '"E"')
        return begin + self._of("", " >o", " && true", " | cat", " # c") + "\n" + body + self._of("E", "\tE") + "\n"

    def _line(self, depth: int) -> str:
        made = self._statement(depth)
        for _ in range(self._chance.randint(0, 2)):
            joint = "" if made.endswith("\n") else self._of(";", "\n", "&&", "||", "|", "&\n", " ; ")
            made += joint + self._statement(depth - 1)
        return made
