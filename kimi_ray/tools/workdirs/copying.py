"""A private copy of a tree: links as links, modes and times kept, blocks shared where the file system can.

Hard links are never made: agents would write into each other's files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress

from kimi_ray.tools.workdirs.private import NotWanted, Stopped, Workshop, not_made

_FICLONE = 0x40049409
_NO_REFLINK = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM})
_SKIPPED_TOLD = 100


def copy_tree(source: str, base: str, name: str, stopped: Stopped, leave_out: Sequence[str]) -> tuple[str, list[str]]:
    """Copy ``source`` to ``base/name``.

    Args:
        source: An absolute path without symbolic links.
        base: Where private directories are.
        name: The copy's name in it.
        stopped: Looked at before every file.
        leave_out: Files and directories that the copy is to be without.

    Returns:
        The copy's path, and what it left out.

    Raises:
        ToolError: ``workdir.exists``, ``workdir.failed``; NotWanted when ``stopped``.
    """
    workshop = Workshop(base, name)
    # the copies are made inside what is copied, as often as not
    without = frozenset(map(os.path.realpath, leave_out)) | {workshop.base}
    job = _Copy(source, without, stopped)
    try:
        with workshop:
            os.mkdir(workshop.tree, 0o700)
            job.run(workshop.tree)
            workshop.publish()
    except OSError as error:
        raise not_made(f"{source} could not be copied to {workshop.target}", workshop.target, error) from error
    return workshop.target, job.skipped


class _Copy:
    def __init__(self, source: str, leave_out: frozenset[str], stopped: Stopped) -> None:
        self._source = source
        self._leave_out = leave_out
        self._stopped = stopped
        self._reflink = sys.platform == "linux"
        self.skipped: list[str] = []

    def run(self, target: str) -> None:
        pending = [(self._source, target)]
        made: list[tuple[str, str]] = []
        while pending:
            of, to = pending.pop()
            try:
                entries = os.scandir(of)
            except FileNotFoundError:
                if of == self._source or os.path.lexists(of):
                    raise
                os.rmdir(to)
                continue
            made.append((of, to))
            with entries:
                for entry in entries:
                    if self._stopped():
                        raise NotWanted
                    self._entry(entry, os.path.join(to, entry.name), pending)
        for of, to in reversed(made):  # innermost first: a directory may be read-only
            try:
                shutil.copystat(of, to, follow_symlinks=False)
            except FileNotFoundError:
                if of == self._source or os.path.lexists(of):
                    raise

    def _entry(self, entry: os.DirEntry[str], place: str, pending: list[tuple[str, str]]) -> None:
        """Copy one; what somebody removes from the source meanwhile counts as never there."""
        try:
            if entry.path in self._leave_out:
                self._skip(entry.path)
            elif entry.is_symlink():
                os.symlink(os.readlink(entry.path), place)
            elif entry.is_dir():
                os.mkdir(place, 0o700)
                pending.append((entry.path, place))
            elif entry.is_file():
                self._file(entry.path, place)
            else:
                self._skip(entry.path)
        except FileNotFoundError:
            if os.path.lexists(entry.path):
                raise
            with suppress(FileNotFoundError):
                os.unlink(place)

    def _file(self, source: str, target: str) -> None:
        if not (self._reflink and self._clone(source, target)):
            shutil.copyfile(source, target, follow_symlinks=False)
        shutil.copystat(source, target, follow_symlinks=False)

    def _clone(self, source: str, target: str) -> bool:
        with open(source, "rb") as of, open(target, "wb") as to:
            try:
                fcntl.ioctl(to.fileno(), _FICLONE, of.fileno())
            except OSError as error:
                if error.errno not in _NO_REFLINK:
                    raise
                self._reflink = False
                return False
        return True

    def _skip(self, path: str) -> None:
        if len(self.skipped) < _SKIPPED_TOLD:
            self.skipped.append(os.path.relpath(path, self._source).encode(errors="replace").decode())
