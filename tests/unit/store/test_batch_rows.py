"""The plain framing and the Tail rule, against every cut and every flipped bit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.errors import StoreError
from kimi_ray.store.batch_rows import (
    EpochRow,
    encode_closed_row,
    encode_epoch_row,
    encode_rows,
    expand_rows,
    parse_batch_row,
)
from kimi_ray.store.plain_framing import PlainScan

HEADER = b'{"type":"log","version":1,"session_id":"s","agent_id":"main"}\n'
SAME, OTHER = "boot-1", "boot-2"


def event(seq: int, text: str = "x") -> bytes:
    return b'{"seq":%d,"time":1,"type":"note/added","data":{"text":"%s"}}\n' % (seq, text.encode())


def build(sizes: list[int], *, closed: bool = False, boot: str = SAME) -> tuple[bytes, list[int]]:
    """A log with batches of these many events, and the offset where each batch ends."""
    log, ends, seq = b"", [], 0
    for number, size in enumerate(sizes):
        rows = [event(seq + index) for index in range(size)]
        if number == 0:
            rows.insert(0, encode_epoch_row(EpochRow(1, 0, "nonce", boot, "disk")))
        log += encode_rows(number, seq, rows, header_line=HEADER if number == 0 else None)
        seq += size
        ends.append(len(log))
    if closed:
        log += encode_rows(len(sizes), seq, [encode_closed_row(1, seq)])
        ends.append(len(log))
    return log, ends


def scan_of(data: bytes) -> PlainScan:
    return PlainScan(lambda offset, size: data[offset : offset + size], len(data), "log")


def read(data: bytes, boot: str) -> tuple[list[bytes], PlainScan, object]:
    scan = scan_of(data)
    lines = [line for batch in scan for line in expand_rows(batch.rows)]
    tail = scan.tail(boot)
    return lines + expand_rows(tail.kept), scan, tail


@given(st.lists(st.lists(st.text(max_size=20), min_size=1, max_size=5), min_size=1, max_size=8))
def test_round_trip(batches: list[list[str]]) -> None:
    from pydantic_core import to_json

    log, seq, wanted = b"", 0, []
    for number, texts in enumerate(batches):
        rows = [
            to_json({"seq": seq + at, "time": 1, "type": "note/added", "data": {"text": text}}) + b"\n"
            for at, text in enumerate(texts)
        ]
        wanted += [row[:-1] for row in rows]
        extra = [encode_epoch_row(EpochRow(1, 0, "n", SAME, "disk"))] if number == 0 else []
        log += encode_rows(number, seq, extra + rows, header_line=HEADER if number == 0 else None)
        seq += len(texts)
    lines, scan, _tail = read(log, SAME)
    assert lines == wanted
    assert (scan.good, scan.next_seq, scan.batches_read) == (len(log), seq, len(batches))
    assert scan.header["session_id"] == "s"
    assert scan.epoch == EpochRow(1, 0, "n", SAME, "disk")


def test_what_the_format_looks_like() -> None:
    log = encode_rows(0, 0, [event(0)], header_line=HEADER)
    lines = log.split(b"\n")
    assert lines[1].startswith(b'{"batch":0,"seq":0,"bytes":%d,"crc":["' % len(event(0)))
    row = parse_batch_row(lines[1] + b"\n")
    assert row is not None
    assert len(row.row_crcs) == 2, "the first batch covers the header too"


@pytest.mark.parametrize("boot", [SAME, OTHER])
@pytest.mark.parametrize("closed", [False, True])
def test_every_cut_is_torn_and_keeps_every_whole_row(boot: str, closed: bool) -> None:
    log, ends = build([3, 4, 1, 5], closed=closed)
    whole = [line for line in (log + b"").split(b"\n") if line.startswith(b'{"seq":')]
    for cut in range(len(log) + 1):
        lines, scan, _tail = read(log[:cut], boot)
        complete = [end for end in ends if end <= cut]
        assert scan.good == (complete[-1] if complete else 0)
        assert lines == whole[: len(lines)], "a prefix, nothing invented"
        stored = [line for line in log[:cut].split(b"\n")[:-1] if line.startswith(b'{"seq":')]
        assert len(lines) == len(stored), f"cut at {cut} loses a row that is there whole"


@pytest.mark.parametrize("boot", [SAME, OTHER])
def test_no_flipped_bit_is_silent(boot: str) -> None:
    log, ends = build([4, 6, 5])
    whole = [line for line in log.split(b"\n") if line.startswith(b'{"seq":')]
    last_batch = ends[-2]
    for at in range(len(log)):
        for bit in range(8):
            damaged = bytearray(log)
            damaged[at] ^= 1 << bit
            try:
                lines, scan, tail = read(bytes(damaged), boot)
            except StoreError as error:
                assert error.code == "store.corrupt"
                assert error.details["file"] == "log"
                start = max((end for end in [0, *ends] if end <= at), default=0)
                assert start <= error.details["offset"] <= max(at, start), (at, error.details)
                assert error.details["seq"] <= len(whole)
                continue
            except Exception as error:  # the header line can only say: unknown version
                assert getattr(error, "code", "") == "log.version_unsupported"
                assert at < len(HEADER)
                continue
            assert boot == OTHER, f"bit {bit} of byte {at} was not seen"
            assert at >= last_batch, "damage before whole batches is corruption"
            assert tail.size > 0
            assert lines == whole[: len(lines)]
            assert scan.good == last_batch


def test_damage_to_a_log_of_one_batch_never_looks_like_a_log_that_was_not_created() -> None:
    log, _ = build([3])
    for at in range(len(log)):
        for bit in range(8):
            damaged = bytearray(log)
            damaged[at] ^= 1 << bit
            with pytest.raises(Exception) as caught:
                read(bytes(damaged), OTHER)
            assert getattr(caught.value, "code", "") in ("store.corrupt", "log.version_unsupported"), caught.value


def test_flipped_bit_in_the_last_batch_costs_only_the_rows_from_it_on() -> None:
    log, ends = build([2, 6])
    at = log.rindex(b'{"seq":5')
    damaged = log[: at + 9] + b"!" + log[at + 10 :]
    lines, _, tail = read(damaged, OTHER)
    assert len(lines) == 5
    assert tail.size == len(log) - ends[0]


@pytest.mark.parametrize("rest", [b"\0" * 64, b"\0" * 5000, b"garbage", b'{"batch":2,"seq":6,"by'])
@pytest.mark.parametrize("boot", [SAME, OTHER])
def test_zeros_garbage_and_half_a_batch_row_are_torn(rest: bytes, boot: str) -> None:
    log, _ = build([2, 4])
    lines, scan, tail = read(log + rest, boot)
    assert (len(lines), scan.good, tail.size, tail.kept) == (6, len(log), len(rest), [])


@pytest.mark.parametrize("boot", [SAME, OTHER])
def test_an_old_batch_appended_is_corrupt(boot: str) -> None:
    log, ends = build([2, 4])
    with pytest.raises(StoreError) as caught:
        read(log + log[ends[0] :], boot)
    assert caught.value.details == {"file": "log", "offset": len(log), "seq": 6}


def test_a_closing_batch_that_was_cut_short_itself_is_torn() -> None:
    log, ends = build([2, 4], closed=True)
    damaged = log[: ends[1]] + b"\0" * 30 + log[ends[1] + 30 :]
    lines, scan, _ = read(damaged, OTHER)
    assert (len(lines), scan.good, scan.closed) == (6, ends[1], False)


def test_a_closed_row_that_counts_lost_events_is_corrupt() -> None:
    log, ends = build([2, 4], closed=True)
    damaged = log[: ends[0]] + b"\0" * (ends[1] - ends[0] + 30) + log[ends[1] + 30 :]
    with pytest.raises(StoreError):
        read(damaged, OTHER)


@pytest.mark.parametrize("data", [b"", b"\0" * 4096, HEADER[:20], HEADER, HEADER + b'{"batch":0,"se'])
def test_a_log_without_its_first_row_was_never_created(data: bytes) -> None:
    _, scan, tail = read(data, OTHER)
    assert tail.unborn
    assert scan.next_seq == 0


def test_another_version_is_refused_before_anything_else() -> None:
    from kimi_ray.errors import LogError

    log = encode_rows(0, 0, [event(0)], header_line=b'{"version":2,"strange":true}\n')
    with pytest.raises(LogError) as caught:
        read(log, SAME)
    assert caught.value.code == "log.version_unsupported"


@settings(max_examples=200)
@given(st.integers(0, 40), st.integers(0, 60), st.binary(max_size=60))
def test_splices_are_never_silent(start: int, length: int, put: bytes) -> None:
    """Any replacement of bytes in the middle is either corrupt, torn, or changes nothing."""
    log, _ = build([2, 3, 2])
    at = len(log) * start // 41
    damaged = log[:at] + put + log[at + length :]
    whole = [line for line in log.split(b"\n") if line.startswith(b'{"seq":')]
    for boot in (SAME, OTHER):
        try:
            lines, _, tail = read(damaged, boot)
        except StoreError as error:
            assert error.code == "store.corrupt"
        except Exception as error:
            assert getattr(error, "code", "") == "log.version_unsupported"
        else:
            assert lines == whole[: len(lines)]
            assert damaged == log or tail.size > 0 or log.startswith(damaged)


def test_a_large_log_is_scanned_through_small_windows() -> None:
    log, ends = build([300] * 40)
    reads: list[int] = []

    def read_at(offset: int, size: int) -> bytes:
        reads.append(size)
        return log[offset : offset + size]

    scan = PlainScan(read_at, len(log), "log").finish()
    assert scan.next_seq == 12000
    assert scan.good == ends[-1]
    assert max(reads) <= 1 << 20
