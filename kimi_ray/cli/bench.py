"""``bench``: the numbers that the design promises, measured here and now."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kimi_ray.cli.options import Address, Json
from kimi_ray.cli.printing import print_json, say

if TYPE_CHECKING:
    from kimi_ray.bench.report import BenchReport

bench = typer.Typer(
    help="Measure this machine: turns, submits, swarms. Each bench runs in a home of its own, which it removes.",
    no_args_is_help=True,
)

Sessions = Annotated[int, typer.Option("--sessions", min=1, help="How many sessions, each with one agent.")]
Turns = Annotated[int, typer.Option("--turns", min=1, help="Prompts of each.")]
CheckpointFlag = Annotated[
    Literal["turn", "request", "none"],
    typer.Option("--checkpoint", help="Where agents wait for durability: at each turn's end, or before each request."),
]
Directory = Annotated[
    str | None, typer.Option("--dir", metavar="DIR", help="On whose disk the home is made. [the temporary directory's]")
]


@bench.command()
def turns(
    sessions: Sessions = 200,
    turns: Turns = 10,
    checkpoint: CheckpointFlag = "turn",
    directory: Directory = None,
    json: Json = False,
    address: Address = None,
) -> None:
    """Durable turns per second: a turn is a model call, a tool call and a final model call, without latency.

    The floor is a plain loop that writes and syncs the same bytes.
    """
    from kimi_ray.bench.runs import bench_turns

    settings: dict[str, Any] = {"sessions": sessions, "turns": turns, "checkpoint": checkpoint}
    _measure(bench_turns(**settings, address=address, directory=directory), json)


@bench.command()
def submit(
    sessions: Sessions = 200,
    turns: Turns = 10,
    checkpoint: CheckpointFlag = "turn",
    directory: Directory = None,
    json: Json = False,
    address: Address = None,
) -> None:
    """The turns of `bench turns`, each submitted and awaited singly by this driver."""
    from kimi_ray.bench.runs import bench_submit

    settings: dict[str, Any] = {"sessions": sessions, "turns": turns, "checkpoint": checkpoint}
    _measure(bench_submit(**settings, address=address, directory=directory), json)


@bench.command()
def swarm(
    agents: Annotated[int, typer.Option("--agents", min=1, help="How many rollouts, one turn each.")] = 1000,
    max_concurrency: Annotated[int, typer.Option("--max-concurrency", min=1, help="How many at once.")] = 256,
    directory: Directory = None,
    json: Json = False,
    address: Address = None,
) -> None:
    """Seconds from the call of a swarm to its last row, on a warm runtime."""
    from kimi_ray.bench.runs import bench_swarm

    _measure(bench_swarm(agents=agents, max_concurrency=max_concurrency, address=address, directory=directory), json)


def _measure(work: Coroutine[Any, Any, BenchReport], as_json: bool) -> None:
    data = asyncio.run(work).to_data()
    if as_json:
        print_json(data)
        return
    width = max(map(len, data))
    for key, value in data.items():
        say(f"{key.ljust(width)}  {value}")
