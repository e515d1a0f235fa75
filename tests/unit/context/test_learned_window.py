"""The window that a refusal has taught: from the log, in every life of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.features.compaction import ContextWindow
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.faults import Place, named_window, status_fault
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.script import Step
from kimi_ray.log import message_tokens
from tests.unit.context.stage import ContextBench, Told, small

WORDS = "please " * 30


def unknown() -> ModelSettings:
    return small(max_context_tokens=None)


class Server:
    """A model with a window of its own, which refuses what is longer; its limits are those of the stage's estimate."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.refused: list[int] = []

    def __call__(self, request: ChatRequest) -> Step:
        size = sum(map(message_tokens, request.messages))
        if size > self.window:
            self.refused.append(size)
            return Step.error("context.overflow", 400)
        return Step("word " * 20)


def window_of(bench: ContextBench) -> int | None:
    return ContextWindow(bench.journal, bench.in_use).tokens


async def test_what_a_server_refused_is_kept_away_from_in_every_life() -> None:
    server = Server(400)
    bench = ContextBench(server, summarizer=Told(), model=unknown())
    assert window_of(bench) is None
    for number in range(30):
        await bench.say(f"{number} {WORDS}")
    assert all(outcome.result.state == "completed" for outcome in bench.outcomes.values())
    first = next(start for start in bench.of("compaction/start"))
    learned = window_of(bench)
    assert first["trigger"] == "overflow" and learned is not None
    assert round(first["tokens"] * 0.85) <= learned <= first["tokens"]
    assert len(server.refused) == 1, "it runs into the wall once, and is compacted before it from then on"
    assert {start["trigger"] for start in bench.of("compaction/start")[1:]} == {"pressure"}
    again = bench.again(server, summarizer=Told(), model=unknown())
    assert window_of(again) == learned
    for number in range(20):
        await again.say(f"again {number} {WORDS}")
    assert len(server.refused) == 1, "a new life knows"
    other = bench.again(server, summarizer=Told(), model=small(max_context_tokens=100_000))
    assert window_of(other) == learned, "a window that is configured too large is no better"
    assert window_of(bench.again(server, summarizer=Told(), model=small(max_context_tokens=200))) == 200


async def test_it_is_kept_to_in_this_life_too_where_the_user_stopped_what_was_mending_it() -> None:
    server, told = Server(400), Told()
    bench = ContextBench(server, summarizer=told, model=unknown())
    told.gate.clear()
    prompts = bench.submit(*[WORDS] * 20)
    async with asyncio.timeout(10):
        await told.asked.wait()
    bench.agent.cancel(None, "user")
    await bench.result(prompts[-1])
    assert bench.of("compaction/end")[-1]["error"]["code"] == "compaction.cancelled"
    assert window_of(bench) is not None
    told.gate.set()
    await bench.say("and now?")
    assert bench.of("compaction/start")[-1]["trigger"] == "pressure"
    assert len(server.refused) == 1


async def test_another_model_is_not_bound_by_it() -> None:
    bench = ContextBench(Server(400), summarizer=Told(), model=unknown())
    for number in range(12):
        await bench.say(f"{number} {WORDS}")
    assert window_of(bench) is not None
    assert bench.journal.fold.windows.of("another") is None


async def test_a_number_that_the_server_names_counts_as_it_is() -> None:
    body = '{"error": {"message": "This model\'s maximum context length is 600 tokens. However, you sent 700."}}'
    fault = status_fault(Place("m"), 400, body)
    assert (fault.code, fault.details["window"]) == ("context.overflow", 600)
    bench = ContextBench(Server(400), summarizer=Told(), model=unknown())
    await bench.say(WORDS)
    windows, name = bench.journal.fold.windows, bench.in_use.model.model
    windows.failed(name, fault.to_data())
    windows.mended(name, 100)
    assert window_of(bench) == 600
    windows.failed(name, {"code": "provider.server", "details": {"window": 5}})
    assert window_of(bench) == 600


async def test_a_size_that_the_server_has_answered_is_no_wall() -> None:
    bench = ContextBench(Server(400), summarizer=Told(), model=unknown())
    await bench.say(WORDS)
    windows, name = bench.journal.fold.windows, bench.in_use.model.model
    windows.mended(name, 1_000)
    windows.mended(name, 10)
    windows.answered(name, 300)
    windows.answered(name, 200)
    assert windows.of(name) == 300


@pytest.mark.parametrize(
    ("said", "window"),
    [
        ("This model's maximum context length is 8192 tokens. However, you requested 9000 tokens", 8192),
        ("the request exceeds the available context size (2048 tokens), try increasing it", 2048),
        ('request (3000 tokens) exceeds the available context size","n_prompt_tokens":3000,"n_ctx":2048', 2048),
        ("prompt is too long: 210000 tokens > 200000 maximum", 200_000),
        ("The input token count (5000) exceeds the maximum number of tokens allowed (4096).", 4096),
        ("maximum context length of 131,072 tokens exceeded", 131_072),
        ("Input is too long for requested model.", None),
        ("reduce the length of the messages", None),
        ("maximum context length is 3 tokens", None),
    ],
)
def test_the_window_in_the_words_of_servers(said: str, window: Any) -> None:
    assert named_window(said) == window
