"""The reading rules of the harness a second time, in another way, to hold the reader to."""

from __future__ import annotations

import json
from typing import Any

import zstandard


def plain_verdict(data: bytes) -> Any:
    """How many events a plain log stores, or ``corrupt``. For logs whose header and events are otherwise right."""
    head, *rest = data.split(b"\n")
    if not rest:
        return "corrupt"
    try:
        if json.loads(head)["type"] != "session":
            return "corrupt"
    except (ValueError, KeyError, TypeError):
        return "corrupt"
    return lines_verdict(rest[:-1])


def lines_verdict(lines: list[bytes]) -> Any:
    """The same for complete event lines."""
    rows = [seqs_and_types(row) for row in lines]
    kept = stored = 0
    for row in rows:
        if row is None or [seq for seq, _ in row] != list(range(stored, stored + len(row))):
            break
        stored += len(row)
        kept += 1
    lost = [kind for row in rows[kept:] if row is not None for _, kind in row]
    return "corrupt" if "turn/end" in lost else stored


def seqs_and_types(row: bytes) -> list[tuple[Any, Any]] | None:
    """What a line holds, or None when it cannot be read."""
    try:
        value = json.loads(row.decode(errors="replace"))
    except ValueError:
        return None
    if not isinstance(value, dict):
        return [(None, None)]
    if str(value.get("type")).endswith("-chunks"):
        members = value["data"].get("texts", value["data"].get("args"))
        if len(members) != len(value["data"]["dt"]) + 1:
            return None
        return [(value["seq0"] + at, "assistant/chunk") for at in range(len(members))]
    return [(value.get("seq"), value.get("type"))]


def frames(data: bytes) -> tuple[list[bytes], bytes | None]:
    """The texts of the complete frames, and what is left in a torn one (None: it is not there)."""
    texts: list[bytes] = []
    while data:
        reader = zstandard.ZstdDecompressor().decompressobj()
        out = reader.decompress(data)
        if not reader.eof:
            return texts, out
        texts.append(out)
        data = reader.unused_data
    return texts, None


def cut_verdict(data: bytes) -> Any:
    """How many events a compressed log stores that was cut somewhere and is not damaged otherwise."""
    texts, torn = frames(data)
    if not texts:
        return "corrupt"
    lines = b"".join([*texts[1:], torn or b""]).split(b"\n")[:-1]
    return lines_verdict(lines)
