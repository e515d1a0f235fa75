"""Where file tools may go: the working directory, less what belongs to the run itself.

A path is resolved through all symbolic links first, and judged. It is then opened part by part from the allowed place,
following no link: whoever puts a link in its way meanwhile gains nothing. What is denied is known by name and by
identity, so that another spelling, a bind mount or a hard link of a denied file is denied too.
"""

from __future__ import annotations

import os
import stat as stat_module
from collections.abc import Generator
from contextlib import contextmanager, suppress

from kimi_ray.errors import ToolError

_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_Identity = tuple[int, int]
_NONE: frozenset[_Identity] = frozenset()


def shown_name(name: str) -> str:
    """A file name as text that can be stored: bytes that are not UTF-8 become U+FFFD."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", errors="replace")


class Confinement:
    """Judges and opens paths. All methods block: they are for threads, or for a local disk.

    Args:
        root: The working directory, resolved.
        scratch: A second allowed directory, resolved.
        denied: Files and directories that may not be touched, resolved; also inside the root. A root inside a denied
            directory is allowed itself.
    """

    def __init__(self, root: str, scratch: str | None, denied: tuple[str, ...]) -> None:
        self._root = root
        self._allowed = (root,) if scratch is None else (root, scratch)
        self._denied = denied
        # what is around an allowed place cannot be met below it
        self._denied_inside = tuple(
            place for place in denied if not any(is_within(allowed, place) for allowed in self._allowed)
        )

    def resolve(self, path: str) -> str:
        """The absolute path without links that ``path`` (relative to the root, or absolute) means.

        Raises:
            ToolError: ``environment.bad_path``, ``environment.outside_workdir``, ``environment.denied``.
        """
        if not path or "\0" in path or not _storable(path):
            raise ToolError(
                "the path is empty" if not path else "a path cannot hold NUL or half a character",
                code="environment.bad_path",
                hint="give a path relative to the working directory",
            )
        resolved = os.path.realpath(os.path.join(self._root, path))
        refusal = self.refusal(resolved)
        if refusal is not None:
            raise refusal.with_details(given=shown_name(path))
        return resolved

    def refusal(self, resolved: str) -> ToolError | None:
        """Why this resolved path may not be touched, or None."""
        around = max((len(place) for place in self._allowed if is_within(resolved, place)), default=-1)
        if around < 0:
            return ToolError(
                f"{shown_name(resolved)} is outside the working directory {self._root}",
                code="environment.outside_workdir",
                hint="use a path inside the working directory",
                details={"path": shown_name(resolved), "root": self._root},
            )
        # the deeper of two nested places decides: a working directory below the home is usable, the home is not
        if any(is_within(resolved, place) and len(place) >= around for place in self._denied):
            return denied_error(resolved)
        return None

    def names_of(self, path: str) -> tuple[str, ...]:
        """The names by which two paths show that they mean one file; whether they may be touched is not asked."""
        joined = os.path.join(self._root, path.replace("\0", ""))
        resolved = os.path.normpath(joined)
        try:
            resolved = os.path.realpath(joined)
            status = os.stat(resolved)
        except (OSError, ValueError):  # not there, not to be looked at, or no path at all
            return (resolved,)
        if stat_module.S_ISREG(status.st_mode) and status.st_nlink > 1:
            return (resolved, f"/\0inode/{status.st_dev}/{status.st_ino}")
        return (resolved,)

    def is_denied(self, status: os.stat_result) -> bool:
        """Whether this is a denied file or directory under whatever name."""
        return _identity(status) in self.denied_identities()

    def open(self, resolved: str, flags: int) -> int:
        """Open what exists at a resolved path; no link is followed.

        Raises:
            OSError: With the path as its filename.
            ToolError: ``environment.denied``.
        """
        denied = self.denied_identities()
        directory, name = self._descend(resolved, denied)
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except OSError as error:
            raise _about(error, resolved) from None
        finally:
            os.close(directory)
        if denied and _identity(os.fstat(fd)) in denied:
            os.close(fd)
            raise denied_error(resolved)
        return fd

    def status(self, resolved: str) -> os.stat_result:
        """What is at a resolved path; a link that came meanwhile is told as a link.

        Raises:
            OSError: With the path as its filename.
            ToolError: ``environment.denied``.
        """
        denied = self.denied_identities()
        directory, name = self._descend(resolved, denied)
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise _about(error, resolved) from None
        finally:
            os.close(directory)
        if denied and _identity(found) in denied:
            raise denied_error(resolved)
        return found

    @contextmanager
    def parent(self, resolved: str) -> Generator[tuple[int, str]]:
        """The directory of a resolved path, open, and the path's name in it (``.`` for an allowed place itself).

        Directories that are missing are made.
        """
        directory, name = self._descend(resolved, self.denied_identities(), make=True)
        try:
            yield directory, name
        except OSError as error:
            raise _about(error, resolved) from None
        finally:
            os.close(directory)

    def _descend(self, resolved: str, denied: frozenset[_Identity], *, make: bool = False) -> tuple[int, str]:
        place = max((place for place in self._allowed if is_within(resolved, place)), key=len)
        *parts, name = resolved[len(place) :].lstrip(os.sep).split(os.sep)
        fd = -1
        try:
            fd = os.open(place, _DIRECTORY)
            for part in parts:
                above = fd
                fd = _enter(above, part, make=make)
                os.close(above)
                if denied and _identity(os.fstat(fd)) in denied:
                    raise denied_error(resolved)
        except (OSError, ToolError) as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OSError):
                raise _about(error, resolved) from None
            raise
        return fd, name or "."

    def denied_identities(self) -> frozenset[_Identity]:
        """Device and inode of what is denied and there."""
        if not self._denied_inside:
            return _NONE
        found: list[_Identity] = []
        # looked at each time: the home or the run directory may be made after the environment
        for place in self._denied_inside:
            with suppress(OSError):
                found.append(_identity(os.stat(place)))
        return frozenset(found)


def is_within(path: str, directory: str) -> bool:
    """Whether a resolved path is a directory or below it."""
    return path == directory or path.startswith(directory if directory.endswith(os.sep) else directory + os.sep)


def _enter(fd: int, part: str, *, make: bool) -> int:
    try:
        return os.open(part, _DIRECTORY, dir_fd=fd)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(part, dir_fd=fd)
    return os.open(part, _DIRECTORY, dir_fd=fd)


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino


def _about(error: OSError, resolved: str) -> OSError:
    """The error naming the whole path, not the part that was being opened."""
    error.filename, error.filename2 = resolved, None
    return error


def denied_error(resolved: str) -> ToolError:
    """What is said of a path that belongs to the run itself."""
    return ToolError(
        f"{shown_name(resolved)} may not be touched by tools",
        code="environment.denied",
        hint="it belongs to the run itself; work on the files of the working directory",
        details={"path": shown_name(resolved)},
    )


def _storable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
