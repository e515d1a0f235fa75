"""Worktrees of a real git: whole or not at all, with nothing of the repository run, and gone without a trace."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kimi_ray.errors import ToolError
from kimi_ray.settings import Workdir
from kimi_ray.tools import prepare_workdir
from kimi_ray.tools.workdirs import drop_sessions, found_again, leftovers, sweep_sessions, workdir_name, worktrees
from kimi_ray.tools.workdirs.private import Workshop

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")


def git(where: Path, *arguments: str) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(where.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    done = subprocess.run(
        ["git", "-C", str(where), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Two commits, a branch and a tag; a space in its path."""
    top = tmp_path / "a repo"
    top.mkdir()
    git(top, "init", "-q", "-b", "main")
    (top / "sub dir").mkdir()
    (top / "sub dir" / "f.txt").write_text("one")
    (top / "items.jsonl").write_text("secret")
    git(top, "add", ".")
    git(top, "commit", "-q", "-m", "one")
    git(top, "tag", "v1")
    (top / "sub dir" / "f.txt").write_text("two")
    git(top, "commit", "-q", "-a", "-m", "two")
    git(top, "branch", "side")
    (top / "sub dir" / "f.txt").write_text("not committed")
    return top


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "w orktrees"


def entries(repo: Path) -> list[str]:
    return git(repo, "worktree", "list", "--porcelain").split("\n\n")[1:]


def hidden(base: Path) -> list[str]:
    return [name for name in os.listdir(base) if name != ".sweep.lock"] if base.exists() else []


async def refused(awaitable) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await awaitable
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(("ref", "text"), [("main", "two"), ("v1", "one"), ("side", "two"), ("HEAD~1", "one")])
async def test_a_commit_branch_or_tag(repo: Path, base: Path, ref: str, text: str) -> None:
    made = await prepare_workdir(Workdir.git(str(repo), ref), base_dir=str(base), name="s.main.1")
    assert made.path == str(base / "s.main.1") and made.created and made.kind == "git"
    tree = Path(made.path)
    assert (tree / "sub dir" / "f.txt").read_text() == text
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "rev-parse", "HEAD") == git(repo, "rev-parse", ref)
    assert git(tree, "branch", "--show-current") == ""
    assert hidden(base) == ["s.main.1"]
    (entry,) = entries(repo)
    assert entry.splitlines()[0] == f"worktree {tree}" and "locked" not in entry and "prunable" not in entry
    git(tree, "commit", "-q", "--allow-empty", "-m", "the agent's")
    await made.release()
    await made.release()
    assert hidden(base) == [] and entries(repo) == []
    assert (repo / "sub dir" / "f.txt").read_text() == "not committed"
    assert git(repo, "rev-parse", "--abbrev-ref", "HEAD") == "main"


async def test_a_bare_repository_and_a_worktree_of_it(repo: Path, base: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.git"
    git(tmp_path, "clone", "-q", "--bare", str(repo), str(bare))
    one = await prepare_workdir(Workdir.git(str(bare), "main"), base_dir=str(base), name="one")
    assert one.path is not None
    two = await prepare_workdir(Workdir.git(one.path, "v1"), base_dir=str(base), name="two")
    assert two.path is not None and Path(two.path, "sub dir/f.txt").read_text() == "one"
    assert len(entries(bare)) == 2
    await two.release()
    await one.release()
    assert entries(bare) == []


async def test_refusals(repo: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")

    async def code(repository: object, ref: str = "main") -> str:
        return (await refused(prepare_workdir(Workdir.git(str(repository), ref), base_dir=str(base), name="n"))).code

    for ref in ("nowhere", "", "--help", "a b", "main:items.jsonl", "\0", "\ud800", "-", "deadbeef" * 5):
        spec = Workdir(kind="git", path=str(repo), ref=ref)
        if ref:
            error = await refused(prepare_workdir(spec, base_dir=str(base), name="n"))
            assert error.code == "workdir.bad_ref", ref
            error.message.encode()
    assert await code(empty, "HEAD") == "workdir.bad_ref"
    assert await code(plain) == "workdir.not_a_repository"
    assert await code(repo / "sub dir") == "workdir.not_a_repository"  # it only lies in one
    assert await code(tmp_path / "missing") == "workdir.not_found"
    for url in ("https://host/repo.git", "ssh://me@host/repo", "git@host:me/repo", "file:///tmp/x"):
        error = await refused(prepare_workdir(Workdir.git(url), base_dir=str(base), name="n"))
        assert error.code == "workdir.invalid" and "clone" in (error.hint or "")
    assert hidden(base) == [] and entries(repo) == []
    monkeypatch.setenv("PATH", str(plain))
    assert await code(repo) == "workdir.no_git"


async def test_nothing_of_the_repository_runs(repo: Path, base: Path, tmp_path: Path, monkeypatch) -> None:
    trap = tmp_path / "trap"
    for name in ("post-checkout", "reference-transaction", "post-index-change", "pre-auto-gc"):
        hook = repo / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\necho {name} >> '{trap}'\n")
        hook.chmod(0o755)
    git(repo, "config", "core.fsmonitor", f"echo monitor >> '{trap}'; false")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    monkeypatch.setenv("GIT_TRACE", str(trap))
    made = await prepare_workdir(Workdir.git(str(repo), "main"), base_dir=str(base), name="n")
    await made.release()
    assert not trap.exists() and not (tmp_path / "index").exists()


async def test_submodules_are_left_empty(repo: Path, base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", str(repo), str(other))
    git(repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other), "module")
    git(repo, "commit", "-q", "-m", "module")
    git(repo, "config", "submodule.recurse", "true")
    made = await prepare_workdir(Workdir.git(str(repo), "main"), base_dir=str(base), name="n")
    assert made.path is not None and list(Path(made.path, "module").iterdir()) == []
    await made.release()
    assert hidden(base) == [] and entries(repo) == []


async def test_what_an_agent_may_not_read_is_not_checked_out(repo: Path, base: Path, tmp_path: Path) -> None:
    denied = [str(repo / "items.jsonl"), str(repo / "sub dir"), str(tmp_path / "elsewhere"), str(repo / "missing")]
    made = await prepare_workdir(Workdir.git(str(repo), "main"), base_dir=str(base), name="n", leave_out=denied)
    assert made.path is not None and set(made.skipped) == {"items.jsonl", "sub dir"}
    assert sorted(os.listdir(made.path)) == [".git"]
    assert git(Path(made.path), "status", "--porcelain") == ""  # so that no commit of the agent deletes them
    await made.release()


async def test_a_taken_name_is_left_alone(repo: Path, base: Path) -> None:
    (base / "n").mkdir(parents=True)
    error = await refused(prepare_workdir(Workdir.git(str(repo)), base_dir=str(base), name="n"))
    assert error.code == "workdir.exists"
    assert hidden(base) == ["n"] and list((base / "n").iterdir()) == [] and entries(repo) == []


async def test_many_at_once_made_and_removed(repo: Path, base: Path) -> None:
    async def one(n: int) -> None:
        made = await prepare_workdir(Workdir.git(str(repo), "main"), base_dir=str(base), name=f"s.agent-{n}.x")
        assert made.path is not None and Path(made.path, "sub dir/f.txt").read_text() == "two"
        assert git(Path(made.path), "status", "--porcelain") == ""
        if n % 2:
            await made.release()

    async def prune() -> None:
        for _ in range(10):
            await asyncio.to_thread(git, repo, "worktree", "prune")
            await asyncio.to_thread(git, repo, "status")

    await asyncio.gather(prune(), *(one(n) for n in range(24)))
    assert len(hidden(base)) == len(entries(repo)) == 12
    assert await drop_sessions(str(base), ["s"]) == 12
    assert hidden(base) == [] and entries(repo) == []


async def test_an_entry_that_is_pruned_late_is_made_again(
    repo: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, pruned = worktrees._publish, []

    def publish(workshop: Workshop) -> None:
        entry = worktrees._entry_of(workshop.tree)
        real(workshop)
        if len(pruned) < most:
            pruned.append(entry)
            shutil.rmtree(entry)

    monkeypatch.setattr(worktrees, "_publish", publish)
    most = 2
    made = await prepare_workdir(Workdir.git(str(repo)), base_dir=str(base), name="s.a.1")
    assert len(pruned) == 2 and git(Path(made.path), "status", "--porcelain") == ""
    await made.release()
    most = 1000
    with pytest.raises(ToolError, match="each time") as caught:
        await prepare_workdir(Workdir.git(str(repo)), base_dir=str(base), name="s.a.2")
    assert caught.value.code == "workdir.failed"
    assert hidden(base) == [] and entries(repo) == []


async def test_released_whatever_the_agent_did_to_it(repo: Path, base: Path, tmp_path: Path) -> None:
    bystander = tmp_path / "bystander"
    git(repo, "worktree", "add", "-q", "--detach", str(bystander))
    for number, vandalism in enumerate(
        (
            lambda tree: (tree / ".git").unlink(),
            lambda tree: (tree / ".git").write_text("rubbish"),
            lambda tree: (tree / ".git").write_text((bystander / ".git").read_text()),
            lambda tree: (tree / "sub dir").chmod(0o500),
            shutil.rmtree,
        )
    ):
        made = await prepare_workdir(Workdir.git(str(repo)), base_dir=str(base), name=f"n{number}")
        assert made.path is not None
        vandalism(Path(made.path))
        again = found_again(made.path, Workdir.git(str(repo)), created=True, base_dir=str(base))
        await again.release()
        assert hidden(base) == [], number
        assert [entry.splitlines()[0] for entry in entries(repo)] == [f"worktree {bystander}"], number
    assert git(bystander, "status", "--porcelain") == ""


async def test_a_repository_that_is_gone(repo: Path, base: Path) -> None:
    made = await prepare_workdir(Workdir.git(str(repo)), base_dir=str(base), name="n")
    shutil.rmtree(repo)
    await made.release()
    assert hidden(base) == []


async def test_cancelled_in_the_middle_leaves_nothing(repo: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    real = worktrees._publish

    def slow(workshop) -> None:
        entered.set()
        assert go_on.wait(10)
        real(workshop)

    monkeypatch.setattr(worktrees, "_publish", slow)
    task = asyncio.create_task(prepare_workdir(Workdir.git(str(repo)), base_dir=str(base), name="n"))
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert hidden(base) == [] and entries(repo) == []


async def test_a_git_that_hangs_is_killed_with_its_caller(base: Path, repo: Path, tmp_path: Path, monkeypatch) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    fake = bin_dir / "git"
    fake.write_text(f"#!/bin/sh\necho $$ > '{tmp_path}/pid.tmp'; mv '{tmp_path}/pid.tmp' '{tmp_path}/pid'\nsleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    task = asyncio.create_task(prepare_workdir(Workdir.git(str(repo)), base_dir=str(base), name="n"))
    async with asyncio.timeout(10):
        while not (tmp_path / "pid").exists():
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("where", ["add", "publish", "rename"])
async def test_killed_in_the_middle_is_swept(repo: Path, base: Path, where: str, monkeypatch) -> None:
    """The process dies at three places; the sweep removes the half-made worktree and its entry."""
    program = f"""
import os, sys, threading
from kimi_ray.tools.workdirs import worktrees, private
def stop(*a):
    print("here", flush=True); threading.Event().wait()
where = {where!r}
if where == "add":
    real = worktrees._Git.add
    worktrees._Git.add = lambda self, *a: (real(self, *a), stop())
elif where == "publish":
    worktrees.Workshop.publish = stop
else:
    os.rename = stop
worktrees.make_worktree({str(repo)!r}, "main", {str(base)!r}, "s.main.1", lambda: False, ())
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert child.stdout is not None and child.stdout.readline() == "here\n"

    async def nobody(_session_id: str) -> bool:
        return False

    monkeypatch.setattr(leftovers, "_UNLOCKED_S", 0.0)
    assert await sweep_sessions(str(base), nobody) == 0  # its maker lives
    assert len(entries(repo)) == 1
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert await sweep_sessions(str(base), nobody, young_s=0.0) >= 1
    assert hidden(base) == [] and entries(repo) == [] and os.listdir(repo / ".git" / "worktrees") == []


async def test_no_prune_ever_sees_an_entry_that_is_not_locked(repo: Path, base: Path, monkeypatch) -> None:
    """What is not locked when a prune reads it goes at any time later: entries come into being locked."""
    seen: list[bool] = []
    real = worktrees.os.replace

    def replace(source: str, target: str) -> None:
        real(source, target)
        seen.append(Path(target, "locked").exists() and entries(repo) != [])
        git(repo, "worktree", "prune")

    monkeypatch.setattr(worktrees.os, "replace", replace)
    (repo / ".git" / "worktrees.tmp-left").mkdir()  # by a process that died just before
    made = await prepare_workdir(Workdir.git(str(repo), "main"), base_dir=str(base), name="n")
    assert seen == [True] and len(entries(repo)) == 1
    assert not list((repo / ".git").glob("worktrees.tmp-*"))
    assert made.path is not None and git(Path(made.path), "status", "--porcelain") == ""
    await made.release()
    assert entries(repo) == []


async def test_a_copy_killed_in_the_middle_is_swept(base: Path, tmp_path: Path, monkeypatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for n in range(3):
        (source / str(n)).write_text("x")
    program = f"""
import threading
from kimi_ray.tools.workdirs import copying
def stop(*a, **b):
    print("here", flush=True); threading.Event().wait()
copying.shutil.copystat = stop
copying.copy_tree({str(source)!r}, {str(base)!r}, "s.main.1", lambda: False, ())
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert child.stdout is not None and child.stdout.readline() == "here\n"

    async def nobody(_session_id: str) -> bool:
        return False

    monkeypatch.setattr(leftovers, "_UNLOCKED_S", 0.0)
    assert await sweep_sessions(str(base), nobody) == 0
    assert not (base / "s.main.1").exists()
    child.kill()
    child.wait()
    child.stdout.close()
    assert await sweep_sessions(str(base), nobody) == 1 and hidden(base) == []


async def test_the_sweep_goes_by_session_and_age(repo: Path, base: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    async def is_there(session_id: str) -> bool:
        asked.append(session_id)
        if session_id == "unknown":
            raise ToolError("the store is away", code="store.unavailable")
        return session_id == "kept"

    assert await sweep_sessions(str(base), is_there) == 0 and not base.exists()
    (tmp_path / "tree").mkdir()
    names = [workdir_name(session, agent, "0123456789") for session in ("kept", "gone", "unknown") for agent in "ab"]
    assert names[0] == "kept.a.23456789"
    for name in names:
        await prepare_workdir(Workdir.copy(str(tmp_path / "tree")), base_dir=str(base), name=name)
    worktree = await prepare_workdir(
        Workdir.git(str(repo)), base_dir=str(base), name=workdir_name("gone", "c", "9" * 9)
    )
    old = time.time() - 7200
    os.utime(base / names[2], (old, old))  # what a copy of an old tree looks like: it is young even so
    assert await sweep_sessions(str(base), is_there) == 0 and asked == []
    assert await sweep_sessions(str(base), is_there, young_s=0.0) == 3
    assert sorted(asked) == ["gone", "kept", "unknown", "unknown"]
    assert sorted(hidden(base)) == sorted(name for name in names if not name.startswith("gone"))
    assert worktree.path is not None and not Path(worktree.path).exists() and entries(repo) == []


async def test_one_sweep_at_a_time(base: Path, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    await prepare_workdir(Workdir.copy(str(tmp_path / "tree")), base_dir=str(base), name="gone.a.1")
    second: list[int] = []

    async def is_there(_session_id: str) -> bool:
        second.append(await sweep_sessions(str(base), is_there, young_s=0.0))
        return False

    assert await sweep_sessions(str(base), is_there, young_s=0.0) == 1
    assert second == [0]


async def test_dropping_is_exact(base: Path, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    for name in ("a.main.1", "a-b.main.1", "a.agent-1.2", "ab.main.1"):
        await prepare_workdir(Workdir.copy(str(tmp_path / "tree")), base_dir=str(base), name=name)
    assert await drop_sessions(str(base), ["a"]) == 2
    assert sorted(hidden(base)) == ["a-b.main.1", "ab.main.1"]
    assert await drop_sessions(str(base), ["a", "nobody"]) == 0
    assert await drop_sessions(str(tmp_path / "no base"), ["a"]) == 0
