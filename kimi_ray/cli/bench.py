"""``bench``: the numbers that the design promises, measured here and now."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from kimi_ray.cli.options import Address, Json
from kimi_ray.cli.printing import print_json, say, table

if TYPE_CHECKING:
    from kimi_ray.bench.report import BenchReport

bench = typer.Typer(
    help="Measure this machine: turns, swarms, logs. Each bench runs in a home of its own, which it removes.",
    no_args_is_help=True,
)

Sessions = Annotated[int, typer.Option("--sessions", min=1, help="How many sessions, each with one agent.")]
Turns = Annotated[int, typer.Option("--turns", min=1, help="Prompts of each.")]
CheckpointFlag = Annotated[
    Literal["turn", "request", "none"],
    typer.Option("--checkpoint", help="Where agents wait for durability: at each turn's end, or before each request."),
]
Forks = Annotated[int, typer.Option("--repeats", min=1, help="How many forks; the median is told.")]
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


@bench.command()
def stream(
    agents: Annotated[int, typer.Option("--agents", min=1, help="How many stream at the same time.")] = 500,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Of each answer.")] = 500,
    tokens_per_s: Annotated[
        float, typer.Option("--tokens-per-s", min=0.1, help="At which the server sends each answer.")
    ] = 50.0,
    ramp_s: Annotated[
        float, typer.Option("--ramp-s", min=0, help="Seconds over which the requests are spread; 0: all at once.")
    ] = 5.0,
    record_chunks: Annotated[
        Literal["all", "coalesced", "none"],
        typer.Option("--record-chunks", help="Which parts of a stream become events."),
    ] = "coalesced",
    directory: Directory = None,
    json: Json = False,
    address: Address = None,
) -> None:
    """CPU microseconds for each token of many streams at once, time added to the first one, lag of the hosts' loops.

    A server of its own process sends the tokens; its CPU is not counted. The floor reads the same streams with plain
    sockets.
    """
    from kimi_ray.bench.stream import bench_stream

    settings: dict[str, Any] = {"tokens": tokens, "tokens_per_s": tokens_per_s, "record_chunks": record_chunks}
    _measure(bench_stream(agents=agents, **settings, ramp_s=ramp_s, address=address, directory=directory), json)


Backend = Annotated[Literal["jsonl", "sqlite"], typer.Option("--backend", help="How the store keeps logs.")]
Compression = Annotated[Literal["none", "zstd"], typer.Option("--compression", help="Of JSONL logs.")]


Events = Annotated[int, typer.Option("--events", min=1, help="Events of the log, in turns of 50.")]
FlushEvery = Annotated[int, typer.Option("--flush-every", min=1, help="Events of a log between flushes.")]
SyncDelay = Annotated[
    float, typer.Option("--sync-delay-ms", min=0, help="Milliseconds that every sync takes in addition.")
]


@bench.command()
def append(
    sessions: Annotated[int, typer.Option("--sessions", min=1, help="How many logs, flushed at the same time.")] = 20,
    events: Annotated[int, typer.Option("--events", min=1, help="Events of each.")] = 1000,
    flush_every: FlushEvery = 50,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often; the median is told.")] = 5,
    backend: Backend = "jsonl",
    compression: Compression = "none",
    sync_delay_ms: SyncDelay = 0.0,
    directory: Directory = None,
    json: Json = False,
    address: Address = None,
) -> None:
    """Durable events per second through one host and the store, all read back afterwards.

    The floor is a plain loop that writes and syncs the same bytes as often.
    """
    from kimi_ray.bench.append import bench_append

    settings: dict[str, Any] = {"sessions": sessions, "events": events, "flush_every": flush_every, "repeats": repeats}
    stored: dict[str, Any] = {"backend": backend, "compression": compression, "sync_delay_ms": sync_delay_ms}
    _measure(bench_append(**settings, **stored, address=address, directory=directory), json)


@bench.command()
def resume(
    events: Events = 200_000,
    flush_every: FlushEvery = 50,
    backend: Backend = "jsonl",
    compression: Compression = "none",
    directory: Directory = None,
    json: Json = False,
) -> None:
    """Seconds from the resume of a long session to its next answer; and reading its log whole and at its end.

    The floor reads the log's file once. Without Ray; peak memory is that of fresh processes.
    """
    from kimi_ray.bench.resume import bench_resume

    settings: dict[str, Any] = {"events": events, "flush_every": flush_every, "directory": directory}
    _measure(bench_resume(**settings, backend=backend, compression=compression), json)


@bench.command()
def fork(
    events: Events = 200_000,
    flush_every: FlushEvery = 50,
    repeats: Forks = 3,
    backend: Backend = "jsonl",
    compression: Compression = "none",
    sync_delay_ms: SyncDelay = 0.0,
    directory: Directory = None,
    json: Json = False,
) -> None:
    """Seconds for a fork of a long log, and by how much the store's memory grew.

    The floor copies the log's file and syncs it once. Without Ray.
    """
    from kimi_ray.bench.fork import bench_fork

    settings: dict[str, Any] = {"events": events, "flush_every": flush_every, "repeats": repeats}
    stored: dict[str, Any] = {"backend": backend, "compression": compression, "sync_delay_ms": sync_delay_ms}
    _measure(bench_fork(**settings, **stored, directory=directory), json)


@bench.command(name="session-fork")
def session_fork(
    events: Events = 200_000,
    flush_every: FlushEvery = 50,
    repeats: Forks = 3,
    backend: Backend = "jsonl",
    compression: Compression = "none",
    sync_delay_ms: SyncDelay = 0.0,
    directory: Directory = None,
    json: Json = False,
) -> None:
    """Seconds for a fork of a whole session with a long log by the API, and by how much memory grew.

    The floor copies the log's file and syncs it once. Without Ray.
    """
    from kimi_ray.bench.session_fork import bench_session_fork

    settings: dict[str, Any] = {"events": events, "flush_every": flush_every, "repeats": repeats}
    stored: dict[str, Any] = {"backend": backend, "compression": compression, "sync_delay_ms": sync_delay_ms}
    _measure(bench_session_fork(**settings, **stored, directory=directory), json)


@bench.command()
def index(
    sessions: Annotated[int, typer.Option("--sessions", min=100, help="How many sessions there are.")] = 100_000,
    directory: Directory = None,
    json: Json = False,
) -> None:
    """Milliseconds to list the 50 newest of many sessions, and to build the index of them.

    The floor is the plain query of the same rows. Without Ray.
    """
    from kimi_ray.bench.index import bench_index

    _measure(bench_index(sessions=sessions, directory=directory), json)


@bench.command()
def loss(
    kills: Annotated[int, typer.Option("--kills", min=1, help="How often each case is killed.")] = 10,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the moments of the kills. [a new one]")] = None,
    directory: Directory = None,
    json: Json = False,
) -> None:
    """What a process that is killed at a random moment loses, and what a power cut after it could, by mode.

    The value is the worst loss of all; the window that bounds it stands in the floor's place.
    """
    from kimi_ray.bench.loss import bench_loss

    _measure(bench_loss(kills=kills, seed=seed, directory=directory), json)


def _measure(work: Coroutine[Any, Any, BenchReport], as_json: bool) -> None:
    data = asyncio.run(work).to_data()
    if as_json:
        print_json(data)
        return
    width = max(map(len, data))
    for key, value in data.items():
        if not isinstance(value, dict):
            say(f"{key.ljust(width)}  {value}")
    for key, value in data.items():
        if isinstance(value, dict) and value:
            say(f"\n{_cases(key, cast('dict[str, Any]', value))}")


def _cases(title: str, facts: dict[str, Any]) -> str:
    """A table of cases with the facts of each, or of facts alone."""
    cases = {name: cast("dict[str, Any]", case) for name, case in facts.items() if isinstance(case, dict)}
    if not cases:
        return table([title, ""], [[name, str(value)] for name, value in facts.items()], right=".r")
    names = list(dict.fromkeys(name for case in cases.values() for name in case))
    rows = [[case, *(str(found.get(name, "")) for name in names)] for case, found in cases.items()]
    return table([title, *names], rows, right="." + "r" * len(names))
