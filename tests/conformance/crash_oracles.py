"""What must be true of a disk after a crash, whatever was being done: one checker for all operations.

``next_process`` is what the process after a crash does; it can itself be cut short. ``check`` looks with a reader
first, lets the next process run, and then compares everything with the ledger.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

from pydantic_core import from_json

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store import open_store
from kimi_ray.store.blobs import digest_of
from kimi_ray.store.seam import Stream
from tests.conformance.crash_life import HOME, WORKSPACE, DiedError, Ledger, Life, LogFacts, all_lines
from tests.conformance.simulated_fs import Disk, SimulatedFs
from tests.conformance.store_contract import MAIN, batch, line

ABSENT = ("store.not_found", "store.deleted")


async def check(disk: Disk, ledger: Ledger) -> None:
    """Every oracle; leaves the disk as the next process left it."""
    await look(disk, ledger)
    last = f"last-{disk.boots}-{len(ledger.claims)}"
    life = await next_process(disk, ledger, last)
    store = life.store
    if ledger.removal == "done" or (ledger.removal and await _is_removed(store)):
        await _check_removed(life)
    else:
        await _check_documents_and_claims(life, last)
        for stream, facts in list(ledger.logs.items()):
            await _check_log(life, stream, facts, last)
        _check_nothing_destroyed(disk, ledger)
    await _check_blobs(life)
    await store.close()
    life.fs.kill()
    await _check_leftovers(disk, ledger)


async def next_process(disk: Disk, ledger: Ledger, nonce: str, calls: int = 10**9) -> Life:
    """What comes after a crash: claim, load, grant, write, close, for every log that there is."""
    life = await Life.start(disk, ledger, calls)
    try:
        await life.claim(nonce)
    except StoreError as error:
        if error.code == "store.deleted" and ledger.removal:
            return life
        raise
    for stream in list(ledger.logs) or [MAIN]:
        await _resume(life, stream, nonce)
    return life


async def _resume(life: Life, stream: Stream, nonce: str) -> None:
    facts = life.ledger.log(stream)
    try:
        await _zombies_are_fenced(life, stream, facts)
        await life.load(stream)
        seq = await life.grant(nonce, stream)
    except StoreError as error:
        if error.code == "store.not_found":
            assert not facts.durable, (stream, "flushed events are gone")
            if stream != MAIN:
                return
            seq = await life.grant(nonce, stream, new=True)
        elif error.code == "store.corrupt":
            assert may_be_corrupt(life.disk, facts), (stream, "nothing was loose", error)
            return
        else:
            raise
    await _zombies_are_fenced(life, stream, facts)
    await life.must_append(nonce, seq, seq + 3, stream, sync=True)
    await life.close_writer(nonce, stream)


async def _zombies_are_fenced(life: Life, stream: Stream, facts: LogFacts) -> None:
    """Whoever had a grant before the newest one that the log must know."""
    newest = max((facts.epochs[nonce] for nonce in facts.stored), default=0)
    for nonce, epoch in facts.epochs.items():
        if epoch < newest:
            seq = len(facts.durable)
            zombie = batch([line(seq, by="a zombie")], seq, epoch=epoch, nonce=nonce, stream=stream)
            error = (await life.store.append([zombie], sync=True))[0].error
            if life.fs.dead:
                raise DiedError
            assert error is not None, f"{nonce} was fenced and still writes"
            if error["code"] != "store.fenced":
                raise StoreError(error["message"], code=error["code"], details=error["details"])


def may_be_corrupt(disk: Disk, facts: LogFacts) -> bool:
    """Whether a power cut can have lost sectors in front of a whole batch that nobody had synced either."""
    return disk.boots > 0 and facts.loose > 1


# -- before anything is repaired ---------------------------------------------------------------------------------------


async def look(disk: Disk, ledger: Ledger) -> None:
    """A reader changes nothing, is shown everything that was flushed, and what it was shown before."""
    before = disk.fingerprint()
    if ledger.boots != disk.boots:
        ledger.boots, ledger.seen, ledger.torn = disk.boots, {}, {}
    fs = SimulatedFs(disk)
    try:
        reader = open_store(HOME, fs=fs)
    except StoreError as error:
        assert error.code == "store.not_found", error
        assert ledger.home_id is None, "the home is gone"
        return
    for stream, facts in ledger.logs.items():
        try:
            view = await reader.inspect(stream)
        except KimiRayError as error:
            if error.code == "store.corrupt":
                assert may_be_corrupt(disk, facts), (stream, "nothing was loose", error)
                assert set(error.details) >= {"file", "offset", "seq"}
                found = dict(await surviving(reader, stream))
            else:
                assert error.code in ABSENT, error
                assert not facts.durable or ledger.removal, (stream, "flushed events are gone")
                continue
        else:
            lines = await all_lines(reader, stream)
            assert len(lines) == view.cut, stream
            found = dict(enumerate(lines))
            seen = ledger.seen.get(stream, [])
            assert lines[: len(seen)] == seen, (stream, "what a reader was shown is gone")
            ledger.seen[stream] = lines
            directory = f"{HOME}/sessions/{WORKSPACE}/s1/agents/{stream.agent_id}"
            if view.torn_bytes and f"{directory}/wire.redo" not in before:
                ledger.torn[stream] = await reader.read_raw(stream)
        for seq, flushed in enumerate(facts.durable):
            assert found.get(seq) == flushed, (stream, seq, "flushed and not readable")
        if not ledger.removal:
            await reader.verify(stream)
    await reader.list()
    await reader.list_documents()
    assert fs.made == 0
    assert disk.fingerprint() == before, "reading changed the disk"


async def surviving(store: Any, stream: Stream) -> list[tuple[int, bytes]]:
    """All events that verify."""
    found: list[tuple[int, bytes]] = []
    cursor: int | None = 0
    while cursor is not None:
        page = await store.read_surviving(stream, cursor)
        found.extend(page.events)
        cursor = page.cursor
    return found


# -- after the next process --------------------------------------------------------------------------------------------


async def _check_log(life: Life, stream: Stream, facts: LogFacts, last: str) -> None:
    store = life.store
    try:
        lines = await all_lines(store, stream)
    except StoreError as error:
        if error.code == "store.corrupt":
            assert may_be_corrupt(life.disk, facts), (stream, "nothing was loose", error)
            return
        assert error.code == "store.not_found", error
        assert not facts.durable, stream
        return
    if facts.epochs.get(last) is None:
        return  # corrupt, but readable up to the damage
    for seq, flushed in enumerate(facts.durable):
        assert lines[seq] == flushed, (stream, seq, "flushed and changed")
    report = await store.verify(stream)
    assert (report.ok, report.torn_bytes, report.events) == (True, 0, len(lines)), report
    _check_rows(stored_rows(await store.read_raw(stream)), facts, lines)
    _check_turns(lines)
    before = life.disk.fingerprint()
    again = await store.load(stream, is_live=False)
    assert (again.closers, again.next_seq, again.torn_bytes) == ((), len(lines), 0), "loading twice is loading once"
    same = life.disk.fingerprint()
    assert {path: same[path] for path in same if "/sessions/" in path} == {
        path: before[path] for path in before if "/sessions/" in path
    }


def _check_nothing_destroyed(disk: Disk, ledger: Ledger) -> None:
    """A torn tail was set aside, all of it."""
    content = {path: data for path, (data, _) in disk.fingerprint().items() if "/wire." in path}
    for stream, raw in ledger.torn.items():
        agent = f"/agents/{stream.agent_id}/"
        log = next((data for path, data in content.items() if agent in path and "/wire.jsonl" in path), b"")
        aside = [data for path, data in content.items() if f"{agent}wire.tail-" in path]
        assert any(raw.endswith(data) and log.startswith(raw[: len(raw) - len(data)]) for data in aside if data), stream


def stored_rows(raw: bytes) -> Iterator[bytes]:
    """The rows of a stored log, without the header, its own batch rows left out."""
    if not raw.startswith(b"{"):
        import zstandard

        raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw), read_across_frames=True).read()
    for row in raw.split(b"\n")[1:-1]:
        if not row.startswith(b'{"batch":'):
            yield row


def _check_rows(rows: Iterator[bytes], facts: LogFacts, lines: list[bytes]) -> None:
    """Epochs rise, each under one nonce, and under it stand only events that this writer sent."""
    epoch, nonce, seq = 0, "", 0
    seen: dict[str, int] = {}
    for row in rows:
        if row.startswith((b'{"epoch":', b'{"closed":')):
            value = from_json(row)
            assert value["seq"] == seq, row
            if "closed" in value:
                assert value["closed"] == epoch, row
                continue
            assert value["epoch"] > epoch, row
            epoch, nonce = value["epoch"], value["writer"]
            assert nonce not in seen, row
            seen[nonce] = epoch
            continue
        assert lines[seq] == row
        if nonce in facts.asked:
            assert facts.sent[nonce].get(seq) == row, (nonce, seq, "nobody sent this")
        else:
            assert facts.open_turn, (nonce, "nobody asked for this grant")
            assert b'"recovered_at"' in row, row
        seq += 1
    assert seq == len(lines)
    for nonce, epoch in facts.epochs.items():
        assert seen.get(nonce, epoch) == epoch, (nonce, "holds another epoch than it was told")
        if nonce in facts.stored:
            assert nonce in seen, (nonce, "a grant was lost")


def _check_turns(lines: list[bytes]) -> None:
    open_turns = sum(b'"turn/start"' in line for line in lines) - sum(b'"turn/end"' in line for line in lines)
    assert open_turns == 0
    assert sum(b'"step/start"' in line for line in lines) == sum(b'"step/end"' in line for line in lines)


async def _check_documents_and_claims(life: Life, last: str) -> None:
    ledger, store = life.ledger, life.store
    document = await store.read_document("s1")
    revision = 0 if document is None else document.revision
    assert revision >= ledger.revision, "an acknowledged document is gone"
    if document is not None:
        assert document.value in ledger.tries[revision], "nobody wrote this document"
        ledger.revision = revision
    for nonce, grant in list(ledger.claims.items()):
        if nonce == last:
            continue
        try:
            await store.write_document("s1", {"by": "a zombie"}, grant=grant, nonce=nonce, revision=revision)
        except StoreError as error:
            assert error.code == "store.fenced", error
        else:
            raise AssertionError(f"the claim of {nonce} was fenced and still writes")
    await life.write_document(last, {"by": last})
    assert (await store.list_documents())[0].value == {"by": last}


async def _is_removed(store: Any) -> bool:
    try:
        await store.load(MAIN)
    except StoreError as error:
        return error.code == "store.deleted"
    return False


async def _check_removed(life: Life) -> None:
    store = life.store
    await life.remove()
    assert (await store.list_logs(), await store.list_documents()) == ([], [])
    for attempt in (store.open_session("s1", "n", workspace_id=WORKSPACE), store.open_writer(MAIN, "z")):
        try:
            await attempt
        except StoreError as error:
            assert error.code == "store.deleted", error
        else:
            raise AssertionError("a removed session came back")
    held = [path for path in life.disk.paths() if "/s1" in path and "/tombstones/" not in path]
    assert held == [], "a removed session left something"


async def _check_blobs(life: Life) -> None:
    for content, acknowledged in life.ledger.blobs.items():
        digest = digest_of(content)
        if await life.store.has_blob(digest):
            assert await life.store.read_blob(digest) == content
        else:
            assert not acknowledged, "an acknowledged blob is gone"
            await life.put_blob(content)
            assert await life.store.read_blob(digest) == content


async def _check_leftovers(disk: Disk, ledger: Ledger) -> None:
    """None where one process may write; elsewhere, where any may, none a day later."""
    left = [path for path in disk.paths() if ".tmp-" in path or path.endswith(".redo")]
    own = [path for path in left if "/sessions/" in path or "/owners/" in path]
    assert own == [], ("leftovers", own)
    if not left:
        return
    disk.now += 2 * 86_400
    with mock.patch("time.time", lambda: disk.now):
        life = await Life.start(disk, ledger)
        if any("/blobs/" in path for path in left):
            await life.store.sweep_blobs()
    left = [path for path in disk.paths() if ".tmp-" in path]
    assert left == [], "leftovers a day later"
