"""From what a person types to a session or a log: unique suffixes, ``@last``, ``RUN:ITEM[#REPEAT]``. Reads only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_ray.errors import ConfigError, SessionError
from kimi_ray.ids import MAIN, is_path_safe_id
from kimi_ray.store.seam import Stream

if TYPE_CHECKING:
    from kimi_ray.store.open import ReadStore

LAST = "@last"
_OF_A_RUN = 1000
_MANIFEST = "run.json"
_REPEAT = re.compile(r"\A(?P<item>.+)#(?P<repeat>\d+)\Z", re.DOTALL)


def open_home(home: str | None, text: str = "") -> tuple[ReadStore, str]:
    """The store of a home, for reading, and the home's path.

    Args:
        home: The flag.
        text: What the person named: the home that a run directory was written with counts before the default one.

    Raises:
        StoreError: ``store.not_found`` when nothing has been run there yet.
    """
    from kimi_ray.config import load_config
    from kimi_ray.store.open import open_store

    config = load_config(home if home is not None else _home_of_run(text))
    return open_store(config.home, network_home=config.network_home), config.home


def run_directory_of(text: str) -> Path | None:
    """The run directory that a text names, or names an agent or a rollout of; None for any other text."""
    found = _split_run(text)
    run = split_agent(text)[0]
    return found[0] if found else Path(run).expanduser() if is_run(run) else None


def _home_of_run(text: str) -> str | None:
    from kimi_ray.runs.run_directory import read_manifest

    directory = run_directory_of(text)
    if directory is None:
        return None
    config: dict[str, Any] = read_manifest(directory).get("config") or {}
    home = config.get("home")
    return str(home) if home and Path(str(home)).is_dir() else None


async def find_stream(store: ReadStore, text: str, agent: str | None = None) -> Stream:
    """The log that a person means.

    Args:
        store: The home.
        text: A session (see ``find_session``), a session and an agent (``SESSION/agent-3``, also ``RUN/agent-3``), or a
            rollout (``RUN:ITEM[#REPEAT]``, RUN a run directory or the end of a run id).
        agent: An agent of that session; None is main, or the rollout's.

    Raises:
        SessionError: ``session.not_found``; ConfigError: ``request.ambiguous_id``, ``request.unknown_id``.
    """
    if ":" in text and not is_run(text):
        stream = await _find_rollout(store, text)
        return stream if agent is None else Stream(stream.session_id, agent)
    session, named = split_agent(text)
    session_id = await find_session(store, session)
    wanted = agent or named or MAIN
    agents = [log.stream.agent_id for log in await store.list(session_id)]
    if wanted in agents:
        return Stream(session_id, wanted)
    if wanted.isdigit() and f"agent-{wanted}" in agents:
        return Stream(session_id, f"agent-{wanted}")
    shown = ", ".join(sorted(agents, key=agent_order)[:8]) or "none"
    raise ConfigError(
        f"the session {session_id} has no agent {wanted!r}",
        code="request.unknown_id",
        hint=f"its agents are {shown}{' ...' if len(agents) > 8 else ''}",
        details={"session_id": session_id, "agent_id": wanted},
    )


async def find_tree(store: ReadStore, text: str) -> str:
    """The id of the session that a person means or names an agent or a rollout of.

    Raises:
        SessionError: ``session.not_found``; ConfigError: ``request.ambiguous_id``, ``request.unknown_id``.
    """
    if ":" in text and not is_run(text):
        return (await _find_rollout(store, text)).session_id
    return await find_session(store, split_agent(text)[0])


def split_agent(text: str) -> tuple[str, str]:
    """``SESSION/AGENT`` and ``RUN/AGENT`` in their two parts; the second is empty when no agent is named."""
    run, _, named = text.rpartition("/")
    if is_run(text) or (run and is_run(run)):
        return (text, "") if is_run(text) else (run, named)
    session, _, named = text.partition("/")
    return session, named


async def find_session(store: ReadStore, text: str) -> str:
    """The id of the session that a person means: ``@last``, an id, or the end of exactly one; of a run its newest.

    Raises:
        SessionError: ``session.not_found``; ConfigError: ``request.ambiguous_id``.
    """
    from kimi_ray.store.session_index_query import SessionQuery
    from kimi_ray.store.session_index_reader import SessionsReader

    sessions = SessionsReader(store)
    run_id = _run_id_of(text)
    if text == LAST or run_id is not None:
        query = SessionQuery(archived=None, run_id=run_id, limit=1 if run_id is None else _OF_A_RUN)
        found = (await sessions.page(query)).items
        if not found:
            raise _no_session(text)
        return next((one.id for one in found if one.fork_group is None or run_id is None), found[0].id)
    if await sessions.get(text) is not None:
        return text
    ending = _by_suffix(await sessions.ids_ending(text), text, "session")
    if ending is not None:
        return ending
    if is_path_safe_id(text) and await store.list(text):
        return text  # its document is gone, or was not written yet
    raise _no_session(text)


def is_run(text: str) -> bool:
    """Whether it names a run directory."""
    return _has_manifest(text)


def _has_manifest(text: str) -> bool:
    try:
        return (Path(text).expanduser() / _MANIFEST).is_file()
    except (OSError, RuntimeError):  # a name that is too long, a link that leads in a circle; a ~ of nobody
        return False


def _run_id_of(text: str) -> str | None:
    from kimi_ray.runs.run_directory import read_manifest

    if is_run(text):
        return str(read_manifest(Path(text).expanduser())["run_id"])
    return text if text.startswith("run_") else None


def agent_order(agent_id: str) -> tuple[int, str]:
    """Sorts main first, then agents by number."""
    digits = agent_id.rpartition("-")[2]
    return (-1, "") if agent_id == MAIN else (int(digits) if digits.isdigit() else 1 << 60, agent_id)


async def _find_rollout(store: ReadStore, text: str) -> Stream:
    found = _split_run(text)
    if found is not None:
        return await _in_directory(store, *found)
    run, _, item = text.partition(":")
    return await _in_headers(store, run, item)


def _split_run(text: str) -> tuple[Path, str] | None:
    """``DIR:ITEM`` where DIR is a run directory; both may hold colons."""
    for at in (at for at, char in enumerate(text) if char == ":"):
        if text[:at] and _has_manifest(text[:at]):
            return Path(text[:at]).expanduser(), text[at + 1 :]
    return None


async def _in_directory(store: ReadStore, directory: Path, item: str) -> Stream:
    from kimi_ray.cli.results import item_text
    from kimi_ray.runs.run_directory import read_manifest, read_rows

    run_id = str(read_manifest(directory)["run_id"])
    rows = {(row.item_id, row.repeat): row for row in read_rows(directory)}
    key = _chosen(rows, item) or _chosen(
        {(item_text(row.item), row.repeat): row for row in rows.values()}, item, whole=True
    )
    if key is not None and key not in rows:
        key = next(one for one, row in rows.items() if (item_text(row.item), row.repeat) == key)
    if key is not None and rows[key].session_id and rows[key].agent_id:
        return Stream(str(rows[key].session_id), str(rows[key].agent_id))
    return await _in_headers(store, run_id, item)


async def _in_headers(store: ReadStore, run: str, item: str) -> Stream:
    """A rollout by the headers of the logs; of several attempts the last. A fork of it is another session."""
    logs = [
        (log.stream, log.header)
        for log in await store.list()
        if log.header and log.header.get("run_id") and "forked_from" not in log.header
    ]
    runs = {str(header["run_id"]) for _, header in logs}
    run_id = _by_suffix(sorted(runs), run, "run")
    attempts: dict[tuple[str, int], list[tuple[int, Stream]]] = {}
    for stream, header in logs:
        if header["run_id"] == run_id and header.get("item_id") is not None:
            key = (str(header["item_id"]), int(header.get("repeat") or 0))
            attempts.setdefault(key, []).append((int(header.get("attempt") or 1), stream))
    chosen = _chosen(attempts, item) if run_id is not None else None
    if chosen is None:
        raise ConfigError(
            f"no log is of the rollout {run}:{item}" if run_id is not None else f"no log is of a run {run!r}",
            code="request.unknown_id",
            hint="write RUN:ITEM or RUN:ITEM#REPEAT; RUN is a run directory or a run id, ITEM an item_id of its rows",
            details={"run": run, "item": item},
        )
    return max(attempts[chosen])[1]


def _chosen(keys: Iterable[tuple[str, int]], text: str, *, whole: bool = False) -> tuple[str, int] | None:
    """The rollout that a text names: the item's id as it is, or with ``#REPEAT``.

    A unique end of the id will do, unless ``whole``.
    """
    known = sorted(keys)
    readings: list[tuple[str, int | None]] = [(text, None)]
    numbered = _REPEAT.match(text)
    if numbered:
        readings.append((numbered["item"], int(numbered["repeat"])))
    for item, repeat in readings:
        ids = sorted({known_id for known_id, _ in known})
        item_id = (item if item in ids else None) if whole else _by_suffix(ids, item, "item")
        if item_id is not None and (item_id, repeat or 0) in known:
            return item_id, repeat or 0
    return None


def _by_suffix(ids: Sequence[str], text: str, what: str) -> str | None:
    if text in ids:
        return text
    found = [one for one in ids if text and one.lower().endswith(text.lower())]
    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} {what} ids end in {text!r}",
            code="request.ambiguous_id",
            hint=f"give more of it: {', '.join(found[:3])}",
            details={"matches": found[:20]},
        )
    return found[0] if found else None


def _no_session(text: str) -> SessionError:
    from kimi_ray.session.refusals import no_session

    usual = no_session(text)
    what = "there is no session yet" if text == LAST else usual.message
    part = ":" in text or "/" in text
    hint = "name a session or a run: a rollout or an agent is not one" if part else usual.hint
    return SessionError(what, code=usual.code, hint=hint, details=usual.details)


def run_of(value: dict[str, Any]) -> str | None:
    """The run that a session's document names, or None."""
    from kimi_ray.store.session_index_rows import run_id_of

    return run_id_of(value.get("custom"), value.get("tags"))
