"""Frames as Parquet files, written as they are read: memory is that of a few batches, however long the logs are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import Field

from kimi_ray.errors import ConfigError
from kimi_ray.frames.schemas import FRAMES
from kimi_ray.frames.sources import Source, Sources
from kimi_ray.frames.tables import OnDamage, read_frames
from kimi_ray.settings import Settings


class FramesReport(Settings):
    """What ``write_parquet`` wrote."""

    out: str
    files: dict[str, str]
    """By frame, the file."""
    rows: dict[str, int]
    """By frame, how many rows."""
    logs: int
    """Logs that were read."""
    events: int
    """Events that were read."""
    ok: bool
    """Nothing was left out."""
    problems: tuple[dict[str, Any], ...] = Field(default=())
    """What could not be read (the first thousand), each ``{code, message, details}``."""

    def to_data(self) -> dict[str, Any]:
        """As plain JSON."""
        return self.model_dump(mode="json")


def write_parquet(
    sources: Sources,
    out: Source,
    names: Iterable[str] = FRAMES,
    *,
    home: Source | None = None,
    on_damage: OnDamage = "skip",
    copied: bool = False,
    force: bool = False,
) -> FramesReport:
    """Write frames as ``<out>/<frame>.parquet``: all of them, or none when it fails. Blocking.

    Args:
        sources: See ``frames.rows``.
        out: The directory; it is made, with its parents.
        names: Which frames.
        home: See ``frames.rows``.
        on_damage: See ``frames.rows``; here ``skip`` is the default, and the report has the problems.
        copied: See ``frames.steps``.
        force: Replace files that are there.

    Raises:
        ConfigError: ``export.exists``, ``export.failed``, and as ``frames.steps``.
    """
    directory = Path(out).expanduser()
    wanted = tuple(dict.fromkeys((names,) if isinstance(names, str) else names))
    targets = {name: directory / f"{name}.parquet" for name in wanted}
    taken = [path for path in targets.values() if os.path.lexists(path)]
    if taken and not force:
        raise ConfigError(
            f"{taken[0]} exists already",
            code="export.exists",
            hint="name another directory with --out, or replace it with --force",
            details={"file": str(taken[0])},
        )
    files = _Files(directory)
    try:
        reading = read_frames(sources, wanted, files.sink, home=home, on_damage=on_damage, copied=copied)
        files.show(targets)
    except OSError as error:
        raise _not_written(directory, error) from error
    finally:
        files.discard()
    return FramesReport(
        out=str(directory),
        files={name: str(path) for name, path in targets.items()},
        rows=reading.counts,
        logs=reading.logs,
        events=reading.events,
        ok=not reading.damaged,
        problems=tuple(reading.problems),
    )


class _Files:
    """Parquet files under names of their own until all are whole."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, Any] = {}
        self._partial: dict[str, Path] = {}

    def sink(self, frame: str, schema: Any) -> Callable[[Any], None]:
        parquet = import_module("pyarrow.parquet")
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._partial[frame] = self._directory / f".{frame}.{os.getpid()}.partial"
        writer = self._writers[frame] = parquet.ParquetWriter(str(path), schema, compression="zstd")
        return writer.write_batch

    def show(self, targets: dict[str, Path]) -> None:
        while self._writers:
            self._writers.popitem()[1].close()
        for frame, target in targets.items():
            os.replace(self._partial.pop(frame), target)

    def discard(self) -> None:
        """Take away what was not shown."""
        while self._writers:
            with suppress(OSError):  # the first error is the one to tell
                self._writers.popitem()[1].close()
        for path in self._partial.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self._partial.clear()


def _not_written(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{error.filename or directory} cannot be written: {error.strerror or error}",
        code="export.failed",
        hint="free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name another directory with --out",
        details={"file": str(directory), "reason": error.strerror or str(error)},
    )
