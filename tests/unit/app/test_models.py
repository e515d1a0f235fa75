"""Which models are configured, and what a name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_ray import ConfigError, Runtime
from kimi_ray.app import ModelCatalogue
from kimi_ray.config import RuntimeConfig
from kimi_ray.hosts.agent_container import host_services
from kimi_ray.hosts.features import Features
from kimi_ray.hosts.ports import Cluster
from kimi_ray.scopes import assemble

TABLES = {
    "near": {"base_url": "http://127.0.0.1:1/v1", "model": "tiny"},
    "far": {"base_url": "https://example.org/v1", "api_key_env": "FAR_KEY", "max_connections": 3},
}


def test_tables_and_their_settings() -> None:
    catalogue = ModelCatalogue(RuntimeConfig(models=TABLES, default_model="near"), {"FAR_KEY": "secret"})
    assert list(catalogue) == ["far", "near"] and len(catalogue) == 2 and "far" in catalogue
    far = catalogue.settings("far")
    assert far is not None and far.max_connections == 3
    assert catalogue.settings("elsewhere") is None and "elsewhere" not in catalogue


def test_what_a_name_means() -> None:
    catalogue = ModelCatalogue(RuntimeConfig(models=TABLES, default_model="near"), {"FAR_KEY": "secret"})
    assert catalogue.resolve().model == "tiny", "the default"
    key = catalogue.resolve("far").api_key
    assert key is not None and key.get_secret_value() == "secret"
    assert catalogue.resolve("near", "http://127.0.0.1:2/v1").base_urls == ("http://127.0.0.1:2/v1",)
    assert catalogue.resolve("scripted").provider == "scripted"
    with pytest.raises(ConfigError) as caught:
        catalogue.resolve("elsewhere")
    assert caught.value.code == "model.not_configured" and "far, near" in caught.value.message


def test_a_bad_table_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelCatalogue(RuntimeConfig(models={"near": {"max_attempts": 0}}))
    assert caught.value.code == "config.invalid" and "models.near.max_attempts" in caught.value.message


async def test_it_is_a_service_of_the_app_and_the_runtime_s(tmp_path: Path) -> None:
    config = RuntimeConfig(home=str(tmp_path / "home"), models=TABLES)
    app = assemble(host_services(), {RuntimeConfig: config, Cluster: object(), Features: Features([])})
    found = await app.get(ModelCatalogue)
    assert found is await app.get(ModelCatalogue) and list(found) == ["far", "near"]
    async with Runtime.connect(tmp_path / "home", "in-process", config={"models": TABLES}) as runtime:
        assert list(runtime.models) == ["far", "near"]
        assert runtime.resolve_model("near") == runtime.models.resolve("near")
