"""Taking a shell command line apart, on the safe side: every simple command in it, or word that it cannot be seen.

This is no shell. It knows enough of one (quotes, substitutions, here-documents, operators) to find every place where
a command begins, and where it does not know it says so (``unseen``): whoever forbids must then take the line for
forbidden, whoever allows must not allow it. It may see commands where there are none, never the other way round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_BLANKS = " \t"
_ENDS_WORD = frozenset(" \t\n;&|()<>")
_RESERVED = frozenset({"if", "then", "else", "elif", "fi", "while", "until", "do", "done", "esac", "{", "}", "!"})
_STRUCTURE = frozenset({"for", "select", "case", "function", "[[", "coproc", "time"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[[^\]]*\])?\+?=")
_JOINED = re.compile(r"\S\\\n\S")
_HARD_IN_BRACES = frozenset("'\"\\`${\n")
_SPECIAL_PARAMETERS = frozenset("@*#?$!-0123456789")
_HARMLESS_TARGETS = frozenset({"/dev/null"})
_MAX_LENGTH = 100_000
_MAX_DEPTH = 20


@dataclass(slots=True)
class Word:
    """One word, its quotes removed."""

    text: str
    expands: bool = False
    """It holds what only the shell knows: a variable, a substitution, braces."""
    globs: bool = False
    """It holds ``*``, ``?`` or ``[``: the names of files."""
    quoted: bool = False


@dataclass(slots=True)
class SimpleCommand:
    """A command with its words, from its name on."""

    words: list[Word] = field(default_factory=list[Word])
    assigns: bool = False
    """Variables are set before it."""
    redirects: bool = False
    """A file is read or written for it."""


@dataclass(slots=True)
class CommandLine:
    """What was found in a line."""

    commands: list[SimpleCommand] = field(default_factory=list[SimpleCommand])
    unseen: str | None = None
    """Why there may be commands that were not found, or None."""
    plain: bool = True
    """Nothing but simple commands, one after the other."""

    def hide(self, why: str) -> None:
        """Something cannot be seen."""
        if self.unseen is None:
            self.unseen = why


def split_commands(text: str) -> CommandLine:
    """The simple commands of a command line, also those in substitutions, groups and branches."""
    found = CommandLine()
    if len(text) > _MAX_LENGTH:
        found.hide(f"it has more than {_MAX_LENGTH} characters")
    else:
        if _JOINED.search(text):
            found.hide("a word that goes on in the next line")
        _Reader(text, found, 0).read()
    return found


@dataclass(slots=True)
class _HereDocument:
    end: str
    strips_tabs: bool
    expands: bool


class _Reader:
    """Reads one text; substitutions in it are read by the same reader where they stand."""

    def __init__(self, text: str, found: CommandLine, depth: int) -> None:
        self._text = text
        self._found = found
        self._depth = depth
        self._at = 0
        self._command = SimpleCommand()
        self._documents: list[_HereDocument] = []
        self._brackets = 0
        self._after_case = False
        """Behind ``;;``: what comes up to the next parenthesis is a pattern of a case."""

    def read(self, *, inside: bool = False) -> None:
        """Read commands to the end, or with ``inside`` to the parenthesis that closes a substitution."""
        if self._depth > _MAX_DEPTH:
            self._found.hide("it is nested too deeply")
            self._at = len(self._text)
            return
        parentheses = 0
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in _BLANKS:
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif char == "\n":
                self._after_case &= not self._command.words
                self._end_command()
                self._at += 1
                self._brackets = 0
                self._skip_documents(inside)
            elif char == "#":
                self._comment(inside=inside or parentheses > 0)
            elif char == ")" and inside and not parentheses:
                self._end_command()
                self._at += 1
                return
            elif char in "()":
                if char == ")" and self._after_case and not parentheses:
                    self._command = SimpleCommand()
                self._after_case &= char == "("
                parentheses = max(0, parentheses + (1 if char == "(" else -1))
                self._found.plain = False
                self._end_command()
                self._at += 1
            elif char in ";&|":
                self._end_command()
                ends_case = self._text.startswith((";;", ";&"), self._at)
                self._after_case = ends_case or (self._after_case and char == "|")
                self._at += 2 if ends_case else 1
            elif char in "<>":
                self._redirect(inside=parentheses > 0)
            else:
                self._add(self._word(), inside=inside)
        self._end_command()
        if inside:
            self._found.hide("a substitution is not closed")

    # -- commands ---------------------------------------------------------------------------------------------------

    def _add(self, word: Word, *, inside: bool) -> None:
        following = self._text[self._at : self._at + 1]
        if following in ("<", ">") and not word.quoted and (word.text.isdigit() or word.text.startswith("{")):
            if not word.text.isdigit():
                self._found.hide("a redirection to a variable")
            return  # the number of a descriptor
        if inside and word.text == "case" and not word.quoted:
            self._found.hide("a case inside a substitution")
        self._command.words.append(word)

    def _end_command(self) -> None:
        command, self._command = self._command, SimpleCommand()
        words = command.words
        while words and not words[0].quoted and words[0].text in _RESERVED:
            del words[0]
            self._found.plain = False
        while words and _ASSIGNMENT.match(words[0].text):
            del words[0]
            command.assigns = True
        if words and words[0].text in _STRUCTURE:
            self._found.plain = False
        if words or command.assigns or command.redirects:
            self._found.commands.append(command)

    def _comment(self, *, inside: bool) -> None:
        words = self._command.words
        if inside or (words and words[0].text == "[["):
            self._found.hide("a # in parentheses or brackets")
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _redirect(self, *, inside: bool) -> None:
        text, at = self._text, self._at
        if text.startswith("<<", at) and not text.startswith("<<<", at):
            self._document(inside)
            return
        if text.startswith(("<(", ">("), at):
            self._found.plain = False
            self._at += 1
            return
        operator = next(op for op in ("<<<", ">>", ">&", "<&", ">|", "<>", "<", ">") if text.startswith(op, at))
        self._at += len(operator)
        self._skip_blanks()
        if text.startswith(("<(", ">("), self._at):
            self._command.redirects, self._found.plain = True, False
            self._at += 1
            return
        target = self._target()
        if target is None:
            return
        copies = operator in (">&", "<&") and (target.text.rstrip("-").isdigit() or target.text == "-")
        if target.expands or not (copies or target.text in _HARMLESS_TARGETS):
            self._command.redirects = True
            self._found.plain = False

    def _skip_blanks(self) -> None:
        while self._text.startswith((" ", "\t", "\\\n"), self._at):
            self._at += 1 if self._text[self._at] in _BLANKS else 2

    def _target(self) -> Word | None:
        self._skip_blanks()
        if self._at >= len(self._text) or self._text[self._at] in _ENDS_WORD:
            self._found.hide("a redirection without a target")
            return None
        return self._word()

    def _document(self, inside: bool) -> None:
        """``<<``: in arithmetic and in subscripts it is something else, and what follows is then no document."""
        if inside or self._brackets > 0:
            self._found.hide("a << in parentheses or brackets")
        strips = self._text.startswith("<<-", self._at)
        self._at += 3 if strips else 2
        self._found.plain = False
        end = self._target()
        if end is None:
            return
        if end.expands:
            self._found.hide("a here-document whose end is not written out")
        self._documents.append(_HereDocument(end.text, strips, not end.quoted))

    def _skip_documents(self, inside: bool) -> None:
        documents, self._documents = self._documents, []
        for document in documents:
            body: list[str] = []
            while self._at < len(self._text):
                stop = self._text.find("\n", self._at)
                line = self._text[self._at :] if stop < 0 else self._text[self._at : stop]
                self._at = len(self._text) if stop < 0 else stop + 1
                text = line.lstrip("\t") if document.strips_tabs else line
                if text == document.end:
                    break
                if inside and text.startswith(document.end):
                    self._found.hide("a here-document in a substitution that some shells end elsewhere")
                body.append(line)
            if document.expands:
                if any(line.endswith("\\") for line in body):
                    self._found.hide("a here-document with a line that goes on")
                self._expand_body("\n".join(body))

    def _expand_body(self, body: str) -> None:
        reader = _Reader(body, self._found, self._depth + 1)
        sink: list[str] = []
        while reader._at < len(body):
            char = body[reader._at]
            if char == "\\":
                reader._at += 2
            elif char == "$":
                reader._dollar(sink, quoted=True)
            elif char == "`":
                reader._backticks(sink)
            else:
                reader._at += 1

    # -- words ------------------------------------------------------------------------------------------------------

    def _word(self) -> Word:
        parts: list[str] = []
        word = Word("")
        text = self._text
        brace = comma = False
        while self._at < len(text) and (char := text[self._at]) not in _ENDS_WORD:
            if char == "\\":
                following = text[self._at + 1 : self._at + 2]
                self._at += 2
                if following != "\n":
                    word.quoted = True
                    parts.append(following or "\\")
            elif char == "'":
                word.quoted = True
                end = text.find("'", self._at + 1)
                if end < 0:
                    self._found.hide("a quote is not closed")
                    end = len(text)
                parts.append(text[self._at + 1 : end])
                self._at = end + 1
            elif char == '"':
                word.quoted = True
                word.expands |= self._double(parts)
            elif char == "`":
                self._backticks(parts)
                word.expands = True
            elif char == "$":
                word.expands |= self._dollar(parts, quoted=False)
            else:
                word.globs |= char in "*?["
                self._brackets = max(0, self._brackets + (char == "[") - (char == "]"))
                brace |= char == "{"
                comma |= brace and (char == "," or text.startswith("..", self._at))
                parts.append(char)
                self._at += 1
        word.expands |= comma
        word.text = "".join(parts)
        return word

    def _double(self, parts: list[str]) -> bool:
        """A double-quoted string; whether it holds what only the shell knows."""
        expands = False
        text = self._text
        self._at += 1
        while self._at < len(text):
            char = text[self._at]
            if char == '"':
                self._at += 1
                return expands
            if char == "\\":
                following = text[self._at + 1 : self._at + 2]
                self._at += 2
                if following in ("$", "`", '"', "\\"):
                    parts.append(following)
                elif following != "\n":
                    parts.append("\\" + following)
            elif char == "`":
                self._backticks(parts)
                expands = True
            elif char == "$":
                expands |= self._dollar(parts, quoted=True)
            else:
                parts.append(char)
                self._at += 1
        self._found.hide("a quote is not closed")
        return expands

    def _dollar(self, parts: list[str], *, quoted: bool) -> bool:
        """What begins with ``$``; whether it is more than the character."""
        text, begin = self._text, self._at
        following = text[begin + 1 : begin + 2]
        if following == "(":
            self._at += 2
            self._substitution()
        elif following == "{":
            self._parameter()
        elif following == "[":
            self._found.hide("arithmetic in $[ ]")
            self._at += 2
        elif following == "'" and not quoted:
            self._ansi_string()
        elif following == '"' and not quoted:
            self._at += 1
            return self._double(parts) or True
        elif following in _SPECIAL_PARAMETERS and following:
            self._at += 2
        elif (name := _NAME.match(text, begin + 1)) is not None:
            self._at = name.end()
        else:
            self._at += 1
            parts.append("$")
            return False
        parts.append(text[begin : self._at])
        return True

    def _substitution(self) -> None:
        """``$(`` up to its end, as commands of their own. A here-document of the line around would begin in it."""
        outer, documents, brackets = self._command, self._documents, self._brackets
        if documents and "\n" in self._text[self._at :]:
            self._found.hide("a substitution behind the beginning of a here-document")
        self._command, self._documents, self._brackets = SimpleCommand(), [], 0
        self._depth += 1
        self.read(inside=True)
        self._depth -= 1
        self._command, self._documents, self._brackets = outer, documents, brackets
        self._found.plain = False

    def _parameter(self) -> None:
        end = self._text.find("}", self._at)
        inner = self._text[self._at + 2 : end]
        if end < 0 or not _HARD_IN_BRACES.isdisjoint(inner):
            self._found.hide("a ${ } with quotes or expansions in it")
        self._at = len(self._text) if end < 0 else end + 1

    def _ansi_string(self) -> None:
        self._at += 2
        while self._at < len(self._text):
            char = self._text[self._at]
            if self._text.startswith("\\'", self._at):
                self._found.hide("a quote in $' '")  # a plain sh ends the string there
            self._at += 2 if char == "\\" else 1
            if char == "'":
                return
        self._found.hide("a quote is not closed")

    def _backticks(self, parts: list[str]) -> None:
        begin = self._at
        end = begin + 1
        while end < len(self._text) and self._text[end] != "`":
            end += 2 if self._text[end] == "\\" else 1
        inner = self._text[begin + 1 : end]
        if end >= len(self._text):
            self._found.hide("a backquote is not closed")
        if "\\" in inner:
            self._found.hide("a backslash in backquotes")
        if self._documents and "\n" in inner:
            self._found.hide("a substitution behind the beginning of a here-document")
        self._at = end + 1
        self._found.plain = False
        _Reader(inner, self._found, self._depth + 1).read()
        parts.append(self._text[begin : self._at])
