"""Deleting a session: the tombstone first, then its files."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Callable
from dataclasses import dataclass

from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import Fs, exists, io_errors, names_in, write_file
from kimi_ray.store.layout import Layout, not_found
from kimi_ray.store.reservations import Reservations


def remove_session(
    layout: Layout,
    directories: Directories,
    reservations: Reservations,
    session_id: str,
    prune: Callable[[set[str]], None],
) -> None:
    """Mark the session as removed, durably, then delete its files. May be repeated; ``prune`` removes the directory of
    its workspace when that is empty.

    Raises:
        StoreError: ``store.not_found`` for a session that never was.
    """
    directory = layout.session_dir(session_id)
    tombstone = layout.tombstone(session_id)
    with io_errors(tombstone):
        if not exists(layout.fs, tombstone):
            if directory is None:
                raise not_found(session_id)
            directories.ensure(layout.tombstones)
            write_file(layout.fs, tombstone, b"", sync=True)
        directories.sync(layout.tombstones)  # one that was found may only be page cache
        if directory is not None:
            remove_tree(layout.fs, directory)
            directories.forget(directory)
        reservations.drop_sessions({session_id})
        if directory is not None:
            prune({directory.rsplit("/", 1)[0]})
    layout.forget(session_id, removed=True)


@dataclass(frozen=True, slots=True)
class Finished:
    """What ``finish_removals`` came upon: directories of workspaces that may be empty now, and removed sessions that
    still have an owner file."""

    workspaces: set[str]
    owned: list[str]


def finish_removals(layout: Layout, directories: Directories, reservations: Reservations) -> Finished:
    """Delete what a process left of removed sessions when it died in the middle.

    The tombstones are made durable first: what was found may only be page cache, and a session that comes back after a
    power cut without some of its files would be worse than one that comes back whole.
    """
    gone = names_in(layout.fs, layout.tombstones)
    if not gone:
        return Finished(set(), [])
    left = [
        path
        for workspace in layout.workspaces()
        for session_id in gone
        if exists(layout.fs, path := f"{layout.sessions}/{workspace}/{session_id}")
    ]
    if left:
        with io_errors(layout.tombstones):
            directories.sync(layout.tombstones)
    for path in left:
        with io_errors(path):
            remove_tree(layout.fs, path)
    names = set(gone)
    reservations.drop_sessions(names)
    owned = [name for name in names_in(layout.fs, layout.owners) if name in names]
    return Finished({path.rsplit("/", 1)[0] for path in left}, owned)


def remove_tree(fs: Fs, path: str) -> None:
    """Delete a directory and all below it; what is gone already does not matter."""
    for name in names_in(fs, path):
        child = f"{path}/{name}"
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(fs.stat(child).st_mode):
                remove_tree(fs, child)
            else:
                fs.unlink(child)
    with contextlib.suppress(FileNotFoundError):
        fs.rmdir(path)
