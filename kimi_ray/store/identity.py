"""``<home>/store.json``: what a store is, fixed once at creation; and whether a home can hold one at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import uuid
from typing import Any, cast

from pydantic_core import from_json, to_json

from kimi_ray.errors import StoreError
from kimi_ray.ids import new_ulid
from kimi_ray.store.fs import Fs, RealFs, exists, io_error, io_errors, read_file, write_file
from kimi_ray.store.reader import unavailable
from kimi_ray.store.seam import StoreIdentity, StoreOptions

FORMAT = 1
IDENTITY_NAME = "store.json"
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "9p", "ceph", "glusterfs", "beegfs", "gpfs", "afs")
_PROBE_TIMEOUT_S = 30
_KNOWN = (("jsonl", "none"), ("jsonl", "zstd"), ("sqlite", "none"))


def check_backend(options: StoreOptions) -> None:
    """Refuse by name what this program cannot open.

    Raises:
        StoreError: ``store.backend_unavailable``.
    """
    if (options.backend, options.compression) not in _KNOWN:
        raise unavailable(options.backend, options.compression)


def read_identity(fs: Fs, home: str) -> StoreIdentity | None:
    """The identity of the store in ``home``, or None when there is none.

    Raises:
        StoreError: ``store.corrupt``, ``store.format_unsupported``.
    """
    path = f"{home}/{IDENTITY_NAME}"
    try:
        data = read_file(fs, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise io_error(error, path) from error
    try:
        value: Any = from_json(data)
        if not isinstance(value, dict):
            raise TypeError("not an object")
        facts = cast("dict[str, Any]", value)
        if int(facts["format"]) > FORMAT:
            raise StoreError(
                f"{path} has format {facts['format']}; this program knows format {FORMAT}",
                code="store.format_unsupported",
                hint="upgrade the program",
                details={"file": path, "format": facts["format"]},
            )
        return StoreIdentity(
            str(facts["uuid"]), str(facts["backend"]), str(facts["compression"]), int(facts["shards"]), FORMAT
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} is damaged: {error}",
            code="store.corrupt",
            hint="restore the file from a backup; its uuid is the name of the runtime",
            details={"file": path, "offset": 0, "seq": -1},
        ) from error


def open_identity(fs: Fs, home: str, options: StoreOptions) -> StoreIdentity:
    """The identity of the store in ``home``, created when there is none; of two racing creators one wins.

    Raises:
        StoreError: ``store.wrong_home``, ``store.settings_mismatch``, ``store.home_not_writable``,
            ``store.unsupported_filesystem``, ``store.format_unsupported``.
    """
    check_backend(options)
    identity = read_identity(fs, home)
    if identity is None:
        if options.expected_home_id is not None:
            raise _wrong_home(home, options.expected_home_id, None)
        _make_home(fs, home)
    check_filesystem(fs, home, network_home=options.network_home)
    if identity is None:
        identity = _create(fs, home, options)
    elif options.durability == "disk":
        with io_errors(home):
            fs.sync_dir(home)  # its creator may have died before it did
    if options.expected_home_id not in (None, identity.home_id):
        raise _wrong_home(home, str(options.expected_home_id), identity.home_id)
    for name in ("backend", "compression", "shards"):
        found, wanted = getattr(identity, name), getattr(options, name)
        if found != wanted:
            raise StoreError(
                f"the store in {home} was created with {name}={found!r}, not {wanted!r}",
                code="store.settings_mismatch",
                hint=f"set {name}={found!r}, or use another home",
                details={"home": home, "setting": name, "stored": found, "asked": wanted},
            )
    return identity


def require_identity(fs: Fs, home: str) -> StoreIdentity:
    """The identity of an existing store.

    Raises:
        StoreError: ``store.not_found``.
    """
    identity = read_identity(fs, home)
    if identity is None:
        raise StoreError(
            f"there is no store at {home}",
            code="store.not_found",
            hint="check that the home is the right one; the first run or import makes it",
            details={"home": home},
        )
    return identity


def _make_home(fs: Fs, home: str) -> None:
    missing: list[str] = []
    step = home
    while step and not exists(fs, step):
        missing.append(step)
        step = step.rsplit("/", 1)[0]
    try:
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                fs.mkdir(path)
        for path in missing:
            fs.sync_dir(path.rsplit("/", 1)[0] or "/")
        while step:  # found, but another creator may have died before it synced them; not all may be opened
            step = step.rsplit("/", 1)[0]
            with contextlib.suppress(OSError):
                fs.sync_dir(step or "/")
        if missing:
            fs.stat(home)  # a link to nothing is in the way of a directory, and none itself
    except OSError as error:
        raise _not_writable(home, error) from error


def _create(fs: Fs, home: str, options: StoreOptions) -> StoreIdentity:
    identity = StoreIdentity(str(uuid.uuid4()), options.backend, options.compression, options.shards)
    data = to_json(
        {
            "format": identity.format,
            "uuid": identity.home_id,
            "backend": identity.backend,
            "compression": identity.compression,
            "shards": identity.shards,
        }
    )
    path = f"{home}/{IDENTITY_NAME}"
    temporary = f"{path}.tmp-{new_ulid()}"
    try:
        write_file(fs, temporary, data + b"\n", sync=True)
        try:
            # another creator may have won, and have cleared our file away
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                fs.link(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(temporary)
        fs.sync_dir(home)
    except OSError as error:
        raise _not_writable(home, error) from error
    return require_identity(fs, home)


def _not_writable(home: str, error: OSError) -> StoreError:
    found = io_error(error, home)
    if found.code == "store.disk_full":
        return found
    return StoreError(
        f"the home {home} cannot be written: {error.strerror}",
        code="store.home_not_writable",
        hint="choose a directory that this user may write, with home=... or KIMI_RAY_HOME",
        details=found.details,
    )


def _wrong_home(home: str, expected: str, found: str | None) -> StoreError:
    return StoreError(
        f"{home} holds {'no store' if found is None else f'the store {found}'}, expected {expected}",
        code="store.wrong_home",
        hint="the storage node sees another directory at this path; pin the store to the node that has the home",
        details={"home": home, "expected": expected, "found": found},
    )


def check_filesystem(fs: Fs, home: str, *, network_home: bool) -> None:
    """Refuse network and user-space file systems, whose locks and syncs may not hold.

    Args:
        network_home: Accept one if two processes really exclude each other on it.

    Raises:
        StoreError: ``store.unsupported_filesystem``.
    """
    with io_errors(home):
        kind = fs.fs_type(home)
    if not is_network(kind):
        return
    if network_home and locks_exclude(home):
        return
    why = "its locks do not exclude a second process" if network_home else "locks and syncs may not hold there"
    raise StoreError(
        f"the home {home} is on {kind}: {why}",
        code="store.unsupported_filesystem",
        hint="use a local disk" if network_home else "use a local disk, or set network_home = true to have it probed",
        details={"home": home, "filesystem": kind},
    )


def is_network(kind: str) -> bool:
    """Whether a file system of this kind may be shared between machines, or be a program's own."""
    return kind in _NETWORK or kind.startswith("fuse")


_PROBE = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(7)
sys.exit(0)
"""
_REFUSED = 7


def locks_exclude(home: str) -> bool:
    """Whether a lock that this process holds keeps a second one out, and lets it in when released."""
    fs = RealFs()
    path = f"{home}/lock-probe-{new_ulid()}"
    with io_errors(path):
        fd = fs.open(path, os.O_RDWR | os.O_CREAT)
        try:
            fs.flock(fd, fcntl.LOCK_EX)
            held = _probe(path)
            fs.flock(fd, fcntl.LOCK_UN)
            return held == _REFUSED and _probe(path) == 0
        finally:
            fs.close(fd)
            fs.unlink(path)


def _probe(path: str) -> int:
    command = [sys.executable, "-c", _PROBE, path]
    return subprocess.run(command, timeout=_PROBE_TIMEOUT_S, check=False, capture_output=True).returncode
