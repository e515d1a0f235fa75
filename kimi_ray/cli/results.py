"""What a swarm brought, after its end: a table for people, a document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kimi_ray.cli.printing import counted, one_line, say, table, terminal_width

if TYPE_CHECKING:
    from kimi_ray.runs import ResultRow, SwarmReport

ROWS_SHOWN = 30
_TEXT_COLUMNS = 100
_NAME_COLUMNS = 32
_NAME_CHARS = 80


def report_data(report: SwarmReport, *, home: str, interrupted: bool, kept: int) -> dict[str, Any]:
    """The final document of ``swarm --json``; the rows are in ``<run_dir>/results.jsonl``."""
    return {
        "run_id": report.run_id,
        "session_id": report.session_id,
        "run_dir": report.run_dir,
        "home": home,
        "ok": report.ok,
        "interrupted": interrupted,
        "rollouts": len(report.rows),
        "kept": kept,
        "totals": report.totals,
        "usage": report.usage.model_dump(mode="json"),
        "cost_usd": report.cost_usd,
        "wall_s": report.wall_s,
        "scores": {name: score.model_dump(mode="json") for name, score in report.scores.items()},
    }


def print_rows(rows: tuple[ResultRow, ...], *, shown: int = ROWS_SHOWN) -> None:
    """The rows, those that did not complete first when not all are shown."""
    chosen = rows if len(rows) <= shown else sorted(rows, key=lambda row: row.status == "completed")[:shown]
    repeated = any(row.repeat for row in rows)
    cells = [
        [
            name_of(row) + (f"#{row.repeat}" if repeated else ""),
            row.status if row.status != "limit" else row.stop,
            str(row.steps),
            str(row.tool_calls),
            str(row.usage.total),
            f"{row.timing.wall_ms / 1000:.2f}",
            one_line(_said(row), _TEXT_COLUMNS),
        ]
        for row in chosen
    ]
    head = ["item", "status", "steps", "tools", "tokens", "s", "answer"]
    say(table(head, cells, width=terminal_width(sys.stdout), right="..rrrr"))
    if len(rows) > len(chosen):
        say(f"... and {len(rows) - len(chosen)} more rows")


def print_summary(report: SwarmReport) -> None:
    """One line of counts, tokens, time and cost, and one of the scores if there are any."""
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in report.totals.items() if count)
    usage = report.usage
    parts = [
        f"{counted(len(report.rows), 'rollout')}: {counts}",
        f"{usage.total} tokens ({usage.output} of them output{', estimated' if usage.estimated else ''})",
        f"{report.wall_s:.1f} s",
    ]
    if report.cost_usd is not None:
        parts.append(f"${report.cost_usd:.4f}")
    say("; ".join(parts))
    if report.scores:
        means = (
            f"{one_line(name, _NAME_COLUMNS)} mean {one.mean:.4g} (n={one.n})" for name, one in report.scores.items()
        )
        say(f"scores: {', '.join(means)}")


def limiter_line(manifest: Mapping[str, Any]) -> str | None:
    """How many requests at once the model got, from ``run.json``; None where nobody counted them."""
    told: dict[str, Any] = manifest.get("limiter") or {}
    first = told.get("first")
    if first is None:
        return None
    last = told.get("last", first)
    lowest, highest = min(first, told.get("lowest", first)), max(first, told.get("highest", first))
    line = f"{first} requests at once" if lowest == highest else f"{first} requests at once at first, {last} at last"
    if lowest != highest:
        line += f", between {lowest} and {highest}"
    if told.get("cuts"):
        line += f", {counted(told['cuts'], 'cut')}"
    return line + (f", paused for {told['paused_s']:.1f} s" if told.get("paused_s") else "")


def name_of(row: ResultRow) -> str:
    """What a person knows the item by, safe, on one line: itself if it is short text, or columns whose id is only their
    hash; else its id."""
    item = row.item
    if not isinstance(item, str):
        from kimi_ray.runs.canonical import sha256_hex

        unnamed = row.item_id.startswith(sha256_hex(item)[:12])
        return one_line(item_text(item) if unnamed else row.item_id, _NAME_COLUMNS)
    if len(item) > _NAME_CHARS or "\n" in item:
        return one_line(row.item_id, _NAME_COLUMNS)
    if len(item) > _NAME_COLUMNS and not any(map(str.isspace, item)):
        item = "…" + item[1 - _NAME_COLUMNS :]  # of a path the end says more
    return one_line(item, _NAME_COLUMNS)


def item_text(item: Any) -> str:
    """An item as text: a string as it is, columns as JSON."""
    return item if isinstance(item, str) else json.dumps(item, ensure_ascii=False, separators=(",", ":"))


def _said(row: ResultRow) -> str:
    if row.error is not None:
        return f"{row.error.code}: {row.error.message}"
    if row.text or row.output is None:
        return row.text or ""
    return json.dumps(row.output, ensure_ascii=False, separators=(",", ":"))
