"""Commands: output, time, environment, and that nothing of them survives."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kimi_ray.errors import ToolError
from kimi_ray.tools import LocalEnvironment
from kimi_ray.tools.commands import scrubbed_environment


@pytest.fixture
async def env(tmp_path: Path):
    environment = LocalEnvironment(tmp_path)
    yield environment
    await environment.close()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


async def until(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def pids_in(path: Path, count: int) -> list[int]:
    found = [int(line) for line in path.read_text().split()] if path.exists() else []
    return found if len(found) == count else []


async def test_output_exit_code_and_streams_together(env: LocalEnvironment) -> None:
    result = await env.exec("echo out; echo err >&2; exit 3")
    assert (result.output, result.exit_code, result.timed_out) == ("out\nerr\n", 3, False)
    assert (await env.exec(["printf", "%s", "a b; echo no"])).output == "a b; echo no"
    assert (await env.exec("kill -TERM $$")).exit_code == 128 + signal.SIGTERM
    assert (await env.exec("cat")).output == ""  # standard input is empty, not ours
    assert (await env.exec("yes | head -1")).output == "y\n"  # SIGPIPE has its default action


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
async def test_the_shell_is_bash(env: LocalEnvironment) -> None:
    assert (await env.exec("set -o pipefail; [[ a == a* ]] && false | true; echo $?")).output == "1\n"


async def test_a_program_that_does_not_exist(env: LocalEnvironment) -> None:
    result = await env.exec(["no-such-program"])
    assert result.exit_code == 127 and "no-such-program" in result.output


async def test_cwd(env: LocalEnvironment, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    assert (await env.exec("pwd", cwd="sub")).output.strip() == str(tmp_path / "sub")
    for cwd, code in (("..", "outside_workdir"), ("none", "not_found")):
        with pytest.raises(ToolError) as caught:
            await env.exec("pwd", cwd=cwd)
        assert caught.value.code == f"environment.{code}"


async def test_a_command_too_long_for_the_kernel_is_an_error_with_a_way_out(env: LocalEnvironment) -> None:
    with pytest.raises(ToolError) as caught:
        await env.exec("true " + "x" * 4_000_000)
    assert caught.value.code == "environment.failed" and "script" in (caught.value.hint or "")
    with pytest.raises(ToolError):
        await env.exec("echo a\0b")


async def test_undecodable_output_becomes_replacement_characters(env: LocalEnvironment) -> None:
    assert (await env.exec(r"printf 'a\377b'")).output == "a\ufffdb"


async def test_output_is_cut_in_its_middle_at_character_boundaries(env: LocalEnvironment) -> None:
    script = "import sys; sys.stdout.buffer.write('é'.encode() * 50_000)"
    result = await env.exec([sys.executable, "-c", script], max_output_bytes=1001)
    assert result.truncated_bytes > 98_000
    assert "\ufffd" not in result.output
    head, _, rest = result.output.partition("\n[... ")
    count, _, tail = rest.partition(" bytes cut here ...]\n")
    assert set(head) == set(tail) == {"é"}
    assert len(head.encode()) + len(tail.encode()) + int(count) == 100_000
    assert (await env.exec("printf 12345678", max_output_bytes=8)).output == "12345678"


async def test_time_out_keeps_what_was_printed_and_kills_everything(env: LocalEnvironment, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    started = time.monotonic()
    result = await env.exec(
        f"echo before; sleep 300 & echo $! >> {pids}; setsid sleep 300 & echo $! >> {pids}; trap '' TERM; wait",
        timeout_s=0.5,
    )
    assert time.monotonic() - started < 4
    assert result.timed_out and result.output == "before\n" and result.exit_code == 137
    left = pids_in(pids, 2)
    assert left and not any(alive(pid) for pid in left)


async def test_what_is_left_in_the_background_ends_with_the_command(env: LocalEnvironment, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    result = await asyncio.wait_for(
        env.exec(
            f"(setsid sh -c 'echo $$ >> {pids}; sleep 300' &); sleep 300 & echo $! >> {pids}; sleep 0.2; echo done"
        ),
        timeout=5,
    )
    assert (result.output, result.exit_code) == ("done\n", 0)
    assert not any(alive(pid) for pid in pids_in(pids, 2))


async def test_cancelling_waits_for_the_kill(env: LocalEnvironment, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    task = asyncio.create_task(env.exec(f"sleep 300 & echo $! >> {pids}; echo $$ >> {pids}; wait"))
    assert await until(lambda: pids_in(pids, 2))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert not any(alive(pid) for pid in pids_in(pids, 2))


async def test_close_ends_running_commands_with_a_named_error(tmp_path: Path) -> None:
    env = LocalEnvironment(tmp_path)
    pids = tmp_path / "pids"
    task = asyncio.create_task(env.exec(f"echo $$ >> {pids}; sleep 300"))
    assert await until(lambda: pids_in(pids, 1))
    await env.close()
    with pytest.raises(ToolError) as caught:
        await task
    assert caught.value.code == "environment.closed"
    assert not any(alive(pid) for pid in pids_in(pids, 1))


async def test_a_command_that_kills_its_supervisor_does_not_get_away(env: LocalEnvironment, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    result = await asyncio.wait_for(
        env.exec(f"sleep 300 & echo $! >> {pids}; echo $$ >> {pids}; kill -9 $PPID; sleep 300"), timeout=8
    )
    assert result.exit_code == 137
    assert await until(lambda: not any(alive(pid) for pid in pids_in(pids, 2)))


HOST = """
import asyncio, os, sys, time
from kimi_ray.tools import LocalEnvironment

async def main():
    env = LocalEnvironment(sys.argv[1])
    commands = asyncio.gather(*(env.exec(sys.argv[2]) for _ in range(2)))
    if sys.argv[3] == "fork":
        while not os.path.exists(sys.argv[1] + "/pids"):
            await asyncio.sleep(0.01)
        if os.fork() == 0:  # a child that holds open what the host held
            time.sleep(10)
            os._exit(0)
    await commands

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["plain", "fork"])
async def test_commands_die_with_a_host_that_was_killed(kind: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    fled = f"(setsid sh -c 'echo $$ >> {pids}; exec sleep 300' &)"
    command = f"sleep 300 & echo $! >> {pids}; {fled}; echo $$ >> {pids}; sleep 300"
    host = subprocess.Popen([sys.executable, "-c", HOST, str(tmp_path), command, kind])
    try:
        assert await until(lambda: pids_in(pids, 6), 20)
        started = pids_in(pids, 6)
        assert all(alive(pid) for pid in started)
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
    assert await until(lambda: not any(alive(pid) for pid in started), 2.0), [pid for pid in started if alive(pid)]


async def test_nothing_secret_goes_over(monkeypatch: pytest.MonkeyPatch, env: LocalEnvironment) -> None:
    secrets = ("OPENAI_API_KEY", "KIMI_RAY_HOME", "RAY_ADDRESS", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "LC_TOKEN", "FOO")
    for name in secrets:
        monkeypatch.setenv(name, "hidden-value")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    output = (await env.exec("env", env={"GIVEN": "1"})).output
    assert "hidden-value" not in output and "GIVEN=1" in output and "LC_ALL=C.UTF-8" in output
    assert {"PATH", "LANG", "TERM"} <= {line.partition("=")[0] for line in output.splitlines()}
    assert scrubbed_environment({"MY_TOKEN": "on purpose"})["MY_TOKEN"] == "on purpose"


async def test_commands_of_one_environment_are_bounded(env: LocalEnvironment) -> None:
    results = await asyncio.gather(*(env.exec(f"echo {n}") for n in range(24)))
    assert [int(result.output) for result in results] == list(range(24))


def test_commands_run_on_a_loop_outside_the_main_thread(tmp_path: Path) -> None:
    found: list[str] = []

    async def main() -> None:
        env = LocalEnvironment(tmp_path)
        found.append((await env.exec("echo from a thread")).output)
        await env.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(20)
    assert found == ["from a thread\n"]
