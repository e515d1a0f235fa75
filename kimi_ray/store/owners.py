"""Which process may write a session.

A store process holds ``flock`` on ``<home>/writers/<ulid>.lock`` for life; a session's owner file names that ulid. If
the lock of the present owner is held, the session is in use; if it is free the kernel says that the process is dead,
and its sessions may be taken over. pid, host and boot id in the lock file are for messages only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from pydantic_core import from_json, to_json

from kimi_ray.errors import StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import (
    Fs,
    io_error,
    io_errors,
    is_locked,
    names_in,
    pwrite_all,
    read_file,
    replace_file,
    wait_for_lock,
)
from kimi_ray.store.layout import Layout
from kimi_ray.store.log_files import clear_leftovers
from kimi_ray.store.refusals import file_held, is_being_made
from kimi_ray.store.unpublished import Marker, Unpublished

_CLAIM_LOCK_TIMEOUT_S = 30.0
_CLAIM_LOCK_PAUSE_S = 0.002
_CLAIM_THREADS = 16


@dataclass(frozen=True, slots=True)
class Owner:
    """An owner file. ``writer`` is empty when a claim was given back but its grant stays known."""

    writer: str
    grant: int
    nonce: str


class Wanted(NamedTuple):
    """A claim that is asked for.

    ``nonce``: the same keeps its grant, another one gets the next; None leaves grant and nonce as they are (an append
    after a restart, a load). ``new`` is the workspace id of a session that must not be there, and is marked as
    unpublished.
    """

    session_id: str
    nonce: str | None
    new: str | None = None


@dataclass(frozen=True, slots=True)
class Orphan:
    """A writer lock whose process is dead and which no session names: ``doctor`` shows and removes it."""

    writer: str
    path: str
    facts: dict[str, Any]


class Owners:
    """The claims of one store process. Thread-safe and blocking; it writes nothing before the first claim."""

    def __init__(
        self,
        fs: Fs,
        layout: Layout,
        directories: Directories,
        unpublished: Unpublished,
        check_new: Callable[[str, str], None],
        *,
        durable: bool,
        boot: str,
    ) -> None:
        """
        Args:
            fs: The files.
            layout: The home.
            directories: Makes the directories of claims.
            unpublished: The markers of sessions that are being made.
            check_new: Refuses a session id, for a workspace id, that is taken (blocking; ``StoreError``).
            durable: Whether claims are synced.
            boot: Of the machine, for messages.
        """
        self._fs = fs
        self._unpublished = unpublished
        self._check_new = check_new
        self._layout = layout
        self._directories = directories
        self._durable = durable
        self._boot = boot
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_CLAIM_THREADS, thread_name_prefix="store-owners")
        self._lock_fd: int | None = None
        self._closed = False
        self.writer = new_ulid()
        self.held: dict[str, Owner] = {}

    def try_claims(self, wanted: list[Wanted]) -> list[Owner | StoreError]:
        """Claim sessions under one ``claim.lock``, without waiting for a living owner.

        Returns:
            Per session the claim, or ``session.in_use`` {host, pid}; for a new one ``store.exists`` and what
            ``check_new`` raises.
        """
        with self._claim_lock(), io_errors(self._layout.owners):
            groups = self._unpublished.groups()
            refused = [self._refusal(want.session_id, groups) for want in wanted]
            marked = self._mark_new(wanted, refused, groups)
            try:
                owners = iter(self._take([want for want, no in zip(wanted, refused, strict=True) if no is None]))
            except BaseException:
                with contextlib.suppress(OSError):  # else the marker stays, and what it names is deleted later
                    self._undo_new(marked)
                raise
            return [next(owners) if error is None else error for error in refused]

    def _mark_new(self, wanted: list[Wanted], refused: list[StoreError | None], groups: list[Marker]) -> list[str]:
        new: dict[str, str] = {}
        places: list[int] = []
        if not any(want.new for want in wanted):
            return []
        taken = self._unpublished.taken(groups)
        for index, want in enumerate(wanted):
            if refused[index] is not None or want.new is None:
                continue
            try:
                self._check_new(want.session_id, want.new)
                other = taken.get(want.session_id.lower())
                if other is not None:
                    raise is_being_made(want.session_id, other)
                taken[want.session_id.lower()] = want.session_id
            except StoreError as error:
                refused[index] = error
                continue
            new[want.session_id] = want.new
            self._unpublished.mine[want.session_id] = want.nonce or ""
            places.append(index)
        if not new:
            return []
        try:
            self._unpublished.add_new(new, self.writer)
        except OSError as error:
            for index in places:
                self._unpublished.mine.pop(wanted[index].session_id, None)
                refused[index] = io_error(error, self._layout.owners)
            return []
        return list(new)

    def _undo_new(self, session_ids: list[str]) -> None:
        for session_id in session_ids:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(self._layout.owner_file(session_id))
        if session_ids:
            self._directories.sync(self._layout.owners)
        for session_id in session_ids:
            self._unpublished.drop_new(session_id)
            self._unpublished.mine.pop(session_id, None)

    @contextlib.contextmanager
    def deciding(self) -> Generator[None]:
        """Nobody else claims a session, or reserves the id of one, during the block (blocking)."""
        with self._claim_lock():
            yield

    def register(self) -> None:
        """Take the lock of this process, before it makes directories without a claim (blocking)."""
        if self._lock_fd is None:
            with self._claim_lock():
                pass

    def refusal(self, session_id: str, groups: list[Marker]) -> StoreError | None:
        """Why a session id cannot be reserved; call it while ``deciding``. ``groups`` are those of ``unpublished``."""
        if session_id in self.held:
            return self._in_use(session_id, self.writer)
        return self._refusal(session_id, groups)

    def forget(self, session_ids: Iterable[str]) -> None:
        """Remove the owner files of sessions that came to nothing, where no living process has them; durable."""
        with self._claim_lock(), io_errors(self._layout.owners):
            for session_id in session_ids:
                owner = self.read(session_id)
                held = session_id in self.held
                if not held and (owner is None or owner.writer == self.writer or not self.lives(owner.writer)):
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.unlink(self._layout.owner_file(session_id))
            # What a dead process removed may not be durable yet, so it is synced in any case.
            self._directories.sync(self._layout.owners)

    def prune(self, directories: Iterable[str]) -> None:
        """Remove directories that are empty, unless another process may be about to use them."""
        with self._claim_lock(), io_errors(self._layout.home):
            names = names_in(self._fs, self._layout.writers)
            if any(
                name != f"{self.writer}.lock" and is_held(self._fs, f"{self._layout.writers}/{name}") for name in names
            ):
                return
            for path in directories:
                self._directories.prune(path)

    def lives(self, writer: str) -> bool:
        """Whether a store process is alive."""
        return bool(writer) and is_held(self._fs, f"{self._layout.writers}/{writer}.lock")

    def release(self, session_id: str, nonce: str | None) -> bool:
        """Give a claim back. With a nonce the owner file goes; without, only its writer is blanked.

        Returns:
            Whether it was this process's claim.
        """
        with self._claim_lock():
            owner = self.held.get(session_id)
            if owner is None or (nonce is not None and owner.nonce != nonce):
                return False
            path = self._layout.owner_file(session_id)
            with io_errors(path):
                if nonce is None and owner.nonce:
                    self._store(session_id, Owner("", owner.grant, owner.nonce))
                else:
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.unlink(path)
                self._directories.sync(self._layout.owners)
            del self.held[session_id]
            return True

    def close(self) -> None:
        """Release the lock of this process; its sessions may then be taken over by anyone."""
        with self._lock:
            self._closed = True
            self.held.clear()
            self._pool.shutdown(wait=True)
            if self._lock_fd is not None:
                fd, self._lock_fd = self._lock_fd, None
                self._fs.close(fd)
                # A file that stays is a lock that nobody holds: no reason to fail a close.
                with contextlib.suppress(OSError):
                    self._fs.unlink(f"{self._layout.writers}/{self.writer}.lock")

    @contextlib.contextmanager
    def _claim_lock(self) -> Generator[None]:
        with self._lock:
            if self._closed:
                raise StoreError("the store is closed", code="store.closed")
            path = f"{self._layout.home}/claim.lock"
            with io_errors(path):
                fd = self._fs.open(path, os.O_RDWR | os.O_CREAT)
            try:
                try:
                    with io_errors_but_blocking(path):
                        wait_for_lock(self._fs, fd, fcntl.LOCK_EX, _CLAIM_LOCK_TIMEOUT_S, _CLAIM_LOCK_PAUSE_S)
                except BlockingIOError:
                    raise file_held(path) from None
                self._open_own_lock()
                yield
            finally:
                self._fs.close(fd)

    def _open_own_lock(self) -> None:
        if self._lock_fd is not None:
            return
        path = f"{self._layout.writers}/{self.writer}.lock"
        with io_errors(path):
            self._directories.ensure(self._layout.writers)
            self._directories.ensure(self._layout.owners)
            clear_leftovers(self._fs, self._layout.owners)
            fd = self._fs.open(path, os.O_RDWR | os.O_CREAT)
            try:
                self._fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                facts = {"pid": os.getpid(), "host": socket.gethostname(), "boot": self._boot}
                pwrite_all(self._fs, fd, to_json(facts) + b"\n", 0)
                self._directories.sync(self._layout.writers)
            except OSError:
                self._fs.close(fd)
                raise
            self._lock_fd = fd

    def _refusal(self, session_id: str, groups: list[Marker]) -> StoreError | None:
        if session_id in self.held:
            return None
        owner = self.read(session_id)
        if owner is not None and owner.writer not in ("", self.writer) and self.lives(owner.writer):
            return self._in_use(session_id, owner.writer)
        marker = self._unpublished.maker_of(session_id, groups)
        if marker is None or (not marker.grouped and marker.writer == self.writer):
            return None
        if marker.writer == self.writer or self.lives(marker.writer):
            return self._in_use(session_id, marker.writer)
        return self._in_use(session_id, marker.writer).with_details(abandoned=True)

    def _take(self, wanted: list[Wanted]) -> list[Owner]:
        answers: list[Owner] = []
        changed: dict[str, Owner] = {}
        for session_id, nonce, _ in wanted:
            found = self.held.get(session_id) or self.read(session_id)
            if found is None:
                owner = Owner(self.writer, 1 if nonce else 0, nonce or "")
            elif nonce is None or nonce == found.nonce:
                owner = Owner(self.writer, found.grant, found.nonce)
            else:
                owner = Owner(self.writer, found.grant + 1, nonce)
            if owner != found or session_id not in self.held:
                changed[session_id] = owner
            answers.append(owner)
        if changed:
            with io_errors(self._layout.owners):
                if len(changed) == 1:
                    self._store(*next(iter(changed.items())))
                else:
                    list(self._pool.map(self._store, changed, changed.values()))
                self._directories.sync(self._layout.owners)
        for (session_id, _, _), owner in zip(wanted, answers, strict=True):
            self.held[session_id] = owner
        return answers

    def _store(self, session_id: str, owner: Owner) -> None:
        data = to_json({"writer": owner.writer, "grant": owner.grant, "nonce": owner.nonce})
        path = self._layout.owner_file(session_id)
        replace_file(self._fs, path, data + b"\n", sync=self._durable, unique=self.writer)

    def read(self, session_id: str) -> Owner | None:
        """The owner file of a session, or None."""
        return read_owner(self._fs, self._layout.owner_file(session_id))

    def _in_use(self, session_id: str, writer: str) -> StoreError:
        facts = _facts(self._fs, f"{self._layout.writers}/{writer}.lock")
        host, pid = facts.get("host"), facts.get("pid")
        return StoreError(
            f"session {session_id} is in use by process {pid} on {host}",
            code="session.in_use",
            hint="close it there, or wait until that process has ended; reading is possible meanwhile",
            details={"session_id": session_id, "host": host, "pid": pid},
            retryable=True,
        )


def read_owner(fs: Fs, path: str) -> Owner | None:
    """An owner file, or None; a damaged one counts as none (its claim was never acknowledged)."""
    try:
        with io_errors_but_missing(path):
            value: Any = from_json(read_file(fs, path))
        facts = cast("dict[str, Any]", value)
        return Owner(str(facts["writer"]), int(facts["grant"]), str(facts["nonce"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def is_held(fs: Fs, path: str) -> bool:
    """Whether a living process holds this writer lock. Call it under ``claim.lock``, or accept a stale answer."""
    with io_errors(path):
        return is_locked(fs, path)


def orphans(fs: Fs, home: str) -> list[Orphan]:
    """Writer locks that are free; those that no session names may be removed with ``remove_orphans``."""
    layout = Layout(fs, home)
    named = {owner.writer for name in names_in(fs, layout.owners) if (owner := read_owner(fs, layout.owner_file(name)))}
    found: list[Orphan] = []
    for name in names_in(fs, layout.writers):
        path = f"{layout.writers}/{name}"
        writer = name.removesuffix(".lock")
        if writer not in named and not is_held(fs, path):
            found.append(Orphan(writer, path, _facts(fs, path)))
    return found


def remove_orphans(fs: Fs, home: str) -> list[Orphan]:
    """Remove stale writer locks, under ``claim.lock`` so that no process is just taking one."""
    path = f"{home}/claim.lock"
    with io_errors(path):
        fd = fs.open(path, os.O_RDWR | os.O_CREAT)
        try:
            fs.flock(fd, fcntl.LOCK_EX)
            found = orphans(fs, home)
            for orphan in found:
                fs.unlink(orphan.path)
            return found
        finally:
            fs.close(fd)


def _facts(fs: Fs, path: str) -> dict[str, Any]:
    try:
        with io_errors_but_missing(path):
            value: Any = from_json(read_file(fs, path))
    except (FileNotFoundError, ValueError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


@contextlib.contextmanager
def io_errors_but_missing(path: str) -> Generator[None]:
    """``io_errors``, but ``FileNotFoundError`` passes."""
    try:
        with io_errors(path):
            yield
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


@contextlib.contextmanager
def io_errors_but_blocking(path: str) -> Generator[None]:
    """``io_errors``, but ``BlockingIOError`` passes."""
    try:
        with io_errors(path):
            yield
    except StoreError as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise error.__cause__ from None
        raise
