"""From a ``ChatRequest`` to the body of a Chat Completions request.

What is on the wire follows from the request and the model's settings alone:

* the text blocks of one message are joined with a newline; with images a message becomes a list of parts;
* a tool result is its text, ``ERROR: `` before a failed one's, ``(no output)`` for an empty one; images in it follow in
  a user message of their own, because a ``tool`` message can only hold text;
* a call whose arguments are not a JSON object goes back as ``{"malformed_arguments": <raw text>}``: servers that
  parse the history would otherwise refuse every later request of the conversation;
* reasoning goes back under ``reasoning_field`` as ``reasoning_history`` says: with ``tool_calls``, on the answers that
  called tools, which thinking models demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic_core import from_json, to_json

from kimi_ray.errors import ProviderError
from kimi_ray.llm.chat import ChatRequest, ToolSpec
from kimi_ray.llm.models import ModelSettings

Json = dict[str, Any]


def chat_body(request: ChatRequest, settings: ModelSettings, *, completion_tokens: bool = False) -> Json:
    """The body, without ``stream``.

    Args:
        request: What is asked.
        settings: The model's settings.
        completion_tokens: Send the output bound as ``max_completion_tokens`` (OpenAI's own server) instead of
            ``max_tokens`` (every other).

    Raises:
        ProviderError: ``provider.bad_request`` for content that has no form on this wire.
    """
    body: Json = {"model": request.model, "messages": wire_messages(request, settings)}
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    sampling = request.sampling
    for key, value in (
        ("temperature", sampling.temperature),
        ("top_p", sampling.top_p),
        ("top_k", sampling.top_k),
        ("max_completion_tokens" if completion_tokens else "max_tokens", sampling.max_output_tokens),
        ("seed", sampling.seed),
        ("stop", list(sampling.stop) if sampling.stop else None),
        ("reasoning_effort", sampling.reasoning_effort),
        ("tool_choice", _tool_choice(sampling.tool_choice, request.tools)),
        ("parallel_tool_calls", sampling.parallel_tool_calls if request.tools else None),
        ("logprobs", True if sampling.logprobs is not None else None),
        ("top_logprobs", sampling.logprobs or None),
        ("return_token_ids", sampling.token_ids or None),
    ):
        if value is not None:
            body[key] = value
    body.update(settings.extra_body)
    body.update(sampling.extra_body or {})
    return body


def wire_messages(request: ChatRequest, settings: ModelSettings) -> list[Json]:
    """The conversation as messages of the wire, the system prompt first."""
    messages: list[Json] = [{"role": "system", "content": request.system}] if request.system else []
    images: list[Json] = []
    for message in request.messages:
        content: Any = message["content"]
        blocks: Sequence[Json] = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] == "assistant":
            _flush(images, messages)
            messages.append(_assistant(blocks, settings))
            continue
        results = [block for block in blocks if block["type"] == "tool-result"]
        if not results:
            _flush(images, messages)
            messages.append({"role": message["role"], "content": _content(blocks)})
        for result in results:
            text, parts = _tool_result(result)
            messages.append({"role": "tool", "tool_call_id": result["tool_call_id"], "content": text})
            images += parts
    _flush(images, messages)
    return messages


def _flush(images: list[Json], messages: list[Json]) -> None:
    """Images of tool results, after all results of their answer: a tool exchange must not be split."""
    if images:
        messages.append({"role": "user", "content": list(images)})
        images.clear()


def _assistant(blocks: Sequence[Json], settings: ModelSettings) -> Json:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Json] = []
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            texts.append(block["text"])
        elif kind == "reasoning":
            reasoning.append(block["text"])
        elif kind == "tool-call":
            calls.append(
                {
                    "id": block["id"],
                    "type": "function",
                    "function": {"name": block["name"], "arguments": _arguments(block["arguments"])},
                }
            )
    message: Json = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    history = settings.reasoning_history
    if reasoning and (history == "all" or (history == "tool_calls" and calls)):
        message[settings.reasoning_field] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(raw: str) -> str:
    if not raw.strip():
        return "{}"
    try:
        parsed = from_json(raw)
    except ValueError:
        parsed = None
    return raw if isinstance(parsed, dict) else to_json({"malformed_arguments": raw}).decode()


def _content(blocks: Sequence[Json]) -> str | list[Json]:
    if all(block["type"] == "text" for block in blocks):
        return "\n".join([block["text"] for block in blocks])
    return [_part(block) for block in blocks]


def _part(block: Json) -> Json:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] == "image":
        url = block.get("url")
        if not isinstance(url, str) and isinstance(block.get("data"), str):
            url = f"data:{block.get('media_type', 'image/png')};base64,{block['data']}"
        if isinstance(url, str):
            return {"type": "image_url", "image_url": {"url": url}}
        raise ProviderError(
            f"an image block without url or data cannot be sent (it has {', '.join(sorted(block))})",
            code="provider.bad_request",
            hint='give {"type": "image", "url": ...} or {"type": "image", "data": <base64>, "media_type": ...}',
        )
    raise ProviderError(
        f"a content block of type {block['type']!r} cannot be sent to a Chat Completions server",
        code="provider.bad_request",
        hint="user messages hold text and image blocks",
        details={"type": str(block["type"])},
    )


def _tool_result(result: Json) -> tuple[str, list[Json]]:
    content: Any = result["content"]
    blocks = cast("Sequence[Json]", [{"type": "text", "text": content}] if isinstance(content, str) else content)
    text = "\n".join([block["text"] for block in blocks if block["type"] == "text"])
    parts = [_part(block) for block in blocks if block["type"] != "text"]
    if parts:
        parts.insert(0, {"type": "text", "text": f"From the result of tool call {result['tool_call_id']}:"})
    if not text.strip():
        text = "(see the images below)" if parts else "(no output)"
    if result.get("is_error") and not text[:5].lower().startswith("error"):
        text = f"ERROR: {text}"
    return text, parts


def _tool(tool: ToolSpec) -> Json:
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def _tool_choice(choice: str | None, tools: Sequence[ToolSpec]) -> str | Mapping[str, Any] | None:
    if choice in ("auto", "none"):
        return choice if tools else None
    if choice is None or choice == "required":
        return choice
    return {"type": "function", "function": {"name": choice}}
