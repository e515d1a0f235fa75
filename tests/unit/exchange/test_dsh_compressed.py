"""Compressed logs: torn frames, what may follow the last good one, and what is damage."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.exchange.dsh.frames import Frame, scan_frames
from tests.unit.exchange.conftest import only, verdict, verdict_of
from tests.unit.exchange.dsh_writer import Log, batched, compressed, crashed, frame, header, header_line, line, put
from tests.unit.exchange.oracle import cut_verdict

EVENTS = crashed()
WHOLE = compressed(header("s1"), batched(EVENTS))
FRAMES = scan_frames(WHOLE).frames
LAST = FRAMES[-1]
CLOSERS = 4
EXPECTED = (len(EVENTS), len(EVENTS) + CLOSERS)


def test_a_crashed_log(tmp_path: Path) -> None:
    reading = only(put(tmp_path, header(), WHOLE))
    assert verdict(reading) == EXPECTED and reading.stored == EVENTS and reading.set_aside == {}
    assert len(FRAMES) == 4


def test_every_cut() -> None:
    for end in range(len(WHOLE)):
        data = WHOLE[:end]
        found = verdict_of(data) if data[:3] == WHOLE[:3] else "corrupt"
        assert (found if found == "corrupt" else found[0]) == cut_verdict(data), end


def test_only_the_checksum_is_torn() -> None:
    for missing in range(1, 5):
        assert verdict_of(WHOLE[:-missing]) == EXPECTED


def test_a_torn_frame_of_which_nothing_decodes() -> None:
    assert verdict_of(WHOLE[: LAST.start + 9]) == (len(EVENTS) - 7, len(EVENTS) - 7 + CLOSERS)


def test_complete_lines_of_a_torn_frame_are_kept() -> None:
    """A frame of several blocks: the whole blocks of it are there."""
    rng = random.Random(7)
    log = Log()
    log.start()
    for _ in range(300):
        log.add("todo/write", {"todos": [{"content": rng.randbytes(600).hex(), "status": "pending"}]})
    data = compressed(header("s1"), [log.events])
    start = scan_frames(data).frames[1].start
    stored, repaired = verdict_of(data[: start + (len(data) - start) * 4 // 5])
    assert 100 < stored < 301 and repaired == stored + 1
    assert stored == cut_verdict(data[: start + (len(data) - start) * 4 // 5])


GARBAGE = [b"\0" * 64, b"\xff" * 16, bytes(range(1, 17)), b"garbage garbage!", b'{"type":"turn/end"}\n', b"\0" * 4]


@pytest.mark.parametrize("tail", GARBAGE)
def test_garbage_behind_the_last_frame_is_set_aside(tmp_path: Path, tail: bytes) -> None:
    """On purpose less strict than the original, which gives up the whole session."""
    path = put(tmp_path, header(), WHOLE + tail)
    reading = only(path)
    assert verdict(reading) == EXPECTED and reading.error is None
    assert reading.set_aside == {"garbage": len(tail)}
    assert path.read_bytes() == WHOLE + tail


@pytest.mark.parametrize(
    "tail", [b"\0", b"\xff\xff", b"\x28\xb5\x2f", b"\x28\xb5\x2f\xfd", WHOLE[LAST.start : LAST.start + 8]]
)
def test_a_frame_that_was_just_begun(tail: bytes) -> None:
    assert verdict_of(WHOLE + tail) == EXPECTED


@pytest.mark.parametrize("place", range(len(FRAMES)))
def test_garbage_between_frames_is_damage(place: int) -> None:
    if place == 0:
        return
    data = WHOLE[: FRAMES[place].start] + b"garbage!" + WHOLE[FRAMES[place].start :]
    assert verdict_of(data) == "corrupt"


def test_every_bit_flip_is_found_or_harmless() -> None:
    """A flipped bit never changes an event, and never makes a committed frame vanish in silence."""
    for at in range(len(WHOLE)):
        for bit in (at % 8, (at + 3) % 8):
            data = bytearray(WHOLE)
            data[at] ^= 1 << bit
            found = verdict_of(bytes(data)) if at > 2 else "corrupt"
            if found in ("corrupt", "unsupported"):
                continue
            # What remains readable: a frame that now looks cut short at the end, or checksum bytes that became a tail.
            assert at >= LAST.start or found == EXPECTED, (at, bit)
            assert found[0] in (len(EVENTS) - 7, len(EVENTS)), (at, bit, found)


def test_a_bit_flip_in_the_text_of_the_last_frame_refuses(tmp_path: Path) -> None:
    data = bytearray(WHOLE)
    data[(LAST.start + LAST.end) // 2] ^= 1
    reading = only(put(tmp_path, header(), bytes(data)))
    assert reading.error is not None and reading.error.kind == "corrupt"
    message = f"corrupt Zstandard session log: frame at byte {LAST.start} failed validation"
    assert reading.error.message == message
    assert reading.error.at["byte"] == LAST.start and reading.error.at["frame"] == 3
    assert reading.header == header() and reading.stored is None


def test_a_broken_magic_number_of_the_last_frame_is_no_garbage() -> None:
    for bit in range(32):
        data = bytearray(WHOLE)
        data[LAST.start + bit // 8] ^= 1 << bit % 8
        assert verdict_of(bytes(data)) == "corrupt"


def test_a_damaged_block_header_in_the_middle_is_no_torn_tail() -> None:
    """On purpose stricter than the original, which would drop the frames behind it without a word."""
    data = bytearray(WHOLE)
    middle = FRAMES[1]
    descriptor = data[middle.start + 4]
    sizes = {0: 1 if descriptor & 0x20 else 0, 1: 2, 2: 4, 3: 8}
    block = middle.start + 5 + (0 if descriptor & 0x20 else 1) + sizes[descriptor >> 6]
    data[block + 2] |= 0x0F
    assert scan_frames(bytes(data)).torn_start == middle.start
    assert verdict_of(bytes(data)) == "corrupt"


def test_a_record_across_two_frames_is_whole() -> None:
    raw = b"".join(map(line, EVENTS))
    data = frame(header_line(header("s1"))) + frame(raw[:1000]) + frame(raw[1000:])
    assert verdict_of(data) == EXPECTED


def test_a_complete_frame_that_ends_in_a_record(tmp_path: Path) -> None:
    raw = b"".join(map(line, EVENTS))
    reading = only(put(tmp_path, header(), frame(header_line(header())) + frame(raw[:-5])))
    assert reading.error is not None
    assert reading.error.message == "corrupt Zstandard session log: complete frame contains a torn JSONL record"
    assert reading.error.at["frame"] == 1


def test_a_bad_line_in_a_complete_frame_is_damage(tmp_path: Path) -> None:
    """In a plain log the same line is a tail that goes; here the frame's checksum says that it was written so."""
    for bad in (b"garbage\n", line({**EVENTS[-1], "seq": len(EVENTS) + 1})):
        assert verdict_of(WHOLE + frame(bad)) == "corrupt"


def test_header_frames(tmp_path: Path) -> None:
    events = frame(b"".join(map(line, EVENTS)))
    assert verdict_of(frame(header_line(header("s1")))) == (0, 0)
    assert verdict_of(frame(header_line(header("s1")) * 2) + events) == "corrupt"
    assert verdict_of(frame(header_line(header("s1"))[:-1]) + events) == "corrupt"
    assert verdict_of(frame(b"") + events) == "corrupt"
    empty = only(put(tmp_path, header(), frame(header_line(header()))[:20]))
    assert empty.error is not None and empty.error.message == "empty or header-less Zstandard session log"
    path = tmp_path / "session.jsonl.zstd"
    path.write_bytes(b"")
    assert only(path).error is not None


def frames_without_checksum() -> bytes:
    raw = [header_line(header("s1")), b"".join(map(line, EVENTS))]
    return b"".join(frame(one, checksum=False) for one in raw)


def test_frames_without_a_checksum_are_read() -> None:
    assert verdict_of(frames_without_checksum()) == EXPECTED


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=0, max_size=3000), min_size=1, max_size=6), st.booleans())
def test_frames_are_found_where_the_decoder_finds_them(texts: list[bytes], checksum: bool) -> None:
    pieces = [frame(text, checksum=checksum) for text in texts]
    places: list[Any] = []
    start = 0
    for piece in pieces:
        places.append(Frame(start, start + len(piece)))
        start += len(piece)
    found = scan_frames(b"".join(pieces))
    assert list(found.frames) == places and found.torn_start is None and found.stopped is None
