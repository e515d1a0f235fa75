"""Both encodings are the same log: any split into batches, any limits of pages, any place to start."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from kimi_ray.errors import KimiRayError
from kimi_ray.store.batch_rows import EpochRow, encode_closed_row, encode_epoch_row, expand_rows, split_rows
from kimi_ray.store.framing import framing_of
from kimi_ray.store.log_read import read_page
from kimi_ray.store.surviving import surviving_page
from kimi_ray.store.window import Window
from tests.unit.store.damaged_logs import (
    ENCODINGS,
    HEADER,
    OTHER,
    SAME,
    Source,
    chunks,
    note,
    paged,
    put_together,
    scanned,
    surviving,
)

Piece = tuple[str, int, str]
PIECES = st.lists(
    st.tuples(st.sampled_from(["note", "chunks", "grant", "closed"]), st.integers(1, 9), st.text(max_size=30)),
    max_size=14,
)


def rows_of(pieces: list[Piece]) -> tuple[list[list[bytes]], list[bytes]]:
    """Batches of stored rows, one a piece, and the canonical lines in them."""
    lines: list[bytes] = []
    batches: list[list[bytes]] = [[encode_epoch_row(EpochRow(1, 0, "n", SAME, "disk"))]]
    epoch = 1
    for kind, count, text in pieces:
        if kind == "note":
            fresh = [
                to_json({"seq": len(lines) + at, "time": 7, "type": "note/added", "data": {"text": text}})
                for at in range(count)
            ]
            batches.append([line + b"\n" for line in fresh])
            lines += fresh
        elif kind == "chunks":
            fresh, rows = chunks(len(lines), len(lines) + count)
            batches.append(rows)
            lines += fresh
        elif kind == "closed":
            batches.append([encode_closed_row(epoch, len(lines))])
        else:
            epoch += 1
            batches.append([encode_epoch_row(EpochRow(epoch, len(lines), "n", SAME, "disk"))])
    return batches, lines


def joined(batches: list[list[bytes]], dice: random.Random) -> list[list[bytes]]:
    """The same rows in other batches."""
    rows = [row for batch in batches for row in batch]
    out: list[list[bytes]] = [[rows[0]]]
    for row in rows[1:]:
        if dice.random() < 0.4:
            out.append([])
        out[-1].append(row)
    return out


@pytest.mark.parametrize("compression", ENCODINGS)
@settings(max_examples=60, deadline=None)
@given(pieces=PIECES, dice=st.randoms(use_true_random=False), limit=st.integers(1, 40), most=st.integers(1, 4000))
def test_any_batches_and_any_pages_give_the_same_lines(
    compression: str, pieces: list[Piece], dice: random.Random, limit: int, most: int
) -> None:
    framing = framing_of(compression)
    batches, lines = rows_of(pieces)
    for split in (batches, joined(batches, dice)):
        data = put_together(framing, split)
        found, tail = scanned(framing, data, OTHER)
        assert found == lines
        assert (tail.size, tail.unborn) == (0, False)
        assert paged(framing, data, OTHER, limit=limit, max_bytes=most) == lines
        assert [line for _, line in surviving(framing, data, OTHER, limit=limit)] == lines
        seq = dice.randrange(len(lines) + 1)
        page = read_page(framing, Source(data), seq, limit, most)
        assert page is not None
        assert (page.first_seq, page.next_seq) == (seq, len(lines))
        assert list(page.lines) == lines[seq : seq + len(page.lines)]
        assert page.lines or seq == len(lines), "one event always fits"
        assert len(page.lines) == 1 or sum(map(len, page.lines)) <= most


@pytest.mark.parametrize("compression", ENCODINGS)
def test_a_page_at_the_tail_of_a_large_log_reads_little(compression: str) -> None:
    framing = framing_of(compression)
    dice = random.Random(5)
    text = dice.randbytes(40).hex()
    batches = [[encode_epoch_row(EpochRow(1, 0, "n", SAME, "disk"))]]
    batches += [[note(seq, text) + b"\n" for seq in range(first, first + 50)] for first in range(0, 40_000, 50)]
    source = Source(put_together(framing, batches))
    bytes_read = 0
    plain_read = source.read

    def counting(offset: int, size: int) -> bytes:
        nonlocal bytes_read
        data = plain_read(offset, size)
        bytes_read += len(data)
        return data

    source.read = counting  # type: ignore[method-assign]
    page = read_page(framing, source, 39_950, 50, 1 << 20)
    assert page is not None
    assert list(page.lines) == [note(seq, text) for seq in range(39_950, 40_000)]
    assert source.reads <= 8
    for seq in dice.sample(range(40_000), 20):
        source.reads = 0
        page = read_page(framing, source, seq, 3, 1 << 20)
        assert page is not None
        assert page.lines[0] == note(seq, text)
        assert source.reads <= 40
    assert bytes_read < 21 * 40 * (256 << 10)


@pytest.mark.parametrize("compression", ENCODINGS)
def test_a_large_log_is_scanned_through_small_windows(compression: str) -> None:
    framing = framing_of(compression)
    text = random.Random(5).randbytes(100).hex()
    batches = [[encode_epoch_row(EpochRow(1, 0, "n", SAME, "disk"))]]
    batches += [[note(seq, text) + b"\n" for seq in range(first, first + 300)] for first in range(0, 30_000, 300)]
    data = put_together(framing, batches)
    sizes: list[int] = []

    def read(offset: int, size: int) -> bytes:
        sizes.append(size)
        return data[offset : offset + size]

    scan = framing.scan(read, len(data), "log").finish()
    assert (scan.next_seq, scan.good) == (30_000, len(data))
    assert max(sizes) <= 1 << 20
    assert sum(sizes) < 2 * len(data) + (1 << 20)


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 64), st.integers(0, 900))
def test_a_window_is_the_file(pieces: list[bytes], ahead: int, at: int) -> None:
    data = b"\n".join(pieces)
    window = Window(lambda offset, size: data[offset : offset + size], len(data), ahead)
    at = min(at, len(data))
    assert window.bytes_at(at, 50) == data[at : at + 50]
    end = data.find(b"\n", at)
    assert window.line_at(at) == (data[at : end + 1] if end >= 0 else None)
    needle = data[at : at + 2] or b"ab"
    places = [place for place in range(len(data)) if data.startswith(needle, place)]
    assert list(window.occurrences(needle, 0, len(data))) == places
    assert list(window.occurrences_before(needle, len(data))) == places[::-1]
    assert list(window.occurrences(needle, at, len(data))) == [place for place in places if place >= at]


@given(st.binary(max_size=300))
def test_rows_are_split_at_newlines_only(data: bytes) -> None:
    rows = split_rows(data)
    assert b"".join(rows) == data[: data.rfind(b"\n") + 1]
    assert all(row.count(b"\n") == 1 and row.endswith(b"\n") for row in rows)


def test_the_header_line_is_at_hand_in_both() -> None:
    for compression in ENCODINGS:
        data = put_together(framing_of(compression), [[encode_epoch_row(EpochRow(1, 0, "n", SAME, "disk"))]])
        probe = framing_of(compression).probe(Source(data).read, len(data))
        assert probe.header_line() == HEADER
        assert expand_rows([row for _, row in probe.rows(probe.before(len(data)) or pytest.fail()).rows if row]) == []


@pytest.mark.parametrize("compression", ENCODINGS)
def test_reading_a_large_log_holds_little_of_it(compression: str) -> None:
    framing = framing_of(compression)
    text = random.Random(5).randbytes(300).hex()
    batches = [[encode_epoch_row(EpochRow(1, 0, "n", SAME, "disk"))]]
    batches += [[note(seq, text + str(seq)) + b"\n" for seq in range(at, at + 100)] for at in range(0, 30_000, 100)]
    source = Source(put_together(framing, batches))
    del batches
    tracemalloc.start()
    try:
        framing.scan(source.read, source.size, "log").finish()
        scanning = tracemalloc.get_traced_memory()[1]
        for seq in range(0, 30_000, 1000):
            read_page(framing, source, seq, 1000, 8 << 20)
        paging = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert scanning < 6 << 20
    assert paging < 8 << 20, "a page and what is read ahead"


@pytest.mark.parametrize("compression", ENCODINGS)
def test_a_file_that_is_cut_while_it_is_read_ends_the_read(compression: str) -> None:
    framing = framing_of(compression)
    batches = [[encode_epoch_row(EpochRow(1, 0, "n", SAME, "disk"))]]
    batches += [[note(seq, str(seq) * 50) + b"\n"] for seq in range(40)]
    data = put_together(framing, batches)
    dice = random.Random(9)
    for _ in range(60):
        left = dice.randrange(len(data))
        source = Source(data[:left])
        source.size = len(data) + dice.choice((0, 1 << 23))
        scan = framing.scan(source.read, source.size, "log").finish()
        with contextlib.suppress(KimiRayError):
            scan.tail(dice.choice((SAME, OTHER)))
        assert scan.next_seq <= 40
        with contextlib.suppress(KimiRayError):
            read_page(framing, source, 0, 100, 1 << 20)
        surviving_page(framing, source, 0, 1000, SAME)
