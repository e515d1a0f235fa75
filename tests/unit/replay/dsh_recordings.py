"""The recorded conversations of ``tests/fixtures/dsh_recordings`` as a store that the harness would have written.

In those files places and times are left out (they follow from the order) and some values are placeholders.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kimi_ray.exchange.dsh.header import encode_segment, project_key

RECORDINGS = Path(__file__).parents[2] / "fixtures" / "dsh_recordings"
NAMES = sorted(path.name for path in RECORDINGS.iterdir() if path.is_dir())


def rows_of(name: str) -> list[list[dict[str, Any]]]:
    """Each session of a recording, the main one first: its header and its rows, as they are in the files."""
    files = sorted((RECORDINGS / name).glob("session*.jsonl"), key=lambda path: (len(path.name), path.name))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in files]


def write_store(name: str, root: Path, cwd: str) -> list[str]:
    """Write the sessions of a recording below ``root``, completed; gives their ids, the main one first."""
    ids: list[str] = []
    for first, *rows in rows_of(name):
        header: dict[str, Any] = {**first, "cwd": cwd, "createdAt": first["createdAt"] or 1_780_000_000_000}
        header["id"] = header["id"].replace("{{sessionId}}", f"recorded-{name}")
        header.setdefault("delegationDepth", 0)
        ids.append(header["id"])
        place = root / str(project_key(cwd)) / str(encode_segment(str(header["id"])))
        place.mkdir(parents=True)
        seq = 0
        lines: list[dict[str, Any]] = [header]
        for row in rows:
            time = int(header["createdAt"]) + seq
            members = row["data"].get("texts", row["data"].get("args")) if row["type"].endswith("-chunks") else None
            if members is not None:
                lines.append({"type": row["type"], "seq0": seq, "time0": time, "data": row["data"]})
                seq += len(members)
            else:
                lines.append({"seq": seq, "time": time, **row})
                seq += 1
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        (place / "session.jsonl").write_text(text)
    return ids
