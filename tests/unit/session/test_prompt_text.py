"""What a prompt leaves in the document: one line, no secrets, bounded."""

from __future__ import annotations

import re
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
        'secret: "hunter2 hunter2, hunter2"',
        '{"Authorization": "Bearer hunter2hunter2"}',
        "Bearer hunter2hunter2hunter2",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJodW50ZXIyIn0.hunter2hunter2",
        "hunter2K/7MDENGbPxRfiCY/hunter2EXAMPLEKEYab",
        "https://x.example/" + "hunter2" * 8 + "/y",
        "_sk-hunter2hunter2",
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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('see <image path="/tmp/a b.png" width="3"> here', "see here"),
        ("see <image path=/tmp/a.png></image> here", "see here"),
        ("a <system>Image compressed to fit: original 4000x3000, sent 2000x1500</system> b", "a b"),
        ("an <image> tag and <system>reminder</system> stay", "an <image> tag and <system>reminder</system> stay"),
    ],
)
def test_upload_tags_and_compression_captions_are_no_text(text: str, shown: str) -> None:
    assert last_prompt(text) == shown


_KEY = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
_KEYS = st.text(_KEY, min_size=40, max_size=90)
_SECRETS = st.one_of(
    _KEYS,
    st.text(_KEY, min_size=12, max_size=60).map("sk-".__add__),
    _KEYS.map("authorization: bearer {}".format),
    st.tuples(
        st.sampled_from(["api_key", "API-KEY", "token", "my_secret", "password", "DB_PASSWORD"]),
        st.sampled_from(["=", ": ", " = ", '": "', "='"]),
        st.text(_KEY, min_size=1, max_size=50),
    ).map("".join),
    _KEYS.map("-----BEGIN EC PRIVATE KEY-----\n{}\n-----END EC PRIVATE KEY-----".format),
)
_SHAPES = [
    re.compile(r"PRIVATE KEY"),
    re.compile(r"(?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{12,}"),
    re.compile(r"[A-Za-z0-9_+=-]{40,}"),
    re.compile(r"(?i)bearer (?!\[redacted\])[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?i)(?:api[_-]?key|token|secret|password)[\"']?\s*[=:]\s*[\"']?(?!\[redacted\])[A-Za-z0-9]"),
]


@given(st.lists(st.one_of(_SECRETS, st.text(max_size=30), st.sampled_from(["\x00", "\n", "<image path=x>"]))))
def test_nothing_that_looks_like_a_secret_survives(parts: list[str]) -> None:
    shown = last_prompt(" ".join(parts))
    for shape in _SHAPES:
        assert not shape.search(shown), (shape.pattern, shown)
