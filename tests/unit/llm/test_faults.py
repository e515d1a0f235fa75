from __future__ import annotations

import json
import pickle

import pytest

from kimi_ray.errors import KimiRayError, ProviderError
from kimi_ray.llm.faults import (
    BODY_CHARS,
    Place,
    answer_fault,
    bad_stream_fault,
    connection_fault,
    redact,
    retry_after_ms,
    status_fault,
    stream_error_fault,
    timeout_fault,
)

KEY = "sk-proj-0123456789abcdef"
PLACE = Place("big-model", "http://me:hunter2@host:8000/v1", (KEY,), "$OPENAI_API_KEY")


def said(message: str, **more: str) -> str:
    return json.dumps({"error": {"message": message, **more}})


VLLM_TOO_LONG = (
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4900 in the messages, 100"
    " in the completion). Please reduce the length of the messages or completion."
)
VLLM_MAX_TOKENS = (
    "'max_tokens' or 'max_completion_tokens' is too large: 5000. This model's maximum context length is 4096 tokens"
    " and your request has 10 input tokens (5000 > 4096 - 10)."
)


@pytest.mark.parametrize(
    ("status", "body", "code", "retryable"),
    [
        (401, said("Incorrect API key provided"), "provider.auth", False),
        (403, "Forbidden", "provider.auth", False),
        (403, said("Your account is suspended due to insufficient balance"), "provider.quota", False),
        (402, "", "provider.quota", False),
        (429, said("Rate limit reached for requests"), "provider.rate_limit", True),
        (429, said("You exceeded your current quota, check your plan and billing"), "provider.quota", False),
        (429, said("x", code="insufficient_quota"), "provider.quota", False),
        (429, said("x", type="exceeded_current_quota_error"), "provider.quota", False),
        (400, said("Your credit balance is too low to access the API"), "provider.quota", False),
        (429, said("The engine is currently overloaded"), "provider.rate_limit", True),
        (529, "", "provider.overloaded", True),
        (503, said("The model is overloaded. Try again later."), "provider.overloaded", True),
        (500, said("server is overloaded"), "provider.overloaded", True),
        (500, "boom", "provider.server", True),
        (502, "<html>Bad gateway</html>", "provider.server", True),
        (503, "no healthy upstream", "provider.server", True),
        (504, "", "provider.server", True),
        (524, "", "provider.server", True),
        (501, "", "provider.server", False),
        (505, "", "provider.server", False),
        (408, "", "provider.timeout", True),
        (409, "", "provider.bad_request", True),
        (404, said("The model `x` does not exist", code="model_not_found"), "provider.not_found", False),
        (404, "<html>", "provider.not_found", False),
        (400, said("The model `x` does not exist."), "provider.not_found", False),
        (400, said("x", code="context_length_exceeded"), "context.overflow", False),
        (400, said(VLLM_TOO_LONG), "context.overflow", False),
        (400, said(VLLM_MAX_TOKENS), "provider.bad_request", False),
        (400, said("request (9000 tokens) exceeds the available context size"), "context.overflow", False),
        (400, said("x", type="exceed_context_size_error"), "context.overflow", False),
        (400, said("prompt is too long: 210000 tokens > 200000 maximum"), "context.overflow", False),
        (413, said("Input is too long for requested model."), "context.overflow", False),
        (422, said("input token count exceeds the maximum"), "context.overflow", False),
        (413, "Payload too large", "provider.bad_request", False),
        (400, said("x", code="content_filter"), "provider.filtered", False),
        (400, said("messages: field required"), "provider.bad_request", False),
        (422, "[]", "provider.bad_request", False),
        (418, "", "provider.bad_request", False),
    ],
)
def test_every_status_has_its_code(status: int, body: str, code: str, retryable: bool) -> None:
    error = status_fault(PLACE, status, body)
    assert (error.code, error.retryable, error.details["status"]) == (code, retryable, status)
    assert str(status) in error.message


def test_the_servers_words_are_in_the_message_and_its_facts_in_the_details() -> None:
    headers = {"X-Request-ID": "req_1", "Retry-After": "7"}
    error = status_fault(PLACE, 429, said("slow down"), headers)
    assert error.message == "http://host:8000/v1 answered 429: slow down"
    assert error.details["request_id"] == "req_1"
    assert error.details["retry_after_ms"] == error.retry_after_ms == 7000
    assert error.details["body"] == said("slow down")
    assert error.error_class == "rate_limit"
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ProviderError)
    assert again.to_data() == error.to_data()


@pytest.mark.parametrize("body", ["x" * 9000, said(f"bad key {KEY} " + "y" * 900), f"Bearer {KEY}", "\x00\x01"])
def test_no_key_and_no_flood_in_an_error(body: str) -> None:
    error = status_fault(PLACE, 401, body, {"x-request-id": f"echo {KEY}"})
    text = json.dumps(error.to_data()) + str(error)
    assert KEY not in text
    assert "hunter2" not in text
    assert len(error.details["body"]) <= BODY_CHARS
    assert "$OPENAI_API_KEY" in str(error.hint)


def test_redact() -> None:
    assert redact("a secret word", ("secret",)) == "a [redacted] word"
    assert redact("sk-abc***********wxyz is wrong") == "[redacted] is wrong"
    assert redact("http://u:p@h/v1") == "http://h/v1"
    assert redact("task-oriented and risk-averse-person", ("", "as")) == "task-oriented and risk-averse-person"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"Retry-After": "3"}, 3000),
        ({"retry-after": " 0.5 "}, 500),
        ({"retry-after": "-4"}, 0),
        ({"Retry-After-Ms": "120", "Retry-After": "3"}, 120),
        ({"retry-after-ms": "soon", "retry-after": "3"}, 3000),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 40_000),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:10 GMT"}, 0),
        ({"retry-after": "after lunch"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": ""}, None),
    ],
)
def test_retry_after_in_every_form(headers: dict[str, str], expected: int | None) -> None:
    assert retry_after_ms(headers, now_s=60) == expected


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        ({"message": "overloaded", "type": "overloaded_error", "code": 529}, "provider.overloaded", True),
        ({"message": "slow", "code": "429"}, "provider.rate_limit", True),
        ({"message": "slow", "type": "rate_limit_error"}, "provider.rate_limit", True),
        ({"message": VLLM_TOO_LONG, "code": 400}, "context.overflow", False),
        ({"message": "boom", "code": None}, "provider.server", True),
        ("boom", "provider.server", True),
        (["odd"], "provider.server", True),
    ],
)
def test_an_error_inside_an_answer(error: object, code: str, retryable: bool) -> None:
    fault = stream_error_fault(PLACE, error)
    assert (fault.code, fault.retryable) == (code, retryable)


def test_timeouts_connections_and_garbage() -> None:
    for kind in ("connect", "idle", "total"):
        fault = timeout_fault(PLACE, kind, 2.5)  # type: ignore[arg-type]
        assert (fault.code, fault.details, fault.retryable) == (
            "provider.timeout",
            {"kind": kind, "timeout_s": 2.5},
            True,
        )
        assert "2.5 s" in fault.message
        assert "hunter2" not in fault.message
    cut = connection_fault(PLACE, "no finish", cut=True)
    assert (cut.code, cut.details["kind"], cut.retryable) == ("provider.connection", "cut", True)
    garbage = bad_stream_fault(PLACE, "a line that is not JSON", f"<html>{KEY}" + "x" * 999)
    assert garbage.code == "provider.bad_stream"
    assert KEY not in json.dumps(garbage.to_data())
    assert len(garbage.details["body"]) <= BODY_CHARS


def test_what_a_complete_answer_amounts_to() -> None:
    assert answer_fault(empty=False, finish="stop") is None
    filtered = answer_fault(empty=True, finish="filtered", raw_finish="content_filter")
    empty = answer_fault(empty=True, finish="stop")
    assert filtered is not None
    assert empty is not None
    assert (filtered.code, filtered.retryable, filtered.error_class) == ("provider.filtered", False, "model_output")
    assert (empty.code, empty.retryable, empty.error_class) == ("provider.empty_response", True, "model_output")
    assert isinstance(empty, KimiRayError)
