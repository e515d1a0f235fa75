"""Zstandard frames: standard ones, found without an index, told from what only looks like them."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.errors import StoreError
from kimi_ray.store.batch_rows import expand_rows
from kimi_ray.store.framing import encode_rows, framing_of
from kimi_ray.store.zstd_frames import FRAME_CONTENT, MAGIC, Codec, measure, one_bit_from_whole, split_content
from tests.unit.store.damaged_logs import HEADER, OTHER, SAME, Source, note, paged, scanned, thirty_events

CODEC = Codec()


def noisy(seq: int, size: int) -> bytes:
    """An event that does not compress well."""
    return note(seq, random.Random(seq).randbytes(size // 2).hex()) + b"\n"


def test_any_zstandard_tool_shows_the_log(tmp_path: Path) -> None:
    built = thirty_events("zstd")
    path = tmp_path / "wire.jsonl.zst"
    path.write_bytes(built.data)
    reader = zstandard.ZstdDecompressor().stream_reader(built.data, read_across_frames=True)
    text = reader.readall()
    assert text.startswith(HEADER)
    assert expand_rows(row + b"\n" for row in text[len(HEADER) : -1].split(b"\n")) == built.lines
    tool = shutil.which("zstd")
    if tool is not None:
        shown = subprocess.run([tool, "-dc", str(path)], check=True, capture_output=True, timeout=30).stdout
        assert shown == text


def test_every_frame_says_its_size_and_has_a_checksum() -> None:
    built = thirty_events("zstd")
    starts = [0, *(batch[0] for batch in built.batches)]
    for start, end in zip(starts, [*starts[1:], len(built.data)], strict=True):
        frame = built.data[start:end]
        facts = zstandard.get_frame_parameters(frame)
        assert facts.has_checksum
        assert facts.content_size == len(CODEC.decompress(frame) or b"")
        assert measure(built.data, start) == (end - start, True, facts.content_size)
    assert CODEC.decompress(built.data[: starts[1]]) == HEADER, "frame 0 is exactly the header line"


@given(st.binary(min_size=1, max_size=400_000), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_a_frame_is_measured_without_decompressing_it(content: bytes, more: int) -> None:
    frame = CODEC.compress(content)
    assert measure(frame + bytes(more)) == (len(frame), True, len(content))
    for end in {0, 1, 3, 4, 5, 6, 9, len(frame) // 2, len(frame) - 4, len(frame) - 1} & set(range(len(frame))):
        seen = measure(frame[:end])
        assert seen is not None
        assert not seen.whole
        assert end < seen.length <= len(frame)


@given(st.binary(max_size=200))
def test_garbage_is_no_frame(data: bytes) -> None:
    if not data.startswith(MAGIC) and not MAGIC.startswith(data):
        assert measure(data) is None
    measure(MAGIC + data)  # whatever it says, it ends


def test_frames_that_a_log_never_has_are_not_taken_for_its_own() -> None:
    content = note(30) + b"\n"
    for foreign in (
        zstandard.ZstdCompressor(write_checksum=False).compress(content),
        zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(content),
        b"\x50\x2a\x4d\x18" + struct.pack("<I", 8) + b"skipped!",
        MAGIC + b"\xe4" + struct.pack("<Q", 1 << 60) + b"\x01\x00\x00" + bytes(4),
    ):
        assert measure(foreign) is None
        lines, tail = scanned(framing_of("zstd"), thirty_events("zstd").data + foreign, SAME)
        assert (len(lines), tail.size, tail.kept) == (30, len(foreign), [])


def test_a_large_batch_is_several_frames_of_whole_rows() -> None:
    framing = framing_of("zstd")
    rows = [noisy(seq, 300_000) for seq in range(30)]
    encoded = encode_rows(framing, 1, 0, rows)
    assert encoded.batches == 3
    at = 0
    contents: list[bytes | None] = []
    while at < len(encoded.data):
        found = measure(encoded.data, at)
        assert found is not None
        assert found.whole
        assert found.content <= FRAME_CONTENT
        contents.append(CODEC.decompress(encoded.data[at : at + found.length]))
        at += found.length
    assert b"".join(content or b"" for content in contents) == b"".join(rows)
    assert all(content and content.startswith(b'{"seq":') and content.endswith(b"\n") for content in contents)


@given(st.lists(st.integers(1, 9_000_000), max_size=12))
@settings(max_examples=50)
def test_rows_are_split_between_rows(sizes: list[int]) -> None:
    payload = bytes(sum(sizes))
    parts = split_content(payload, sizes)
    assert sum(map(len, parts)) == len(payload)
    edges = {sum(sizes[:count]) for count in range(len(sizes) + 1)}
    end = 0
    for part in parts:
        end += len(part)
        assert end in edges
        assert len(part) <= FRAME_CONTENT or len(part) in sizes


def large_log() -> tuple[bytes, list[bytes], int]:
    """A log whose last batch is one frame of many blocks; where that frame starts."""
    framing = framing_of("zstd")
    built = thirty_events("zstd")
    rows = [noisy(seq, 60_000) for seq in range(30, 50)]
    data = built.data + encode_rows(framing, len(built.batches), 30, rows).data
    return data, built.lines + [row[:-1] for row in rows], len(built.data)


def test_the_blocks_of_a_cut_frame_are_kept_while_the_machine_ran_on() -> None:
    data, lines, start = large_log()
    framing = framing_of("zstd")
    kept: list[int] = []
    for cut in range(start + 1, len(data), 40_009):
        found, tail = scanned(framing, data[:cut], SAME)
        assert found == lines[: len(found)]
        assert paged(framing, data[:cut], SAME) == found
        assert scanned(framing, data[:cut], OTHER)[0] == lines[:30]
        assert framing.scan(Source(tail_repaired(data[:cut], tail)).read, 1 << 30, "log")
        kept.append(len(found))
    assert kept == sorted(kept)
    assert kept[-1] > 45


def tail_repaired(data: bytes, tail: object) -> bytes:
    framing = framing_of("zstd")
    scan = framing.scan(Source(data).read, len(data), "log").finish()
    judged = scan.tail(SAME)
    assert judged == tail
    repaired = data[: judged.offset] + scan.encode_kept(judged.kept)
    assert scanned(framing, repaired, OTHER)[1].size == 0
    return repaired


def test_a_flipped_length_is_not_taken_for_a_cut() -> None:
    data, _, start = large_log()
    frame = data[start:]
    heads = [start + at for at in range(14)]
    pos = start + 9
    while pos < len(data) - 4:
        heads += [pos, pos + 1, pos + 2]
        head = int.from_bytes(data[pos : pos + 3], "little")
        pos += 3 + (head >> 3)
        if head & 1:
            break
    dice = random.Random(3)
    for at in dice.sample(heads, 12):
        damaged = bytearray(data)
        damaged[at] ^= 1 << dice.randrange(8)
        with pytest.raises(StoreError) as caught:
            scanned(framing_of("zstd"), bytes(damaged), SAME)
        assert caught.value.details == {"file": "log", "offset": start, "seq": 30}
    for cut in dice.sample(range(1, len(frame)), 12):
        assert not one_bit_from_whole(CODEC, frame[:cut])


def test_threads_have_contexts_of_their_own() -> None:
    def work(number: int) -> bool:
        content = noisy(number, 50_000) * 3
        return all(CODEC.decompress(CODEC.compress(content)) == content for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))
