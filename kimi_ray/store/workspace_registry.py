"""``<home>/workspaces.json``: the directories that were worked in, by their id; several spellings of one are aliases.

::

    {"version": 1, "workspaces": {<id>: {"root", "name", "created_at", "last_opened_at"}}, "deleted_workspace_ids": []}

It can be lost: it is then made again from the directories that the sessions' documents name. Forgetting a workspace
touches none of its sessions.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from pydantic_core import from_json, to_json

from kimi_ray.errors import SessionError, StoreError
from kimi_ray.ids import new_ulid, workspace_id, workspace_root_key
from kimi_ray.settings import Settings
from kimi_ray.store.fs import Fs, io_errors, names_in, read_file, replace_file
from kimi_ray.store.leftovers import TEMPORARY
from kimi_ray.store.owners import io_errors_but_missing
from kimi_ray.wall_clock import epoch_ms

REGISTRY_NAME = "workspaces.json"
_LOCK_NAME = "workspaces.lock"
_TURN_S = 10.0
_TURN_PAUSE_S = 0.005
VERSION = 1

Place = tuple[str, str]
"""A workspace id and a directory, as a session's document names them."""

_ABSOLUTE = re.compile(r"\A(?:/|\\\\|[A-Za-z]:[\\/])")


class WorkspaceEntry(Settings):
    """A directory that was worked in. Times are epoch milliseconds."""

    id: str
    root: str
    name: str
    created_at: int
    last_opened_at: int
    alias_ids: tuple[str, ...] = ()
    """Other ids of the same directory, under other spellings: their sessions are listed with this one's."""


@dataclass(slots=True)
class Registry:
    """What the file says."""

    entries: dict[str, WorkspaceEntry] = field(default_factory=dict[str, WorkspaceEntry])
    deleted: list[str] = field(default_factory=list[str])

    def by_root(self, root: str) -> WorkspaceEntry | None:
        """The entry of a directory, in this spelling or another."""
        key = workspace_root_key(root)
        same = [entry for entry in self.entries.values() if workspace_root_key(entry.root) == key]
        return self.entries.get(workspace_id(root)) or (_preferred(same) if same else None)

    def to_data(self) -> dict[str, Any]:
        """The file's content."""
        return {
            "version": VERSION,
            "workspaces": {
                entry.id: {
                    "root": entry.root,
                    "name": entry.name,
                    "created_at": _iso(entry.created_at),
                    "last_opened_at": _iso(entry.last_opened_at),
                }
                for entry in self.entries.values()
            },
            "deleted_workspace_ids": self.deleted,
        }


def parse_registry(data: bytes) -> Registry:
    """The registry that a file holds.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, OverflowError: It is none.
    """
    value: Any = from_json(data)
    if int(value["version"]) > VERSION:
        raise StoreError(
            f"{REGISTRY_NAME} has version {value['version']}; this program knows {VERSION}",
            code="store.format_unsupported",
            hint="upgrade the program",
        )
    deleted: Any = value["deleted_workspace_ids"]
    if not isinstance(deleted, list):
        raise TypeError("deleted_workspace_ids is no list")
    registry = Registry(deleted=[str(one) for one in cast("list[Any]", deleted)])
    for one, facts in cast("dict[str, dict[str, str]]", value["workspaces"]).items():
        if not isinstance(facts["root"], str) or not isinstance(facts["name"], str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{one} has no root or no name")
        registry.entries[one] = WorkspaceEntry(
            id=one,
            root=facts["root"],
            name=facts["name"],
            created_at=_ms(facts["created_at"]),
            last_opened_at=_ms(facts["last_opened_at"]),
        )
    return registry


def read_registry(fs: Fs, home: str) -> Registry | None:
    """The registry of a home; None when there is none, or it is damaged.

    Raises:
        StoreError: ``store.format_unsupported``, and what a file call gives.
    """
    path = f"{home}/{REGISTRY_NAME}"
    try:
        with io_errors_but_missing(path):
            data = read_file(fs, path)
        return parse_registry(data)
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def alias_ids(ids: Iterable[str], registry: Registry, places: Iterable[Place]) -> tuple[str, ...]:
    """All ids of the directories that these ids stand for, without duplicates; an unknown id stands for itself."""
    wanted = list(dict.fromkeys(ids))
    by_key: dict[str, list[str]] = {}
    keys: dict[str, list[str]] = {}
    known = [(entry.id, entry.root) for entry in registry.entries.values()]
    for one, root in [*known, *places]:
        key = workspace_root_key(root)
        keys.setdefault(one, []).append(key)
        by_key.setdefault(key, []).extend((one, workspace_id(root)))
    for one in list(wanted):
        for key in keys.get(one, ()):
            wanted += by_key[key]
    return tuple(dict.fromkeys(wanted))


def merged(registry: Registry, places: Iterable[Place]) -> list[WorkspaceEntry]:
    """One entry a directory, the one opened last first: its aliases are told in it."""
    same: dict[str, list[WorkspaceEntry]] = {}
    for entry in registry.entries.values():
        same.setdefault(workspace_root_key(entry.root), []).append(entry)
    pairs = list(places)
    shown: list[WorkspaceEntry] = []
    for entries in same.values():
        best = _preferred(entries)
        others = tuple(one for one in alias_ids([best.id], registry, pairs) if one != best.id)
        opened = max(entry.last_opened_at for entry in entries)
        shown.append(best.model_copy(update={"alias_ids": others, "last_opened_at": opened}))
    return sorted(shown, key=lambda entry: (-entry.last_opened_at, entry.id))


class WorkspaceRegistry:
    """The registry of one home. Changes come one after the other, also those of other processes (``workspaces.lock``).

    Args:
        fs: The files.
        home: The home.
        places: The directories of all sessions.
        durable: Whether a change survives a power cut.
        clock: Epoch milliseconds.
    """

    def __init__(
        self,
        fs: Fs,
        home: str,
        places: Callable[[], Awaitable[list[Place]]],
        *,
        durable: bool = True,
        clock: Callable[[], int] = epoch_ms,
    ) -> None:
        self._fs = fs
        self._home = home
        self._path = f"{home}/{REGISTRY_NAME}"
        self._places = places
        self._durable = durable
        self._clock = clock
        self._lock = asyncio.Lock()
        self._merged = False

    async def list(self) -> list[WorkspaceEntry]:
        """All workspaces that are not forgotten, the one opened last first."""
        async with self._changing():
            registry = await self._load()
        return merged(registry, await self._places())

    async def aliases(self, ids: Iterable[str]) -> tuple[str, ...]:
        """See ``alias_ids``."""
        registry = await asyncio.to_thread(read_registry, self._fs, self._home) or Registry()
        return alias_ids(ids, registry, await self._places())

    async def touch(self, root: str, name: str | None = None) -> WorkspaceEntry:
        """A directory is worked in now. It is remembered, also if it was forgotten."""
        async with self._changing():
            registry = await self._load()
            now = self._clock()
            found = registry.by_root(root)
            if found is None:
                one = workspace_id(root)
                found = WorkspaceEntry(id=one, root=root, name=_name(root), created_at=now, last_opened_at=now)
            changes: dict[str, Any] = {"last_opened_at": max(now, found.last_opened_at)}
            if name is not None:
                changes["name"] = name
            entry = found.model_copy(update=changes)
            registry.entries[entry.id] = entry
            registry.deleted = [one for one in registry.deleted if one not in (entry.id, workspace_id(root))]
            await self._store(registry)
            return entry

    async def update(self, one: str, name: str) -> WorkspaceEntry:
        """Give a workspace another name.

        Raises:
            SessionError: ``workspace.unknown``.
        """
        async with self._changing():
            registry = await self._load()
            entry = _known(registry, one).model_copy(update={"name": name})
            registry.entries[entry.id] = entry
            await self._store(registry)
            return entry

    async def delete(self, one: str) -> None:
        """Forget a workspace, under all its ids, until somebody works in it again. Its sessions stay.

        Raises:
            SessionError: ``workspace.unknown``.
        """
        places = await self._places()
        async with self._changing():
            registry = await self._load()
            entry = _known(registry, one)
            gone = alias_ids([one, entry.id], registry, places)
            registry.deleted = list(dict.fromkeys([*registry.deleted, *gone]))
            for alias in gone:
                registry.entries.pop(alias, None)
            await self._store(registry)

    async def clear_leftovers(self) -> None:
        """Remove what a process left that died while it wrote the file; not while another one has its turn.

        Raises:
            StoreError: What a file call gives.
        """

        def clear() -> None:
            with io_errors(self._home):
                fd = self._take_turn() if self._temporaries() else None
                if fd is not None:
                    self._fs.close(fd)

        await asyncio.to_thread(clear)

    @asynccontextmanager
    async def _changing(self) -> AsyncGenerator[None]:
        """The turn of this process to read the file and write it anew; then nobody else's temporary file is in use.

        Raises:
            StoreError: ``store.busy`` when another process keeps its turn for too long.
        """
        async with self._lock:
            deadline = time.monotonic() + _TURN_S
            while (fd := await asyncio.to_thread(self._take_turn)) is None:
                if time.monotonic() >= deadline:
                    raise StoreError(
                        f"another process has been changing {self._path} for {_TURN_S:g} s",
                        code="store.busy",
                        hint="try again; if it stays so, a process that holds workspaces.lock hangs",
                        retryable=True,
                    )
                await asyncio.sleep(_TURN_PAUSE_S)
            try:
                yield
            finally:
                await asyncio.to_thread(self._fs.close, fd)

    def _take_turn(self) -> int | None:
        with io_errors(self._home):
            fd = self._fs.open(f"{self._home}/{_LOCK_NAME}", os.O_RDWR | os.O_CREAT)
            try:
                self._fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in self._temporaries():
                    self._fs.unlink(f"{self._home}/{name}")
            except BlockingIOError:
                self._fs.close(fd)
                return None
            except BaseException:
                self._fs.close(fd)
                raise
            return fd

    def _temporaries(self) -> list[str]:
        return [name for name in names_in(self._fs, self._home) if name.startswith(REGISTRY_NAME + TEMPORARY)]

    async def _load(self) -> Registry:
        registry = await asyncio.to_thread(read_registry, self._fs, self._home)
        if registry is None or not self._merged:
            places = await self._places()
            if registry is None:
                await asyncio.to_thread(self._set_aside)
            found = registry or Registry()
            if _merge(found, places, self._clock()) or registry is None:
                await self._store(found)
            self._merged = True
            return found
        return registry

    def _set_aside(self) -> None:
        try:
            with io_errors_but_missing(self._path):
                self._fs.rename(self._path, f"{self._path}.damaged-{new_ulid()}")
        except FileNotFoundError:
            pass  # there was none

    async def _store(self, registry: Registry) -> None:
        data = to_json(registry.to_data(), indent=2) + b"\n"

        def write() -> None:
            with io_errors(self._path):
                replace_file(self._fs, self._path, data, sync=self._durable, unique=new_ulid())
                if self._durable:
                    self._fs.sync_dir(self._home)

        await asyncio.to_thread(write)


def _merge(registry: Registry, places: Iterable[Place], now: int) -> bool:
    changed = False
    for one, root in places:
        if not _ABSOLUTE.match(root) or {one, workspace_id(root)} & set(registry.deleted):
            continue
        if registry.by_root(root) is None:
            made = workspace_id(root)
            registry.entries[made] = WorkspaceEntry(
                id=made, root=root, name=_name(root), created_at=now, last_opened_at=now
            )
            changed = True
    return changed


def _known(registry: Registry, one: str) -> WorkspaceEntry:
    entry = registry.entries.get(one)
    if entry is None:
        raise SessionError(
            f"there is no workspace {one!r}",
            code="workspace.unknown",
            hint="rt.workspaces.list() shows those there are",
            details={"workspace_id": one},
        )
    return entry


def _preferred(entries: list[WorkspaceEntry]) -> WorkspaceEntry:
    return next((entry for entry in entries if entry.id == workspace_id(entry.root)), entries[0])


def _name(root: str) -> str:
    return os.path.basename(root.replace("\\", "/").rstrip("/")) or root


def _iso(at: int) -> str:
    return datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)
