"""Where logs are: a home of any backend, or the archive of a session. Read-only, blocking, a run of lines at a time."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, Final, Protocol, cast

from pydantic_core import from_json

from kimi_ray.errors import ConfigError, KimiRayError, StoreError
from kimi_ray.exchange.archive import FORMAT, MANIFEST, VERSION
from kimi_ray.store.fs import RealFs, io_errors
from kimi_ray.store.identity import require_identity
from kimi_ray.store.reader import open_reader
from kimi_ray.store.seam import ListedLog, Stream

_PAGE_EVENTS: Final = 50_000
_PAGE_BYTES: Final = 8 << 20
_LINE_BYTES: Final = 64 << 20
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)


class Place(Protocol):
    """Something that has logs."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    def logs(self, session_id: str | None = None) -> list[ListedLog]:
        """The logs of a session, or of all; a broken one has no header and an error."""
        ...

    def lines(self, stream: Stream) -> Iterator[tuple[bytes, ...]]:
        """The canonical lines of a log in runs, as far as it is written now; a streamed chunk may be an empty one.

        Raises:
            StoreError: ``store.corrupt`` and the like, where the log is damaged.
        """
        ...

    def blob(self, digest: str) -> bytes:
        """A content that was kept by reference.

        Raises:
            StoreError: ``store.blob_missing``, ``store.corrupt``.
        """
        ...


class HomePlace:
    """A home, read beside whoever writes it.

    Raises:
        StoreError: ``store.not_found``, ``store.corrupt``, ``store.format_unsupported``.
    """

    def __init__(self, home: str | os.PathLike[str]) -> None:
        self.name: str = os.path.abspath(os.path.expanduser(os.fspath(home)))
        fs = RealFs()
        with io_errors(self.name):
            self._reader = open_reader(fs, self.name, require_identity(fs, self.name))

    def logs(self, session_id: str | None = None) -> list[ListedLog]:
        """See ``Place``."""
        with io_errors(self.name):
            return self._reader.list_logs(session_id)

    def lines(self, stream: Stream) -> Iterator[tuple[bytes, ...]]:
        """See ``Place``."""
        seq, end = 0, 1
        while seq < end:
            with io_errors(self.name):
                page = self._reader.read_from(stream, seq, _PAGE_EVENTS, _PAGE_BYTES, chunks=False)
            end = page.next_seq if seq == 0 else end
            lines = page.lines[: end - seq]
            if not lines:
                return
            yield lines
            seq += len(lines)

    def blob(self, digest: str) -> bytes:
        """See ``Place``."""
        with io_errors(self.name):
            return self._reader.read_blob(digest)

    def close(self) -> None:
        """Give descriptors back."""
        self._reader.close()


class ArchivePlace:
    """The archive of one session, as ``sessions export`` writes it.

    Raises:
        ConfigError: ``export.not_an_archive``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name: str = os.fspath(path)
        try:
            self._zip = zipfile.ZipFile(path)
            manifest: dict[str, Any] = json.loads(self._zip.read(MANIFEST))
            if manifest["format"] != FORMAT or manifest["version"] != VERSION:
                raise self._not_one("its manifest is of something else, or of another version")
            self.session_id = str(manifest["session"]["session_id"])
            agents = cast("list[dict[str, Any]]", manifest["agents"])
            self._files = {str(one["agent_id"]): one.get("file") for one in agents}
            told = [one["details"] for one in cast("list[dict[str, Any]]", manifest.get("problems") or [])]
            self._cut = {str(one["agent_id"]): one["seq"] for one in told if "agent_id" in one and "seq" in one}
            """Logs that the export found damaged, each with the seq from which on."""
        except (KeyError, TypeError, ValueError, *_BROKEN) as error:
            raise self._not_one(str(error) or type(error).__name__) from error

    def logs(self, session_id: str | None = None) -> list[ListedLog]:
        """See ``Place``."""
        if session_id not in (None, self.session_id):
            return []
        return [self._listed(agent_id, file) for agent_id, file in self._files.items()]

    def lines(self, stream: Stream) -> Iterator[tuple[bytes, ...]]:
        """See ``Place``."""
        file = str(self._files[stream.agent_id])
        try:
            with self._zip.open(file) as found:
                self._header_line(found)
                while True:
                    run = found.readlines(_PAGE_BYTES)
                    if not run:
                        break
                    yield tuple(line.rstrip(b"\n") for line in run)
        except (KeyError, *_BROKEN) as error:
            raise self._damaged(file, error) from error
        if stream.agent_id in self._cut:
            seq = self._cut[stream.agent_id]
            raise StoreError(
                f"the log of {stream} was damaged from seq {seq} on when {self.name} was made of it",
                code="store.corrupt",
                hint="`kimi-ray sessions salvage` makes a new session of everything that verifies",
                details={"file": self.name, "path": file, "seq": seq},
            )

    def blob(self, digest: str) -> bytes:
        """See ``Place``."""
        name = f"blobs/{digest.removeprefix('sha256:')}"
        try:
            return self._zip.read(name)
        except KeyError:
            raise StoreError(
                f"the archive {self.name} has no blob {digest}", code="store.blob_missing", details={"digest": digest}
            ) from None
        except _BROKEN as error:
            raise self._damaged(name, error) from error

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    def _listed(self, agent_id: str, file: str | None) -> ListedLog:
        stream = Stream(self.session_id, agent_id)
        if file is None:
            error = StoreError(f"the export could not read the log of {stream}", code="store.corrupt")
            return ListedLog(stream, None, None, error.to_data())
        try:
            with self._zip.open(file) as found:
                header: dict[str, Any] = dict(from_json(self._header_line(found)))
            return ListedLog(stream, header, None)
        except (KeyError, TypeError, ValueError, *_BROKEN) as error:
            return ListedLog(stream, None, None, self._damaged(file, error).to_data())

    @staticmethod
    def _header_line(file: IO[bytes]) -> bytes:
        return file.readline(_LINE_BYTES)

    def _damaged(self, file: str, error: Exception) -> StoreError:
        return StoreError(
            f"{file} in {self.name} is damaged: {error or type(error).__name__}",
            code="store.corrupt",
            hint="kimi-ray sessions export --check FILE says what is wrong with it",
            details={"file": self.name, "path": file},
        )

    def _not_one(self, why: str) -> KimiRayError:
        return ConfigError(
            f"{self.name} is not an archive of a session: {why}",
            code="export.not_an_archive",
            hint="kimi-ray sessions export ID makes one",
            details={"file": self.name},
        )


__all__ = ["ArchivePlace", "HomePlace", "Place"]
