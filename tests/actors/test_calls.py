"""Nobody but ``actors/calls.py`` waits for Ray, and Ray's errors come out in our codes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from ray import exceptions as ray_errors

from kimi_ray.actors.calls import translated
from kimi_ray.errors import KimiRayError, StoreError

PACKAGE = Path(__file__).parents[2] / "kimi_ray"
WAITING = {"get", "wait", "get_async"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def offences(source: str) -> list[str]:
    """Awaited or gathered ``.remote(...)`` calls, ``ray.get``/``ray.wait``, futures of references."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Await):
            awaited = node.value
            calls = [inner for inner in ast.walk(awaited) if isinstance(inner, ast.Call)]
            lambdas = {id(inner) for fn in ast.walk(awaited) if isinstance(fn, ast.Lambda) for inner in ast.walk(fn)}
            found += [
                f"line {call.lineno}: awaits a reference"
                for call in calls
                if isinstance(call.func, ast.Attribute) and call.func.attr == "remote" and id(call) not in lambdas
            ]
        if isinstance(node, ast.Attribute) and node.attr in WAITING and _is_ray(node.value):
            found.append(f"line {node.lineno}: ray.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module == "ray":
            found += [f"line {node.lineno}: from ray import {a.name}" for a in node.names if a.name in WAITING]
    return found


def _is_ray(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("ray", "_ray", "typed_ray")


def test_only_calls_awaits_references():
    bad = {
        str(path.relative_to(PACKAGE)): found
        for path in modules()
        if path != PACKAGE / "actors" / "calls.py" and (found := offences(path.read_text()))
    }
    assert bad == {}


@pytest.mark.parametrize(
    "code",
    [
        "async def f(a):\n    return await a.m.remote(1)",
        "async def f(a):\n    await asyncio.gather(a.m.remote(), a.m.remote())",
        "def f(r):\n    return ray.get(r)",
        "def f(r):\n    return _ray().wait([r])",
        "from ray import get",
    ],
)
def test_the_rule_above_can_be_broken(code: str):
    assert offences(code)


def test_ray_is_imported_in_this_room_only():
    importers = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name == "ray" or name.startswith("ray.") for name in names):
                importers.add(path.relative_to(PACKAGE).parts[0])
    assert importers == {"actors"}


def test_connecting_is_imported_without_ray():
    import subprocess
    import sys

    code = "import kimi_ray.actors, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (ray_errors.ActorDiedError(), "infra.actor_died", True),
        (ray_errors.ActorUnavailableError("gone for now", None), "infra.actor_unavailable", True),
        (ray_errors.GetTimeoutError("late"), "infra.timeout", True),
        (ray_errors.ActorUnschedulableError("no node"), "infra.unschedulable", True),
        (ray_errors.TaskUnschedulableError("no node"), "infra.unschedulable", True),
        (ray_errors.PendingCallsLimitExceeded("many"), "infra.pending_limit", True),
        (ray_errors.ObjectStoreFullError("full"), "infra.object_store_full", True),
        (ray_errors.OutOfMemoryError("oom"), "infra.out_of_memory", True),
        (ray_errors.AuthenticationError("who?"), "runtime.auth", False),
        (ray_errors.RuntimeEnvSetupError("pip"), "runtime.env_failed", False),
        (ray_errors.WorkerCrashedError(), "infra.actor_died", True),
        (ray_errors.RaySystemError("strange"), "infra.ray", False),
    ],
)
def test_codes(error: Exception, code: str, retryable: bool):
    told = translated(error, "h/agents-1", "run_many")
    assert (told.code, told.retryable) == (code, retryable)
    assert "h/agents-1" in told.message
    assert told.details.get("actor") == "h/agents-1"


def test_the_way_in_is_told_when_a_token_is_missing():
    assert "RAY_AUTH_TOKEN" in str(translated(ray_errors.AuthenticationError("no"), "Ray", "nodes").hint)


def test_an_error_of_ours_inside_a_task_error_comes_out_whole():
    cause = StoreError("full", code="store.disk_full", hint="delete", details={"free": 0}, retryable=True)
    task = ray_errors.RayTaskError("f", "Traceback ...", cause, proctitle="p", pid=1, ip="1.2.3.4")
    told = translated(task, "h/store-0", "append")
    assert isinstance(told, StoreError)
    assert told.to_data() == cause.to_data()


def test_any_other_error_inside_a_task_error_keeps_its_type_and_traceback():
    task = ray_errors.RayTaskError("f", "Traceback\nKeyError: 'x'", KeyError("x"), proctitle="p", pid=1, ip="1.2.3.4")
    told = translated(task, "h/store-0", "append")
    assert type(told) is KimiRayError
    assert told.code == "internal"
    assert told.details["exception"] == "KeyError"
    assert "Traceback" in told.details["traceback"]
