"""Where a run's time went: a picture of every rollout's model calls and tool calls, and a table of its tools.

    python examples/run_picture.py                       # makes a small run of its own: scripted model, no network
    python examples/run_picture.py runs/20261130T...     # a run of yours; --out picture.svg, --home DIR for its logs

The picture is an SVG file, which every browser opens; it shows what a bar is where the mouse rests on it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from html import escape
from pathlib import Path
from typing import Any

import kimi_ray
from kimi_ray import frames
from kimi_ray.llm import ChatRequest, Step

COLOURS = {"answered": "#4c78a8", "cut": "#9ecae9", "failed": "#e45756", "ok": "#54a24b", "error": "#f58518"}
LANE, LEFT, WIDTH, MOST = 18, 150, 900, 60


async def look_up(word: str) -> str:
    """Look a word up. It takes its time, and does not know every word."""
    await asyncio.sleep(0.01 * len(word))
    if word.startswith("x"):
        raise LookupError(f"{word} is in no dictionary")
    return f"{word}: a word of {len(word)} letters"


def model(request: ChatRequest) -> Step:
    """A scripted model: it looks one to three things up, and answers."""
    word = next(m["content"][0]["text"] for m in request.messages if m["source"]["kind"] == "user").split()[-1]
    rng = random.Random(f"{word}{request.step}")
    latency_s = rng.uniform(0.02, 0.12)
    if request.step < len(word) % 3 + 1:
        call = Step.call("look_up", {"word": word[request.step :]})
        return Step(tool_calls=call.tool_calls, latency_s=latency_s)
    return Step(text=f"I know {word} now.", latency_s=latency_s)


async def make_run(directory: Path) -> Path:
    """A run of eight rollouts, four at a time."""
    async with kimi_ray.Runtime.connect(directory / "home", address="in-process") as runtime:
        name = "scripted:run_picture:model"
        session = await runtime.workspace(directory).create_session(model=name)
        words = "lantern box xylem harbour tin xenon meadow quill".split()
        how: dict[str, Any] = {"profile": "bare", "tools": [look_up], "model": name, "max_concurrency": 4}
        await session.swarm("Learn the word {{item}}", words, out=directory / "run", **how)
    return directory / "run"


def draw(tables: dict[str, Any]) -> str:
    """A lane for each rollout, in the order in which they began; calls as bars over seconds."""
    rows = {(row["session_id"], row["agent_id"]): row for row in tables["rows"].to_pylist()}
    bars = [
        (call["session_id"], call["agent_id"], call["started"], call["ended"], call[outcome], call.get("name", "model"))
        for frame, outcome in (("model_calls", "outcome"), ("tool_calls", "status"))
        for call in tables[frame].to_pylist()
        if call["started"] is not None and call["ended"] is not None
    ]
    if not bars:
        return "<svg xmlns='http://www.w3.org/2000/svg' width='300' height='40'><text y='20'>no calls</text></svg>"
    first, last = min(bar[2] for bar in bars), max(bar[3] for bar in bars)
    seconds = max((last - first).total_seconds(), 0.001)
    lanes = list(dict.fromkeys((bar[0], bar[1]) for bar in sorted(bars, key=lambda bar: bar[2])))[:MOST]
    height = LANE * (len(lanes) + 3)
    style = "font-family='sans-serif' font-size='11'"
    svg = [f"<svg xmlns='http://www.w3.org/2000/svg' width='{LEFT + WIDTH + 40}' height='{height}' {style}>"]
    svg.append("<rect width='100%' height='100%' fill='white'/>")
    for at, (what, colour) in enumerate(COLOURS.items()):
        svg.append(f"<rect x='{LEFT + 90 * at}' y='6' width='10' height='10' fill='{colour}'/>")
        svg.append(f"<text x='{LEFT + 90 * at + 14}' y='15'>{what}</text>")
    for tick in range(6):
        x = LEFT + WIDTH * tick / 5
        svg.append(f"<path d='M{x:.1f} {LANE * 1.5}V{height - LANE}' stroke='#ddd'/>")
        svg.append(f"<text x='{x:.1f}' y='{height - 5}' text-anchor='middle'>{seconds * tick / 5:.2f} s</text>")
    for number, lane in enumerate(lanes):
        row = rows.get(lane)
        label = lane[1] if row is None else f"{str(row['item']).strip(chr(34))[:18]} ({row['status']})"
        svg.append(f"<text x='4' y='{LANE * (number + 2) + 12}'>{escape(label)}</text>")
    for session_id, agent_id, began, ended, outcome, name in [bar for bar in bars if bar[:2] in lanes]:
        y = LANE * (lanes.index((session_id, agent_id)) + 2) + 2
        x = LEFT + WIDTH * (began - first).total_seconds() / seconds
        width = max(WIDTH * (ended - began).total_seconds() / seconds, 1.5)
        told = escape(f"{name}, {outcome}: {(ended - began).total_seconds() * 1000:.0f} ms")
        place, fill = f"x='{x:.1f}' y='{y}' width='{width:.1f}' height='{LANE - 5}'", COLOURS.get(outcome, "#bbb")
        svg.append(f"<rect {place} fill='{fill}'><title>{told}</title></rect>")
    return "\n".join([*svg, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="a run directory; without one a small run is made")
    parser.add_argument("--home", help="where its logs are, if not where it was run")
    parser.add_argument("--out", type=Path, default=Path("run.svg"))
    arguments = parser.parse_args()
    run = arguments.run or asyncio.run(make_run(Path(tempfile.mkdtemp())))
    try:
        tables = frames.tables(run, ["rows", "model_calls", "tool_calls"], home=arguments.home, on_damage="skip")
    except kimi_ray.KimiRayError as error:
        parser.exit(2, f"{run} cannot be read: {error.message}\n")
    for problem in frames.problems(tables["rows"]):
        print(f"left out: {problem['message']}")
    by_tool = tables["tool_calls"].group_by(["name", "status"]).aggregate([("call_id", "count"), ("run_ms", "mean")])
    print(f"{'tool':<12} {'status':<12} {'calls':>6} {'mean ms':>8}")
    for line in by_tool.sort_by([("name", "ascending"), ("status", "descending")]).to_pylist():
        print(f"{line['name']:<12} {line['status']:<12} {line['call_id_count']:>6} {line['run_ms_mean'] or 0:>8.1f}")
    arguments.out.write_text(draw(tables), encoding="utf-8")
    counts = [(tables["rows"].num_rows, "rollout"), (tables["model_calls"].num_rows, "model call")]
    print(", ".join(f"{n} {what}{'' if n == 1 else 's'}" for n, what in counts) + f": {arguments.out}")


if __name__ == "__main__":
    main()
