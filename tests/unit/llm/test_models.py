from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from kimi_ray.errors import ConfigError
from kimi_ray.llm import (
    ChatRequest,
    ModelSettings,
    Price,
    ResolvedModel,
    RetryPolicy,
    ScriptedProvider,
    TextDelta,
    build_provider,
    cost_usd,
    resolve_model,
)
from kimi_ray.llm.openai import OpenAIProvider
from kimi_ray.settings import Usage

LOCAL = "http://127.0.0.1:8000/v1"
FAR = "https://models.example.com/v1"
KEY = "sk-0123456789"


def refused(*args: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve_model(*args)
    return caught.value


def test_a_table_of_that_name_comes_first() -> None:
    models = {"big": ModelSettings(model="vendor/big-1", base_url=FAR, api_key_env="BIG_KEY")}
    found = resolve_model("big", models, None, {"BIG_KEY": KEY, "OPENAI_BASE_URL": LOCAL, "OPENAI_API_KEY": "other"})
    assert (found.name, found.model, found.provider, found.base_urls) == ("big", "vendor/big-1", "openai", (FAR,))
    assert found.api_key is not None
    assert found.api_key.get_secret_value() == KEY
    assert resolve_model("big", models, LOCAL, {}).base_urls == (LOCAL,)


def test_a_table_without_an_address_takes_the_environments_or_openais() -> None:
    models = {"gpt": ModelSettings()}
    assert resolve_model("gpt", models, None, {"OPENAI_BASE_URL": LOCAL}).base_urls == (LOCAL,)
    at_home = resolve_model("gpt", models, None, {"OPENAI_API_KEY": KEY})
    assert (at_home.model, at_home.base_urls) == ("gpt", ("https://api.openai.com/v1",))


def test_any_name_with_a_base_url_is_the_name_on_the_wire() -> None:
    for found in (
        resolve_model("org/tiny", {}, LOCAL, {}),
        resolve_model("org/tiny", {}, None, {"OPENAI_BASE_URL": LOCAL}),
    ):
        assert (found.model, found.base_urls, found.api_key) == ("org/tiny", (LOCAL,), None)


def test_not_configured_names_both_forms() -> None:
    error = refused("tiny", {"big": ModelSettings()}, None, {})
    assert error.code == "model.not_configured"
    assert "'tiny'" in error.message
    assert "big" in error.message
    assert error.hint is not None
    assert "[models.tiny]" in error.hint
    assert "--base-url" in error.hint
    assert refused(None, {}, None, {}).code == "model.not_configured"
    assert refused("", {}, LOCAL, {}).code == "model.not_configured"
    assert refused(None, {"a": ModelSettings(), "b": ModelSettings()}, None, {}).details["configured"] == ["a", "b"]


def test_no_name_is_the_only_table_or_the_one_called_default() -> None:
    local = ModelSettings(base_url=LOCAL)
    assert resolve_model(None, {"one": local}, None, {}).name == "one"
    assert resolve_model(None, {"one": local, "default": local}, None, {}).name == "default"


@pytest.mark.parametrize(
    ("url", "needed"),
    [
        (LOCAL, False),
        ("http://localhost:1/v1", False),
        ("http://[::1]:1/v1", False),
        ("http://127.9.9.9/v1", False),
        ("http://10.0.0.5:8000/v1", True),
        ("http://localhost.example.com/v1", True),
        (FAR, True),
    ],
)
def test_a_key_is_needed_everywhere_but_on_loopback(url: str, needed: bool) -> None:
    if not needed:
        assert resolve_model("m", {}, url, {}).api_key is None
        return
    error = refused("m", {}, url, {"OPENAI_API_KEY": "  "})
    assert error.code == "model.no_api_key"
    assert "OPENAI_API_KEY" in error.message
    other = refused("m", {"m": ModelSettings(base_url=(LOCAL, url), api_key_env="K")}, None, {"OPENAI_API_KEY": KEY})
    assert other.details["variable"] == "K"
    assert resolve_model("m", {"m": ModelSettings(base_url=url, api_key_env="")}, None, {}).api_key is None


def test_a_key_that_is_set_is_sent_to_loopback_too() -> None:
    assert resolve_model("m", {}, LOCAL, {"OPENAI_API_KEY": KEY}).api_key is not None


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x/v1", "http://", "http:///v1", "https://[model/v1", "http://model:port/v1"]
)
def test_an_address_that_is_none(url: str) -> None:
    assert refused("m", {}, url, {}).code == "model.bad_base_url"
    with pytest.raises(ValidationError):
        ModelSettings(base_url=(LOCAL, url))


def test_the_secret_travels_and_is_never_shown() -> None:
    settings = ModelSettings(base_url=FAR, extra_headers={"X-Api-Key": "hush"})
    found = resolve_model("m", {"m": settings}, None, {"OPENAI_API_KEY": KEY})
    shown = repr(found) + str(found) + found.model_dump_json() + json.dumps(found.said()) + json.dumps(settings.said())
    assert KEY not in shown + found.cache_key()
    assert "hush" not in repr(settings) + json.dumps(settings.said())
    assert settings.said()["extra_headers"] == {"X-Api-Key": "**********"}
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert again.api_key.get_secret_value() == KEY


def test_models_that_one_provider_can_serve_have_one_key() -> None:
    def key(**changes: Any) -> str:
        values: dict[str, Any] = {"name": "a", "provider": "openai", "model": "a", "base_urls": (LOCAL,)}
        return ResolvedModel.model_validate(values | changes).cache_key()

    assert key() == key(name="b", model="b")
    different = {
        key(),
        key(base_urls=(FAR,)),
        key(api_key=KEY),
        key(api_key="other"),
        key(settings=ModelSettings(timeout_s=1)),
        key(settings=ModelSettings(extra_headers={"a": "b"})),
        key(settings=ModelSettings(extra_headers={"a": "c"})),
    }
    assert len(different) == 7


async def test_the_scripted_models_need_no_table() -> None:
    found = resolve_model("scripted", {}, None, {})
    assert (found.provider, found.model, found.api_key) == ("scripted", "scripted", None)
    provider = build_provider(found)
    assert isinstance(provider, ScriptedProvider)
    named = resolve_model("scripted:kimi_ray.llm.scripts:echo", {}, LOCAL, {})
    message = {"id": "u", "role": "user", "content": [{"type": "text", "text": "polly"}]}
    chunks = [chunk async for chunk in build_provider(named).stream(ChatRequest(named.model, None, [message]))]
    assert [chunk.text for chunk in chunks if isinstance(chunk, TextDelta)] == ["polly"]


async def test_a_scripted_table_with_its_steps_and_pace() -> None:
    table = ModelSettings.model_validate(
        {"provider": "scripted", "script": ["a", {"text": "b"}], "chunk_chars": 1, "on_end": "cycle"}
    )
    found = resolve_model("fake", {"fake": table}, None, {})
    provider = build_provider(pickle.loads(pickle.dumps(found)))
    texts = [
        "".join([chunk.text async for chunk in provider.stream(ChatRequest("m", None, [])) if type(chunk) is TextDelta])
        for _ in range(3)
    ]
    assert texts == ["a", "b", "a"]
    with pytest.raises(ConfigError) as caught:
        build_provider(resolve_model("scripted:no_such_module:f", {}, None, {}))
    assert caught.value.code == "config.invalid_script"


async def test_an_openai_provider_is_built_without_touching_the_network() -> None:
    provider = build_provider(resolve_model("m", {}, FAR, {"OPENAI_API_KEY": KEY}))
    assert isinstance(provider, OpenAIProvider)
    assert provider.name == "openai"
    assert KEY not in repr(provider)
    await provider.close()


def test_the_retry_policy_of_a_model() -> None:
    settings = ModelSettings(max_attempts=3, retry_after_cap_s=1.5)
    found = ResolvedModel(name="m", provider="openai", model="m", settings=settings)
    assert found.retry == RetryPolicy(max_attempts=3, retry_after_cap_ms=1500)


def test_cost() -> None:
    usage = Usage(input=1_000_000, cached=500_000, cache_write=1_000_000, output=2_000_000, reasoning=1_000_000)
    assert cost_usd(usage, Price(input=1, cached_input=0.5, output=3)) == pytest.approx(1 + 1 + 0.25 + 6)
    assert cost_usd(usage, Price(input=1, output=0)) == pytest.approx(2.5)
    assert cost_usd(Usage(), Price(input=9, output=9)) == 0


def test_importing_the_room_does_not_import_the_sdk() -> None:
    import subprocess
    import sys

    code = (
        "import sys, kimi_ray.llm, kimi_ray.llm.openai;"
        "print([m for m in ('openai', 'httpx', 'httpx2', 'ray') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
