"""``stream``: many agents that stream at the same time from a server which is not what makes them slow.

What is measured is the way of a token from the socket into the log: CPU for each, what comes on top of the server's own
time until the first is there, and how late the hosts' loops are meanwhile. The agents live before, with open logs, and
have asked the server once. The floor reads as many of the same streams with plain sockets and decodes their JSON.

Every answer is checked to its last token, and the logs to hold every answer, or the bench fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from kimi_ray.agent.specs import PromptResult
from kimi_ray.bench import loop_lag
from kimi_ray.bench.host_logs import bench_runtime
from kimi_ray.bench.loop_lag import LoopFacts, percentile
from kimi_ray.bench.processes import Meter, cpu_s
from kimi_ray.bench.report import BenchReport
from kimi_ray.bench.token_server import TOKEN
from kimi_ray.errors import KimiRayError
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from kimi_ray.settings import Profile, Sampling
from kimi_ray.store import open_store

T = TypeVar("T")

MODEL = "paced"
PROFILE = Profile(name="bench", system_prompt="You talk.")
MEASURED_TURN = 1
START_BOUND_S = 30.0
SLACK_S = 120.0
PAGE_EVENTS = 5000
_MAX_REPORT_BYTES = 64 << 20


async def bench_stream(
    *,
    agents: int = 500,
    tokens: int = 500,
    tokens_per_s: float = 50.0,
    ramp_s: float = 5.0,
    record_chunks: Literal["all", "coalesced", "none"] = "coalesced",
    address: str | None = None,
    directory: str | None = None,
) -> BenchReport:
    """CPU microseconds for each streamed token, all processes together but the server.

    Args:
        agents: How many stream at once.
        tokens: Of each answer.
        tokens_per_s: At which the server sends each answer.
        ramp_s: Seconds over which the requests are spread evenly; 0 sends all at once.
        record_chunks: Which parts of a stream become events.
        address: Where to run; None is a local Ray.
        directory: On whose disk the home is; None is the temporary directory's.
    """
    work = _Work(agents, tokens, ramp_s, tokens / tokens_per_s + ramp_s + SLACK_S)
    async with _token_server(tokens_per_s) as server:
        table = {"base_url": server.url, "api_key_env": "", "adaptive_connections": False, "max_attempts": 1}
        settings = {
            "models": {MODEL: table | {"record_chunks": record_chunks}},
            "features": (loop_lag.FEATURE,),
        }
        async with bench_runtime(address, directory, settings) as runtime:
            sessions = await _living_agents(runtime, agents)
            await server.report()
            served_cpu_s = server.cpu_s()
            with Meter() as meter:
                began = time.perf_counter()
                results = await work.spread(lambda number: _answer(sessions[number], tokens))
                wall_s = time.perf_counter() - began
            served_cpu_s = server.cpu_s() - served_cpu_s
            served = await server.report()
            _check(results, work)
            await asyncio.gather(*(session.main.flush() for session in sessions))
            facts = _Facts(agents, tokens, served)
            await facts.read(runtime.config.home)
        reader = _PlainReader(server.url, tokens)
        before = time.process_time()
        plain = await work.spread(lambda _: reader.read())
        floor_cpu_s = time.process_time() - before
        plain_served = await server.report()
    used_s = meter.cpu_s - served_cpu_s
    return BenchReport(
        bench="stream",
        value=used_s / work.tokens * 1e6,
        unit="us/token",
        floor=floor_cpu_s / work.tokens * 1e6,
        ratio=used_s / floor_cpu_s,
        wall_s=wall_s,
        cpu_s=used_s,
        peak_pss_mb=meter.peak_pss_mb,
        figures={
            "agents": agents,
            "tokens": tokens,
            "tokens_per_s": tokens_per_s,
            "ramp_s": ramp_s,
            "record_chunks": record_chunks,
            "tokens_at_once_per_s": work.tokens / wall_s,
            **facts.figures(),
            "plain_added_first_token_ms": _spread([ms - plain_served.requests[name][0] for name, ms in plain]),
            "server": {
                "cpu_s": round(served_cpu_s, 3),
                "late_p50_ms": percentile(served.late_ms, 0.5),
                "late_p99_ms": percentile(served.late_ms, 0.99),
                "late_max_ms": percentile(served.late_ms, 1.0),
            },
            "cpu_by_role": meter.cpu_by_role,
        },
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """So many answers of so many tokens each, begun one after the other over ``ramp_s``."""

    answers: int
    tokens_each: int
    ramp_s: float
    bound_s: float

    @property
    def tokens(self) -> int:
        return self.answers * self.tokens_each

    async def spread(self, one: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
        """Run all, each at its time.

        Raises:
            KimiRayError: ``bench.incomplete`` when they do not end.
        """

        async def at_its_time(number: int) -> T:
            await asyncio.sleep(self.ramp_s * number / self.answers)
            return await one(number)

        try:
            async with asyncio.timeout(self.bound_s):
                return list(await asyncio.gather(*map(at_its_time, range(self.answers))))
        except TimeoutError:
            raise KimiRayError(f"the streams did not end in {self.bound_s:g} s", code="bench.incomplete") from None


# -- the agents ------------------------------------------------------------------------------------------------------


async def _living_agents(runtime: Runtime, count: int) -> list[Session]:
    """Sessions whose agents have had one answer of one token."""
    workspace = runtime.workspace(runtime.config.home)
    sessions = await asyncio.gather(
        *(workspace.create_session(profile=PROFILE, model=MODEL) for _ in range(count)),
    )
    for result in await asyncio.gather(*(_answer(session, 1) for session in sessions)):
        result.raise_for_state()
    return list(sessions)


async def _answer(session: Session, tokens: int) -> PromptResult:
    prompt = await session.main.submit("Talk.", sampling=Sampling(max_output_tokens=tokens))
    return await prompt.result()


def _check(results: list[PromptResult], work: _Work) -> None:
    for result in results:
        result.raise_for_state()
    whole = sum(result.text == TOKEN * work.tokens_each for result in results)
    if whole != work.answers or any(result.usage.output != work.tokens_each for result in results):
        raise KimiRayError(f"{whole} of {work.answers} answers are whole", code="bench.incomplete")


class _Facts:
    """What the logs tell of the measured turn, beside what the server tells of the same answers."""

    def __init__(self, agents: int, tokens: int, served: _Served) -> None:
        self._agents = agents
        self._tokens = tokens
        self._served = served
        self._first_ms: list[float] = []
        self._whole_ms: list[float] = []
        self._events = 0
        self._measured = False
        self._loops: dict[int, LoopFacts] = {}

    async def read(self, home: str) -> None:
        """Read all logs, and hold them against what was served.

        Raises:
            KimiRayError: ``bench.incomplete``.
        """
        store = open_store(home)
        for log in await store.list():
            seq = 0
            while lines := (await store.read_from(log.stream, seq, PAGE_EVENTS)).lines:
                seq += len(lines)
                self._page(list(map(json.loads, lines)))
        if len(self._first_ms) != self._agents or not self._loops:
            raise KimiRayError(
                f"{len(self._first_ms)} of {self._agents} answers are in the logs", code="bench.incomplete"
            )

    def _page(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "turn/start":
                self._measured = event["data"]["turn"] == MEASURED_TURN
            if self._measured:
                self._event(event["type"], event["data"])

    def _event(self, kind: str, data: dict[str, Any]) -> None:
        self._events += 1
        if kind == "llm/response":
            first_ms, whole_ms = self._served.requests[data["response_id"]]
            self._first_ms.append(data["timing"]["ttft_ms"] - first_ms)
            self._whole_ms.append(data["timing"]["total_ms"] - whole_ms)
        elif kind == loop_lag.EVENT:
            facts = LoopFacts.model_validate(data)
            known = self._loops.get(facts.pid)
            if known is None or known.samples < facts.samples:
                self._loops[facts.pid] = facts

    def figures(self) -> dict[str, Any]:
        """Of all answers; of the loops the worst host."""
        loops = self._loops.values()
        return {
            "events_per_token": self._events / (self._agents * self._tokens),
            "hosts": len(loops),
            "added_first_token_ms": _spread(self._first_ms),
            "added_whole_ms": _spread(self._whole_ms),
            "loop_lag_ms": {
                "p50": max(loop.p50_ms for loop in loops),
                "p99": max(loop.p99_ms for loop in loops),
                "max": max(loop.max_ms for loop in loops),
            },
        }


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99), "max": percentile(ordered, 1.0)}


# -- the server ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Served:
    """What the server says of itself; milliseconds."""

    requests: dict[str, tuple[float, float]]
    """All so far by id, from the request's coming to its first token and to its last."""
    late_ms: list[float]
    """Its beats since the report before, in order of size."""


class _TokenServer:
    """The server's process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        self.url = url

    def cpu_s(self) -> float:
        """CPU seconds that it has used so far."""
        return cpu_s([self._process.pid])

    async def report(self) -> _Served:
        """What it says of itself."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"report\n")
        told = json.loads(await _line(self._process))
        requests = {name: (first, whole) for name, (first, whole) in told["requests"].items()}
        return _Served(requests, sorted(told["late_ms"]))


@asynccontextmanager
async def _token_server(tokens_per_s: float) -> AsyncGenerator[_TokenServer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        f"from kimi_ray.bench.token_server import main; main({tokens_per_s!r})",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_REPORT_BYTES,
        start_new_session=True,  # Ctrl-C is the bench's, which then ends it
    )
    try:
        yield _TokenServer(process, f"http://127.0.0.1:{int(await _line(process))}/v1")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_BOUND_S):
            line = await process.stdout.readline()
    except TimeoutError:
        line = b""
    if not line:
        raise KimiRayError("the server of tokens says nothing", code="bench.incomplete")
    return line


# -- the floor -------------------------------------------------------------------------------------------------------


class _PlainReader:
    """Reads the same answers with plain sockets, one JSON object after the other."""

    def __init__(self, url: str, tokens: int) -> None:
        self._port = urlsplit(url).port
        self._tokens = tokens
        body = json.dumps({"model": MODEL, "max_tokens": tokens, "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body

    async def read(self) -> tuple[str, float]:
        """One answer to its end: its id, and milliseconds until its first token."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            began = time.perf_counter()
            writer.write(self._request)
            name, first_ms, seen = "", 0.0, 0
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    break
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if event["choices"] and event["choices"][0]["delta"].get("content"):
                        seen += 1
                        if seen == 1:
                            name, first_ms = event["id"], (time.perf_counter() - began) * 1000
        finally:
            writer.close()
        if seen != self._tokens:
            raise KimiRayError(f"{seen} of {self._tokens} tokens came from the server", code="bench.incomplete")
        return name, first_ms
