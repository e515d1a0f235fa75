"""A session as one file: a zip that any program can read, the same bytes for the same content.

``manifest.json`` says what is in it and what is missing, ``document.json`` is the session document,
``agents/<id>/events.jsonl`` the header of a log and its events in canonical form (the same from every backend),
``blobs/<hex>`` the large contents that they name. Nothing in it depends on where the home was.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import zipfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, Protocol, cast

from kimi_ray.errors import ConfigError, KimiRayError
from kimi_ray.events import encode
from kimi_ray.session.refusals import no_session
from kimi_ray.store.checkup import UNREADABLE, blob_references
from kimi_ray.store.open import ReadStore
from kimi_ray.store.seam import ListedLog, Stream
from kimi_ray.version import __version__

FORMAT = "kimi-ray-session"
VERSION = 1
MANIFEST = "manifest.json"
DOCUMENT = "document.json"
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)
_LEVEL = 6
_PAGE_EVENTS = 10_000
_TRIES = 3


class Sink(Protocol):
    """Where the bytes of an archive go."""

    def write(self, data: bytes, /) -> int:
        """Take bytes."""
        ...

    def flush(self) -> None:
        """Pass on what was taken."""
        ...


async def export_session(
    store: ReadStore, session_id: str, path: str | os.PathLike[str] | Sink, *, force: bool = False
) -> dict[str, Any]:
    """Write a session into an archive, also beside somebody who writes it: of each log a prefix that was whole.

    Damage does not stop it: a log goes in as far as it verifies, and the manifest says what is wrong. Memory is that
    of one page of events and of one blob.

    Args:
        store: The home (``open_store``).
        session_id: The session, archived or not.
        path: The file to make, whole or not at all; or an open binary stream, to which the bytes go as they come.
        force: Replace a file that is there.

    Returns:
        The manifest. ``ok`` is false when something could not be read; see ``problems``.

    Raises:
        SessionError: ``session.not_found``; ConfigError: ``export.exists``, ``export.failed``; StoreError: ``store.*``
            for what is neither damage nor absence.
    """
    if isinstance(path, str | os.PathLike):
        with whole_file(os.fspath(path), force=force) as file:
            return await _Export(store, session_id, file).run()
    try:
        return await _Export(store, session_id, path).run()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise not_written("the archive", error) from error


class _Unseekable:
    """A stream as one that cannot seek: the same bytes, wherever they go."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, data: bytes) -> int:
        self._sink.write(data)
        return len(data)

    def flush(self) -> None:
        self._sink.flush()


@dataclass(slots=True)
class _Entry:
    """A file in the archive while it is written."""

    stream: IO[bytes]
    digest: Any = field(default_factory=hashlib.sha256)
    size: int = 0

    def write(self, data: bytes) -> None:
        self.stream.write(data)
        self.digest.update(data)
        self.size += len(data)

    def write_lines(self, lines: tuple[bytes, ...], blobs: set[str]) -> None:
        self.write(b"\n".join(lines) + b"\n")
        for line in lines:
            blobs.update(blob_references(line))


class _Export:
    def __init__(self, store: ReadStore, session_id: str, sink: Sink) -> None:
        self._store = store
        self._session_id = session_id
        self._zip = zipfile.ZipFile(cast("Any", _Unseekable(sink)), "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL)
        self._files: list[dict[str, Any]] = []
        self._problems: list[dict[str, Any]] = []
        self._blobs: set[str] = set()

    async def run(self) -> dict[str, Any]:
        with self._zip:
            document = await self._document()
            logs = sorted(await self._store.list(self._session_id), key=lambda log: log.stream.agent_id)
            if document is None and not logs:
                raise no_session(self._session_id)
            agents = [await self._agent(log) for log in logs]
            blobs = [await self._blob(digest) for digest in sorted(self._blobs)]
            manifest: dict[str, Any] = {
                "format": FORMAT,
                "version": VERSION,
                "ok": not self._problems,
                "kimi_ray": __version__,
                "source": {"backend": self._store.identity.backend},
                "session": document or {"session_id": self._session_id},
                "agents": agents,
                "blobs": blobs,
                "files": self._files,
                "problems": self._problems,
            }
            await asyncio.to_thread(self._write_whole, MANIFEST, _plain(manifest, indent=1), listed=False)
        return manifest

    async def _document(self) -> dict[str, Any] | None:
        try:
            document = await self._store.read_document(self._session_id)
        except KimiRayError as error:
            if error.code not in UNREADABLE:
                raise
            self._problem(error.code, "the session document cannot be read")
            return None
        if document is None:
            return None
        await asyncio.to_thread(self._write_whole, DOCUMENT, _plain(document.value))
        return {
            "session_id": document.session_id,
            "workspace_id": document.workspace_id,
            "revision": document.revision,
            "file": DOCUMENT,
        }

    async def _agent(self, log: ListedLog) -> dict[str, Any]:
        agent_id = log.stream.agent_id
        if log.header is None:
            code = (log.error or {}).get("code") or "store.corrupt"
            self._problem(code, f"the header of the log of {agent_id} cannot be read", agent_id=agent_id)
            return {"agent_id": agent_id, "events": 0, "prefix": True}
        name = f"agents/{agent_id}/events.jsonl"
        with self._open(name) as entry:
            await asyncio.to_thread(entry.write, encode(log.header) + b"\n")
            count, whole = await self._events(log.stream, entry)
        return {"agent_id": agent_id, "events": count, "prefix": not whole, "file": name}

    async def _events(self, stream: Stream, entry: _Entry) -> tuple[int, bool]:
        """Write a log up to the end that it has now; how many events, and whether that is all that is stored."""
        seq, end, tries = 0, 1, 0
        while seq < end:
            try:
                page = await self._store.read_from(stream, seq, _PAGE_EVENTS)
            except KimiRayError as error:
                cut_off = error.code == "store.not_found" and await self._is_listed(stream)  # right behind its header
                if error.code not in UNREADABLE and not cut_off:
                    raise
                tries += 1
                if tries < _TRIES:
                    continue  # what looks damaged beside a writer may be half written
                message = f"the log of {stream.agent_id} verifies up to here only: {seq} events"
                self._problem(error.code, message, agent_id=stream.agent_id, seq=seq)
                return seq, False
            tries = 0
            end = page.next_seq if seq == 0 else end
            lines = page.lines[: end - seq]
            if not lines:
                break
            await asyncio.to_thread(entry.write_lines, lines, self._blobs)
            seq += len(lines)
        try:
            return seq, (await self._store.read_from(stream, seq, 1)).next_seq <= seq
        except KimiRayError:
            return seq, False

    async def _is_listed(self, stream: Stream) -> bool:
        return any(log.stream == stream for log in await self._store.list(self._session_id))

    async def _blob(self, digest: str) -> dict[str, Any]:
        try:
            content = await self._store.read_blob(digest)
        except KimiRayError as error:
            if error.code not in (*UNREADABLE, "store.blob_missing"):
                raise
            self._problem(error.code, f"the blob {digest} cannot be read", digest=digest)
            return {"digest": digest, "missing": True}
        name = f"blobs/{digest.removeprefix('sha256:')}"
        await asyncio.to_thread(self._write_whole, name, content)
        return {"digest": digest, "bytes": len(content), "file": name}

    def _problem(self, code: str, message: str, **details: Any) -> None:
        self._problems.append({"code": code, "message": message, "details": details})

    @contextmanager
    def _open(self, name: str, *, listed: bool = True) -> Generator[_Entry]:
        info = zipfile.ZipInfo(name, _FIXED_TIME)
        info.compress_type = zipfile.ZIP_DEFLATED
        info.create_system = 3
        info.external_attr = 0o644 << 16
        with self._zip.open(info, "w", force_zip64=True) as stream:
            entry = _Entry(stream)
            yield entry
        if listed:
            self._files.append({"path": name, "sha256": entry.digest.hexdigest(), "bytes": entry.size})

    def _write_whole(self, name: str, content: bytes, *, listed: bool = True) -> None:
        with self._open(name, listed=listed) as entry:
            entry.write(content)


def _plain(value: Any, *, indent: int | None = None) -> bytes:
    separators = (",", ": ") if indent else (",", ":")
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, indent=indent, separators=separators)
    return text.encode("utf-8", "surrogatepass") + b"\n"


@contextmanager
def whole_file(name: str, *, force: bool) -> Generator[IO[bytes]]:
    """A file that appears under its name when the block has ended well, or not at all."""
    target = os.path.abspath(name)
    if os.path.lexists(target) and not force:
        raise _exists(target)
    directory, short = os.path.split(target)
    partial = os.path.join(directory, f".{short[:200]}.{os.getpid()}.partial")
    try:
        file = open(partial, "xb")  # noqa: SIM115  closed below, before it is shown
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            _show(partial, target, force=force)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(partial)
    except OSError as error:
        raise not_written(target, error) from error


def not_written(target: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{target} cannot be written: {error.strerror or error}",
        code="export.failed",
        hint="free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name another file with --out",
        details={"file": target, "reason": error.strerror or str(error)},
    )


def _show(partial: str, target: str, *, force: bool) -> None:
    if force:
        os.replace(partial, target)
        return
    try:
        os.link(partial, target)
    except FileExistsError:
        raise _exists(target) from None
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise _exists(target) from None
        os.rename(partial, target)


def _exists(target: str) -> ConfigError:
    return ConfigError(
        f"{target} exists already",
        code="export.exists",
        hint="name another file with --out, or replace it with --force",
        details={"file": target},
    )
