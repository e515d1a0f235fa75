"""What a prompt leaves behind in its session's document: one line of text without secrets.

The document is shown in listings, so a key that a user pasted into a prompt must not be in it (the log has the prompt
as it was).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

LAST_PROMPT_CHARS = 4000
TITLE_CHARS = 200
REDACTED = "[redacted]"

_PLACEHOLDERS = {"image": "[image]", "audio": "[audio]", "video": "[video]"}
# Control characters, and whitespace of any kind, become one space.
_BLANKS = re.compile(r"[\s\x00-\x1f\x7f-\x9f]+")
# What clients put beside an image that they upload, and the note that an image was compressed.
_UPLOADS = re.compile(
    r"(?i)<image\s[^<>]{0,2000}path\s{0,5}=[^<>]{0,2000}>|</image>"
    r"|<(system|image-compression|image-caption)>\s{0,9}(?:\[|\()?image[^<>]{0,40}compress[^<>]{0,2000}</\1>"
)
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_BEARER = re.compile(
    r"(?i)(authorization[\"']?\s{0,5}[:=]\s{0,5}[\"']?bearer\s{1,5})\S+|(\bbearer\s{1,5})[\w.~+/=-]{16,}"
)
# Bounded gaps: a long run of word characters must not be looked through once for each of them.
_NAMED = re.compile(
    r"(?i)((?:api[_-]?key|token|secret|passwo?r?d)[A-Za-z0-9_-]{0,40}[\"']?\s{0,5}[=:]\s{0,5})"
    r"(?:\"[^\"\n]{0,4000}(?:\"|$)|'[^'\n]{0,4000}(?:'|$)|[\"']?[^\s\"',;]+)"
)
_SK = re.compile(r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{12,}")
_JWT = re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}(?:\.[A-Za-z0-9_-]*)?")
_RUN = re.compile(r"[A-Za-z0-9_/+=.~-]{40,}")
_LONG = re.compile(r"[A-Za-z0-9_+=~-]{40,}")


def prompt_text(content: str | Iterable[Mapping[str, Any]]) -> str:
    """The text of a prompt: its text blocks joined by newlines, ``[image]`` and the like for other media."""
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for block in content:
        kind = str(block.get("type"))
        if kind == "text":
            parts.append(str(block.get("text", "")))
        elif kind in _PLACEHOLDERS:
            parts.append(_PLACEHOLDERS[kind])
    return "\n".join(parts)


def redacted(text: str) -> str:
    """The text with private keys, bearer tokens, named secrets, ``sk-`` keys and other long tokens replaced."""
    text = _PEM.sub(REDACTED, text)
    text = _BEARER.sub(lambda found: f"{found[1] or found[2]}{REDACTED}", text)
    text = _NAMED.sub(rf"\1{REDACTED}", text)
    text = _SK.sub(REDACTED, text)
    text = _JWT.sub(REDACTED, text)
    return _RUN.sub(lambda found: _long_token(found[0]), text)


def _long_token(run: str) -> str:
    """A long run without the tokens in it: paths and dotted names stay, what looks like base64 with slashes goes."""
    looks_random = all(any(kind(char) for char in run) for kind in (str.isupper, str.islower, str.isdigit))
    if looks_random and "." not in run and not run.startswith(("/", "~")):
        return REDACTED
    return _LONG.sub(REDACTED, run)


def last_prompt(content: str | Iterable[Mapping[str, Any]]) -> str:
    """A prompt as the document keeps it: one line without upload tags, redacted, at most 4,000 characters."""
    text = prompt_text(content)
    # A long prompt is cut before the patterns run over it, with room for what they remove.
    text = redacted(_UPLOADS.sub(" ", text[: LAST_PROMPT_CHARS * 8]))
    return _BLANKS.sub(" ", text).strip()[:LAST_PROMPT_CHARS]


def title_from_prompt(line: str) -> str | None:
    """The title that a prompt suggests (its first 200 characters), or None for an empty one."""
    return line[:TITLE_CHARS].strip() or None
