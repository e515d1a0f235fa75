"""Temporary files of processes that died, and when it is certain that nobody is writing them any more."""

from __future__ import annotations

import contextlib
import time

from kimi_ray.store.fs import Fs, names_in

TEMPORARY = ".tmp-"
_ABANDONED_AFTER_S = 24 * 3600.0


def clear_before(fs: Fs, directory: str, writer: str) -> None:
    """Remove temporary files that were begun before the store process ``writer`` was, where only that one may write.

    Args:
        fs: The files.
        directory: Where to look; below it nothing is touched.
        writer: The ULID of this process; a temporary file's name ends in a ULID too, so younger ones are its own.

    Raises:
        OSError: As the file system gave it.
    """
    for name in names_in(fs, directory):
        _, mark, made = name.rpartition(TEMPORARY)
        if mark and made < writer:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(f"{directory}/{name}")


def sweep_abandoned(fs: Fs, directory: str) -> None:
    """Remove temporary files that nobody touched for a day, where any process may write.

    Raises:
        OSError: As the file system gave it.
    """
    limit = time.time() - _ABANDONED_AFTER_S
    for name in names_in(fs, directory):
        if TEMPORARY in name:
            path = f"{directory}/{name}"
            with contextlib.suppress(FileNotFoundError):
                if fs.stat(path).st_mtime < limit:
                    fs.unlink(path)
