"""A hook's command, however it behaves: its end is told, in time, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kimi_ray.features.external_hooks import CommandEnd, HookProcesses, verdict_of
from kimi_ray.features.external_hooks.verdict import MESSAGE_CHARS, hook_input
from kimi_ray.tools.commands import scrubbed_environment


async def run(command: str, cwd: Path, *, stdin: bytes = b"{}\n", timeout_s: float = 10.0) -> CommandEnd:
    return await HookProcesses().run(command, stdin, cwd=str(cwd), env=scrubbed_environment(), timeout_s=timeout_s)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in b"ZX"
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def pid_in(path: Path) -> int:
    await until(lambda: path.exists() and path.read_text().strip() != "")
    return int(path.read_text())


async def test_it_reads_json_and_its_words_and_code_come_back(tmp_path: Path) -> None:
    end = await run("cat; echo err >&2; pwd; exit 7", tmp_path, stdin=b'{"a": 1}\n')
    assert (end.exit_code, end.stderr, end.timed_out, end.error) == (7, "err\n", False, None)
    assert end.stdout == '{"a": 1}\n' + f"{tmp_path}\n"


async def test_it_need_not_read_a_large_input(tmp_path: Path) -> None:
    end = await run("head -c 1 >/dev/null; echo done", tmp_path, stdin=b"x" * (8 << 20))
    assert (end.exit_code, end.stdout) == (0, "done\n")


async def test_it_sees_nothing_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("SOME_TOKEN", "t")
    end = await run("env", tmp_path)
    assert "secret" not in end.stdout and "SOME_TOKEN" not in end.stdout and "PATH=" in end.stdout


async def test_one_that_hangs_is_ended_with_all_its_group(tmp_path: Path) -> None:
    began = time.monotonic()
    end = await run("sleep 600 & echo $! > child; echo $$ > self; wait", tmp_path, timeout_s=0.4)
    assert end.timed_out and time.monotonic() - began < 3
    assert not is_alive(int((tmp_path / "child").read_text())) and not is_alive(int((tmp_path / "self").read_text()))


async def test_sigterm_comes_first(tmp_path: Path) -> None:
    end = await run("trap 'echo bye; exit 0' TERM; while :; do sleep 0.01; done", tmp_path, timeout_s=0.3)
    assert end.timed_out and end.stdout == "bye\n"
    assert not verdict_of("PreToolUse", end).blocked


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    began = time.monotonic()
    end = await run("trap '' TERM; echo $$ > self; while :; do sleep 0.05; done", tmp_path, timeout_s=0.3)
    assert end.timed_out and time.monotonic() - began < 3
    assert not is_alive(int((tmp_path / "self").read_text()))


async def test_children_that_hold_the_pipe_are_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    end = await run("(sleep 600 & echo $! > one); (setsid sleep 600 & echo $! > two); echo said", tmp_path)
    assert (end.exit_code, end.stdout) == (0, "said\n")
    assert time.monotonic() - began < 3
    assert not is_alive(int((tmp_path / "one").read_text())) and not is_alive(int((tmp_path / "two").read_text()))


async def test_endless_output_is_bounded_and_its_exit_code_counts(tmp_path: Path) -> None:
    end = await run("head -c 40000000 /dev/zero | tr '\\0' x; head -c 3000000 /dev/zero >&2; exit 2", tmp_path)
    assert end.exit_code == 2 and len(end.stdout) == len(end.stderr) == 1 << 20
    verdict = verdict_of("PreToolUse", end)
    assert verdict.blocked and len(verdict.message or "") < MESSAGE_CHARS + 100
    endless = await run("yes", tmp_path, timeout_s=0.4)
    assert endless.timed_out


async def test_one_that_deletes_its_directory_ends_as_any_other_and_the_next_does_not_start(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    end = await run(f"rmdir {place}; echo gone", place)
    assert (end.exit_code, end.stdout) == (0, "gone\n")
    after = await run("echo never", place)
    assert after.exit_code is None and after.error is not None and str(place) in after.error
    verdict = verdict_of("PreToolUse", after)
    assert not verdict.blocked and verdict.problem == after.error


async def test_a_cancel_kills_it(tmp_path: Path) -> None:
    running = asyncio.create_task(run("trap '' TERM; echo $$ > self; sleep 600 & wait; wait", tmp_path, timeout_s=60))
    pid = await pid_in(tmp_path / "self")
    began = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not is_alive(pid) and time.monotonic() - began < 3


async def test_a_hook_that_kills_its_supervisor_leaves_nothing(tmp_path: Path) -> None:
    end = await run("echo $$ > self; kill -9 $PPID; sleep 600", tmp_path, timeout_s=5)
    assert not end.timed_out and end.exit_code != 0
    pid = int((tmp_path / "self").read_text())
    await until(lambda: not is_alive(pid))


async def test_so_many_run_at_once_and_no_more(tmp_path: Path) -> None:
    processes = HookProcesses(max_concurrent=2)
    (tmp_path / "gate").touch()
    command = "echo $$ > started.$$; while [ -e gate ]; do sleep 0.01; done"
    work = [
        asyncio.create_task(processes.run(command, b"", cwd=str(tmp_path), env=scrubbed_environment(), timeout_s=10))
        for _ in range(5)
    ]
    await until(lambda: len(list(tmp_path.glob("started.*"))) == 2)
    await asyncio.sleep(0.05)  # a third would have started by now
    assert len(list(tmp_path.glob("started.*"))) == 2
    os.unlink(tmp_path / "gate")
    assert [end.exit_code for end in await asyncio.gather(*work)] == [0] * 5


async def test_one_that_an_agent_waits_for_does_not_wait_behind_notices_that_hang(tmp_path: Path) -> None:
    processes = HookProcesses(max_concurrent=1)
    where = {"cwd": str(tmp_path), "env": scrubbed_environment()}
    hanging = [
        asyncio.create_task(processes.run("touch begun; sleep 600", b"", **where, timeout_s=60, background=True))
        for _ in range(3)
    ]
    await until((tmp_path / "begun").exists)
    assert (await processes.run("echo asked", b"", **where, timeout_s=10)).stdout == "asked\n"
    for task in hanging:
        task.cancel()
    await asyncio.wait(hanging)


# -- what its end means ---------------------------------------------------------------------------------------------


def end(code: int | None = 0, out: str = "", err: str = "", **more: object) -> CommandEnd:
    return CommandEnd(code, out, err, **more)  # type: ignore[arg-type]


DENY = '{"hookSpecificOutput": {"permissionDecision": "deny", "permissionDecisionReason": "not here"}}'


@pytest.mark.parametrize("event", ["PreToolUse", "UserPromptSubmit", "Stop"])
def test_what_blocks(event: str) -> None:
    assert verdict_of(event, end(2, "ignored", "because\n")).message == "because"
    silent = verdict_of(event, end(2))
    assert silent.blocked and event in (silent.message or "")
    denied = verdict_of(event, end(0, DENY))
    assert denied.blocked and denied.message == "not here"


@pytest.mark.parametrize(
    "found", [end(1), end(127, "", "no such command"), end(137), end(2, timed_out=True), end(None, error="x")]
)
def test_everything_else_lets_it_go_on_and_says_why(found: CommandEnd) -> None:
    verdict = verdict_of("PreToolUse", found)
    assert not verdict.blocked and verdict.message is None and verdict.problem


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("", None),
        ("  \n", None),
        ("plain text\n", "plain text"),
        ("[1, 2]", "[1, 2]"),
        ("{broken", "{broken"),
        ("{}", None),
        ('{"message": "said"}', "said"),
        ('{"message": 3}', None),
        ('{"hookSpecificOutput": {"permissionDecision": "allow"}}', None),
        ('{"hookSpecificOutput": {"additionalContext": "more"}}', "more"),
        ('{"hookSpecificOutput": "text"}', None),
        ("{" * 100_000, "{" * MESSAGE_CHARS + "\n[... cut here ...]"),
        ('{"message": "half \\ud800"}', "half ?"),
    ],
)
def test_what_it_says_to_the_model(out: str, message: str | None) -> None:
    verdict = verdict_of("UserPromptSubmit", end(0, out))
    assert not verdict.blocked and verdict.message == message


def test_an_event_that_cannot_be_blocked_is_not(tmp_path: Path) -> None:
    for found in (end(2, "", "no"), end(0, DENY)):
        verdict = verdict_of("PostToolUse", found)
        assert not verdict.blocked and "cannot be blocked" in (verdict.problem or "")


def test_what_cannot_be_written_as_json_is_told() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError):
        hook_input("PreToolUse", {}, {"tool_input": deep})
    assert b"\\ud800" in hook_input("PreToolUse", {}, {"tool_input": "\ud800"})
