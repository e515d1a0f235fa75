"""Commands whose host ends as a Ray worker does: it kills its own children first, the commands' supervisors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.actors.fault_models import running, wait_for
from tests.actors.test_processes import ROOT

HOST = """
import asyncio, sys
from kimi_ray.tools.commands import run_command, scrubbed_environment
asyncio.run(run_command(["bash", "-c", sys.argv[1]], cwd="/", env=scrubbed_environment(), timeout_s=None,
                        max_output_bytes=1000))
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("of_its_own", [False, True], ids=["in the group", "in a session of its own"])
def test_a_host_that_kills_its_children_and_dies_leaves_no_command(tmp_path: Path, of_its_own: bool) -> None:
    shells, sleeper = tmp_path / "shell", tmp_path / "sleeper"
    start = "setsid sleep 300" if of_its_own else "sleep 300"
    line = f"{start} & echo $! > {sleeper}; echo $$ > {shells}; wait"
    host = subprocess.Popen([sys.executable, "-c", HOST, line], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_for(lambda: shells.exists() and shells.read_text().strip())
        pids = [int(shells.read_text()), int(sleeper.read_text())]
        assert all(map(running, pids))
        for child in children(host.pid):
            os.kill(child, signal.SIGKILL)
    finally:
        host.kill()
        host.wait()
    wait_for(lambda: not any(map(running, pids)), 5)
