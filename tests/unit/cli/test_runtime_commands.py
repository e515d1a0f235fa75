"""``drain`` and ``status``: what they print of a cluster, and their exit codes. The cluster itself is made up."""

from __future__ import annotations

from typing import Any

import pytest

from kimi_ray.actors import node_facts, operate
from kimi_ray.cli import doctor as doctor_module
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import RuntimeFault
from kimi_ray.hosts.driver_leases import program_versions
from tests.unit.cli.conftest import Cli

NODE = "9f3c21ab" + "0" * 20


def report(**said: Any) -> dict[str, Any]:
    return {
        "node_id": NODE, "by": "request", "done": True, "deadline": None, "elapsed_s": 1.5, "moved": 14,
        "handed_over": 2, "stopped": ["h/agents-1"], "running": [], "pinned": [], "sessions": [], "cancelled": [],
        "errors": {}, **said,
    }  # fmt: skip


def told(**said: Any) -> dict[str, Any]:
    return {
        "address": "10.0.0.1:6379", "namespace": "kimi_ray", "node_id": NODE, "done": True,
        "drained": [{"home_id": "h", **report()}], "failed": {}, **said,
    }  # fmt: skip


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``drain`` is to be told, and what it asked."""
    kept: dict[str, Any] = {"told": told()}

    def drain(config: RuntimeConfig, node: str, **how: Any) -> dict[str, Any]:
        kept["asked"] = (config.address, node, how)
        if isinstance(kept["told"], Exception):
            raise kept["told"]
        return kept["told"]

    monkeypatch.setattr(operate, "drain", drain)
    return kept


def test_drain_says_what_left(cli: Cli, answers: dict[str, Any]) -> None:
    result = cli("drain", "9f3c21ab", "--address", "10.0.0.1:6379", "--deadline", "12.5", "--force")
    assert (result.code, result.err) == (0, "")
    assert answers["asked"] == ("10.0.0.1:6379", "9f3c21ab", {"deadline_s": 12.5, "force": True, "undo": False})
    assert f"node {NODE} is empty" in result.out
    assert "14 agents let go, 2 sessions handed over, 1 hosts ended in 1.5 s" in result.out
    document = cli("drain", "here", "--address", "10.0.0.1:6379", "--json").document
    assert set(document) == {"address", "namespace", "node_id", "done", "drained", "failed"}


def test_what_is_left_is_named_and_an_exit_code(cli: Cli, answers: dict[str, Any]) -> None:
    many = [f"session_x/agent-{n}" for n in range(9)]
    left = report(done=False, running=many, pinned=["session_x/main\x1b[31m"], sessions=["session_y"])
    answers["told"] = told(done=False, drained=[{"home_id": "h", **left}])
    result = cli("drain", NODE, "--address", "10.0.0.1:6379")
    assert result.code == 1
    assert "is draining" in result.out and "and 4 more" in result.out and "session_y" in result.out
    assert "\x1b" not in result.out


def test_undo_and_a_refusal(cli: Cli, answers: dict[str, Any]) -> None:
    answers["told"] = told(drained=[])
    result = cli("drain", NODE, "--undo", "--address", "10.0.0.1:6379")
    assert result.code == 0 and "takes work again" in result.out
    assert answers["asked"][2]["undo"] is True
    answers["told"] = told(done=False, drained=[], failed={"h": {"code": "infra.last_node", "message": "the last one"}})
    result = cli("drain", NODE, "--address", "10.0.0.1:6379")
    assert result.code == 1 and "h: the last one" in result.err
    answers["told"] = RuntimeFault("'x' names no living nodes", code="infra.unknown_node", hint="look")
    result = cli("drain", "x", "--address", "10.0.0.1:6379", "--json")
    assert result.code != 0 and result.document["error"]["code"] == "infra.unknown_node"


def test_without_a_cluster_there_is_nothing_to_drain(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_ray.actors.ray_session.is_running", lambda: False)  # whatever other tests have started
    result = cli("drain", "here")
    assert result.code == 0 and "no cluster" in result.out


def runtime() -> dict[str, Any]:
    nodes = [
        {"node_id": "head" * 7, "address": "10.0.0.1", "cpus": 0.0, "is_head": True, "has_storage": False},
        {"node_id": "disk" * 7, "address": "10.0.0.2", "cpus": 8.0, "is_head": False, "has_storage": True},
        {"node_id": NODE, "address": "10.0.0.3", "cpus": 8.0, "is_head": False, "has_storage": False},
    ]
    drains = [None, None, report(done=False, running=["s/agent-1"], pinned=["s/main"])]
    host = {"name": "h/agents-01", "kind": "agents", "node_id": NODE, "pid": 7, "load": 2, "dedicated": False}
    host |= {"sessions": [], "fingerprint": "85dc95523f13fe5a", "environment": "", "draining": True}
    rows = [{**node, "alive": True, "draining": one} for node, one in zip(nodes, drains, strict=True)]
    return {"home_id": "h", "home": "/h", "hosts": [host], "leases": [], "nodes": rows, "failures": {}, "actors": []}


def test_status_shows_the_home_what_drains_and_the_code(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"address": "10.0.0.1:6379", "namespace": "kimi_ray", "runtimes": [runtime()]}
    monkeypatch.setattr(operate, "status", lambda _config: found)
    out = cli("status", "--address", "10.0.0.1:6379").out
    lines = {line.split()[1]: line for line in out.splitlines() if " CPUs" in line}
    assert lines["10.0.0.1"].endswith("head") and lines["10.0.0.2"].endswith("home")
    assert lines["10.0.0.3"].endswith("draining (2 left)")
    assert "85dc9552" in out


def test_doctor_tells_the_home_what_drains_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [
        {**{key: node[key] for key in ("node_id", "address", "is_head", "has_storage")}, "draining": number == 1}
        | {"versions": program_versions(), "host": "m"}
        for number, node in enumerate(runtime()["nodes"])
    ]
    monkeypatch.setattr(node_facts, "node_facts", lambda _config: facts)
    monkeypatch.setattr(operate, "status", lambda _config: {"runtimes": [runtime()]})
    found = {one.check: one for one in doctor_module._cluster(RuntimeConfig(address="10.0.0.1:6379"))}
    assert "10.0.0.2" in found["storage node"].detail and found["storage node"].status == "OK"
    assert found["draining"].status == "WARN"
    assert NODE[:8] in found["draining"].detail and "diskdisk" in found["draining"].detail
    assert "1 fingerprint" in found["user code"].detail


def test_status_shows_the_limits_of_models(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [
        {"model": "kimi\x1b", "limit": 12, "in_use": 10, "wanted": 30, "hosts": 2, "cuts": 1, "paused_s": 2.5},
        {"model": "quiet", "limit": 1, "in_use": 0, "wanted": 0, "hosts": 0, "cuts": 0, "paused_s": 0.0},
    ]
    found = {"address": "a:1", "namespace": "kimi_ray", "runtimes": [{**runtime(), "limits": limits}]}
    monkeypatch.setattr(operate, "status", lambda _config: found)
    lines = [line.strip() for line in cli("status", "--address", "a:1").out.splitlines() if line.startswith("  limit")]
    assert lines == [
        "limit     kimi\\x1b: 12 requests at once, 10 under way, 20 waiting, 1 cut, paused for 2.5 s",
        "limit     quiet: 1 request at once, 0 under way, 0 waiting",
    ]
