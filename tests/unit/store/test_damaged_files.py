"""Damaged files through the store: looking writes nothing, a writer repairs or refuses, and no byte is destroyed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from kimi_ray.errors import KimiRayError
from kimi_ray.store import JsonlStore, StoreOptions, Stream, open_store, open_store_for_writing
from kimi_ray.store.framing import encode_rows
from tests.conformance.store_contract import MAIN, all_lines, batch, fingerprint, header, ok
from tests.conftest import Budget
from tests.unit.store.damaged_logs import ENCODINGS, EVENTS, OTHER, SAME, Built, note, thirty_events
from tests.unit.store.killable_fs import KillableFs

AGENT = "sessions/wd_x_0123/s1/agents/main"
Change = Callable[[Built], bytes]


@pytest.fixture(scope="module", params=ENCODINGS)
def built(request: pytest.FixtureRequest) -> Built:
    return thirty_events(request.param)


async def store_at(home: Path, compression: str, boot: str) -> JsonlStore:
    options = StoreOptions(compression=compression, extra={"boot_id": boot}, claim_timeout_s=1)
    store = await open_store_for_writing(str(home), options, fs=KillableFs(syncs=False))
    assert isinstance(store, JsonlStore)
    return store


async def place(home: Path, built: Built, data: bytes) -> Path:
    """A home with one log of this content."""
    await (await store_at(home, built.framing.compression, SAME)).close()
    agent = home / AGENT
    agent.mkdir(parents=True)
    path = agent / built.framing.log_name
    path.write_bytes(data)
    return path


async def looked_at(home: Path, store: object) -> tuple[str, int]:
    """Look in every way; ``("", events)`` of a readable log, or the code of its error and how far pages go."""
    before = fingerprint(home / "sessions")
    code, count = "", 0
    try:
        count = (await store.inspect(MAIN)).cut  # type: ignore[attr-defined]
    except KimiRayError as error:
        code = error.code
    lines: list[bytes] = []
    try:
        while page := (await store.read_from(MAIN, len(lines), 9)).lines:  # type: ignore[attr-defined]
            lines.extend(page)
    except KimiRayError as error:
        assert error.code in ("store.corrupt", "store.not_found", "log.version_unsupported")
    report = await store.verify(MAIN)  # type: ignore[attr-defined]
    assert report.ok == (code == ""), report.problems
    for problem in report.problems:
        details = problem["details"]
        assert isinstance(details, dict)
        assert {"file", "offset", "seq"} <= details.keys() or problem["code"] == "log.version_unsupported"
    await store.read_surviving(MAIN)  # type: ignore[attr-defined]
    await store.read_raw(MAIN)  # type: ignore[attr-defined]
    await store.revision(MAIN)  # type: ignore[attr-defined]
    assert fingerprint(home / "sessions") == before, "looking writes nothing"
    if not code:
        assert len(lines) == count
    return code, len(lines)


async def lived_through(home: Path, built: Built, data: bytes, boot: str) -> str:
    """Look at a damaged log, write to it, restart, write again; returns the code it is refused with."""
    path = await place(home, built, data)
    await looked_at(home, open_store(home))
    store = await store_at(home, built.framing.compression, boot)
    code, count = await looked_at(home, store)
    assert code in ("", "store.corrupt", "store.not_found", "log.version_unsupported")
    if code in ("store.corrupt", "log.version_unsupported"):
        for attempt in (store.open_writer(MAIN, "w3"), store.load(MAIN, is_live=False)):
            with pytest.raises(KimiRayError) as caught:
                await attempt
            assert caught.value.code == code
        assert path.read_bytes() == data
        await store.close()
        return code
    await store.open_session("s1", "n", workspace_id="wd_x_0123")
    grant = await store.open_writer(MAIN if not code else header(), "w3")
    assert grant.next_seq == count
    for first in (count, count + 2):
        rows = batch([note(first), note(first + 1)], first, epoch=grant.epoch, nonce="w3")
        ok(await store.append([rows], sync=True))
        assert (await store.verify(MAIN)).problems == ()
        await store.close()
        store = await store_at(home, built.framing.compression, boot)
        assert (await store.inspect(MAIN)).torn_bytes == 0
    assert await all_lines(store) == all_ever_written(built)[:count] + [note(seq) for seq in range(count, count + 4)]
    assert (await store.verify(MAIN)).problems == ()
    await store.close()
    check_nothing_destroyed(path, data)
    return code


def check_nothing_destroyed(path: Path, data: bytes) -> None:
    aside = [file for file in path.parent.iterdir() if file.name.startswith("wire.tail-")]
    assert not (path.parent / "wire.redo").exists()
    if not aside:
        assert path.read_bytes().startswith(data)
        return
    assert len(aside) == 1
    moved = aside[0].read_bytes()
    assert data.endswith(moved)
    offset = len(data) - len(moved)
    if offset:
        assert aside[0].name.endswith(f"-{offset}")
        assert path.read_bytes().startswith(data[:offset])


def next_batch(built: Built) -> bytes:
    rows = [note(EVENTS + at) + b"\n" for at in range(3)]
    return encode_rows(built.framing, len(built.batches), EVENTS, rows).data


def all_ever_written(built: Built) -> list[bytes]:
    return built.lines + [note(EVENTS + at) for at in range(3)]


TORN: dict[str, Change] = {
    "zeros": lambda built: bytes(64),
    "a page of zeros": lambda built: bytes(5000),
    "garbage": lambda built: random.Random(1).randbytes(16).replace(b"\n", b"x"),
    "a line of garbage": lambda built: b"!! no line of ours !!\n",
    "lines of garbage": lambda built: b"what\nis\nthis?\n",
    "a stray brace": lambda built: b"{",
    "half a batch": lambda built: next_batch(built)[: len(next_batch(built)) // 2],
    "a batch without its last byte": lambda built: next_batch(built)[:-1],
    "the first bytes of a batch": lambda built: next_batch(built)[:3],
}
CORRUPT: dict[str, Change] = {
    "an old batch again": lambda built: built.data + built.data[built.batches[-1][0] :],
    "the log twice": lambda built: built.data + built.data,
    "an old batch after garbage": lambda built: built.data + b"??" + built.data[built.batches[1][0] :],
    "a batch missing": lambda built: built.data[: built.batches[2][0]] + built.data[built.batches[4][0] :],
    "two batches exchanged": lambda built: (
        built.data[: built.batches[4][0]]
        + built.data[built.batches[5][0] : built.batches[5][2]]
        + built.data[built.batches[4][0] : built.batches[4][2]]
        + built.data[built.batches[6][0] :]
    ),
    "zeros within": lambda built: (
        built.data[: built.batches[4][0]]
        + bytes(built.batches[4][2] - built.batches[4][0])
        + built.data[built.batches[4][2] :]
    ),
    "a header that is lost": lambda built: built.data[built.batches[0][0] :],
}
UNBORN: dict[str, Change] = {
    "empty": lambda built: b"",
    "only zeros": lambda built: bytes(4096),
    "header only": lambda built: built.data[: built.batches[0][0]],
    "half a header": lambda built: built.data[: built.batches[0][0] // 2],
}


@pytest.mark.parametrize("boot", [SAME, OTHER])
@pytest.mark.parametrize("what", TORN)
async def test_what_a_crash_leaves_at_the_end_is_set_aside(tmp_path: Path, built: Built, what: str, boot: str) -> None:
    assert await lived_through(tmp_path, built, built.data + TORN[what](built), boot) == ""


@pytest.mark.parametrize("boot", [SAME, OTHER])
@pytest.mark.parametrize("what", CORRUPT)
async def test_damage_before_whole_batches_is_refused_and_left_alone(
    tmp_path: Path, built: Built, what: str, boot: str
) -> None:
    assert await lived_through(tmp_path, built, CORRUPT[what](built), boot) == "store.corrupt"


@pytest.mark.parametrize("boot", [SAME, OTHER])
@pytest.mark.parametrize("what", UNBORN)
async def test_a_log_that_never_came_to_be_gives_way(tmp_path: Path, built: Built, what: str, boot: str) -> None:
    assert await lived_through(tmp_path, built, UNBORN[what](built), boot) == "store.not_found"


async def test_a_log_with_other_line_ends_is_refused_and_its_rows_survive(tmp_path: Path) -> None:
    built = thirty_events("none")
    data = built.data.replace(b"\n", b"\r\n")
    assert await lived_through(tmp_path, built, data, SAME) == "store.corrupt"


def some_damage(built: Built, dice: random.Random) -> bytes:
    if dice.random() < 0.5:
        return built.data[: dice.randrange(len(built.data))]
    damaged = bytearray(built.data)
    damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
    return bytes(damaged)


async def test_some_cuts_and_flipped_bits(tmp_path: Path, built: Built) -> None:
    dice = random.Random(7)
    for number in range(24):
        boot = dice.choice((SAME, OTHER))
        await lived_through(tmp_path / str(number), built, some_damage(built, dice), boot)


@pytest.mark.long
async def test_more_cuts_and_flipped_bits(tmp_path: Path, built: Built, budget: Budget) -> None:
    for dice in budget.rounds():
        boot = dice.choice((SAME, OTHER))
        await lived_through(tmp_path / str(budget.round), built, some_damage(built, dice), boot)


@pytest.mark.parametrize("how", ["without checksum and size", "the whole log in one frame", "cut"])
async def test_a_newer_version_may_frame_otherwise_and_is_still_refused_as_newer(tmp_path: Path, how: str) -> None:
    """DeepSeek Harness test 48: structurally foreign, and yet unsupported, not corrupt."""
    line = b'{"type":"log","version":2,"what":"%s"}\n' % (b"else" * 50)
    foreign = zstandard.ZstdCompressor(write_checksum=False, write_content_size=False)
    data = {
        "without checksum and size": foreign.compress(line) + foreign.compress(b"\0\1"),
        "the whole log in one frame": zstandard.ZstdCompressor(write_checksum=True).compress(line + b"[1]\n" * 9),
        "cut": foreign.compress(line + random.Random(1).randbytes(200_000))[:-9],
    }[how]
    built = thirty_events("zstd")
    path = await place(tmp_path, built, data)
    store = await store_at(tmp_path, "zstd", SAME)
    for attempt in (store.inspect(MAIN), store.open_writer(MAIN, "w"), store.read_from(MAIN, 0)):
        with pytest.raises(KimiRayError) as caught:
            await attempt
        assert caught.value.code == "log.version_unsupported"
    assert [row.error["code"] for row in await store.list_logs() if row.error] == ["log.version_unsupported"]
    assert path.read_bytes() == data
    await store.close()


async def test_a_clean_log_does_not_grow_by_being_opened(tmp_path: Path, built: Built) -> None:
    """Kimi Code W1: each open of a log added a record."""
    path = await place(tmp_path, built, built.data)
    for _ in range(3):
        store = await store_at(tmp_path, built.framing.compression, SAME)
        assert (await store.load(MAIN, is_live=False)).cut == EVENTS
        await store.close()
    assert path.read_bytes() == built.data
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("version", [0, 2, 1.5, 99])
async def test_another_version_is_refused_on_every_path_before_anything_else(
    tmp_path: Path, built: Built, version: float
) -> None:
    line = b'{"log":"of another shape","version":%s}\n' % str(version).encode()
    framing = built.framing
    head = framing.header(line)
    path = await place(tmp_path, built, head + b"\xff whatever \n stands here \0")
    (path.parent / "wire.redo").write_bytes(b"a repair of another format")
    store = await store_at(tmp_path, framing.compression, SAME)
    await store.open_session("s1", "n")
    before = fingerprint(path.parent)
    hints = set()
    target = Stream("s2", "main")
    await store.open_session("s2", "n", workspace_id="wd_x_0123")
    for attempt in (
        store.inspect(MAIN),
        store.load(MAIN, is_live=False),
        store.read_from(MAIN, 0),
        store.read_surviving(MAIN),
        store.open_writer(MAIN, "w"),
        store.open_writer(header(), "w"),
        store.fork(MAIN, 0, header(target), "w"),
        open_store(tmp_path).inspect(MAIN),
    ):
        with pytest.raises(KimiRayError) as caught:
            await attempt
        assert caught.value.code == "log.version_unsupported"
        hints.add(caught.value.hint)
    assert hints == {"upgrade the program" if version > 1 else "no program reads this version any more"}
    report = await store.verify(MAIN)
    assert [problem["code"] for problem in report.problems] == ["log.version_unsupported"]
    assert [row.error["code"] for row in await store.list_logs() if row.error] == ["log.version_unsupported"]
    assert [row.error["code"] for row in await store.snapshots() if row.error] == ["log.version_unsupported"]
    assert fingerprint(path.parent) == before
    await store.close()
