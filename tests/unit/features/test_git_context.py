"""The git context of ``explore`` subagents (K test 62), from told answers of git and from a real repository."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.agent.slots import AgentSlots, ChildStarting
from kimi_ray.errors import ToolError
from kimi_ray.features.git_context import (
    GIT_TIMEOUT_S,
    HOSTS,
    NOT_A_REPOSITORY,
    GitContext,
    collect_git_context,
    project_name,
    safe_remote,
)
from kimi_ray.tools.contract import ExecResult
from kimi_ray.tools.local import LocalEnvironment

REV_PARSE = "rev-parse --is-inside-work-tree"
FILTERS = "config --show-scope --name-only --get-regexp ^filter\\."
REMOTE = "remote get-url origin"
BRANCH = "symbolic-ref --short HEAD"
STATUS = "status --porcelain --ignore-submodules=dirty"
LOG = "log -3 --format=%h %s"

FAILED = ExecResult(1, "")
SLOW = ExecResult(137, "", timed_out=True)


def said(output: str, exit_code: int = 0, truncated_bytes: int = 0) -> ExecResult:
    return ExecResult(exit_code, output, truncated_bytes=truncated_bytes)


class FakeEnvironment:
    """Answers git by its subcommand; what is not scripted fails."""

    def __init__(self, script: dict[str, ExecResult | ToolError], root: str | None = "/repo") -> None:
        self.root = root
        self.script = {REV_PARSE: said("true\n"), FILTERS: FAILED, **script}
        self.options: dict[str, list[str]] = {}
        self.env: Mapping[str, str] = {}
        self.asked: Counter[str] = Counter()

    async def exec(
        self, command: Sequence[str] | str, *, env: Mapping[str, str] | None = None, timeout_s: float = 0, **_: Any
    ) -> ExecResult:
        assert isinstance(command, str) and timeout_s == GIT_TIMEOUT_S
        argv = shlex.split(command.removesuffix(" 2>/dev/null"))
        assert argv.pop(0) == "git"
        options: list[str] = []
        while argv[0] == "-c":
            options.append(argv[1])
            argv = argv[2:]
        asked = " ".join(argv)
        assert asked == REV_PARSE or command.endswith(" 2>/dev/null")  # stderr is no part of an answer
        self.options[asked] = options
        self.asked[asked] += 1
        await asyncio.sleep(0)
        self.env = env or {}
        answer = self.script.get(asked, FAILED)
        if isinstance(answer, ToolError):
            raise answer
        return answer


async def block(script: dict[str, ExecResult | ToolError], root: str | None = "/repo") -> str:
    return await collect_git_context(FakeEnvironment(script, root))  # type: ignore[arg-type]


async def test_the_block_with_all_parts() -> None:
    found = await block(
        {
            REMOTE: said("git@github.com:owner/repo.git\n"),
            BRANCH: said("main\n"),
            STATUS: said(" M src/a.ts\n?? src/b.ts\n"),
            LOG: said("abc123 Initial commit\ndef456 second commit\n"),
        }
    )
    assert found == "\n".join(
        [
            "<git-context>",
            "Working directory: /repo",
            "Remote: git@github.com:owner/repo.git",
            "Project: owner/repo",
            "Branch: main",
            "Dirty files (2):",
            "   M src/a.ts",
            "  ?? src/b.ts",
            "Recent commits:",
            "  abc123 Initial commit",
            "  def456 second commit",
            "</git-context>",
        ]
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (said("fatal: not a git repository (or any of the parent directories): .git\n", 128), NOT_A_REPOSITORY),
        (said("fatal: detected dubious ownership in repository at '/repo'\n", 128), ""),
        (said("not a git repository", 1), ""),
        (said("bash: git: command not found", 127), ""),
        (SLOW, ""),
        (ToolError("no shell", code="environment.failed"), ""),
    ],
)
async def test_without_a_repository_nothing_else_is_asked(answer: ExecResult | ToolError, expected: str) -> None:
    environment = FakeEnvironment({REV_PARSE: answer, BRANCH: said("main")})
    assert await collect_git_context(environment) == expected  # type: ignore[arg-type]
    assert list(environment.options) == [REV_PARSE]


async def test_only_the_working_directory_known_is_nothing() -> None:
    assert await block({}) == ""
    assert await block({REMOTE: said("git@internal.example.test:secret/repo.git"), BRANCH: said("\n")}) == ""


async def test_without_a_working_directory_git_is_not_asked() -> None:
    environment = FakeEnvironment({BRANCH: said("main")}, root=None)
    assert await collect_git_context(environment) == ""  # type: ignore[arg-type]
    assert environment.options == {}


@pytest.mark.parametrize("failing", [REMOTE, BRANCH, STATUS, LOG])
@pytest.mark.parametrize("how", [FAILED, SLOW, ToolError("gone", code="environment.closed")])
async def test_a_failure_leaves_out_its_own_part(failing: str, how: ExecResult | ToolError) -> None:
    script: dict[str, ExecResult | ToolError] = {
        REMOTE: said("https://github.com/acme/widgets.git"),
        BRANCH: said("main"),
        STATUS: said(" M a.py"),
        LOG: said("abc123 first"),
    }
    words = {REMOTE: ["Remote:", "Project:"], BRANCH: ["Branch:"], STATUS: ["Dirty"], LOG: ["Recent"]}
    found = await block({**script, failing: how})
    for part, names in words.items():
        for name in names:
            assert (name in found) == (part != failing), (name, found)


async def test_twenty_dirty_files_are_shown() -> None:
    lines = [f" M src/f{number}.ts" for number in range(25)]
    found = await block({STATUS: said("\n".join(lines))})
    assert "Dirty files (25):" in found and found.count(" M src/") == 20
    assert "  ... and 5 more\n" in found
    assert "... and" not in await block({STATUS: said("\n".join(lines[:20]))})
    cut = await block({STATUS: said("\n".join(lines), truncated_bytes=9)})
    assert "Dirty files (25+):" in cut and "  ... and 5+ more" in cut


async def test_commit_lines_are_cut() -> None:
    found = await block({LOG: said("abc " + "x" * 500)})
    assert max(map(len, found.splitlines())) == 202


async def test_git_runs_nothing_that_the_repository_configures() -> None:
    scopes = (
        "local\tfilter.evil.clean\nlocal\tfilter.evil.process\nworktree\tfilter.w t.smudge\nglobal\tfilter.lfs.clean\n"
    )
    environment = FakeEnvironment({FILTERS: said(scopes), STATUS: said(" M a")})
    assert " M a" in await collect_git_context(environment)  # type: ignore[arg-type]
    for options in environment.options.values():
        assert {"core.fsmonitor=false", "core.hooksPath=/dev/null", "log.showSignature=false"} <= set(options)
    assert {f"filter.{name}.{key}" for name in ("evil", "w t") for key in ("clean=", "process=", "required=false")} == {
        option for option in environment.options[STATUS] if option.startswith("filter.")
    }
    assert environment.env["GIT_OPTIONAL_LOCKS"] == "0"


@pytest.mark.parametrize(
    "answer", [said("local\tfilter.a=b.clean\n"), said("", 129), SLOW, said("x", truncated_bytes=1)]
)
async def test_filters_that_cannot_be_set_to_none_leave_out_the_status(answer: ExecResult) -> None:
    environment = FakeEnvironment({FILTERS: answer, STATUS: said(" M a"), BRANCH: said("main")})
    found = await collect_git_context(environment)  # type: ignore[arg-type]
    assert "Branch: main" in found and "Dirty" not in found and STATUS not in environment.options


@pytest.mark.parametrize(
    ("url", "safe", "project"),
    [
        ("https://user:token@github.com/owner/repo.git", "https://github.com/owner/repo.git", "owner/repo"),
        ("https://token@gitlab.com/a/b/c", "https://gitlab.com/a/b/c", "a/b/c"),
        ("https://GitHub.com/o/r.git?x=secret#y", "https://github.com/o/r.git", "o/r"),
        ("ssh://git@codeberg.org:2222/o/r.git", "ssh://codeberg.org:2222/o/r.git", "o/r"),
        ("git@git.sr.ht:~me/r", "git@git.sr.ht:~me/r", "~me/r"),
        ("token@github.com:o/r.git", "github.com:o/r.git", "o/r"),
        ("git://gitee.com/o/r/", "git://gitee.com/o/r/", "o/r"),
    ],
)
def test_remotes_that_are_told(url: str, safe: str, project: str) -> None:
    assert safe_remote(url) == safe
    assert project_name(safe) == project


@pytest.mark.parametrize(
    "url",
    [
        "git@internal.example.test:secret/repo.git",
        "https://internal.example.test/secret/repo.git",
        "https://github.com.evil.test/o/r",
        "https://github.com@evil.test/o/r",
        "https://evil.test/github.com",
        "git@evil.test:github.com/o/r",
        "file:///home/me/repo",
        "/home/me/repo",
        "../repo",
        "ext::sh -c whoami github.com",
        "https://github.com/o/r\nBranch: lies",
        "https://[github.com/o/r",
        "https://github.com:port/o/r",
        "",
    ],
)
def test_remotes_that_are_not_told(url: str) -> None:
    assert safe_remote(url) is None


def test_the_hosts() -> None:
    assert sorted(HOSTS) == ["bitbucket.org", "codeberg.org", "git.sr.ht", "gitee.com", "github.com", "gitlab.com"]


async def test_only_a_new_explorer_is_told() -> None:
    slots = AgentSlots()
    GitContext(slots, FakeEnvironment({BRANCH: said("main")}))  # type: ignore[arg-type]

    async def before(**about: Any) -> list[str]:
        return (await slots.child_starting.run(ChildStarting("agent-1", prompt="look", **about))).before

    (found,) = await before(profile="explore")
    assert "Branch: main" in found
    assert await before(profile="coder") == await before(profile="explore", first=False) == []


async def test_who_asks_at_the_same_time_gets_one_answer() -> None:
    slots, environment = AgentSlots(), FakeEnvironment({BRANCH: said("main")})
    GitContext(slots, environment)  # type: ignore[arg-type]

    async def ask() -> list[str]:
        return (await slots.child_starting.run(ChildStarting("agent-1", "explore", "look"))).before

    first, *others = [asyncio.ensure_future(ask()) for _ in range(5)]
    await asyncio.sleep(0)
    first.cancel()
    told = await asyncio.gather(*others)
    assert all("Branch: main" in block for (block,) in told)
    assert environment.asked[REV_PARSE] == 1
    environment.script[BRANCH] = said("next")
    assert "Branch: next" in (await ask())[0] and environment.asked[REV_PARSE] == 2


# -- a real repository ----------------------------------------------------------------------------------------------


def git(repo: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.test", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *identity, *arguments], cwd=repo, check=True, capture_output=True)


async def told(path: Path) -> str:
    environment = LocalEnvironment(str(path))
    try:
        return await collect_git_context(environment)
    finally:
        await environment.close()


async def test_a_real_repository(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    assert await told(repo) == NOT_A_REPOSITORY
    git(repo, "init", "-q")
    assert await told(repo) == f"<git-context>\nWorking directory: {repo}\nBranch: main\n</git-context>"
    (repo / "a.txt").write_text("one\n")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "first")
    git(repo, "remote", "add", "origin", "https://me:secret@github.com/o/r.git")
    marker = tmp_path / "ran"
    for key in ("filter.evil.clean", "core.fsmonitor"):
        git(repo, "config", key, f"touch {marker}; cat")
    (repo / ".gitattributes").write_text("*.txt filter=evil\n")
    (repo / "a.txt").write_text("two\n")
    found = await told(repo)
    assert "Remote: https://github.com/o/r.git\nProject: o/r\nBranch: main\nDirty files (2):" in found
    assert "   M a.txt" in found and "  ?? .gitattributes" in found and "secret" not in found
    assert found.splitlines()[-2].endswith(" first")
    assert not marker.exists()
    git(repo, "checkout", "-q", "--detach")
    assert "Branch:" not in await told(repo)
    below = repo / "sub"
    below.mkdir()
    assert f"Working directory: {below}" in await told(below)


def _git_in(directory: Path, *arguments: str) -> str:
    directory.mkdir(exist_ok=True)
    who = {"GIT_CONFIG_GLOBAL": "/dev/null", "HOME": str(directory), "PATH": os.environ["PATH"]}
    who |= {f"GIT_{role}_{what}": f"{what}@x" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(["git", *arguments], cwd=directory, env=who, check=True, capture_output=True, text=True)
    return done.stdout.strip()


async def _told_of(directory: Path) -> str:
    environment = LocalEnvironment(directory)
    try:
        return await collect_git_context(environment)
    finally:
        await environment.close()


async def test_the_programs_of_a_submodule_do_not_run(tmp_path: Path) -> None:
    top, mark = tmp_path / "top", tmp_path / "ran"
    _git_in(top, "init", "-q")
    inner = top / "inner"
    _git_in(inner, "init", "-q")
    (inner / "file").write_text("one")
    (inner / ".gitattributes").write_text("* filter=evil")
    for directory in (inner, top):
        _git_in(directory, "add", ".")
        _git_in(directory, "commit", "-q", "-m", "first")
    _git_in(inner, "config", "filter.evil.clean", f"touch {mark}; cat")
    (inner / "file").write_text("two")
    assert "Recent commits" in await _told_of(top)
    assert not mark.exists()


async def test_what_a_partial_clone_lacks_is_not_fetched(tmp_path: Path) -> None:
    work, mark = tmp_path / "work", tmp_path / "ran"
    _git_in(work, "init", "-q")
    (work / "file").write_text("one")
    _git_in(work, "add", ".")
    _git_in(work, "commit", "-q", "-m", "first")
    tree = _git_in(work, "rev-parse", "HEAD^{tree}")
    (work / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    for key, value in (
        ("core.repositoryformatversion", "1"),
        ("extensions.partialClone", "origin"),
        ("remote.origin.promisor", "true"),
        ("remote.origin.url", str(tmp_path)),
        ("remote.origin.uploadpack", f"touch {mark}; false"),
    ):
        _git_in(work, "config", key, value)
    assert "Recent commits" in await _told_of(work)
    assert not mark.exists()
