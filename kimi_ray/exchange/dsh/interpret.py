"""From what an artifact holds to what the original's calls return: upgrades, rules, closers."""

from __future__ import annotations

from kimi_ray.exchange.dsh.closers import interrupted_turn_closers
from kimi_ray.exchange.dsh.errors import InvalidSession, Refusal, corrupt
from kimi_ray.exchange.dsh.header import FORMAT_VERSION, check_header, version_refusal
from kimi_ray.exchange.dsh.legacy import Upgrade, refuse_retired
from kimi_ray.exchange.dsh.model import Event, Reading, Stored
from kimi_ray.exchange.dsh.rules import check_event, check_known, check_session


def interpret(reading: Reading, stored: Stored) -> None:
    """Fill in what ``readFrom`` (``stored``) and ``inspect`` and ``load`` (``closers``) give, or the ``error``.

    Args:
        reading: The session, its id known.
        stored: What its artifact holds.
    """
    session_id = str(reading.id)
    reading.set_aside = stored.set_aside
    reading.notes.update(stored.notes)
    try:
        if stored.header["version"] != FORMAT_VERSION:
            raise version_refusal(session_id, stored.header["version"])
        reading.stored = _read(reading, stored.events, session_id)
        reading.closers = _repair(reading.stored, stored, session_id)
    except Refusal as refusal:
        reading.error = refusal.placed(file=reading.source)
        reading.closers = None
        if refusal.kind == "unsupported" and reading.encoding != "sqlite":
            refusal.message += f" (raw log: {reading.source})"


def _read(reading: Reading, events: list[Event], session_id: str) -> list[Event]:
    """The stored events in the present shape, each passing its own rules."""
    refuse_retired(events, session_id)
    upgrade = Upgrade(session_id)
    present: list[Event] = []
    for event in events:
        event["seq"] = int(event["seq"])
        made = upgrade.apply(event) if type(event.get("type")) is str else event
        try:
            check_event(made)
        except InvalidSession as error:
            raise _invalid(session_id, error) from None
        if type(made.get("type")) is str:
            upgrade.note(made)
        present.append(made)
    for event in present:
        check_known(event, session_id)
    if upgrade.upgraded:
        reading.notes["legacy_shape"] += upgrade.upgraded
    return present


def _repair(events: list[Event], stored: Stored, session_id: str) -> list[Event]:
    """The closers, after the whole session passed as a session."""
    try:
        closers = interrupted_turn_closers(events)
        check_header(stored.header)
        check_session([*events, *closers])
    except InvalidSession as error:
        raise _invalid(session_id, error) from None
    except RecursionError:
        # Only two results of which one replaces the other are compared in depth.
        raise corrupt(f'stored session "{session_id}" failed validation: results are nested too deeply') from None
    return closers


def _invalid(session_id: str, error: InvalidSession) -> Refusal:
    at = {} if error.seq is None else {"seq": error.seq}
    return corrupt(f'stored session "{session_id}" failed validation: {error}', **at)
