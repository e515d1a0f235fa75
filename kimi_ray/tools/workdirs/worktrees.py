"""A worktree of a local repository, made without anything of the repository or of the user being run.

No hooks, no file system monitor, no prompts, no network: what a commit lacks here (submodules, large files of Git LFS,
the blobs of a partial clone) is not fetched. A worktree is *locked* while it is made, so that no ``git worktree
prune`` takes it for a leftover; its place in the repository, ``worktrees/<id>``, is laid out as gitrepository-layout(5)
says, and is removed with it.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kimi_ray.errors import ToolError
from kimi_ray.ids import new_ulid
from kimi_ray.tools.commands import scrubbed_environment
from kimi_ray.tools.workdirs.private import REPOSITORY, NotWanted, Stopped, Workshop, not_made, remove

_TIMEOUT_S = 600.0
_LOOK_S = 0.1
_TRIES = 8
_BUSY = re.compile(r"worktrees/|File exists|\.lock|could not lock|another git process|Unable to create", re.IGNORECASE)
_HALF_MADE = "worktrees.tmp-"
_LOCK_S = 60.0
_LOCK_LOOK_S = 0.01
_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.askPass=",
    "credential.helper=",
    "protocol.allow=never",
    "submodule.recurse=false",
    "worktree.useRelativePaths=false",
    "safe.bareRepository=all",
    "gc.auto=0",
    "maintenance.auto=false",
)


def make_worktree(
    repository: str, ref: str, base: str, name: str, stopped: Stopped, leave_out: Sequence[str]
) -> tuple[str, list[str]]:
    """Check ``ref`` out of ``repository`` to ``base/name``, with a detached HEAD.

    Args:
        repository: The top directory of a repository, or a bare one; absolute, without symbolic links.
        ref: A commit, branch or tag.
        base: Where private directories are.
        name: The worktree's name in it.
        stopped: Looked at while git works.
        leave_out: Files and directories of the repository's own directory that the worktree is to be without.

    Returns:
        The worktree's path, and what it is without.

    Raises:
        ToolError: ``workdir.no_git``, ``workdir.not_a_repository``, ``workdir.bad_ref``, ``workdir.exists``,
            ``workdir.failed``; NotWanted when ``stopped``.
    """
    git = _Git(repository, stopped)
    common = git.common_directory()
    commit = git.commit(ref)
    for _ in range(_TRIES):
        workshop = Workshop(base, name)
        try:
            skipped = _make(git, workshop, common, commit, leave_out)
        except OSError as error:
            raise not_made(f"no worktree of {repository} could be made", workshop.target, error) from error
        if _entry_of(workshop.target) is not None:
            return workshop.target, skipped
        # Somebody's prune had found the entry before it was locked, and has removed it only now.
        remove(workshop.target)
        forget(common, workshop.target)
    raise ToolError(
        f"no worktree of {repository} could be made: its entry in worktrees/ is removed each time",
        code="workdir.failed",
        hint="git worktree prune runs there all the time",
        details={"path": repository},
    )


def _make(git: _Git, workshop: Workshop, common: str, commit: str, leave_out: Sequence[str]) -> list[str]:
    with workshop:
        Path(workshop.partial, REPOSITORY).write_text(common, errors="surrogateescape")
        try:
            git.add(common, workshop.tree, commit)
            skipped = git.leave_out(workshop.tree, leave_out)
            _publish(workshop)
        except BaseException:
            forget(common, workshop.tree, workshop.target if not os.path.lexists(workshop.target) else None)
            raise
    return skipped


def remove_worktree(path: str, repository: str | None = None) -> None:
    """Remove a worktree and its entry in its repository. Idempotent.

    Args:
        path: The worktree, in whatever state.
        repository: The repository, in case the worktree does not say (an agent may have removed its ``.git``).

    Raises:
        ToolError: ``workdir.failed``.
    """
    entry = _entry_of(path)
    common = None
    if entry is None and repository is not None:
        common = _common_directory(os.path.realpath(repository))
    remove(path)
    if entry is not None:
        with _alone(os.path.dirname(os.path.dirname(entry))):
            remove(entry)
    elif common is not None:
        forget(common, path)


def forget(common: str, *paths: str | None) -> None:
    """Remove the entries of worktrees that are not there any more from a repository.

    Raises:
        ToolError: ``workdir.failed``.
    """
    wanted = {os.path.join(path, ".git") for path in paths if path is not None}
    entries = os.path.join(common, "worktrees")
    with suppress(OSError):
        for name in os.listdir(entries):
            entry = os.path.join(entries, name)
            if _back_pointer(entry) in wanted:
                with _alone(common):
                    remove(entry)


def is_worktree(path: str) -> bool:
    """Whether a directory has the ``.git`` file of a worktree."""
    return os.path.isfile(os.path.join(path, ".git"))


@contextmanager
def _alone(common: str, stopped: Stopped = lambda: False) -> Generator[None]:
    """Nobody else of kimi_ray changes the entries of a repository: git reads those of the others, half written or not.

    Users' own commands do not know of this lock, and it is not everywhere to be had: who meets them tries again.
    """
    try:
        handle = os.open(common, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + _LOCK_S
        while time.monotonic() < until and not stopped():
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_LOOK_S)
            except OSError:
                break
        yield
    finally:
        os.close(handle)


def _enter(common: str, tree: str, commit: str) -> None:
    """Make an empty worktree with its entry, as ``git worktree add --lock --no-checkout --detach`` does.

    git makes the entry first and locks it then: a prune that looks in between removes it, at any time later. Here it
    comes into being locked. Call it under ``_alone``: what others left half made is removed.
    """
    for name in os.listdir(common):
        if name.startswith(_HALF_MADE):
            remove(os.path.join(common, name))
    mark = new_ulid()
    making = os.path.join(common, f"{_HALF_MADE}{mark}")
    entry = os.path.join(common, "worktrees", f"{os.path.basename(tree)}-{mark}")
    pointer = os.path.join(tree, ".git")
    os.mkdir(making)
    parts = {"HEAD": commit, "commondir": "../..", "gitdir": pointer, "locked": "it is being made"}
    for name, text in parts.items():
        Path(making, name).write_bytes(os.fsencode(text) + b"\n")
    os.makedirs(tree)
    Path(pointer).write_bytes(b"gitdir: " + os.fsencode(entry) + b"\n")
    os.makedirs(os.path.dirname(entry), exist_ok=True)
    os.replace(making, entry)


def _publish(workshop: Workshop) -> None:
    """Move the worktree to its place; its entry leads there before it is there, and is unlocked afterwards."""
    entry = _entry_of(workshop.tree)
    if entry is None:
        raise ToolError(f"{workshop.tree} is no worktree", code="workdir.failed", details={"path": workshop.tree})
    pointer = Path(entry, "gitdir")
    before = pointer.read_bytes()
    pointer.write_bytes(os.fsencode(os.path.join(workshop.target, ".git")) + b"\n")
    try:
        workshop.publish()
    except BaseException:
        pointer.write_bytes(before)
        raise
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(entry, "locked"))


def _entry_of(worktree: str) -> str | None:
    """``<repository>/worktrees/<id>`` of a worktree, if both say so."""
    entry = _entry_said(worktree)
    if entry is None:
        return None
    owned = os.path.basename(os.path.dirname(entry)) == "worktrees" and os.path.isfile(os.path.join(entry, "commondir"))
    return entry if owned and _back_pointer(entry) == os.path.join(worktree, ".git") else None


def _entry_said(worktree: str) -> str | None:
    try:
        text = os.fsdecode(Path(worktree, ".git").read_bytes())
    except OSError:
        return None
    if not text.startswith("gitdir: "):
        return None
    return os.path.normpath(os.path.join(worktree, text.removeprefix("gitdir: ").rstrip("\n")))


def _back_pointer(entry: str) -> str | None:
    try:
        return os.fsdecode(Path(entry, "gitdir").read_bytes()).rstrip("\n")
    except OSError:
        return None


def _common_directory(repository: str) -> str | None:
    """The directory with the objects of a repository, found without git."""
    place = os.path.join(repository, ".git")
    if os.path.isdir(place):
        return place
    if os.path.isfile(place):
        text = os.fsdecode(Path(place).read_bytes()).removeprefix("gitdir: ").rstrip("\n")
        own = os.path.join(repository, text)
        with suppress(OSError):
            return os.path.normpath(os.path.join(own, os.fsdecode(Path(own, "commondir").read_bytes()).strip()))
        return own
    return repository if os.path.isdir(os.path.join(repository, "objects")) else None


class _Git:
    """git on one repository, in an environment that has nothing of this process's."""

    def __init__(self, repository: str, stopped: Stopped) -> None:
        self._repository = repository
        self._stopped = stopped
        self._until = time.monotonic() + _TIMEOUT_S
        self._env = scrubbed_environment(
            {
                "LC_ALL": "C",
                "GIT_TERMINAL_PROMPT": "0",
                "GIT_ASKPASS": "",
                "SSH_ASKPASS": "",
                "GIT_LFS_SKIP_SMUDGE": "1",
                "GIT_NO_LAZY_FETCH": "1",
                "GIT_OPTIONAL_LOCKS": "0",
                # a directory that only lies in a repository is not taken for it
                "GIT_CEILING_DIRECTORIES": os.path.dirname(repository),
            }
        )

    def common_directory(self) -> str:
        code, out, err = self._run("rev-parse", "--git-common-dir")
        if code != 0:
            owned_by_another = "dubious ownership" in err
            raise ToolError(
                f"{self._repository} " + (f"is not used: {_last(err)}" if owned_by_another else "is not a repository"),
                code="workdir.failed" if owned_by_another else "workdir.not_a_repository",
                hint="git config --global --add safe.directory PATH, if it is to be trusted"
                if owned_by_another
                else "name the top directory of a clone, or a bare repository, on the node where the agent works",
                details={"path": self._repository},
            )
        return os.path.realpath(os.path.join(self._repository, os.fsdecode(out).rstrip("\n")))

    def commit(self, ref: str) -> str:
        bad = not ref or "\0" in ref or ref != ref.encode(errors="replace").decode()
        code, out, _ = (
            (1, b"", "")
            if bad
            else self._run("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        )
        if code != 0:
            shown = ref.encode(errors="replace").decode()[:200]
            raise ToolError(
                f"{self._repository} has no commit {shown!r}",
                code="workdir.bad_ref",
                hint="give a commit, branch or tag that was fetched before; git branch -a and git tag show them",
                details={"path": self._repository, "ref": shown},
            )
        return out.decode().strip()

    def add(self, common: str, tree: str, commit: str) -> None:
        for attempt in range(1, _TRIES + 1):
            with _alone(common, self._stopped):
                if os.path.isdir(os.path.join(common, "reftable")):  # HEAD is git's own matter there
                    code, _, err = self._run(
                        "worktree", "add", "--detach", "--lock", "--no-checkout", "--quiet", tree, commit
                    )
                else:
                    _enter(common, tree, commit)
                    code, err = 0, ""
            if code == 0:
                code, _, err = self._run("-C", tree, "reset", "--hard", "--quiet")
                if code == 0 and _entry_of(tree) is not None:
                    return
                if code == 0:  # somebody's prune ran into the moment between making the entry and locking it
                    err = "its entry in worktrees/ was removed meanwhile"
                    entry = _entry_said(tree)
                    if entry is not None and os.path.dirname(entry) == os.path.join(common, "worktrees"):
                        remove(entry)
                forget(common, tree)
            if attempt == _TRIES or _BUSY.search(err) is None or "No space left" in err:
                raise ToolError(
                    f"no worktree of {self._repository} could be made: {_last(err)}",
                    code="workdir.failed",
                    hint="free some space" if "No space left" in err else None,
                    details={"path": self._repository, "reason": err[-2000:]},
                )
            if os.path.lexists(tree):
                shutil.rmtree(tree, ignore_errors=True)
            time.sleep(random.uniform(0.01, 0.05) * 2**attempt)  # to come apart from the others

    def leave_out(self, tree: str, places: Sequence[str]) -> list[str]:
        """Take files out of the working tree, and out of what git looks for in it."""
        skipped: list[str] = []
        for place in places:
            inside = os.path.relpath(os.path.realpath(place), self._repository)
            if inside == os.curdir or inside.split(os.sep, 1)[0] == os.pardir:
                continue
            copy = os.path.join(tree, inside)
            if not os.path.lexists(copy) or os.path.realpath(os.path.dirname(copy)) != os.path.dirname(copy):
                continue
            _, listed, _ = self._run("-C", tree, "--literal-pathspecs", "ls-files", "-z", "--", inside)
            self._run("-C", tree, "update-index", "-z", "--skip-worktree", "--stdin", given=listed)
            if os.path.isdir(copy) and not os.path.islink(copy):
                remove(copy)
            else:
                os.unlink(copy)
            skipped.append(inside.encode(errors="replace").decode())
        return skipped

    def _run(self, *arguments: str, given: bytes | None = None) -> tuple[int, bytes, str]:
        """Run git to its end: its exit code, what it printed, what it complained about."""
        settings = [part for setting in _SETTINGS for part in ("-c", setting)]
        try:
            process = subprocess.Popen(
                ["git", "-C", self._repository, *settings, *arguments],
                stdin=subprocess.PIPE if given is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._env,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise ToolError(
                "there is no git on this node",
                code="workdir.no_git",
                hint="install git on every node where agents work, or use --workdir copy",
            ) from error
        with process:
            while True:
                try:
                    out, err = process.communicate(given, timeout=_LOOK_S)
                    return process.returncode, out, err.decode(errors="replace")
                except subprocess.TimeoutExpired:
                    given = None  # it is on its way
                    late = time.monotonic() > self._until
                    if not late and not self._stopped():
                        continue
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
                    if late:
                        raise ToolError(
                            f"git took longer than {_TIMEOUT_S:.0f} s on {self._repository}",
                            code="workdir.failed",
                            details={"path": self._repository},
                        ) from None
                    raise NotWanted from None


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return (lines[-1] if lines else "git said nothing")[:500]
