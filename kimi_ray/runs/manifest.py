"""``run.json``: what a reader needs to understand a run, and ``--resume`` to go on with it. Never a secret."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

from kimi_ray.errors import RunError
from kimi_ray.runs.items import RunItem, items_hash
from kimi_ray.runs.prompts import Prompt, prompt_hash
from kimi_ray.runs.seeds import RunSeed

MANIFEST_VERSION = 1
REMOVED = "(removed)"
_GIT_TIMEOUT_S = 5.0
_LIBRARIES = ("kimi-ray", "ray", "openai", "pydantic", "pyarrow", "zstandard")
_SECRET_NAME = re.compile(
    r"(^|[-_.])(api[-_]?keys?|secrets?|passwords?|passwd|credentials?|authorization|cookie|(auth|access|bearer|api)[-_]?token|token)$",
    re.IGNORECASE,
)
_SECRET_FLAG = re.compile(r"\A(--?[A-Za-z0-9-]+)=(.*)\Z", re.DOTALL)


def build_manifest(
    *,
    run_id: str,
    items: Sequence[RunItem],
    prompt: Prompt,
    seed: RunSeed,
    repeats: int,
    arguments: Mapping[str, Any],
    config: Mapping[str, Any],
    rollout: str | None = None,
    output_schema: Mapping[str, Any] | None = None,
    items_source: str | None = None,
    selection: Mapping[str, Any] | None = None,
    prices: Mapping[str, Any] | None = None,
    served_models: Sequence[str] | None = None,
    argv: Sequence[str] | None = None,
    directory: str | os.PathLike[str] = ".",
    now: datetime | None = None,
) -> dict[str, Any]:
    """The manifest of a new run, as plain JSON. Blocking: it asks git.

    Args:
        run_id: The run's id.
        items: What it works on, in order.
        prompt: The template or function.
        seed: The run's seed.
        repeats: How often each item is run.
        arguments: What the caller said (flags or keyword arguments), enough to say it again.
        config: The resolved settings.
        rollout: The name of the rollout function.
        output_schema: The JSON schema of the outputs.
        items_source: The items file's path, or None for items from Python.
        selection: Filter, limit, shuffle seed and id column.
        prices: Per model, US dollars and the date they were configured for.
        served_models: The server's list of models.
        argv: The command line.
        directory: Where to look for a git work tree.
        now: The time to record; None is now.
    """
    return {
        "v": MANIFEST_VERSION,
        "run_id": run_id,
        "created_at": (now or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="milliseconds"),
        "versions": versions(),
        "git": git_state(directory),
        "cwd": str(Path(directory).absolute()),
        "argv": None if argv is None else arguments_without_secrets(argv),
        "arguments": without_secrets(dict(arguments)),
        "config": without_secrets(dict(config)),
        "items": {
            "source": items_source,
            "count": len(items),
            "sha256": items_hash(items),
            "selection": dict(selection or {}),
        },
        "prompt": {"sha256": prompt_hash(prompt), "text": prompt if isinstance(prompt, str) else None},
        "seed": {"value": seed.value, "sent": seed.sent},
        "repeats": repeats,
        "rollouts": len(items) * repeats,
        "rollout": rollout,
        "output_schema": None if output_schema is None else dict(output_schema),
        "prices": dict(prices or {}),
        "served_models": None if served_models is None else list(served_models),
    }


def seed_of(manifest: Mapping[str, Any]) -> RunSeed:
    """The run seed that a manifest recorded.

    Raises:
        RunError: ``run.corrupt`` when it records none.
    """
    seed: Any = manifest.get("seed")
    recorded = cast("Mapping[str, Any]", seed if isinstance(seed, dict) else {})
    value, sent = recorded.get("value"), recorded.get("sent")
    if not isinstance(value, int) or not isinstance(sent, bool):
        raise RunError(
            "the manifest of the run records no seed",
            code="run.corrupt",
            hint="put back run.json as it was written, or start a new run with another --out",
        )
    return RunSeed(value, sent)


def versions() -> dict[str, str | None]:
    """Versions of Python and of the libraries that matter, read without importing them; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_state(directory: str | os.PathLike[str] = ".") -> dict[str, Any] | None:
    """``{commit, dirty, root}`` of the work tree around a directory; None without git, a work tree or a commit.

    ``dirty`` is None when git did not answer in time.
    """
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                [git, "-C", os.fspath(directory), *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_GIT_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "--verify", "HEAD")
    root = ask("rev-parse", "--show-toplevel")
    if not commit or not root:
        return None
    changes = ask("status", "--porcelain", "--untracked-files=normal")
    return {"commit": commit, "dirty": None if changes is None else bool(changes), "root": root}


def without_secrets(value: Any, name: str = "") -> Any:
    """A copy of plain JSON without what may be secret.

    Removed are values under names such as ``api_key``, ``token``, ``password``; the values of all ``extra_headers``,
    and of the ``headers`` and ``env`` of a server; and user information in URLs. A name that ends in ``_env`` holds the
    name of a variable and stays.
    """
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        if name in ("extra_headers", "headers", "env"):
            return dict.fromkeys(table, REMOVED)
        return {key: without_secrets(item, key) for key, item in table.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in cast("Sequence[Any]", value)]
    if value is not None and not isinstance(value, bool) and _SECRET_NAME.search(name):
        return REMOVED
    return _plain_url(value) if isinstance(value, str) else value


def arguments_without_secrets(argv: Sequence[str]) -> list[str]:
    """A command line as it may be kept."""
    kept: list[str] = []
    hide_next = False
    for word in argv:
        flag = _SECRET_FLAG.match(word)
        if hide_next:
            kept.append(REMOVED)
        elif flag and _SECRET_NAME.search(flag[1]):
            kept.append(f"{flag[1]}={REMOVED}")
        elif flag:
            kept.append(f"{flag[1]}={_plain_url(flag[2])}")
        else:
            kept.append(_plain_url(word))
        hide_next = not hide_next and word.startswith("-") and not flag and _SECRET_NAME.search(word) is not None
    return kept


def _plain_url(text: str) -> str:
    if "://" not in text or "@" not in text:
        return text
    try:
        parts = urlsplit(text)
        if parts.username is None and parts.password is None:
            return text
        return urlunsplit(parts._replace(netloc=f"{REMOVED}@{parts.netloc.rpartition('@')[2]}"))
    except ValueError:
        return REMOVED
