"""What a prompt leaves in the document: one line, no secrets, bounded."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.session import last_prompt
from kimi_ray.session.prompt_text import LAST_PROMPT_CHARS, redacted


@pytest.mark.parametrize(
    "secret",
    [
        "sk-abcdefghijklmnop",
        "api_key=hunter2hunter2",
        "API-KEY: hunter2hunter2",
        'password = "hunter2hunter2"',
        "OPENAI_API_KEY=hunter2hunter2",
        "authorization: Bearer hunter2hunter2",
        "hunter2" * 8,
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2hunter2\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nhunter2hunter2 and cut off",
    ],
)
def test_secrets_are_replaced(secret: str) -> None:
    shown = last_prompt(f"please use {secret} now")
    assert "hunter2" not in shown and "abcdefghijklmnop" not in shown
    assert shown.startswith("please use ") and "[redacted]" in shown


@pytest.mark.parametrize(
    "text",
    ["Find the bug in kimi_ray/hosts/session_host.py", "a path /usr/lib/python3.11/site-packages/pydantic/main.py"],
)
def test_ordinary_text_stays(text: str) -> None:
    assert last_prompt(text) == text


def test_blocks_become_one_line() -> None:
    content = [
        {"type": "text", "text": "look\tat\x00 this"},
        {"type": "image", "data": "..."},
        {"type": "text", "text": "ok"},
    ]
    assert last_prompt(content) == "look at this [image] ok"


@given(st.text(max_size=9000))
def test_always_one_bounded_line(text: str) -> None:
    shown = last_prompt(text)
    assert len(shown) <= LAST_PROMPT_CHARS
    assert "\n" not in shown and "\x00" not in shown and shown == shown.strip()


def test_five_megabytes_take_no_time() -> None:
    began = time.monotonic()
    last_prompt("a= b" * (5 << 18))
    redacted("-" * 20_000 + "=" * 20_000)
    assert time.monotonic() - began < 1.0
