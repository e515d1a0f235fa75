"""Whose conversations ``sessions export --format openai|sharegpt|atif`` writes, and where."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from kimi_ray.exchange import ExportReport, Wanted
    from kimi_ray.exchange.text_export import ExportFormat
    from kimi_ray.store.open import ReadStore

_STDOUT = "-"
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_OF_THE_ROW = ("status", "stop", "output", "scores", "seed", "cost_usd", "tags", "item")


async def export_text(
    text: str, format_: str, home: str | None, out: str | None, *, force: bool
) -> tuple[str, ExportReport]:
    """Write what a person names; where it went, and what came of it."""
    from kimi_ray.cli.lookup import find_session, find_stream, is_run, open_home, split_agent
    from kimi_ray.exchange import Wanted, export_conversations

    store, _ = open_home(home, text)
    wanted: list[Wanted] | str
    if is_run(text):
        name, wanted = _of_directory(text)
    elif ":" in text or split_agent(text)[1]:
        stream = await find_stream(store, text)
        name, wanted = str(stream), [Wanted(session_id=stream.session_id, agent_id=stream.agent_id)]
    elif text.startswith("run_"):
        name, wanted = text, await _of_run(store, await find_session(store, text), text)
    else:
        name = wanted = await find_session(store, text)
    known = cast("ExportFormat", format_)
    if out == _STDOUT:
        report = await export_conversations(store, wanted, known, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return out, report
    place = out if out is not None else f"{_UNFIT.sub('-', name)}.{format_}.jsonl"
    return place, await export_conversations(store, wanted, known, place, force=force)


def _of_directory(run: str) -> tuple[str, list[Wanted]]:
    """The rollouts of a run directory in the order of the items, each with what its row says."""
    from kimi_ray.exchange import Wanted
    from kimi_ray.runs.run_directory import read_manifest, read_rows

    directory = Path(run).expanduser()
    rows = sorted(read_rows(directory), key=lambda row: (row.index, row.repeat))
    found: list[Wanted] = []
    for row in rows:
        if row.session_id and row.agent_id:
            told: dict[str, Any] = row.model_dump(mode="json", include=set(_OF_THE_ROW))
            facts = {key: told[key] for key in _OF_THE_ROW if told[key] not in (None, {})}
            found.append(Wanted(session_id=row.session_id, agent_id=row.agent_id, facts=facts))
    return str(read_manifest(directory).get("run_id")), found


async def _of_run(store: ReadStore, session_id: str, run_id: str) -> list[Wanted]:
    """The rollouts of a run by the headers of the logs: of several attempts at an item the last."""
    from kimi_ray.cli.lookup import agent_order
    from kimi_ray.exchange import Wanted

    last: dict[tuple[str, int], tuple[int, str]] = {}
    for log in await store.list(session_id):
        header = log.header or {}
        if header.get("run_id") == run_id and header.get("item_id") is not None:
            key = (str(header["item_id"]), int(header.get("repeat") or 0))
            last[key] = max(last.get(key, (0, "")), (int(header.get("attempt") or 1), log.stream.agent_id))
    agents = sorted((agent_id for _, agent_id in last.values()), key=agent_order)
    return [Wanted(session_id=session_id, agent_id=agent_id) for agent_id in agents]
