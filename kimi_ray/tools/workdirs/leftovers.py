"""What sessions leave in a node's directory of private directories: removed with their session, or swept."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from kimi_ray.errors import KimiRayError, ToolError
from kimi_ray.tools.workdirs.prepare import remove_private
from kimi_ray.tools.workdirs.private import PARTIAL, REPOSITORY, is_being_made, remove, session_of
from kimi_ray.tools.workdirs.worktrees import forget, is_worktree, remove_worktree

YOUNG_S = 3600.0
"""A private directory may be made before its session is there (a fork's): younger ones are left alone."""
_LOCK = ".sweep.lock"
_HOME = ".home"
_UNLOCKED_S = 60.0
"""A maker locks its ``.partial`` directory right after making it."""


async def drop_sessions(base: str, session_ids: Collection[str]) -> int:
    """Remove the private directories of sessions, worktrees with their entries too.

    Returns:
        How many were there.

    Raises:
        ToolError: ``workdir.failed`` when one cannot be removed; the others are gone.
    """
    wanted = set(session_ids)
    names = await asyncio.to_thread(_names, base)
    return await asyncio.to_thread(
        _remove_all, [os.path.join(base, name) for name in names if _whole(name) and session_of(name) in wanted]
    )


def belongs_to(base: str, home: str) -> bool:
    """Whether a node's private directories are those of this home, and not of another one with the same id.

    The first home that asks is remembered; one that is not at its place any more, as far as this node sees, has been
    moved. Blocking.

    Args:
        base: The directory of private directories; made when missing.
        home: The home's directory.
    """
    place = os.path.join(base, _HOME)
    mine = os.fsencode(os.path.abspath(home))
    try:
        os.makedirs(base, exist_ok=True)
        with suppress(FileExistsError):
            _remember(place, mine, new=True)
        known = Path(place).read_bytes()
        if known != mine and known and os.path.exists(known):
            return False
        if known != mine:
            _remember(place, mine, new=False)
    except OSError:
        return False
    return True


def _remember(place: str, home: bytes, *, new: bool) -> None:
    partial = f"{place}.{os.getpid()}.{time.monotonic_ns()}"
    Path(partial).write_bytes(home)
    try:
        if new:
            os.link(partial, place)
        else:
            os.replace(partial, place)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)


async def sweep_sessions(
    base: str, is_there: Callable[[str], Awaitable[bool]], *, young_s: float = YOUNG_S, within_s: float = 600.0
) -> int:
    """Remove the private directories whose session is gone, and what makers that died left half made.

    One sweep at a time on a node; a second one does nothing. What cannot be asked or removed is left for the next.

    Args:
        base: The directory of private directories.
        is_there: Whether a session is in the store.
        young_s: Directories that changed within so many seconds are left alone.
        within_s: The sweep goes no further after so many seconds.

    Returns:
        How many were removed.
    """
    removed = 0
    until = time.monotonic() + within_s
    known: dict[str, bool] = {}
    async with _alone(base) as alone:
        for name in await asyncio.to_thread(_names, base) if alone else ():
            if time.monotonic() > until:
                break
            path = os.path.join(base, name)
            with suppress(KimiRayError, OSError):
                if name.endswith(PARTIAL):
                    removed += await asyncio.to_thread(_remove_partial, path)
                elif _whole(name) and await asyncio.to_thread(_age_s, path) > young_s:
                    session_id = session_of(name)
                    if session_id not in known:
                        known[session_id] = await is_there(session_id)
                    if not known[session_id]:
                        await asyncio.to_thread(remove_private, path)
                        removed += 1
    return removed


@asynccontextmanager
async def _alone(base: str) -> AsyncGenerator[bool]:
    """Whether nobody else on this node sweeps; for as long as the block runs."""
    try:
        handle = os.open(os.path.join(base, _LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        yield False  # nothing was ever made here
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        yield False
        return
    try:
        yield True
    finally:
        os.close(handle)


def _names(base: str) -> list[str]:
    try:
        return sorted(os.listdir(base))
    except OSError:
        return []


def _whole(name: str) -> bool:
    return not name.startswith(".")


def _age_s(path: str) -> float:
    # not the time of modification: a copy has its source's
    return time.time() - os.lstat(path).st_ctime


def _remove_all(paths: list[str]) -> int:
    first: ToolError | None = None
    for path in paths:
        try:
            remove_private(path)
        except ToolError as error:
            first = first or error
    if first is not None:
        raise first
    return len(paths)


def _remove_partial(path: str) -> bool:
    if _age_s(path) < _UNLOCKED_S or is_being_made(path):
        return False
    tree = os.path.join(path, "tree")
    if is_worktree(tree):
        remove_worktree(tree)
    # it may have died on the way to the directory's place, which it took first
    target = os.path.join(os.path.dirname(path), os.path.basename(path)[1:].rsplit(".", 3)[0])
    with suppress(OSError):
        os.rmdir(target)
    with suppress(OSError):
        common = Path(path, REPOSITORY).read_text(errors="surrogateescape")
        forget(common, tree, None if os.path.lexists(target) else target)
    remove(path)
    return True
