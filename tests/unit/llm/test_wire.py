from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kimi_ray.errors import ProviderError
from kimi_ray.llm import ChatRequest, ModelSettings, ToolSpec, describe_request
from kimi_ray.llm.wire import chat_body
from kimi_ray.settings import Sampling

READ = ToolSpec("Read", "Reads.", {"type": "object"})


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"id": "u", "role": "user", "content": list(blocks), "source": {"kind": "user"}}


def called(*calls: tuple[str, str], said: str = "", thought: str = "") -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "reasoning", "text": thought}] if thought else []
    content += [text(said)] if said else []
    content += [{"type": "tool-call", "id": at, "name": "Read", "arguments": raw} for at, raw in calls]
    return {"id": "a", "role": "assistant", "content": content, "source": {"kind": "model"}}


def result(call_id: str, *blocks: dict[str, Any], is_error: bool = False) -> dict[str, Any]:
    block = {"type": "tool-result", "tool_call_id": call_id, "content": list(blocks), "is_error": is_error}
    return {"id": "t", "role": "user", "source": {"kind": "tool", "call_id": call_id}, "content": [block]}


def wire(*messages: dict[str, Any], system: str | None = None, **settings: Any) -> list[dict[str, Any]]:
    return chat_body(ChatRequest("m", system, list(messages)), ModelSettings(**settings))["messages"]


def test_a_conversation_with_tools() -> None:
    messages = wire(
        user(text("a"), text("b")),
        called(("c1", '{"path":"x"}'), ("c2", ""), said="I look."),
        result("c1", text("one"), text("two")),
        result("c2", is_error=False),
        called(said="done"),
        system="Be brief.",
    )
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "Read", "arguments": '{"path":"x"}'}},
                {"id": "c2", "type": "function", "function": {"name": "Read", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one\ntwo"},
        {"role": "tool", "tool_call_id": "c2", "content": "(no output)"},
        {"role": "assistant", "content": "done"},
    ]


@pytest.mark.parametrize(
    ("said", "sent"),
    [("no such file", "ERROR: no such file"), ("Error: x", "Error: x"), ("", "ERROR: (no output)")],
)
def test_a_failed_tool_is_seen_as_failed(said: str, sent: str) -> None:
    assert wire(result("c", text(said), is_error=True))[0]["content"] == sent


@pytest.mark.parametrize("raw", ['{"path": "x', "[1]", "plain", '{"a": 1} trailing'])
def test_arguments_that_are_no_json_object_do_not_poison_the_conversation(raw: str) -> None:
    from pydantic_core import from_json

    arguments = wire(called(("c", raw)))[0]["tool_calls"][0]["function"]["arguments"]
    assert from_json(arguments) == {"malformed_arguments": raw}


@pytest.mark.parametrize(
    ("history", "plain", "calling"), [("none", False, False), ("tool_calls", False, True), ("all", True, True)]
)
def test_reasoning_goes_back_as_the_settings_say(history: str, plain: bool, calling: bool) -> None:
    spoken, tool = wire(
        called(said="x", thought="hm"),
        called(("c", "{}"), thought="so"),
        reasoning_history=history,
        reasoning_field="thoughts",
    )
    assert spoken.get("thoughts") == ("hm" if plain else None)
    assert tool.get("thoughts") == ("so" if calling else None)
    assert tool["content"] is None
    assert wire(called(thought="only"), reasoning_history=history)[0]["content"] == ""


def test_images_of_users_and_of_tools() -> None:
    image = {"type": "image", "data": "QUJD", "media_type": "image/jpeg"}
    sent = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,QUJD"}}
    assert wire(user(text("see"), image))[0]["content"] == [text("see"), sent]
    url = {"type": "image", "url": "http://h/x.png"}
    messages = wire(
        called(("c1", ""), ("c2", "")), result("c1", url), result("c2", text("t"), image), user(text("go on"))
    )
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool", "user", "user"]
    assert messages[1]["content"] == "(see the images below)"
    assert [part["type"] for part in messages[3]["content"]] == ["text", "image_url", "text", "image_url"]
    for odd in ({"type": "image", "attachment": 1}, {"type": "video"}):
        with pytest.raises(ProviderError) as caught:
            wire(user(odd))
        assert caught.value.code == "provider.bad_request"


def body(sampling: Sampling, *tools: ToolSpec, completion_tokens: bool = False, **settings: Any) -> dict[str, Any]:
    request = ChatRequest("m", None, [], tools, sampling)
    made = chat_body(request, ModelSettings(**settings), completion_tokens=completion_tokens)
    return {key: value for key, value in made.items() if key not in ("model", "messages", "tools")}


def test_what_is_not_said_is_not_sent() -> None:
    assert body(Sampling()) == {}
    everything = Sampling(
        temperature=0,
        top_p=0.5,
        top_k=3,
        max_output_tokens=9,
        seed=0,
        stop=("x",),
        reasoning_effort="low",
        tool_choice="auto",
        parallel_tool_calls=False,
        logprobs=2,
        token_ids=True,
    )
    assert body(everything, READ) == {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "max_tokens": 9,
        "seed": 0,
        "stop": ["x"],
        "reasoning_effort": "low",
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    assert body(Sampling(logprobs=0)) == {"logprobs": True}
    assert body(Sampling(max_output_tokens=9), completion_tokens=True) == {"max_completion_tokens": 9}


def test_a_tool_choice_by_name_and_without_tools() -> None:
    assert body(Sampling(tool_choice="Read"), READ)["tool_choice"] == {"type": "function", "function": {"name": "Read"}}
    assert body(Sampling(tool_choice="required"), READ)["tool_choice"] == "required"
    assert body(Sampling(tool_choice="none", parallel_tool_calls=True)) == {}


def test_the_extra_body_of_the_request_wins_over_the_models_and_both_over_the_rest() -> None:
    made = body(Sampling(top_k=1, extra_body={"a": 2, "top_k": 7}), extra_body={"a": 1, "b": 1})
    assert made == {"a": 2, "b": 1, "top_k": 7}


def test_the_description_of_a_request_has_nothing_empty_in_it() -> None:
    assert describe_request(ChatRequest("m", "", []), provider="p") == {"provider": "p", "model": "m"}
    full = ChatRequest("m", "sys", [user(text("x"))], (READ,), Sampling(seed=1))
    assert describe_request(full, provider="p") == {
        "provider": "p",
        "model": "m",
        "sampling": {"seed": 1},
        "system": "sys",
        "tools": [{"name": "Read", "description": "Reads.", "parameters": {"type": "object"}}],
    }


def test_misspelt_settings_are_refused() -> None:
    with pytest.raises(ValidationError):
        ModelSettings(base_ulr="http://x")  # type: ignore[call-arg]
