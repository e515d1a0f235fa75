"""The header of a session: its line in a file, its shape, and the directory that it demands."""

from __future__ import annotations

import re
from typing import Any, Final, cast

from kimi_ray.exchange.dsh.errors import InvalidSession, Refusal, corrupt, unsupported
from kimi_ray.exchange.dsh.js_json import is_number, is_safe_integer, parse_bytes, shown
from kimi_ray.exchange.dsh.model import JsonObject

FORMAT_VERSION: Final = 0
NO_CWD: Final = "_no-cwd"
FIELDS: Final = (
    "version",
    "id",
    "createdAt",
    "cwd",
    "parentSession",
    "seedLength",
    "origin",
    "delegationDepth",
    "agentPreset",
)

_SEPARATORS = frozenset("/\\:")
_PROJECT_UNITS = 251
_ESCAPED = re.compile(r"~([0-9A-F]{4})")
_LITERAL = re.compile(r"[A-Za-z0-9._-]")


def parse_header_line(record: bytes) -> JsonObject:
    """The header in the first line of a log. Another version is refused before its shape is looked at.

    Args:
        record: The line with its newline.

    Raises:
        Refusal: ``unsupported`` for another version, ``corrupt`` for anything else that is wrong.
    """
    if not record.endswith(b"\n") or record.index(b"\n") != len(record) - 1:
        raise corrupt("empty or header-less session log", line=1, byte=0)
    try:
        value = parse_bytes(record[:-1]).value
    except ValueError:
        raise corrupt("corrupt session log: header line is not valid JSON", line=1, byte=0) from None
    if isinstance(value, dict):
        found = cast("JsonObject", value).get("version")
        if is_number(found) and found != FORMAT_VERSION:
            raise version_refusal(cast("JsonObject", value).get("id"), found)
    if not is_header_line(value):
        raise corrupt("corrupt session log: first line is not a session header", line=1, byte=0)
    if "sandboxMode" in value or "approvalPolicy" in value:
        raise corrupt("session header uses retired policy baseline fields", line=1, byte=0)
    return header_of(cast("JsonObject", value))


def listed_header(record: bytes) -> JsonObject | None:
    """The header as a listing shows it, also of another version; None for what is none."""
    try:
        value = parse_bytes(record.removesuffix(b"\n")).value
    except ValueError:
        return None
    return header_of(cast("JsonObject", value)) if is_header_line(value) else None


def header_of(line: JsonObject) -> JsonObject:
    """The known fields in their order."""
    return {key: line[key] for key in FIELDS if key in line}


def is_header_line(value: Any) -> bool:
    """Whether a parsed first line has the shape of a header. Some fields are only looked at by ``check_header``."""
    if not isinstance(value, dict):
        return False
    line = cast("JsonObject", value)
    return (
        line.get("type") == "session"
        and is_number(line.get("version"))
        and type(line.get("id")) is str
        and _is_count(line.get("createdAt"))
        and _is_count(line.get("delegationDepth"))
        and ("origin" not in line or line["origin"] == "subagent")
        and ("agentPreset" not in line or type(line["agentPreset"]) is str)
    )


def version_refusal(session_id: Any, version: Any) -> Refusal:
    """The refusal of another format version, in both directions."""
    named = f'session "{shown(session_id)}" uses log format v{shown(version)}'
    if version > FORMAT_VERSION:
        return unsupported(
            f"{named}, but this harness reads only v{FORMAT_VERSION}: the log was written by a newer harness — "
            "upgrade the harness to open it",
            line=1,
        )
    return unsupported(
        f"{named}, older than the supported v{FORMAT_VERSION}, and this build ships no upgrade path for it", line=1
    )


def check_header(header: JsonObject) -> None:
    """What restoring a session demands of its header.

    Raises:
        InvalidSession: naming the field.
    """
    if not is_safe_integer(header.get("createdAt")) or header["createdAt"] < 0:
        raise InvalidSession("session header createdAt must be a non-negative safe integer")
    for key in ("cwd", "parentSession", "agentPreset"):
        if key in header and type(header[key]) is not str:
            raise InvalidSession(f"session header {key} must be a string")
    if "cwd" in header and not header["cwd"].startswith("/"):
        raise InvalidSession(f'session header cwd must be an absolute path, got "{header["cwd"]}"')
    for key in ("seedLength", "delegationDepth"):
        if key in header and (not is_safe_integer(header[key]) or header[key] < 0):
            raise InvalidSession(f"session header {key} must be a non-negative safe integer")
    if "origin" in header and header["origin"] != "subagent":
        raise InvalidSession('session header origin must be "subagent"')


def encode_segment(session_id: str) -> str | None:
    """The directory name of a session id; None for the empty one, which has none."""
    if session_id in (".", ".."):
        return "~002E" * len(session_id)
    return _escaped(session_id) or None


def decode_segment(segment: str) -> str | None:
    """The session id of a directory name, or None when it is not one that ``encode_segment`` gives."""
    units = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), segment)
    # Two escaped halves are one character; a half alone stays what it is.
    text = units.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return text if encode_segment(text) == segment else None


def project_key(cwd: Any) -> str | None:
    """The directory name of a project, made of its path; None when there is none for this value."""
    if cwd is None:
        return NO_CWD
    if type(cwd) is not str or not cwd:
        return None
    flat: list[str] = []
    separated = False
    for char in cwd:
        if char in _SEPARATORS:
            flat.append("" if separated else "-")
            separated = True
        else:
            flat.append(_escaped(char))
            separated = False
    slug = "".join(flat).lstrip("-") or "root"
    return f"--{slug[:_PROJECT_UNITS]}--"


def _escaped(text: str) -> str:
    if _LITERAL.fullmatch(text):
        return text
    units = text.encode("utf-16-be", "surrogatepass")
    codes = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
    return "".join(chr(code) if _LITERAL.fullmatch(chr(code)) else f"~{code:04X}" for code in codes)


def _is_count(value: Any) -> bool:
    return type(value) is int and is_safe_integer(value) and value >= 0
