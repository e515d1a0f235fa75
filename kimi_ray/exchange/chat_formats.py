"""Conversations in the formats that fine-tuning reads: OpenAI's messages, and ShareGPT as Hermes models write it."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json, to_json

from kimi_ray.exchange.conversations import Conversation, texts_of
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.models import ModelSettings
from kimi_ray.llm.wire import wire_messages

Json = dict[str, Any]

_WIRE = ModelSettings(reasoning_history="all")


def openai_conversation(conversation: Conversation) -> Json:
    """``{"messages", "tools"?, "metadata"}`` with the messages as they go over the wire; reasoning as
    ``reasoning_content``.

    Raises:
        ProviderError: ``provider.bad_request`` for content that has no form there.
    """
    asked = conversation.asked
    request = ChatRequest(asked.model or "", asked.system, conversation.messages)
    line: Json = {"messages": wire_messages(request, _WIRE)}
    if asked.tools:
        line["tools"] = openai_tools(conversation)
    line["metadata"] = _metadata(conversation)
    return line


def openai_tools(conversation: Conversation) -> list[Json]:
    """The tools as function definitions."""
    return [function_of(tool) for tool in conversation.asked.tools]


def function_of(tool: Json) -> Json:
    """A tool as OpenAI's function definition."""
    return {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters")}}


def sharegpt_conversation(conversation: Conversation) -> Json:
    """``{"id", "conversations": [{"from": "system" | "human" | "gpt" | "tool", "value"}], "tools"?, "metadata"}``.

    Calls stand in their answer as ``<tool_call>`` JSON, results in one ``tool`` turn behind it as ``<tool_response>``
    JSON, reasoning as ``<think>``; messages of one side that follow each other are one turn.
    """
    asked = conversation.asked
    turns: list[Json] = [{"from": "system", "value": asked.system}] if asked.system else []
    for message in conversation.messages:
        side, value = _turn(message)
        if turns and turns[-1]["from"] == side != "system":
            turns[-1]["value"] += f"\n{value}"
        else:
            turns.append({"from": side, "value": value})
    line: Json = {"id": str(conversation.stream), "conversations": turns}
    if asked.tools:
        line["tools"] = to_json(openai_tools(conversation)).decode()
    line["metadata"] = _metadata(conversation)
    return line


def _turn(message: Json) -> tuple[str, str]:
    blocks: list[Json] = message["content"]
    if message["role"] == "assistant":
        return "gpt", _answer(blocks)
    results = [block for block in blocks if block["type"] == "tool-result"]
    if results:
        return "tool", "\n".join(map(_response, results))
    return "human", "\n".join("[image]" if block["type"] == "image" else str(block["text"]) for block in blocks)


def _answer(blocks: list[Json]) -> str:
    parts: list[str] = []
    reasoning = texts_of(blocks, "reasoning")
    if reasoning:
        parts.append(f"<think>\n{reasoning}\n</think>")
    text = texts_of(blocks)
    if text:
        parts.append(text)
    for block in blocks:
        if block["type"] == "tool-call":
            call = {"name": block["name"], "arguments": arguments_of(block["arguments"])}
            parts.append(f"<tool_call>\n{to_json(call).decode()}\n</tool_call>")
    return "\n".join(parts)


def _response(block: Json) -> str:
    told = {"tool_call_id": block["tool_call_id"], "content": texts_of(block["content"])}
    if block.get("is_error"):
        told["is_error"] = True
    return f"<tool_response>\n{to_json(told).decode()}\n</tool_response>"


def arguments_of(raw: Any) -> Json:
    """A call's arguments as an object; text that is none as ``{"malformed_arguments": raw}``, as it went back."""
    if isinstance(raw, dict):
        return raw  # pyright: ignore[reportUnknownVariableType]
    text = str(raw)
    try:
        parsed: Any = from_json(text) if text.strip() else {}
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"malformed_arguments": text}  # pyright: ignore[reportUnknownVariableType]


def _metadata(conversation: Conversation) -> Json:
    model = conversation.asked.model
    return {**conversation.facts, **({} if model is None else {"model": model})}
