"""What a model and its server can do, found out by asking: one small request for each question, each bounded.

Nothing is believed that was not seen: a parameter that a server accepts and does not heed is told as "not heeded".
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pydantic_core import from_json

from kimi_ray.errors import KimiRayError
from kimi_ray.llm.assemble import Assembled, Assembler
from kimi_ray.llm.chat import ChatProvider, ChatRequest, ReasoningDelta, TextDelta, ToolSpec
from kimi_ray.llm.faults import STALE
from kimi_ray.llm.models import DEFAULT_KEY_ENV, ResolvedModel, build_provider, is_loopback
from kimi_ray.llm.openai import OpenAIProvider
from kimi_ray.llm.surrogates import whole
from kimi_ray.settings import Sampling, Settings

PROBE_S = 60.0
"""How long one question may take."""

ANSWER_TOKENS = 512
"""Enough for a model that thinks before it says a word."""

Verdict = Literal["yes", "no", "not heeded", "not told", "not tried"]

_CONTEXT_NAMES = ("max_model_len", "context_length", "max_context_length", "context_window", "n_ctx")
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_CALLED_TWICE = 2
_ASKED = frozenset({"provider", "model", "base_url", "api_key_env", "stream", "reasoning_field", "reasoning_history"})
"""The settings that the questions go by, or whose answers would show another one."""

_TABLES = ("price", "compaction")
"""Tables within a model's that no answer says anything of: they stay as they are configured."""

_WEATHER = ToolSpec(
    "get_weather",
    "The weather in a city at this moment.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
_FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"animal": {"type": "string"}, "legs": {"type": "integer"}},
            "required": ["animal", "legs"],
            "additionalProperties": False,
        },
    },
}


class Finding(Settings):
    """The answer to one question."""

    name: str
    verdict: Verdict
    told: str = ""
    """What was seen, in words."""
    ms: int | None = None
    """How long it took, milliseconds."""
    error: dict[str, Any] | None = None
    """Why not, when the server said so."""


class ModelCheck(Settings):
    """All that was found out about a model."""

    name: str
    model: str
    """The name on the wire."""
    server: str
    works: bool
    """Whether it answers a plain chat, in a stream or whole."""
    findings: tuple[Finding, ...]
    served: tuple[str, ...] = ()
    """The models that the server lists."""
    settings: dict[str, Any]
    """What ``[models.X]`` should say."""
    configured: tuple[str, ...] = ()
    """The keys of these that were in the settings already, and that no answer bears out."""

    @property
    def table(self) -> str:
        """``settings`` as TOML; those that were ``configured`` say so."""
        name = self.name if self.name.replace("-", "").replace("_", "").isalnum() else json.dumps(self.name)
        told = dict.fromkeys(self.configured, "  # as configured, not asked")
        plain = {key: value for key, value in self.settings.items() if key not in _TABLES}
        lines = [f"[models.{name}]", *_lines(plain, told)]
        for key in _TABLES:
            if key in self.settings:
                lines += ["", f"[models.{name}.{key}]{told.get(key, '')}", *_lines(self.settings[key], {})]
        return "\n".join(lines)


def _lines(values: dict[str, Any], told: dict[str, str]) -> list[str]:
    return [f"{key} = {json.dumps(value)}{told.get(key, '')}" for key, value in values.items() if value is not None]


@dataclass(slots=True)
class _Seen:
    """What the questions learn from each other's answers."""

    whole: bool = False
    streams: bool = False
    served: list[str] = field(default_factory=list[str])
    context: int | None = None
    reasoning_field: str | None = None
    history: str | None = None
    call: Assembled | None = None


async def check_model(
    resolved: ResolvedModel,
    *,
    probe_s: float = PROBE_S,
    on_question: Callable[[str, int], None] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
) -> ModelCheck:
    """Ask a model everything, one question after the other.

    Args:
        resolved: The model.
        probe_s: Seconds for each question.
        on_question: Told which question is being asked, and how many come after it.
        on_finding: Told each answer as it is known.

    Raises:
        ConfigError: ``config.invalid_script``.
    """
    check = _Check(resolved, probe_s, on_question, on_finding)
    try:
        return await check.run()
    finally:
        await check.close()


class _Check:
    def __init__(
        self,
        resolved: ResolvedModel,
        probe_s: float,
        on_question: Callable[[str, int], None] | None,
        on_finding: Callable[[Finding], None] | None,
    ) -> None:
        self._resolved = resolved
        self._probe_s = probe_s
        self._on_question = on_question
        self._on_finding = on_finding
        self._requests = 0
        self._provider = build_provider(resolved)
        self._server = self._provider if isinstance(self._provider, OpenAIProvider) else None
        self._others: list[ChatProvider] = []
        self._seen = _Seen()
        self._findings: list[Finding] = []

    async def close(self) -> None:
        for provider in (self._provider, *self._others):
            await provider.close()

    async def run(self) -> ModelCheck:
        seen = self._seen
        questions: list[tuple[str, Callable[[], Awaitable[tuple[Verdict, str]]]]] = [
            *([("model list", self._list)] if self._server is not None else []),
            ("chat", self._chat),
            ("stream", self._stream),
            ("tools", self._tools),
            ("tool results", self._results),
            ("parallel calls", self._parallel),
            ("reasoning", self._reasoning),
            ("structured output", self._structured),
            ("seed", self._seed),
            ("log-probabilities", self._logprobs),
            ("token ids", self._token_ids),
        ]
        basic = {"model list", "chat", "stream"}
        for left, (name, question) in zip(range(len(questions) - 1, -1, -1), questions, strict=True):
            if name in basic or seen.whole or seen.streams:
                if self._on_question is not None:
                    self._on_question(name, left)
                finding = await self._ask(name, question)
            else:
                finding = Finding(name=name, verdict="not tried")
            self._findings.append(finding)
            if self._on_finding is not None:
                self._on_finding(finding)
        advice, said = self._advice(), self._resolved.settings.said()
        asked = _ASKED if seen.context != advice.get("max_context_tokens") else {*_ASKED, "max_context_tokens"}
        return ModelCheck(
            name=self._resolved.name,
            model=self._resolved.model,
            server=", ".join(self._resolved.base_urls) or self._resolved.provider,
            works=seen.whole or seen.streams,
            findings=tuple(self._findings),
            served=tuple(seen.served),
            settings=advice,
            configured=tuple(key for key, value in advice.items() if said.get(key) == value and key not in asked),
        )

    async def _ask(self, name: str, question: Callable[[], Awaitable[tuple[Verdict, str]]]) -> Finding:
        began = time.monotonic()
        error: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(self._probe_s):
                try:
                    verdict, told = await question()
                except KimiRayError as failure:
                    if failure.details.get("kind") != STALE:
                        raise
                    verdict, told = await question()
        except TimeoutError:
            verdict, told = "no", f"no answer within {self._probe_s:g} s"
        except KimiRayError as failure:
            verdict, told, error = "no", failure.message, failure.to_data()
        spent = round((time.monotonic() - began) * 1000)
        return Finding(name=name, verdict=verdict, told=told, ms=spent, error=error)

    # -- questions --------------------------------------------------------------------------------------------------

    async def _list(self) -> tuple[Verdict, str]:
        seen = self._seen
        listed = await cast("OpenAIProvider", self._server).model_list(timeout_s=self._probe_s)
        seen.served = sorted(str(model["id"]) for model in listed)
        ours = next((model for model in listed if model["id"] == self._resolved.model), None)
        # a server with one model often answers for it under any name
        seen.context = _context_of(ours or listed[0]) if ours or len(listed) == 1 else None
        many = "1 model" if len(seen.served) == 1 else f"{len(seen.served)} models"
        told = f"{many}: {', '.join(seen.served[:5])}{' ...' if len(seen.served) > 5 else ''}"
        if ours is None:
            return "yes", f"{told}; {self._resolved.model!r} is not among them"
        if seen.context:
            told += f"; context of {seen.context} tokens"
            configured = self._resolved.settings.max_context_tokens
            if configured not in (None, seen.context):
                told += f", and {configured} are configured"
        return "yes", told

    async def _chat(self) -> tuple[Verdict, str]:
        seen = self._seen
        request = self._request("Say hello in one word.")
        if self._server is None:
            answer = await self._answer(request)
            seen.whole = True
            return "yes", f"said {_short(answer.text)}" if answer.text else "answered without text"
        body = await self._server.whole_answer(request)
        seen.whole = True
        seen.reasoning_field = _reasoning_field(body)
        said = _message(body).get("content") or ""
        told = f"said {_short(said)}" if said else "answered without text"
        return "yes", told + ("" if body.get("usage") else "; told no usage: tokens will be estimated")

    async def _stream(self) -> tuple[Verdict, str]:
        seen = self._seen
        provider = self._variant(stream=True)
        began = time.monotonic()
        first: float | None = None
        pieces = 0
        assembler = Assembler()
        async for chunk in provider.stream(self._request("Count from one to ten in words.")):
            assembler.add(chunk)
            if isinstance(chunk, TextDelta | ReasoningDelta):
                first = first or time.monotonic()
                pieces += 1
        usage = assembler.usage
        seen.streams = True
        told = f"{pieces} pieces" + (f", the first after {(first - began) * 1000:.0f} ms" if first else "")
        if usage is None or usage.estimated:
            told += "; told no usage in the stream: tokens will be estimated"
        else:
            told += f"; usage told ({usage.input + usage.cached} in, {usage.output} out)"
        return ("yes" if pieces > 1 else "not heeded"), told

    async def _tools(self) -> tuple[Verdict, str]:
        prompt = "What is the weather in Paris? Use the tool get_weather."
        answer = await self._answer(self._request(prompt, tools=(_WEATHER,)))
        forced = not answer.tool_calls
        if forced:
            answer = await self._answer(
                self._request(prompt, tools=(_WEATHER,), sampling=Sampling(tool_choice="required"))
            )
        if not answer.tool_calls:
            return "not heeded", "the tool was offered, demanded, and not called"
        call = answer.tool_calls[0]
        arguments = _object(call["arguments"])
        if arguments is None or call["name"] != _WEATHER.name:
            return "no", f"called {call['name']!r} with {_short(call['arguments'])}"
        self._seen.call = answer
        return "yes", f"called with {_short(call['arguments'])}" + (", when it had to" if forced else "")

    async def _results(self) -> tuple[Verdict, str]:
        called = self._seen.call
        if called is None:
            return "not tried", "no tool was called"
        results: list[dict[str, Any]] = [
            {
                "id": "result",
                "role": "user",
                "source": {"kind": "tool", "call_id": call["id"]},
                "content": [
                    {
                        "type": "tool-result",
                        "tool_call_id": call["id"],
                        "content": [{"type": "text", "text": "14 degrees, rain"}],
                        "is_error": False,
                    }
                ],
            }
            for call in called.tool_calls
        ]
        said: dict[str, Any] = {"id": "called", "role": "assistant", "content": called.content}
        request = self._request("What is the weather in Paris? Use the tool get_weather.", tools=(_WEATHER,))
        request.messages.extend([said, *results])
        configured = self._resolved.settings.reasoning_history
        refusal: KimiRayError | None = None
        for history in dict.fromkeys((configured, "all", "none")):
            try:
                answer = await self._answer(request, reasoning_history=history)
            except KimiRayError as error:
                if error.code != "provider.bad_request":
                    raise
                refusal = refusal or error
                continue
            self._seen.history = None if history == configured else history
            told = "called again" if answer.tool_calls else f"said {_short(answer.text)}"
            return "yes", told if history == configured else f"{told}, with reasoning_history = {history!r} only"
        raise cast("KimiRayError", refusal)

    async def _parallel(self) -> tuple[Verdict, str]:
        if self._seen.call is None:
            return "not tried", "no tool was called"
        prompt = "Call get_weather for Paris and for Rome, both in this one answer."
        request = self._request(prompt, tools=(_WEATHER,), sampling=Sampling(parallel_tool_calls=True))
        try:
            answer = await self._answer(request)
        except KimiRayError as error:
            if error.code != "provider.bad_request":
                raise
            answer = await self._answer(self._request(prompt, tools=(_WEATHER,)))
        calls = answer.tool_calls
        ids = {call["id"] for call in calls}
        if len(calls) < _CALLED_TWICE:
            return "not heeded", f"{len(calls)} call in one answer"
        return "yes", f"{len(calls)} calls" + (
            "" if len(ids) == len(calls) else " with equal ids, which are made unique"
        )

    async def _reasoning(self) -> tuple[Verdict, str]:
        request = self._request("Is 91 a prime number? Think first.")
        answer = await self._answer(request)
        thought = next((block["text"] for block in answer.content if block["type"] == "reasoning"), "")
        if not thought:
            return "not told", "no reasoning came beside the answer"
        seen = self._seen
        if self._server is not None and seen.whole and seen.reasoning_field is None:
            # the answer as it is says under which name
            seen.reasoning_field = _reasoning_field(await self._server.whole_answer(request))
        name = seen.reasoning_field
        return "yes", f"{len(thought)} characters" + (f" under {name}" if name else "")

    async def _structured(self) -> tuple[Verdict, str]:
        sampling = Sampling(extra_body={"response_format": _FORM})
        answer = await self._answer(self._request("Name an animal and its number of legs, as JSON.", sampling=sampling))
        found = _object(answer.text)
        if found is not None and isinstance(found.get("animal"), str) and isinstance(found.get("legs"), int):
            return "yes", f"said {_short(answer.text)}"
        return "not heeded", f"said {_short(answer.text)}"

    async def _seed(self) -> tuple[Verdict, str]:
        texts = [
            (
                await self._answer(
                    self._request(
                        "Invent a name for a ship.", sampling=Sampling(seed=seed, temperature=1.0, max_output_tokens=64)
                    )
                )
            ).content
            for seed in (7, 7, 8)
        ]
        plain = [[block.get("text") for block in content] for content in texts]
        if plain[0] != plain[1]:
            return "not heeded", "one seed gave two answers"
        return "yes", "one seed, one answer" if plain[0] != plain[2] else "one answer, whatever the seed"

    async def _logprobs(self) -> tuple[Verdict, str]:
        return await self._per_token("logprobs", Sampling(logprobs=1))

    async def _token_ids(self) -> tuple[Verdict, str]:
        return await self._per_token("token_ids", Sampling(token_ids=True))

    async def _per_token(self, name: str, sampling: Sampling) -> tuple[Verdict, str]:
        answer = await self._answer(self._request("Say hello in one word.", sampling=sampling))
        found: list[Any] = (answer.meta.tokens or {}).get(name) or []
        return ("yes", f"of {len(found)} tokens") if found else ("not heeded", "asked for, and not in the answer")

    # -- asking -----------------------------------------------------------------------------------------------------

    def _request(
        self, prompt: str, *, tools: tuple[ToolSpec, ...] = (), sampling: Sampling | None = None
    ) -> ChatRequest:
        message: dict[str, Any] = {"id": "asked", "role": "user", "content": [{"type": "text", "text": prompt}]}
        message["source"] = {"kind": "user"}
        bounded = (sampling or Sampling()).over(Sampling(max_output_tokens=ANSWER_TOKENS))
        self._requests += 1  # as steps, so that a chaos model does not meet one fault in all of them
        return ChatRequest(self._resolved.model, None, [message], tools=tools, sampling=bounded, step=self._requests)

    async def _answer(self, request: ChatRequest, **settings: Any) -> Assembled:
        provider = self._variant(stream=self._seen.streams or not self._seen.whole, **settings)
        assembler = Assembler()
        async for chunk in provider.stream(request):
            assembler.add(chunk)
        return assembler.result()

    def _variant(self, **settings: Any) -> ChatProvider:
        """The provider with other settings, where it has any."""
        known = self._resolved.settings
        if self._server is None or all(getattr(known, key) == value for key, value in settings.items()):
            return self._provider
        other = build_provider(
            self._resolved.model_copy(update={"settings": known.model_copy(update=settings)}),
        )
        self._others.append(other)
        return other

    def _advice(self) -> dict[str, Any]:
        """The model's settings as they are, less what is the default, with what the answers showed."""
        resolved, seen = self._resolved, self._seen
        said = resolved.settings.said()
        advice: dict[str, Any] = {}
        if resolved.provider != "openai":
            return {"provider": resolved.provider} | said
        if resolved.model != resolved.name:
            advice["model"] = resolved.model
        urls = resolved.base_urls
        advice["base_url"] = urls[0] if len(urls) == 1 else list(urls)
        if resolved.api_key is None and not all(is_loopback(url) for url in urls):
            advice["api_key_env"] = ""
        elif resolved.api_key is not None and resolved.key_env != DEFAULT_KEY_ENV:
            advice["api_key_env"] = resolved.key_env
        plain = {key: value for key, value in said.items() if not isinstance(value, dict) and key != "provider"}
        kept = {key: said[key] for key in _TABLES if key in said}
        advice = plain | advice | kept
        if seen.context and "max_context_tokens" not in advice:
            advice["max_context_tokens"] = seen.context
        if seen.whole and not seen.streams:
            advice["stream"] = False
        if seen.reasoning_field not in (None, resolved.settings.reasoning_field):
            advice["reasoning_field"] = seen.reasoning_field
        if seen.history is not None:
            advice["reasoning_history"] = seen.history
        return advice


def _message(body: dict[str, Any]) -> dict[str, Any]:
    return cast("dict[str, Any]", body["choices"][0].get("message") or {})


def _reasoning_field(body: dict[str, Any]) -> str | None:
    message = _message(body)
    return next((name for name in _REASONING_NAMES if message.get(name)), None)


def _context_of(model: dict[str, Any]) -> int | None:
    """The context that a server tells of a model, under one of the names that servers use."""
    meta = model.get("meta")
    for facts in (model, cast("dict[str, Any]", meta) if isinstance(meta, dict) else {}):
        for name in _CONTEXT_NAMES:
            value = facts.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value: Any = from_json(text)
    except ValueError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _short(text: Any) -> str:
    flat = whole(" ".join(str(text).split()))
    return json.dumps(flat if len(flat) <= 60 else flat[:59] + "…", ensure_ascii=False)
