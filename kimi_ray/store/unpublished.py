"""Sessions that are being made, and which nobody sees yet: markers below ``<home>/unpublished/``.

``new/<session_id>`` is a session that is made by its first document: it is unpublished while the marker is there and
the document is not. ``groups/<group>`` names sessions that appear together: they are unpublished while it has that
name; the flip renames it to ``groups/<group>.published``. The record goes on to ``published/<group>``, where it tells
for a while that the group was published. A marker names its writer (``owners``); those of a dead one are rolled back.

Markers of new sessions are not synced, their directory is: after a power cut one may be empty, and its writer is dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from pydantic_core import from_json, to_json

from kimi_ray.ids import is_path_safe_id, new_ulid
from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import exists, names_in, read_file, replace_file, write_file
from kimi_ray.store.layout import Layout, check_id
from kimi_ray.store.leftovers import TEMPORARY

_PUBLISHED = ".published"
_RECORDS_LAST_S = 3600.0

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker file. ``writer`` is empty when it cannot be read; ``sessions`` maps session ids to workspace ids."""

    name: str
    path: str
    writer: str
    sessions: dict[str, str]
    grouped: bool


@dataclass(frozen=True, slots=True)
class _Look:
    """The markers at one moment."""

    new: frozenset[str]
    groups: dict[str, Marker] = field(default_factory=dict[str, Marker])
    published: frozenset[str] = frozenset()


class Unpublished:
    """The markers of one home. Blocking and thread-safe; what decides is called under ``claim.lock``."""

    def __init__(self, layout: Layout, directories: Directories, has_document: Callable[[str], bool]) -> None:
        """
        Args:
            layout: The home.
            directories: Makes the directories of markers.
            has_document: Whether a session has a document (blocking): then a new one is published.
        """
        self._fs = layout.fs
        self._layout = layout
        self._directories = directories
        self._has_document = has_document
        self._root = f"{layout.home}/unpublished"
        self._new = f"{self._root}/new"
        self._groups = f"{self._root}/groups"
        self._records = f"{self._root}/published"
        self._read: dict[str, tuple[tuple[int, int, int], Marker]] = {}
        self.mine: dict[str, str] = {}
        """Sessions that this process makes, with the nonce of their claim; it sees them by name."""

    # -- reading -----------------------------------------------------------------------------------------------------

    def hides(self, session_id: str) -> bool:
        """Whether a session that was found is not to be seen. Ask after finding it: its marker is older than it is."""
        if session_id in self.mine:
            return False
        new = exists(self._fs, f"{self._new}/{session_id}") and not self._has_document(session_id)
        if new or self.group_with(session_id) is not None:
            self._layout.forget(session_id)  # it may come to nothing, and come back elsewhere
            return True
        return False

    def seen(self, listing: Callable[[], list[R]], session_of: Callable[[R], str]) -> list[R]:
        """What ``listing`` finds (blocking), without the sessions that nobody sees: a group is there whole or not at
        all."""
        before = self._look()
        found = listing()
        hidden = self._hidden_since(before)
        return [one for one in found if session_of(one) not in hidden] if hidden else found

    def _look(self) -> _Look:
        names = names_in(self._fs, self._groups)
        published = {name.removesuffix(_PUBLISHED) for name in names if name.endswith(_PUBLISHED)}
        return _Look(
            frozenset(self.new_names()),
            {marker.name: marker for marker in self._pending(names)},
            frozenset(published.union(names_in(self._fs, self._records))),
        )

    def _hidden_since(self, before: _Look) -> frozenset[str]:
        after = self._look()
        hidden: set[str] = set()
        for marker in (*before.groups.values(), *after.groups.values()):
            hidden.update(marker.sessions)
        for group in after.published - before.published:
            record = self.record(group)
            hidden.update(() if record is None else record.sessions)
        hidden.update(name for name in before.new | after.new if not self._has_document(name))
        return frozenset(hidden)

    def _pending(self, names: Iterable[str]) -> list[Marker]:
        found = [self._group(name) for name in names if "." not in name]
        return [marker for marker in found if marker is not None]

    def groups(self) -> list[Marker]:
        """The publications that are under way, or were when their process died."""
        return self._pending(names_in(self._fs, self._groups))

    def group_with(self, session_id: str) -> Marker | None:
        """The publication under way that a session belongs to."""
        return next((marker for marker in self.groups() if session_id in marker.sessions), None)

    def group(self, group: str) -> Marker | None:
        """A publication under way.

        Raises:
            StoreError: ``store.invalid_id``.
        """
        return self._group(check_id(group, "group"))

    def _group(self, group: str) -> Marker | None:
        path = f"{self._groups}/{group}"
        try:
            facts = self._fs.stat(path)
            state = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
            known = self._read.get(group)
            if known is not None and known[0] == state:
                return known[1]
            marker = self._parse(group, path, grouped=True)
        except FileNotFoundError:
            self._read.pop(group, None)
            return None
        self._read[group] = (state, marker)
        return marker

    def record(self, group: str) -> Marker | None:
        """A publication that was published not long ago."""
        check_id(group, "group")
        for path in (f"{self._groups}/{group}{_PUBLISHED}", f"{self._records}/{group}"):
            with contextlib.suppress(FileNotFoundError):
                return self._parse(group, path, grouped=True)
        return None

    def new(self, session_id: str) -> Marker | None:
        """The marker of a session that its first document makes."""
        try:
            return self._parse(session_id, f"{self._new}/{session_id}", grouped=False)
        except FileNotFoundError:
            return None

    def maker_of(self, session_id: str, groups: list[Marker]) -> Marker | None:
        """The marker that keeps a session from being published, or None."""
        for marker in groups:
            if session_id in marker.sessions:
                return marker
        marker = self.new(session_id)
        return None if marker is None or self._has_document(session_id) else marker

    def all_new(self) -> list[Marker]:
        """The markers of all sessions that their first document makes."""
        found = [self.new(name) for name in self.new_names()]
        return [marker for marker in found if marker is not None]

    def new_names(self) -> list[str]:
        """The ids of these sessions."""
        return list(filter(is_path_safe_id, names_in(self._fs, self._new)))

    def taken(self, groups: Iterable[Marker]) -> dict[str, str]:
        """The ids that are being made, new or in ``groups``, by how they look in small letters."""
        taken = {name.lower(): name for name in self.new_names()}
        taken.update((name.lower(), name) for marker in groups for name in marker.sessions)
        return taken

    def _parse(self, name: str, path: str, *, grouped: bool) -> Marker:
        writer, sessions = "", {} if grouped else {name: ""}
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            facts = cast("dict[str, Any]", from_json(read_file(self._fs, path)))
            named = {str(key): str(value) for key, value in facts["sessions"].items()}
            writer, sessions = str(facts["writer"]), named
        return Marker(name, path, writer, sessions, grouped)

    # -- writing -----------------------------------------------------------------------------------------------------

    def add_new(self, sessions: dict[str, str], writer: str) -> None:
        """Mark sessions that their first document will make; their names are durable when this returns.

        Raises:
            OSError: As the file system gave it; then nothing is marked.
        """
        self._directories.ensure(self._new)
        made: list[str] = []
        try:
            for session_id, workspace_id in sessions.items():
                data = to_json({"writer": writer, "sessions": {session_id: workspace_id}})
                made.append(session_id)
                write_file(self._fs, f"{self._new}/{session_id}", data + b"\n", sync=False)
            self._directories.sync(self._new)
        except OSError:
            for session_id in made:
                self.drop_new(session_id)
            raise

    def drop_new(self, session_id: str) -> None:
        """The session has its document, or there is nothing of it: that a marker cannot be removed does no harm."""
        with contextlib.suppress(OSError):
            self._fs.unlink(f"{self._new}/{session_id}")

    def add_group(self, group: str, sessions: dict[str, str], writer: str) -> None:
        """Mark sessions that will appear together; durable when this returns.

        Raises:
            OSError: As the file system gave it; then nothing is marked.
        """
        self._directories.ensure(self._groups)
        path = f"{self._groups}/{group}"
        data = to_json({"writer": writer, "sessions": sessions})
        replace_file(self._fs, path, data + b"\n", sync=self._directories.durable, unique=new_ulid())
        try:
            self._directories.sync(self._groups)
        except OSError:
            with contextlib.suppress(OSError):
                self._fs.unlink(path)
            raise

    def flip(self, marker: Marker) -> None:
        """Publish a group; durable when this returns.

        Raises:
            OSError: As the file system gave it; it may be published all the same.
        """
        self._fs.rename(marker.path, marker.path + _PUBLISHED)
        self.settle(marker.name)

    def settle(self, group: str) -> None:
        """Make a flip that was seen durable, and file its record.

        Raises:
            OSError: As the file system gave it.
        """
        path = f"{self._groups}/{group}{_PUBLISHED}"
        if not exists(self._fs, path):
            return
        self._directories.sync(self._groups)
        with contextlib.suppress(OSError):
            self._directories.ensure(self._records)
            with contextlib.suppress(FileExistsError):
                self._fs.link(path, f"{self._records}/{group}")
            self._fs.unlink(path)

    def drop(self, marker: Marker) -> None:
        """What a marker names is deleted, durably: so is the marker.

        Raises:
            OSError: As the file system gave it.
        """
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(marker.path)
        self._directories.sync(marker.path.rsplit("/", 1)[0])

    def tidy(self) -> bool:
        """File the records of flips and forget old ones; whether there is something for ``clear``."""
        names = names_in(self._fs, self._groups)
        for name in names:
            if name.endswith(_PUBLISHED):
                self.settle(name.removesuffix(_PUBLISHED))
        limit = time.time() - _RECORDS_LAST_S
        for name in names_in(self._fs, self._records):
            path = f"{self._records}/{name}"
            with contextlib.suppress(FileNotFoundError):
                if self._fs.stat(path).st_mtime < limit:
                    self._fs.unlink(path)
        return any(TEMPORARY in name for name in names)

    def clear(self) -> None:
        """Remove temporary files of markers that never came to be; nobody writes one under ``claim.lock``."""
        for name in names_in(self._fs, self._groups):
            if TEMPORARY in name:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(f"{self._groups}/{name}")

    def lock(self, marker: Marker, *, alone: bool) -> int | None:
        """Keep others from ending what a marker stands for, ``alone`` also from adding to it; without waiting.

        Returns:
            The descriptor to give to ``unlock``, or None when the marker is not there any more.

        Raises:
            OSError: ``BlockingIOError`` while others hold it.
        """
        try:
            fd = self._fs.open(marker.path, os.O_RDWR if alone else os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            self._fs.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if self._fs.stat(marker.path).st_ino == self._fs.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            pass
        except OSError:
            self._fs.close(fd)
            raise
        self._fs.close(fd)
        return None

    def unlock(self, fd: int) -> None:
        """Give a lock back."""
        self._fs.close(fd)


def unpublished_in(layout: Layout, has_document: Callable[[str], bool]) -> Unpublished:
    """The markers of a home that is only read."""
    return Unpublished(layout, Directories(layout.fs, layout.home, durable=False), has_document)
