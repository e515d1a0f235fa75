"""The manifest: enough to understand and resume a run, and never a secret."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.runs import RunSeed, build_manifest, prepare_items, versions, without_secrets
from kimi_ray.runs import manifest as manifest_module
from kimi_ray.runs.manifest import arguments_without_secrets, git_state

SECRET = "sk-very-secret-0123456789"
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def built(**how: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "run_id": "run_1", "items": prepare_items(["a", "b"]), "prompt": "{{item}}", "seed": RunSeed(3, sent=False),
        "repeats": 4, "arguments": {"retries": 1}, "config": {"shards": 1}, **how,
    }  # fmt: skip
    return build_manifest(**given)


def test_what_a_manifest_says() -> None:
    made = built(
        items_source="f.jsonl", selection={"shuffle": 5, "limit": 2}, prices={"m": {"input": 1.0, "date": "2026-01-02"}}
    )
    assert json.loads(json.dumps(made)) == made
    assert made["v"] == 1
    assert made["items"]["count"] == 2
    assert made["items"]["selection"] == {"shuffle": 5, "limit": 2}
    assert made["rollouts"] == 8
    assert made["seed"] == {"value": 3, "sent": False}
    assert made["prompt"]["text"] == "{{item}}"
    assert made["versions"]["python"]
    assert made["versions"]["pydantic"] == versions()["pydantic"]
    assert made["created_at"].endswith("+00:00")


def test_no_secret_is_ever_in_it() -> None:
    made = built(
        arguments={
            "api_key": SECRET,
            "base_url": f"https://user:{SECRET}@host:1/v1?x=1",
            "nested": [{"auth_token": SECRET}],
        },
        config={
            "models": {
                "m": {
                    "extra_headers": {"X-Whatever": SECRET},
                    "api_key_env": "MY_KEY",
                    "max_context_tokens": 4096,
                    "base_url": [f"http://{SECRET}@h/v1", "http://plain/v1"],
                }
            },
            "password": SECRET,
        },
        argv=["kimi-ray", "swarm", "--api-key", SECRET, f"--token={SECRET}", "--base-url", f"http://u:{SECRET}@h/v1"],
    )
    assert SECRET not in json.dumps(made)
    model = made["config"]["models"]["m"]
    assert model["api_key_env"] == "MY_KEY"
    assert model["max_context_tokens"] == 4096
    assert model["base_url"][1] == "http://plain/v1"
    assert list(model["extra_headers"]) == ["X-Whatever"]
    assert made["arguments"]["base_url"].endswith("@host:1/v1?x=1")


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("api_key", False), ("OPENAI_API_KEY", False), ("apiKey", False), ("x-api-key", False), ("secret", False),
        ("client_secret", False), ("Authorization", False), ("token", False),
        ("access-token", False), ("cookie", False),
        ("max_output_tokens", True), ("tokens", True), ("token_ids", True), ("api_key_env", True), ("tokenizer", True),
        ("monkey", True), ("keyboard", True), ("id_column", True),
    ],
)  # fmt: skip
def test_names_that_mean_a_secret(name: str, kept: bool) -> None:
    assert (without_secrets({name: "value"})[name] == "value") is kept


def test_what_is_not_secret_is_copied_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, {"b": "x@y"}], "url": "http://h/@x", "mail": "a@b.c", "token": None}
    copy = without_secrets(value)
    assert copy == value
    assert copy["a"] is not value["a"]


def test_command_lines() -> None:
    argv = ["run", "--model", "m", "--api-key", SECRET, "--seed", "7", "--tag=token=x", "-q"]
    assert arguments_without_secrets(argv) == [
        "run",
        "--model",
        "m",
        "--api-key",
        "(removed)",
        "--seed",
        "7",
        "--tag=token=x",
        "-q",
    ]


def git(path: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(path), *identity, *arguments], check=True, capture_output=True)


@needs_git
def test_git_commit_and_whether_it_is_dirty(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None, "no commit yet"
    (tmp_path / "f").write_text("1")
    git(tmp_path, "add", "f")
    git(tmp_path, "commit", "-qm", "m")
    state = git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "f").write_text("2")
    changed = git_state(tmp_path)
    assert changed is not None
    assert changed["dirty"] is True


def test_without_git_there_is_no_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(".") is None
    assert built()["git"] is None


def test_a_git_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "git"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(manifest_module, "_GIT_TIMEOUT_S", 0.2)
    began = time.monotonic()
    assert git_state(".") is None
    assert time.monotonic() - began < 10, "the fake git sleeps for a minute"
