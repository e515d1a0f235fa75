"""Making one agent's working directory, and letting go of it."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from kimi_ray.errors import ToolError
from kimi_ray.settings import Workdir
from kimi_ray.tools.workdirs.copying import copy_tree
from kimi_ray.tools.workdirs.factory import FactoryContext, Leave, call_factory, load_factory
from kimi_ray.tools.workdirs.private import (
    NotWanted,
    Stopped,
    check_name,
    not_made,
    private_root,
    remove,
    session_of,
    taken,
)
from kimi_ray.tools.workdirs.spec import invalid, refuse_remote
from kimi_ray.tools.workdirs.worktrees import is_worktree, make_worktree, remove_worktree

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PreparedWorkdir:
    """A directory ready to work in.

    ``path`` is absolute, or None for no directory; ``created``: it was made for this agent, and goes with it;
    ``skipped``: what a copy or worktree is without (pipes, sockets, devices, what it was told to leave out, and the
    place of the copies itself), at most 100. ``private`` is the directory that is removed (a factory's may hold the
    path), ``repository`` a worktree's, ``leave`` what a factory wants done at the end.
    """

    path: str | None
    kind: Literal["none", "shared", "copy", "git", "factory"]
    created: bool
    keep: bool = False
    skipped: tuple[str, ...] = ()
    private: str | None = None
    repository: str | None = None
    leave: Leave | None = field(default=None, compare=False)

    async def release(self, keep: bool | None = None) -> None:
        """Let go: do what a factory wants done, and remove what was created, unless it is to be kept. Idempotent, but
        for a factory's part.

        Args:
            keep: None takes what ``prepare_workdir`` was told.

        Raises:
            ToolError: ``workdir.failed`` when it cannot be removed.
        """
        try:
            if self.leave is not None:
                await self.leave()
        finally:
            place = self.private or self.path
            if self.created and place is not None and not (self.keep if keep is None else keep):
                await asyncio.to_thread(remove_private, place, self.repository if self.kind == "git" else None)


def found_again(path: str, spec: Workdir, *, created: bool, base_dir: str) -> PreparedWorkdir:
    """A directory that an earlier activation of the same agent prepared; see ``check_workdir``."""
    private = (private_root(path, base_dir) or path) if created else None
    repository = spec.path if spec.kind == "git" else None
    return PreparedWorkdir(path, spec.kind, created=created, private=private, repository=repository)


async def prepare_workdir(
    spec: Workdir,
    *,
    base_dir: str,
    name: str,
    keep: bool = False,
    leave_out: Sequence[str] = (),
    context: FactoryContext | None = None,
) -> PreparedWorkdir:
    """Make the working directory of one agent, on the machine this runs on.

    A copy or a worktree appears under its name when it is complete, or not at all: also when this is cancelled, or
    killed (then a hidden ``.partial`` directory is left in ``base_dir``).

    Args:
        spec: Which kind.
        base_dir: Where private directories are made; created when missing.
        name: The directory's name in it, one part of a path.
        keep: Whether ``release`` is to keep what was made.
        leave_out: Files and directories that a copy or worktree is to be without: what its agent may not read (the run
            directory, the items file) would come within its reach by being copied.
        context: For whom, for a factory; its ``base_dir`` is put in here.

    Raises:
        ToolError: ``workdir.not_found``, ``workdir.not_a_directory``, ``workdir.exists``, ``workdir.failed``,
            ``workdir.invalid``, ``workdir.no_git``, ``workdir.not_a_repository``, ``workdir.bad_ref``.
    """
    if spec.kind == "none":
        return PreparedWorkdir(None, "none", created=False)
    if spec.kind == "factory":
        return await _from_factory(spec, base_dir, name, keep, context)
    refuse_remote(spec)
    source = await asyncio.to_thread(_directory, spec.path or "")
    if spec.kind == "shared":
        return PreparedWorkdir(source, "shared", created=False)

    def make(stopped: Stopped) -> tuple[str, list[str]]:
        if spec.kind == "copy":
            return copy_tree(source, base_dir, name, stopped, leave_out)
        return make_worktree(source, spec.ref or "HEAD", base_dir, name, stopped, leave_out)

    repository = source if spec.kind == "git" else None
    path, skipped = await _stoppable(make, lambda made: remove_private(made[0], repository))
    return PreparedWorkdir(
        path, spec.kind, created=True, keep=keep, skipped=tuple(skipped), private=path, repository=repository
    )


async def check_workdir(prepared_path: str) -> None:
    """Make sure that a directory recorded earlier is still here.

    Raises:
        ToolError: ``workdir.lost``: its node or its disk is another one now. Work must start again, not go on in an
            empty directory.
    """
    if not await asyncio.to_thread(os.path.isdir, prepared_path):
        raise ToolError(
            f"the working directory {prepared_path} is gone",
            code="workdir.lost",
            hint="a private directory goes with its rollout (keep_workdirs=True, --keep-workdirs keeps it), its session"
            " or its node: run again from the start, or fork the agent with another workdir",
            details={"path": prepared_path},
            retryable=True,
        )


def remove_private(path: str, repository: str | None = None) -> None:
    """Remove a private directory; of a worktree its entry in the repository too. Blocking and idempotent.

    Raises:
        ToolError: ``workdir.failed``.
    """
    if repository is not None or is_worktree(path):
        remove_worktree(path, repository)
    else:
        remove(path)


async def _stoppable(make: Callable[[Stopped], R], undo: Callable[[R], None]) -> R:
    """Blocking work in a thread that ends soon when this is cancelled, and is then undone."""
    stopped = threading.Event()
    making = asyncio.ensure_future(asyncio.to_thread(make, stopped.is_set))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait({making})  # it looks at the flag all the time
        if not making.cancelled() and making.exception() is None:
            await asyncio.to_thread(undo, making.result())
        raise
    except NotWanted:  # pragma: no cover  only a cancelled caller stops it
        raise asyncio.CancelledError from None


async def _from_factory(
    spec: Workdir, base_dir: str, name: str, keep: bool, context: FactoryContext | None
) -> PreparedWorkdir:
    of = context or FactoryContext(session_id=session_of(name), agent_id="main")
    place = await asyncio.to_thread(_make_empty, base_dir, name)
    try:
        path, leave = await call_factory(spec.path or "", replace(of, base_dir=place), spec.timeout_s)
        if await asyncio.to_thread(_is_empty, place) and path != place:
            await asyncio.to_thread(remove, place)
            return PreparedWorkdir(path, "factory", created=False, keep=keep, leave=leave)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(remove, place))
        raise
    return PreparedWorkdir(path, "factory", created=True, keep=keep, private=place, leave=leave)


def _make_empty(base_dir: str, name: str) -> str:
    check_name(name)
    place = os.path.join(os.path.realpath(base_dir), name)
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.mkdir(place, 0o700)
    except FileExistsError:
        raise taken(place) from None
    except OSError as error:
        raise not_made(f"{place} could not be made", place, error) from error
    return place


def _is_empty(place: str) -> bool:
    try:
        with os.scandir(place) as entries:
            return next(entries, None) is None
    except FileNotFoundError:  # the function has removed what it did not need
        return True


def _directory(given: str) -> str:
    whole = given.encode(errors="replace").decode()
    if "\0" in given or given != whole:
        raise invalid(whole, "a path cannot hold NUL or half a character")
    path = os.path.realpath(os.path.expanduser(given))
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        raise ToolError(
            f"the working directory {path} " + ("does not exist" if missing else f"cannot be used: {error.strerror}"),
            code="workdir.not_found" if missing else "workdir.failed",
            hint="create it, or name another; it must be on the node where the agent works",
            details={"path": path},
        ) from error
    if not stat.S_ISDIR(mode):
        raise ToolError(
            f"the working directory {path} is not a directory", code="workdir.not_a_directory", details={"path": path}
        )
    return path


def check_factory(workdir: Workdir) -> None:
    """Make sure that a factory can be imported, where its name has no placeholders. Nothing for the other kinds.

    Raises:
        ToolError: ``workdir.invalid``.
    """
    if workdir.kind == "factory" and "{{" not in (workdir.path or ""):
        load_factory(workdir.path or "")
