"""Every cut and every flipped bit of a log of thirty events, in both encodings, before and after a restart."""

from __future__ import annotations

import random

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.store.batch_rows import expand_rows, parse_batch_row, seq_of, split_rows
from tests.conftest import Budget
from tests.unit.store.damaged_logs import (
    ENCODINGS,
    OTHER,
    SAME,
    Built,
    coded,
    paged,
    scanned,
    surviving,
    thirty_events,
)

_CHECKSUM = 4


@pytest.fixture(scope="module", params=ENCODINGS)
def built(request: pytest.FixtureRequest) -> Built:
    return thirty_events(request.param)


def check_cut(built: Built, cut: int, boot: str, *, deep: bool) -> None:
    data = built.data[:cut]
    lines, tail = scanned(built.framing, data, boot)
    assert lines == built.lines[: len(lines)], "a prefix, nothing invented"
    assert len(lines) >= built.whole_events(cut)
    if built.framing.compression == "zstd" and boot == OTHER:
        assert len(lines) == built.whole_events(cut), "after a restart nothing that does not verify is kept"
    if built.framing.compression == "none" and cut > built.batches[0][0]:
        rest = data[max([end for _, _, end, _ in built.batches if end <= cut], default=0) :]
        assert len(lines) >= built.whole_events(cut) + rest.count(b'\n{"seq":') - 1
    assert tail.unborn or (tail.size > 0) == (cut not in [end for _, _, end, _ in built.batches])
    assert tail.offset + tail.size == cut
    if deep:
        assert paged(built.framing, data, boot) == (lines if not tail.unborn else [])
        assert [line for _, line in surviving(built.framing, data, boot)] == lines


@pytest.mark.parametrize("boot", [SAME, OTHER])
def test_every_cut_is_torn_and_leaves_a_prefix(built: Built, boot: str) -> None:
    for cut in range(len(built.data) + 1):
        check_cut(built, cut, boot, deep=cut % 5 == 0)


def test_only_the_checksum_of_the_last_frame_is_torn() -> None:
    """DeepSeek Harness tests 50 and 51: complete records of a torn frame are kept; all, if only its end is missing."""
    built = thirty_events("zstd")
    for missing in range(1, _CHECKSUM + 1):
        lines, tail = scanned(built.framing, built.data[:-missing], SAME)
        assert lines == built.lines
        assert len(tail.kept) == 4
        assert len(scanned(built.framing, built.data[:-missing], OTHER)[0]) == built.batches[-1][1]


def check_flip(built: Built, at: int, bit: int, boot: str, *, deep: bool) -> None:
    damaged = bytearray(built.data)
    damaged[at] ^= 1 << bit
    data = bytes(damaged)
    start, seq, _end, _ = built.batch_at(at)
    code = ""
    try:
        lines, tail = scanned(built.framing, data, boot)
    except KimiRayError as error:
        code = coded(error)
        if code == "store.corrupt":
            assert start <= error.details["offset"] <= at or error.details["offset"] == 0 == built.batch_at(at)[1]
            assert error.details["seq"] >= seq
    else:
        if tail.size == 0:
            assert lines == built.lines, "what is not seen changes nothing"
        else:
            assert boot == OTHER, f"bit {bit} of byte {at} is taken for a torn tail: acknowledged events are lost"
            assert start == built.batches[-1][0], "damage before whole batches is corruption"
            assert lines == built.lines[: len(lines)]
            assert len(lines) >= seq
    if not deep or code == "log.version_unsupported":
        return
    pages = paged_or_error(built, data, boot)
    assert pages == built.lines[: len(pages)]
    check_survivors(built, data, at, boot)


def paged_or_error(built: Built, data: bytes, boot: str) -> list[bytes]:
    try:
        return paged(built.framing, data, boot, limit=3)
    except KimiRayError as error:
        coded(error)
        return []


def check_survivors(built: Built, data: bytes, at: int, boot: str) -> None:
    """Damage costs at most the damaged row, or frame."""
    found = surviving(built.framing, data, boot)
    assert all(line == built.lines[seq] for seq, line in found), "only what was written"
    _, seq, _, next_seq = built.batch_at(at)
    lost = set(range(seq, next_seq)) if built.framing.compression == "zstd" else lost_rows(built, at)
    assert {seq for seq, _ in found} >= set(range(len(built.lines))) - lost, at


def lost_rows(built: Built, at: int) -> set[int]:
    """Seqs of the row that this byte of a plain log is in, and of the next one when the byte is its newline."""
    start = built.data.rfind(b"\n", 0, at) + 1
    end = built.data.find(b"\n", at) + 1
    if built.data[at : at + 1] == b"\n":
        end = (built.data.find(b"\n", end) + 1) or end
    rows = split_rows(built.data[start:end])
    if start < built.batches[0][0]:
        rows = rows[1:]
    return seqs_of(rows) | seqs_of(rows_of_checksum(built, at, start))


def rows_of_checksum(built: Built, at: int, start: int) -> list[bytes]:
    """When the byte is in the checksums of the batch row at ``start``: the rows whose checksums it is part of."""
    end = built.data.find(b"\n", start) + 1
    row = parse_batch_row(built.data[start:end])
    first = built.data.find(b"[", start) + 1
    if row is None or not first <= at <= first + len(row.crcs):
        return []
    place = (at - first) // len('"01234567",') - (1 if row.number == 0 else 0)
    return split_rows(built.data[end : end + row.size])[max(0, place) : place + 2]


def seqs_of(rows: list[bytes]) -> set[int]:
    return {seq_of(line) for line in expand_rows(rows)}


@pytest.mark.parametrize("boot", [SAME, OTHER])
def test_no_flipped_bit_is_silent(built: Built, boot: str) -> None:
    dice = random.Random(boot)
    for at in range(len(built.data)):
        check_flip(built, at, dice.randrange(8), boot, deep=at % 3 == 0)


@pytest.mark.long
def test_every_flipped_bit(built: Built, budget: Budget) -> None:
    places = [(at, bit, boot) for at in range(len(built.data)) for bit in range(8) for boot in (SAME, OTHER)]
    for dice in budget.rounds():
        for at, bit, boot in dice.sample(places, min(len(places), 300)):
            check_flip(built, at, bit, boot, deep=True)


@pytest.mark.long
def test_any_damage_at_all(built: Built, budget: Budget) -> None:
    """Cuts, flips, holes, doubled and moved pieces, several at once: coded errors and true lines only."""
    for dice in budget.rounds():
        data = bytearray(built.data)
        for _ in range(dice.randrange(1, 4)):
            harm(data, dice)
        boot = dice.choice((SAME, OTHER))
        try:
            lines, _ = scanned(built.framing, bytes(data), boot)
        except KimiRayError as error:
            coded(error)
        else:
            assert lines == built.lines[: len(lines)]
        pages = paged_or_error(built, bytes(data), boot)
        assert pages == built.lines[: len(pages)]
        try:
            found = surviving(built.framing, bytes(data), boot)
        except KimiRayError as error:
            assert coded(error) == "log.version_unsupported"
        else:
            assert all(line == built.lines[seq] for seq, line in found)


def harm(data: bytearray, dice: random.Random) -> None:
    at = dice.randrange(len(data) + 1)
    length = dice.choice((1, 4, 30, 200))
    match dice.randrange(6):
        case 0:
            del data[at:]
        case 1:
            del data[at : at + length]
        case 2:
            data[at : at + length] = bytes(len(data[at : at + length]))
        case 3:
            data[at:at] = data[at : at + length]
        case 4:
            data[at:at] = dice.randbytes(length)
        case _:
            for place in range(at, min(len(data), at + length)):
                data[place] ^= 1 << dice.randrange(8)
