"""The model that plays recorded answers: by agent, by position, and from a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import ConfigError, ProviderError
from kimi_ray.llm.assemble import Assembler
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.models import build_provider, resolve_model
from kimi_ray.llm.recorded import RecordedAnswer, RecordedProvider, load_answers
from kimi_ray.settings import Usage

HELLO = RecordedAnswer([{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "hello"}], usage=Usage(input=3))
CALL = RecordedAnswer([{"type": "tool-call", "id": "c", "name": "look", "arguments": "{}"}])
FAILED = RecordedAnswer(
    [],
    error={"kind": "ProviderError", "code": "provider.overloaded", "message": "busy", "details": {"retry_after_ms": 9}},
    retried=True,
)


def request(agent_id: str = "main", session_id: str = "s", answers: int = 0) -> ChatRequest:
    said: list[dict[str, Any]] = [{"id": "x", "role": "assistant", "content": []}] * answers
    return ChatRequest("m", None, said, session_id=session_id, agent_id=agent_id)


async def ask(provider: Any, asked: ChatRequest) -> Any:
    assembler = Assembler()
    async for chunk in provider.stream(asked):
        assembler.add(chunk)
    return assembler.result()


async def test_each_agent_of_each_session_has_its_own_place() -> None:
    provider = RecordedProvider({"main": [HELLO, CALL], "agent-1": [CALL]})
    assert (await ask(provider, request())).text == "hello"
    assert (await ask(provider, request(session_id="other"))).text == "hello"
    found = await ask(provider, request())
    assert found.finish == "tool-calls" and found.content == list(CALL.content)
    assert provider.left == {"agent-1": 1}
    with pytest.raises(ProviderError) as exhausted:
        await ask(provider, request())
    assert exhausted.value.code == "provider.recording_exhausted" and not exhausted.value.retryable
    with pytest.raises(ProviderError):
        await ask(provider, request("nobody"))


async def test_a_failure_is_retryable_if_it_was_retried_and_asks_nobody_to_wait() -> None:
    provider = RecordedProvider({"main": [FAILED, HELLO]})
    with pytest.raises(ProviderError) as failed:
        await ask(provider, request())
    assert failed.value.code == "provider.overloaded"
    assert failed.value.retryable and failed.value.retry_after_ms is None
    assert (await ask(provider, request())).usage == Usage(input=3)


async def test_an_agent_that_was_not_seen_before_goes_on_behind_its_answers() -> None:
    provider = RecordedProvider({"main": [FAILED, HELLO, FAILED, CALL, HELLO]})
    assert (await ask(provider, request(answers=2))).text == "hello"


async def test_an_answer_that_was_cut_never_ends() -> None:
    provider = RecordedProvider({"main": [RecordedAnswer(HELLO.content, cut=True)]})
    assembler = Assembler()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            async for chunk in provider.stream(request()):
                assembler.add(chunk)
    assert assembler.partial() == list(HELLO.content)


async def test_answers_go_through_a_file(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b"\n".join(answer.to_line("main") for answer in (FAILED, HELLO, CALL)) + b"\n\n")
    assert load_answers(str(file)) == {"main": [FAILED, HELLO, CALL]}
    resolved = resolve_model(f"recorded:{file}", {}, None, {})
    provider = build_provider(resolved)
    assert provider.name == resolved.provider == "recorded"
    with pytest.raises(ProviderError):
        await ask(provider, request())
    assert (await ask(provider, request())).text == "hello"


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"content": 5}', '{"content": [{"type": "image"}]}', '{"text": "x"}', '{"usage": {"input": "x"}}'],
)
def test_what_is_no_answer_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"content": []}) + "\n" + line)
    with pytest.raises(ConfigError) as refused:
        load_answers(str(file))
    assert refused.value.code == "config.invalid_recording"
    assert refused.value.details == {"file": str(file), "line": 2}
    with pytest.raises(ConfigError):
        build_provider(resolve_model(f"recorded:{tmp_path}/none", {}, None, {}))
