"""The bench of streams: a small one runs through; its server keeps its pace, and what is not whole is noticed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kimi_ray.bench import stream, token_server
from kimi_ray.bench.loop_lag import LoopFacts, LoopLag, percentile
from kimi_ray.bench.stream import bench_stream
from kimi_ray.cli.app import app
from kimi_ray.errors import KimiRayError

CONTRACT = ["bench", "value", "unit", "floor", "ratio", "wall_s", "cpu_s", "peak_pss_mb"]
SMALL: dict[str, Any] = {"agents": 6, "tokens": 30, "tokens_per_s": 60.0, "ramp_s": 0.2, "address": "in-process"}


async def test_agents_stream_and_the_bench_tells_what_it_cost(tmp_path: Path) -> None:
    report = (await bench_stream(**SMALL, directory=str(tmp_path))).to_data()
    assert list(report)[:8] == CONTRACT
    assert (report["bench"], report["unit"], report["agents"], report["tokens"]) == ("stream", "us/token", 6, 30)
    # 29 tokens after the first one, at 60 a second: whoever measured less did not stream.
    assert report["wall_s"] >= 29 / 60
    assert report["hosts"] >= 1 and report["events_per_token"] > 0
    lag, added, server = report["loop_lag_ms"], report["added_first_token_ms"], report["server"]
    assert 0 <= lag["p50"] <= lag["p99"] <= lag["max"]
    assert 0 <= added["p50"] <= added["p99"] <= added["max"] < 1000 * report["wall_s"]
    assert 0 <= server["late_p50_ms"] <= server["late_max_ms"]
    assert list(tmp_path.iterdir()) == []


async def test_every_chunk_is_an_event_where_all_are_recorded(tmp_path: Path) -> None:
    report = (await bench_stream(**SMALL, record_chunks="all", directory=str(tmp_path))).to_data()
    assert report["events_per_token"] > 1


async def test_an_answer_that_is_not_whole_fails_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "TOKEN", "another ")
    with pytest.raises(KimiRayError, match="0 of 6 answers are whole") as caught:
        await bench_stream(**SMALL, directory=str(tmp_path))
    assert caught.value.code == "bench.incomplete"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
async def serving() -> AsyncGenerator[tuple[int, token_server.Clock]]:
    """The server's port, in this process, and its clock."""
    clock, served = token_server.Clock(100.0), dict[str, token_server.Served]()
    server = await asyncio.get_running_loop().create_server(
        lambda: token_server.Connection(clock, served), "127.0.0.1", 0
    )
    beating = asyncio.create_task(clock.run())
    yield server.sockets[0].getsockname()[1], clock
    beating.cancel()
    server.close()


async def answer(reader: asyncio.StreamReader) -> list[dict[str, Any]]:
    """The events of one chunked answer."""
    events: list[dict[str, Any]] = []
    await reader.readuntil(b"\r\n\r\n")
    while size := int(await reader.readline(), 16):
        piece = await reader.readexactly(size + 2)
        if piece != b"data: [DONE]\n\n\r\n":
            events.append(json.loads(piece.removeprefix(b"data: ")))
    assert await reader.readline() == b"\r\n"
    return events


async def test_one_connection_has_answers_one_after_the_other_however_its_bytes_come(
    serving: tuple[int, token_server.Clock],
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving[0])
    names: list[str] = []
    async with asyncio.timeout(20):
        for tokens in (1, 3):
            body = json.dumps({"max_tokens": tokens}).encode()
            request = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            for at in range(0, len(request), 7):
                writer.write(request[at : at + 7])
                await asyncio.sleep(0)
            events = await answer(reader)
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
            assert text == token_server.TOKEN * tokens
            assert events[-2]["choices"][0]["finish_reason"] == "stop"
            assert events[-1]["usage"]["completion_tokens"] == tokens
            names.append(events[0]["id"])
    writer.close()
    assert len(set(names)) == 2


async def test_a_stream_that_nobody_reads_any_more_is_left(serving: tuple[int, token_server.Clock]) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", serving[0])
    writer.write(b'POST / HTTP/1.1\r\ncontent-length: 19\r\n\r\n{"max_tokens":1000}')
    clock = serving[1]
    async with asyncio.timeout(20):
        while not any(clock._streams):
            await asyncio.sleep(0.005)
        writer.transport.abort()
        while any(clock._streams):
            await asyncio.sleep(0.005)


async def test_a_loop_that_is_held_up_shows_in_its_lag() -> None:
    lag = LoopLag()
    sampling = asyncio.create_task(lag.run())
    try:
        lag.begin(0)
        async with asyncio.timeout(20):
            while lag.facts().samples < 3:
                await asyncio.sleep(0.01)
            held = asyncio.get_running_loop().time() + 0.2
            while asyncio.get_running_loop().time() < held:
                pass
            while lag.facts().max_ms < 150:
                await asyncio.sleep(0.01)
        lag.begin(1)
        assert lag.facts() == LoopFacts(turn=1, samples=0, p50_ms=0, p99_ms=0, max_ms=0, pid=lag.facts().pid)
    finally:
        sampling.cancel()


def test_percentiles() -> None:
    assert percentile([], 0.5) == 0
    assert [percentile([1.0, 2.0, 3.0, 4.0], part) for part in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 4.0, 4.0]


def test_the_command_tells_it_in_lines_too() -> None:
    words = "bench stream --agents 2 --tokens 5 --ramp-s 0 --address in-process".split()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "us/token" in result.output and "loop_lag_ms" in result.output and "{" not in result.output
