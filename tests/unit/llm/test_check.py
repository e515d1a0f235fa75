"""``models check`` against servers that can much, little, or nothing: it tells what it saw, and ends in time."""

from __future__ import annotations

import asyncio
import json
import tomllib
from typing import Any

import pytest

from kimi_ray.llm.check import Finding, ModelCheck, check_model
from kimi_ray.llm.models import ModelSettings, resolve_model
from tests.unit.llm.asking import KEY, Serve

USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


class Server:
    """A server with abilities that can be switched off."""

    def __init__(self, **abilities: Any) -> None:
        self.can: dict[str, Any] = {
            "list": True, "whole": True, "stream": True, "usage": True, "tools": "auto", "parallel": True,
            "reasoning": None, "schema": True, "seed": True, "logprobs": True, "token_ids": True, "results": True,
        }  # fmt: skip
        assert set(abilities) <= set(self.can)
        self.can |= abilities
        self.asked = 0
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, received: Any, reply: Any) -> None:
        if received.line.startswith("GET"):
            if not self.can["list"]:
                await reply.full(404, {"error": {"message": "Not Found"}})
                return
            listed = {"id": "tiny", "object": "model", "created": 1, "owned_by": "x", "max_model_len": 4096}
            await reply.full(200, {"object": "list", "data": [listed]})
            return
        body = received.json
        self.asked += 1
        self.bodies.append(body)
        if body["messages"][-1]["role"] == "tool":
            refusal = self._refuses_results(body)
            if refusal:
                await reply.full(400, {"error": {"message": refusal}})
                return
        message = self._message(body)
        if body.get("stream") and self.can["stream"]:
            await self._stream(reply, message)
        elif not body.get("stream") and not self.can["whole"]:
            await reply.full(400, {"error": {"message": "only streams"}})
        else:
            choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
            choice |= self._tokens(body)
            await reply.full(200, {"id": "r", "model": "tiny", "choices": [choice]} | self._usage())

    def _refuses_results(self, body: dict[str, Any]) -> str | None:
        if self.can["results"] == "with reasoning":
            called = next(message for message in body["messages"] if message.get("tool_calls"))
            return None if "reasoning_content" in called else "reasoning_content is missing"
        return None if self.can["results"] else "I know no role tool"

    def _usage(self) -> dict[str, Any]:
        return {"usage": USAGE} if self.can["usage"] else {}

    def _message(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["messages"][-1]["content"]
        message: dict[str, Any] = {"role": "assistant", "content": "one two three"}
        if self.can["reasoning"] and ("prime" in prompt or self.can["reasoning"] == "reasoning"):
            message[self.can["reasoning"]] = "let me think"
        calls = self.can["tools"] == "auto" or (self.can["tools"] == "forced" and body.get("tool_choice") == "required")
        if body.get("tools") and calls and body["messages"][-1]["role"] == "user":
            cities = ["Paris", "Rome"] if "Rome" in prompt and self.can["parallel"] else ["Paris"]
            message["tool_calls"] = [
                {
                    "id": f"c{number}",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
                }
                for number, city in enumerate(cities)
            ]
        if "response_format" in body:
            message["content"] = '{"animal": "dog", "legs": 4}' if self.can["schema"] else "A dog has four legs."
        if "seed" in body:
            message["content"] = f"ship {body['seed'] if self.can['seed'] else self.asked}"
        return message

    def _tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if body.get("logprobs") and self.can["logprobs"]:
            found["logprobs"] = {"content": [{"token": "one", "logprob": -0.5, "top_logprobs": []}]}
        if body.get("return_token_ids") and self.can["token_ids"]:
            found["token_ids"] = [1, 2, 3]
        return found

    async def _stream(self, reply: Any, message: dict[str, Any]) -> None:
        body = self.bodies[-1]
        await reply.start()
        for name in ("reasoning_content", "reasoning"):
            if name in message:
                await reply.delta(**{name: message[name]})
        if message["content"]:
            for word in message["content"].split(" "):
                await reply.delta(content=word + " ")
        for number, call in enumerate(message.get("tool_calls", ())):
            await reply.delta(tool_calls=[{"index": number, **call}])
        choice = {"index": 0, "delta": {}, "finish_reason": "stop"} | self._tokens(body)
        await reply.event({"id": "r", "choices": [choice]} | self._usage())
        await reply.end()


async def check(serve: Serve, server: Any, name: str = "mine", probe_s: float = 20.0, **settings: Any) -> ModelCheck:
    started = await serve(server)
    table = ModelSettings(model="tiny", base_url=started.url, **settings)
    resolved = resolve_model(name, {name: table}, None, {"OPENAI_API_KEY": KEY})
    async with asyncio.timeout(60):
        found = await check_model(resolved, probe_s=probe_s)
    text = found.model_dump_json() + found.table
    assert KEY not in text
    assert tomllib.loads(found.table)["models"][name] == found.settings
    return found


def verdicts(found: ModelCheck) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in found.findings}


def finding(found: ModelCheck, name: str) -> Finding:
    return next(one for one in found.findings if one.name == name)


async def test_a_server_that_can_everything(serve: Serve) -> None:
    found = await check(serve, Server(reasoning="reasoning_content"))
    assert set(verdicts(found).values()) == {"yes"}, found.findings
    assert found.works
    assert found.served == ("tiny",)
    assert found.settings == {
        "model": "tiny",
        "base_url": found.settings["base_url"],
        "max_context_tokens": 4096,
    }
    assert "one seed, one answer" in finding(found, "seed").told


async def test_what_was_configured_is_not_told_as_found(serve: Serve) -> None:
    found = await check(serve, Server(), max_context_tokens=9_000, max_attempts=2)
    assert set(found.configured) == {"max_context_tokens", "max_attempts"}
    assert "max_context_tokens = 9000  # as configured" in found.table
    assert "context of 4096 tokens, and 9000 are configured" in finding(found, "model list").told
    found = await check(serve, Server(), max_context_tokens=4096)
    assert found.configured == () and "#" not in found.table


async def test_a_server_that_can_little(serve: Serve) -> None:
    weak = Server(
        list=False, usage=False, tools=None, schema=False, seed=False, logprobs=False, token_ids=False, parallel=False
    )
    found = await check(serve, weak)
    assert found.works
    assert verdicts(found) == {
        "model list": "no",
        "chat": "yes",
        "stream": "yes",
        "tools": "not heeded",
        "tool results": "not tried",
        "parallel calls": "not tried",
        "reasoning": "not told",
        "structured output": "not heeded",
        "seed": "not heeded",
        "log-probabilities": "not heeded",
        "token ids": "not heeded",
    }
    assert "estimated" in finding(found, "chat").told
    assert "estimated" in finding(found, "stream").told
    assert (finding(found, "model list").error or {})["code"] == "provider.not_found"


async def test_what_the_answers_show_is_in_the_table(serve: Serve) -> None:
    found = await check(serve, Server(reasoning="reasoning"), name="org/my.model", max_attempts=3)
    assert found.settings["reasoning_field"] == "reasoning"
    assert found.settings["max_attempts"] == 3
    assert '[models."org/my.model"]' in found.table


async def test_a_server_that_wants_all_reasoning_back(serve: Serve) -> None:
    server = Server(reasoning="reasoning_content", results="with reasoning")
    found = await check(serve, server, reasoning_history="none")
    # nothing was thought before the call, so that no setting can send it back
    assert verdicts(found)["tool results"] == "no"
    thinking = Server(results="with reasoning", reasoning="reasoning")
    found = await check(serve, thinking, reasoning_history="none")
    assert verdicts(found)["tool results"] == "yes"
    assert found.settings["reasoning_history"] == "all"


async def test_tools_only_when_they_must(serve: Serve) -> None:
    found = await check(serve, Server(tools="forced"))
    assert finding(found, "tools").told.endswith("when it had to")
    assert verdicts(found)["tool results"] == "yes"
    assert verdicts(found)["parallel calls"] == "not heeded"


async def test_a_server_that_does_not_stream_and_one_that_only_streams(serve: Serve) -> None:
    found = await check(serve, Server(stream=False))
    assert (found.works, verdicts(found)["stream"]) == (True, "not heeded")
    found = await check(serve, Server(whole=False))
    assert (found.works, verdicts(found)["chat"], verdicts(found)["tools"]) == (True, "no", "yes")
    assert "stream" not in found.settings


async def test_a_server_that_streams_badly_is_to_be_asked_without(serve: Serve) -> None:
    class Broken(Server):
        async def _stream(self, reply: Any, message: dict[str, Any]) -> None:
            await reply.start()
            await reply.piece(b"data: nonsense\n\n")
            await reply.end()

    found = await check(serve, Broken())
    assert found.works
    assert found.settings["stream"] is False
    assert verdicts(found)["tools"] == "yes"


@pytest.mark.parametrize("status", [401, 404, 429, 500])
async def test_a_server_that_refuses_is_asked_no_more(serve: Serve, status: int) -> None:
    asked = 0

    async def refuse(_: Any, reply: Any) -> None:
        nonlocal asked
        asked += 1
        await reply.full(status, {"error": {"message": f"no: {KEY}"}}, retry_after="1")

    found = await check(serve, refuse)
    assert not found.works
    assert asked == 3
    assert verdicts(found)["tools"] == "not tried"
    assert str(status) in finding(found, "chat").told


async def test_every_question_is_bounded(serve: Serve) -> None:
    async def silent(_: Any, reply: Any) -> None:
        await asyncio.sleep(60)

    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await check(serve, silent, probe_s=0.2)
    assert loop.time() - began < 10
    assert not found.works
    assert "0.2 s" in finding(found, "chat").told


async def test_nobody_is_there() -> None:
    table = ModelSettings(base_url="http://127.0.0.1:1/v1")
    found = await check_model(resolve_model("gone", {"gone": table}, None, {}), probe_s=5)
    assert not found.works
    assert (finding(found, "chat").error or {})["code"] == "provider.connection"


async def test_a_scripted_model_can_be_checked_too() -> None:
    found = await check_model(resolve_model("scripted", {}, None, {}))
    assert found.works
    assert found.server == "scripted"


async def test_what_a_server_says_of_itself_can_always_be_printed(serve: Serve) -> None:
    said = "half \ud800 of it"

    async def odd(received: Any, reply: Any) -> None:
        if received.line.startswith("GET"):
            await reply.full(200, {"data": [{"id": said}]})
        else:
            message = {"role": "assistant", "content": said, "reasoning_content": said}
            choice = {"index": 0, "message": message, "finish_reason": said, "token_ids": True}
            await reply.full(200, {"id": said, "model": said, "choices": [choice]})

    found = await check(serve, odd)
    assert found.works and "half \ufffd of it" in finding(found, "chat").told
    json.dumps(found.model_dump(mode="json"), ensure_ascii=False).encode()


def test_the_tables_that_were_configured_stay() -> None:
    settings = {"price": {"input": 0.5, "output": 2.0}, "max_context_tokens": 9000, "compaction": {"retries": 3}}
    found = ModelCheck(name="a.b", model="m", server="s", works=True, findings=(), settings=settings)
    assert tomllib.loads(found.table)["models"]["a.b"] == settings
    assert found.table.index("max_context_tokens") < found.table.index("price")


async def test_a_check_keeps_price_and_compaction() -> None:
    said = {"price": {"input": 0.5, "output": 2.0}, "compaction": {"retries": 3}}
    settings = ModelSettings.model_validate({"base_url": "http://127.0.0.1:9/v1", **said})
    found = await check_model(resolve_model("m", {"m": settings}, None, {}), probe_s=5)
    assert {key: found.settings.get(key) for key in said} == said
