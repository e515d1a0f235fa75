"""From what somebody names to logs and rows: run directories, run ids, sessions, agents, archives."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json

from kimi_ray.config import load_config
from kimi_ray.errors import ConfigError, KimiRayError, RunError, SessionError, StoreError, error_from_data
from kimi_ray.frames.places import ArchivePlace, HomePlace, Place
from kimi_ray.frames.prices import NO_PRICES, Prices, configured_prices, prices_of_run
from kimi_ray.ids import MAIN, agent_number, is_path_safe_id
from kimi_ray.runs.run_directory import ATTEMPTS, MANIFEST, RESULTS, read_manifest
from kimi_ray.session.document_value import parent_of_log
from kimi_ray.session.refusals import no_agent, no_session
from kimi_ray.store.seam import ListedLog, Stream

Source = str | os.PathLike[str]
Sources = Source | Iterable[Source]

_RUN_PREFIX: Final = "run_"
_ARCHIVE_ENDS: Final = ".zip"


@dataclass(frozen=True, slots=True)
class FoundLog:
    """A log to read."""

    place: Place
    stream: Stream
    header: dict[str, Any]
    prices: Prices = NO_PRICES


@dataclass(slots=True)
class Found:
    """What the sources lead to: run directories, and logs, each once."""

    runs: list[Path] = field(default_factory=list[Path])
    logs: list[FoundLog] = field(default_factory=list[FoundLog])
    faults: list[KimiRayError] = field(default_factory=list[KimiRayError])
    """Logs that are named and cannot be read."""
    by_name: set[Stream] = field(default_factory=set[Stream])
    """Logs that were named themselves, or with their session, and not only come with a run directory."""
    in_rows: set[Stream] = field(default_factory=set[Stream])
    """Logs of which the rows and attempts of a run directory tell."""

    def tells_row(self, log: FoundLog) -> bool:
        """Whether the row of a log comes from the log itself."""
        return log.stream in self.by_name and log.stream not in self.in_rows


class Finder:
    """Resolves sources. Homes and archives stay open until ``close``.

    Args:
        home: The home for sessions and run ids, and for runs in place of the one that they were written with; None
            takes the run's own, and else the configured one.
    """

    def __init__(self, home: Source | None) -> None:
        self._home = None if home is None else os.fspath(home)
        self._homes: dict[str, HomePlace] = {}
        self._archives: list[ArchivePlace] = []
        self._seen: set[tuple[str, Stream]] = set()
        self._configured: dict[str | None, Prices] = {}
        self._found = Found()

    def find(self, sources: Sources, *, logs: bool) -> Found:
        """Everything that is named, in order; what is named twice comes once.

        Args:
            sources: A run directory, a run id, a session id, ``SESSION/AGENT``, the file of a session's archive; or
                several.
            logs: Whether logs are wanted, and not only the rows of run directories.

        Raises:
            ConfigError: ``frames.bad_source``; SessionError: ``session.not_found``; AgentError: ``agent.not_found``;
                RunError, StoreError: for a run or a home that cannot be read.
        """
        for source in _each(sources):
            text = os.fspath(source)
            if not isinstance(text, str) or not text or "\0" in text:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise _bad_source(source)
            path = Path(text).expanduser()
            if _is_file(path / MANIFEST):
                self._run(path, logs=logs)
            elif text.endswith(_ARCHIVE_ENDS) and _is_file(path):
                archive = ArchivePlace(path)
                self._archives.append(archive)
                self._take(archive, archive.logs(), f"archive:{path.resolve()}")
            elif path.is_dir():
                read_manifest(path)  # says that there is no run
            elif text.startswith(_RUN_PREFIX) and is_path_safe_id(text):
                self._run_id(text)
            else:
                self._session(text)
        return self._found

    def close(self) -> None:
        """Give descriptors back."""
        for place in (*self._homes.values(), *self._archives):
            place.close()

    def _run(self, directory: Path, *, logs: bool) -> None:
        resolved = directory.resolve()
        if any(known.resolve() == resolved for known in self._found.runs):
            return
        manifest = read_manifest(directory)
        self._found.runs.append(directory)
        named = dict.fromkeys(_streams_of(directory))
        self._found.in_rows.update(named)
        home = self._home_of(manifest)
        if not logs or not (named or home):
            return
        try:
            place = self._place(home)
        except StoreError as error:
            if named:
                self._found.faults.append(_no_logs(directory, len(named), error))
            return
        sessions = dict.fromkeys(one.session_id for one in named)
        # No rollout has ended yet: only headers tell which logs are the run's.
        found = [log for session in sessions for log in place.logs(session)] if named else place.logs()
        wanted = _of_run(found, str(manifest.get("run_id")), named)
        self._take(place, wanted, place.name, by_name=False, run=prices_of_run(manifest))
        there = {log.stream for log in found}
        missing = [stream for stream in named if stream not in there]
        if missing:
            self._found.faults.append(_missing(directory, missing, place.name))

    def _run_id(self, run_id: str) -> None:
        place = self._place(self._home)
        everything = place.logs()
        logs = _of_run(everything, run_id, {})
        if not logs:
            raise ConfigError(
                f"no log of {place.name} is of the run {run_id}",
                code="request.unknown_id",
                hint="name the run directory, or another home",
                details={"run": run_id},
            )
        self._take(place, logs, place.name)

    def _session(self, text: str) -> None:
        session_id, _, agent_id = text.partition("/")
        if not is_path_safe_id(session_id) or (agent_id and not is_path_safe_id(agent_id)):
            raise _bad_source(text)
        place = self._place(self._home)
        known = logs = place.logs(session_id)
        if agent_id and not known:
            raise no_such_place(text, place.name)
        if agent_id:
            logs = [log for log in known if log.stream.agent_id == agent_id]
        if not logs:
            raise no_agent(Stream(session_id, agent_id)) if known else no_session(session_id, home=place.name)
        self._take(place, logs, place.name)

    def _home_of(self, manifest: dict[str, Any]) -> str | None:
        if self._home is not None:
            return self._home
        config: Any = manifest.get("config")
        named: Any = config.get("home") if isinstance(config, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        return named if isinstance(named, str) and os.path.isdir(named) else None

    def _place(self, home: str | None) -> HomePlace:
        path = os.path.abspath(os.path.expanduser(home if home is not None else load_config().home))
        if path not in self._homes:
            self._homes[path] = HomePlace(path)
        return self._homes[path]

    def _prices(self, place: Place) -> Prices:
        """What is configured where the place is; of an archive where frames are made."""
        home = place.name if isinstance(place, HomePlace) else self._home
        if home not in self._configured:
            self._configured[home] = NO_PRICES
            try:
                self._configured[home] = configured_prices(load_config(home))
            except ConfigError as error:
                self._found.faults.append(error)
        return self._configured[home]

    def _take(
        self,
        place: Place,
        logs: Iterable[ListedLog],
        key: str,
        *,
        by_name: bool = True,
        run: Prices | None = None,
    ) -> None:
        for log in sorted(logs, key=lambda one: (one.stream.session_id, _order(one.stream.agent_id))):
            if by_name:
                self._found.by_name.add(log.stream)
            if (key, log.stream) in self._seen:
                continue
            self._seen.add((key, log.stream))
            if log.header is None:
                error = error_from_data(log.error or {"code": "store.corrupt", "message": "its header cannot be read"})
                self._found.faults.append(error.with_details(session_id=log.stream[0], agent_id=log.stream[1]))
            else:
                prices = self._prices(place)
                if run is not None:
                    # A rollout has its run's price or none; agents below it may have other models.
                    prices = run if log.header.get("item_id") is not None else run.over(prices)
                self._found.logs.append(FoundLog(place, log.stream, log.header, prices))


def _each(sources: Sources) -> Iterator[Source]:
    if isinstance(sources, str | os.PathLike):
        yield sources
        return
    if not isinstance(sources, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _bad_source(sources)
    for source in sources:
        if not isinstance(source, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _bad_source(source)
        yield source


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _order(agent_id: str) -> tuple[int, str]:
    """Main first, then agents by number."""
    return (-1, "") if agent_id == MAIN else (agent_number(agent_id) or 1 << 60, agent_id)


def _streams_of(directory: Path) -> Iterator[Stream]:
    """The logs that the rows and attempts of a run name; what is wrong with a row is told where it becomes one."""
    for name in (RESULTS, ATTEMPTS):
        try:
            with (directory / name).open("rb") as file:
                for line in file:
                    stream = _stream_of(line)
                    if stream is not None:
                        yield stream
        except OSError:
            continue


def _stream_of(line: bytes) -> Stream | None:
    try:
        row: Any = from_json(line)
        session_id, agent_id = row["session_id"], row["agent_id"]
    except (ValueError, TypeError, KeyError):
        return None
    known = isinstance(session_id, str) and isinstance(agent_id, str) and is_path_safe_id(session_id)
    return Stream(session_id, agent_id) if known else None


def _of_run(logs: Iterable[ListedLog], run_id: str, named: dict[Stream, None]) -> list[ListedLog]:
    """The rollouts of a run and the agents below them; of a fork of one, which is another session, nothing."""
    known = list(logs)
    chosen: dict[Stream, ListedLog] = {}
    for log in known:
        header = log.header or {}
        if log.stream in named or (
            header.get("run_id") == run_id and header.get("item_id") is not None and "forked_from" not in header
        ):
            chosen[log.stream] = log
    grew = True
    while grew:
        grew = False
        for log in known:
            if log.header is None or log.stream in chosen or log.stream.agent_id == MAIN:
                continue
            if Stream(log.stream.session_id, parent_of_log(log.header)) in chosen:
                chosen[log.stream] = log
                grew = True
    return list(chosen.values())


def no_such_place(text: str, home: str) -> RunError | SessionError:
    """For ``A/B`` when neither a directory nor a session is there: an id says that a session was meant."""
    session_id = text.partition("/")[0]
    if session_id.startswith("session_"):
        return no_session(session_id, home=home)
    return RunError(
        f"there is no run directory {text}, and no session {session_id!r} in {home}",
        code="run.not_found",
        hint="name the directory of a run, or SESSION/AGENT",
        details={"run_dir": text},
    )


def _bad_source(source: object) -> ConfigError:
    return ConfigError(
        f"{str(source)[:200]!r} names no run and no session",
        code="frames.bad_source",
        hint="name a run directory, a run id, a session id, SESSION/AGENT, or the zip of a session",
        details={"source": str(source)[:200]},
    )


def _no_logs(directory: Path, count: int, error: StoreError) -> StoreError:
    return StoreError(
        f"the logs of {directory} ({count}) cannot be read: {error.message}",
        code=error.code,
        hint="name the home that has them with --home (home= in Python); frames.rows needs none",
        details={**error.details, "run_dir": str(directory), "logs": count},
    )


def _missing(directory: Path, missing: list[Stream], home: str) -> StoreError:
    return StoreError(
        f"{len(missing)} logs that {directory} names are not in {home}, {missing[0]} for one",
        code="store.not_found",
        hint="name the home that has them with --home (home= in Python)",
        details={"run_dir": str(directory), "logs": [str(one) for one in missing[:20]], "count": len(missing)},
    )
