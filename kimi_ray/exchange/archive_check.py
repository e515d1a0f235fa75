"""Whether an archive of a session is what its manifest says: every checksum, every event's place, every blob."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field

from kimi_ray.errors import ConfigError, KimiRayError
from kimi_ray.events import decode, parse_header
from kimi_ray.exchange.archive import FORMAT, MANIFEST, VERSION
from kimi_ray.exchange.archive_shape import shape_problems
from kimi_ray.settings import Settings
from kimi_ray.store.checkup import blob_references

_CHUNK = 1 << 20
_MANIFEST_BYTES = 1 << 30
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)
"""``RuntimeError``: zipfile's for what is encrypted, packed in another way (``NotImplementedError`` is one too), or
nested too deeply for json (``RecursionError`` is one too)."""


class ArchiveCheck(Settings):
    """What ``verify_archive`` found. ``problems`` are the archive's own; what the export itself could not read stands
    in the manifest."""

    ok: bool
    session_id: str | None = None
    agents: int = 0
    events: int = 0
    blobs: int = 0
    problems: tuple[dict[str, Any], ...] = Field(default=())
    manifest: dict[str, Any] = Field(default_factory=dict)

    def to_data(self) -> dict[str, Any]:
        """The check as plain JSON."""
        return self.model_dump(mode="json")


def verify_archive(path: str | os.PathLike[str]) -> ArchiveCheck:
    """Check an archive. Blocking; memory is that of a line or a chunk.

    Raises:
        ConfigError: ``export.not_an_archive`` when it is none, or of a newer version.
    """
    shown = os.fspath(path)
    try:
        archive = zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise _not_one(shown, "it does not exist") from error
    except _BROKEN as error:
        raise _not_one(shown, str(error) or type(error).__name__) from error
    with archive:
        return _Check(archive, _manifest(archive, shown)).run()


def _manifest(archive: zipfile.ZipFile, shown: str) -> dict[str, Any]:
    try:
        if archive.getinfo(MANIFEST).file_size > _MANIFEST_BYTES:
            raise _not_one(shown, "its manifest is too large")
        manifest: Any = json.loads(archive.read(MANIFEST))
        found = cast("dict[str, Any]", manifest)
        if found["format"] != FORMAT:
            raise _not_one(shown, "its manifest is of something else")
        if found["version"] != VERSION:
            raise _not_one(shown, f"it has version {found['version']}, this program reads {VERSION}")
        _Manifest.model_validate(found)
    except (KeyError, TypeError, ValueError, *_BROKEN) as error:
        raise _not_one(shown, f"its manifest cannot be read: {error}") from error
    return found


def _not_one(shown: str, why: str) -> ConfigError:
    return ConfigError(
        f"{shown} is not an archive of a session: {why}",
        code="export.not_an_archive",
        hint="kimi-ray sessions export ID makes one",
        details={"file": shown},
    )


class _Session(BaseModel):
    session_id: str


class _Agent(BaseModel):
    agent_id: str
    events: int
    file: str | None = None


class _Blob(BaseModel):
    digest: str
    missing: bool = False


class _File(BaseModel):
    path: str
    sha256: str
    bytes: int


class _Manifest(BaseModel):
    """What must be in a manifest; a ``ValidationError`` is a ``ValueError``."""

    model_config = ConfigDict(strict=True)

    ok: bool
    session: _Session
    agents: list[_Agent]
    blobs: list[_Blob]
    files: list[_File]
    problems: list[dict[str, Any]]


@dataclass(slots=True)
class _Seen:
    sha256: str
    size: int
    events: int = 0


class _Check:
    def __init__(self, archive: zipfile.ZipFile, manifest: dict[str, Any]) -> None:
        self._archive = archive
        self._manifest = manifest
        self._problems: list[dict[str, Any]] = []
        self._blobs: set[str] = set()
        self._session_id: str = manifest["session"]["session_id"]

    def run(self) -> ArchiveCheck:
        manifest = self._manifest
        names, listed = set(self._archive.namelist()), {one["path"] for one in manifest["files"]}
        self._expect(len(names) == len(self._archive.namelist()), "a file is in the archive twice")
        for name in sorted(names - {*listed, MANIFEST}):
            self._expect(False, "a file is not in the manifest", path=name)
        self._expect(len(listed) == len(manifest["files"]), "the manifest names a file twice")
        for message in shape_problems(self._archive):
            self._expect(False, message)
        agents = {one.get("file"): one for one in manifest["agents"]}
        events = 0
        for one in manifest["files"]:
            name = one["path"]
            if name not in names:
                self._expect(False, "a file is missing", path=name)
                continue
            seen = self._look(name, is_log=name in agents)
            if seen is None:
                continue
            events += seen.events
            self._expect(
                (seen.sha256, seen.size) == (one.get("sha256"), one.get("bytes")),
                "a file is not the one that was exported",
                path=name,
            )
            self._expect(
                name in agents or not name.startswith("agents/"),
                "a log is not one of an agent in the manifest",
                path=name,
            )
            if name in agents:
                told = agents[name].get("events")
                self._expect(seen.events == told, f"{seen.events} events, not {told}", path=name)
            if name.startswith("blobs/"):
                self._expect(name == f"blobs/{seen.sha256}", "a blob is not what its name says", path=name)
        for one in manifest["agents"]:
            name = one.get("file")
            self._expect(name is None or name in listed, "the log of an agent is not among the files", path=name)
        known = {one.get("digest") for one in manifest["blobs"]}
        for digest in sorted(self._blobs - known):
            self._expect(False, "a blob is named by an event and not in the manifest", digest=digest)
        for one in manifest["blobs"]:
            name = f"blobs/{one['digest'].removeprefix('sha256:')}"
            there = one.get("missing", False) or name in listed
            self._expect(there, "a blob in the manifest is not among the files", path=name)
        return ArchiveCheck(
            ok=not self._problems,
            session_id=self._session_id,
            agents=len(manifest["agents"]),
            events=events,
            blobs=len(known),
            problems=tuple(self._problems),
            manifest=manifest,
        )

    def _look(self, name: str, *, is_log: bool) -> _Seen | None:
        digest = hashlib.sha256()
        size = lines = 0
        try:
            with self._archive.open(name) as stream:
                for data in stream if is_log else iter(lambda: stream.read(_CHUNK), b""):
                    digest.update(data)
                    size += len(data)
                    if is_log:
                        self._line(name, lines, data)
                        lines += 1
        except _BROKEN as error:
            self._expect(False, f"a file cannot be read: {error}", path=name)
            return None
        return _Seen(digest.hexdigest(), size, max(0, lines - 1))

    def _line(self, name: str, number: int, line: bytes) -> None:
        if number == 0:
            try:
                header = parse_header(decode(line))
            except KimiRayError as error:
                self._expect(False, f"the header cannot be read: {error.message}", path=name)
                return
            mine = (header.session_id, f"agents/{header.agent_id}/events.jsonl") == (self._session_id, name)
            self._expect(mine, "the header is of another log", path=name)
            return
        self._expect(
            line.startswith(b'{"seq":%d,' % (number - 1)) and line.endswith(b"}\n"),
            f"line {number + 1} is not event {number - 1}",
            path=name,
        )
        self._blobs.update(blob_references(line))

    def _expect(self, holds: bool, message: str, **details: Any) -> None:
        if not holds and len(self._problems) < 1000:
            self._problems.append({"code": "export.corrupt", "message": message, "details": details})
