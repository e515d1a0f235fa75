"""Finding what a path holds: a root of projects, one session, one file, a database; and reading each session of it.

One broken session is told in its own row and hides nobody else (the original's listing fails as a whole). Nothing is
written, and no file of the source is opened for writing.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import Final

from kimi_ray.errors import ConfigError
from kimi_ray.exchange.dsh import database
from kimi_ray.exchange.dsh.errors import Refusal, corrupt, unsupported
from kimi_ray.exchange.dsh.frames import MAGIC
from kimi_ray.exchange.dsh.header import NO_CWD, decode_segment, encode_segment, project_key
from kimi_ray.exchange.dsh.interpret import interpret
from kimi_ray.exchange.dsh.log_file import list_compressed, list_plain, read_compressed, read_plain
from kimi_ray.exchange.dsh.model import JsonObject, Reading

PLAIN_NAME: Final = "session.jsonl"
COMPRESSED_NAME: Final = "session.jsonl.zstd"
DATABASE_NAME: Final = "sessions.sqlite"
_NAMES: Final = (PLAIN_NAME, COMPRESSED_NAME)
_FLAT = re.compile(r".\.jsonl(\.zstd)?\Z")
_PROJECT = re.compile(r"--.*--\Z", re.DOTALL)
_STABLE_READS: Final = 20


def read_source(path: str) -> Iterator[Reading]:
    """Every session under a path, one at a time, in the order of their places.

    Args:
        path: A root of the harness, a project or session directory in it, a log file, or a database.

    Raises:
        ConfigError: ``import.not_found``, ``import.nothing_found``.
    """
    place = os.path.abspath(path)
    if os.path.isfile(place):
        yield from _file(place)
        return
    if not path or not os.path.isdir(place):
        what = "the path is empty" if not path else f"there is no {place}"
        raise ConfigError(
            f"{place} is neither a file nor a directory" if path and os.path.lexists(place) else what,
            code="import.not_found",
            hint="name a root of session logs, a session's directory, a log file or a database",
            details={"path": place},
        )
    found = False
    for reading in _without_twins(_told(place, _directory)):
        found = True
        yield reading
    if not found:
        raise ConfigError(
            f"{place} holds no sessions of the harness",
            code="import.nothing_found",
            hint="a root has <project>/<session>/session.jsonl or session.jsonl.zstd below it, or a sessions database",
            details={"path": place},
        )


_Found = list[tuple[str, Iterator[Reading]]]


def _told(place: str, look: Callable[[str], _Found]) -> _Found:
    """What is found in a directory; one that cannot be listed is told."""
    try:
        return look(place)
    except OSError as error:
        reading = Reading(None, place, "none")
        reading.error = _unreadable(place, error)
        return [(place, iter([reading]))]


def _directory(place: str) -> _Found:
    """What a directory holds: ``(file, its sessions)`` without reading any of them yet."""
    if _logs(place):
        return [_session(place)]
    for one in _directories(place):
        if _logs(one):
            return _project(place)
    found = [entry for project in _directories(place) for entry in _told(project, _project)]
    found += [(path, _database(path)) for path in _files(place) if _is_database(path)]
    if not found and os.path.isdir(f"{place}/sessions"):
        return _directory(f"{place}/sessions")
    return found


def _project(project: str) -> _Found:
    found = [_session(directory) for directory in _directories(project) if _logs(directory)]
    return found + [(path, _flat(path)) for path in _files(project) if _FLAT.search(os.path.basename(path))]


def _without_twins(found: _Found) -> Iterator[Reading]:
    """The sessions, those whose id is in several places refused: nobody can say which is meant."""
    places: dict[str, list[str]] = {}
    for path, _ in found:
        if os.path.basename(path) in _NAMES:
            places.setdefault(_id_of(path), []).append(path)
    for path, readings in found:
        for reading in readings:
            twins = [other for other in places.get(reading.id or "", ()) if other != path]
            if twins and os.path.basename(path) in _NAMES:
                reading.stored = reading.closers = None
                reading.error = corrupt(
                    f'duplicate JSONL session id "{reading.id}" appears in multiple project directories',
                    file=path,
                    also=twins,
                )
            yield reading


def _session(directory: str) -> tuple[str, Iterator[Reading]]:
    present = _logs(directory)
    if len(present) == 1:
        return present[0], _file(present[0])
    return present[0], _both(present)


def _logs(directory: str) -> list[str]:
    """What lies where the logs of a session would: whatever it is, the session is told."""
    present: list[str] = []
    for name in _NAMES:
        try:
            os.lstat(f"{directory}/{name}")
        except PermissionError:
            return [f"{directory}/{name}"]  # one of them may be there, and reading it says why it cannot be told
        except OSError:
            continue
        present.append(f"{directory}/{name}")
    return present


def _both(present: list[str]) -> Iterator[Reading]:
    reading = Reading(_id_of(present[0]), present[0], "none")
    reading.error = corrupt(
        f"JSONL artifact {present[1]} uses the opposite encoding of {present[0]}: only one of them can be the session",
        file=present[1],
    )
    yield reading


def _flat(path: str) -> Iterator[Reading]:
    name = os.path.basename(path).removesuffix(".zstd").removesuffix(".jsonl")
    reading = Reading(decode_segment(name) or name, path, "zstd" if path.endswith(".zstd") else "none")
    reading.error = unsupported(
        f"JSONL artifact {path} uses the unsupported flat-file layout; give the file itself to read it", file=path
    )
    yield reading


def _file(path: str) -> Iterator[Reading]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would wait for its writer
            raise OSError(errno.EINVAL, "it is not a regular file")
        with open(path, "rb") as file:
            start = file.read(16)
    except OSError as error:
        reading = Reading(_id_of(path), path, "none")
        reading.error = _unreadable(path, error)
        yield reading
        return
    if start == database.MAGIC:
        yield from _database(path)
        return
    compressed = path.endswith(".zstd") or start[:4] == MAGIC
    reading = Reading(_id_of(path), path, "zstd" if compressed else "none")
    try:
        _read_log(reading, _stable_bytes(path))
    except OSError as error:
        reading.error = _unreadable(path, error)
    except Refusal as refusal:
        reading.error = refusal.placed(file=path)
        if refusal.kind == "unsupported":
            refusal.message += f" (raw log: {path})"
    yield reading


def _unreadable(path: str, error: OSError) -> Refusal:
    return corrupt(f"{path} cannot be read: {error.strerror or error}", file=path)


def _read_log(reading: Reading, data: bytes) -> None:
    compressed = reading.encoding == "zstd"
    reading.header = list_compressed(data) if compressed else list_plain(data)
    bound = _is_bound(reading.source)
    if reading.header is not None and not bound:
        reading.id = reading.header["id"]
    stored = read_compressed(data) if compressed else read_plain(data)
    if bound:
        _check_place(reading.source, str(reading.id), stored.header)
    interpret(reading, stored)


def _check_place(path: str, session_id: str, header: JsonObject) -> None:
    """The header must name the directory that its log is in.

    Raises:
        Refusal: ``corrupt``.
    """
    if header["id"] != session_id:
        raise corrupt(
            f'stored session identity mismatch: requested "{session_id}", header contains "{header["id"]}"', line=1
        )
    directory = os.path.dirname(path)
    wanted = (project_key(header["cwd"]) if header.get("cwd", "") is not None else None) if "cwd" in header else NO_CWD
    names = (os.path.basename(os.path.dirname(directory)), os.path.basename(directory))
    if names != (wanted, encode_segment(header["id"])):
        raise corrupt(
            f'corrupt session log "{path}": header id and cwd identify "{wanted}/{encode_segment(header["id"])}"',
            line=1,
        )


def _database(path: str) -> Iterator[Reading]:
    try:
        with database.opened_copy(path) as connection:
            for session_id in database.session_ids(connection):
                reading = Reading(session_id, path, "sqlite")
                try:
                    reading.header = database.header_row(connection, session_id)
                    interpret(reading, database.read_session(connection, session_id, reading.header))
                except Refusal as refusal:
                    reading.error = refusal.placed(file=path)
                yield reading
    except (Refusal, OSError) as error:
        reading = Reading(None, path, "sqlite")
        reading.error = _unreadable(path, error) if isinstance(error, OSError) else error.placed(file=path)
        yield reading


def _stable_bytes(path: str) -> bytes:
    """The whole of a file that did not change while it was read.

    Raises:
        Refusal: ``corrupt`` when it never stood still.
    """
    for _ in range(_STABLE_READS):
        with open(path, "rb") as file:
            before = os.fstat(file.fileno())
            data = file.read()
        after = os.stat(path)
        if (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns):
            return data
    raise corrupt(f"{path} is being written to: it changed {_STABLE_READS} times while it was read")


def _id_of(path: str) -> str:
    """The id that the place of a log names: its directory's, or the file's own name."""
    directory, name = os.path.split(path)
    segment = os.path.basename(directory) if name in _NAMES else name.removesuffix(".zstd").removesuffix(".jsonl")
    return decode_segment(segment) or segment


def _is_bound(path: str) -> bool:
    """Whether a file lies where the harness would look for it: only then must its header name its place."""
    directory, name = os.path.split(path)
    project = os.path.basename(os.path.dirname(directory))
    return name in _NAMES and (project == NO_CWD or _PROJECT.match(project) is not None)


def _is_database(path: str) -> bool:
    if os.path.basename(path) == DATABASE_NAME:
        return True  # also when it does not begin like one: it is told as damaged
    try:
        with open(path, "rb") as file:
            return file.read(len(database.MAGIC)) == database.MAGIC
    except OSError:
        return False


def _directories(place: str) -> list[str]:
    return sorted(entry.path for entry in _entries(place) if _holds(entry.is_dir))


def _files(place: str) -> list[str]:
    return sorted(entry.path for entry in _entries(place) if _holds(entry.is_file))


def _holds(check: Callable[[], bool]) -> bool:
    """A check of an entry; a link that leads in a circle is nothing."""
    try:
        return check()
    except OSError:
        return False


def _entries(place: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(place) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []  # it went away meanwhile
