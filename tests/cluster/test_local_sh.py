"""``cluster/local.sh``: nodes that are there, a token that counts, a node that dies, and nothing left behind."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="local.sh needs Linux")

SCRIPT = Path(__file__).parents[2] / "cluster" / "local.sh"
DRIVER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
nodes = [node for node in ray.nodes() if node["Alive"]]
print(len(nodes), sum("kimi_ray_storage" in node["Resources"] for node in nodes))
"""
# A whole ray.init tries a wrong token for 20 s; one call to the cluster's control store says no at once.
KNOCK = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=10)))
"""


class Cluster:
    def __init__(self, state: Path) -> None:
        self.environment = {**os.environ, "PYTHON": sys.executable, "KIMI_RAY_CLUSTER_DIR": str(state)}
        for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
            self.environment.pop(name, None)

    def run(self, *arguments: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def exports(self) -> dict[str, str]:
        """What a driver needs to join."""
        return dict(re.findall(r"^export (\w+)=(.*)$", self.run("env").stdout, re.MULTILINE))

    def joining(self) -> dict[str, str]:
        """The whole environment of a driver that joins."""
        return {**self.environment, **self.exports()}

    def drive(self, code: str, address: str, **exports: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, address],
            env={**self.environment, **exports}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "state of a cluster")
    yield made
    made.run("down")


def free_base_port(count: int) -> int:
    """A port with ``count`` free ones behind it: above those of Ray's workers, below those that any connection gets."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for base in random.sample(range(20_000, max(ephemeral, 30_000) - count), 50):
        if all(is_free(base + step) for step in range(count)):
            return base
    raise RuntimeError("no run of free ports found")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.long
def test_two_nodes_come_serve_a_driver_with_the_token_and_go(cluster: Cluster, tmp_path: Path) -> None:
    base = free_base_port(20)
    up = cluster.run("up", "2", "--base-port", str(base), "--num-cpus", "1")
    assert up.returncode == 0, up.stderr
    address = f"127.0.0.1:{base}"
    assert up.stdout.rstrip().endswith(f"--address {address}")
    exports = cluster.exports()
    assert exports["RAY_AUTH_MODE"] == "token"
    assert exports["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"

    driven = cluster.drive(DRIVER, address, **exports)
    assert driven.stdout.split() == ["2", "1"], driven.stderr
    assert cluster.drive(KNOCK, address, **exports).stdout == "2\n"
    stranger = cluster.drive(KNOCK, address, **{**exports, "RAY_AUTH_TOKEN": "0" * 64})
    assert stranger.returncode != 0
    assert "AuthenticationError" in stranger.stderr

    again = cluster.run("up", "1")
    assert again.returncode == 2
    assert "already up" in again.stderr

    listed = cluster.run("status").stdout
    pids = {int(pid): int(node) for node, pid in re.findall(r"^node (\d+)\s+pid (\d+)", listed, re.MULTILINE)}
    assert set(pids.values()) == {0, 1}
    assert all(alive(pid) for pid in pids)
    assert cluster.run("kill", "1").returncode == 0
    assert not any(alive(pid) for pid, node in pids.items() if node == 1)
    assert any(alive(pid) for pid, node in pids.items() if node == 0)
    added = cluster.run("add")
    assert added.stdout == "node 2 is up\n", added.stderr
    raylets = re.findall(r"^node 2\s+pid (\d+)\s+raylet$", cluster.run("status").stdout, re.MULTILINE)
    assert len(raylets) == 1
    pids[int(raylets[0])] = 2

    assert cluster.run("down").returncode == 0
    assert not any(alive(pid) for pid in pids)
    assert not (tmp_path / "state of a cluster").exists()
    assert cluster.run("down").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["up"], "usage"),
        (["up", "0"], "usage"),
        (["up", "2", "--num-cpus"], "--num-cpus needs a number"),
        (["up", "2", "--bogus", "3"], "unknown option --bogus"),
        (["up", "2", "--base-port", "65530"], "--base-port"),
        (["kill", "1"], "no cluster"),
        (["env"], "no cluster"),
        (["add"], "no cluster"),
        (["status"], "no cluster"),
        ([], "local.sh up N"),
    ],
)
def test_bad_usage_says_what_to_do_and_leaves_nothing(
    cluster: Cluster, tmp_path: Path, arguments: list[str], told: str
) -> None:
    done = cluster.run(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_port_in_use_is_named_before_anything_starts(cluster: Cluster, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cluster.run("up", "1", "--base-port", str(port - 1))
    assert done.returncode == 2
    assert f"port {port} is in use" in done.stderr
    assert os.listdir(tmp_path) == []
