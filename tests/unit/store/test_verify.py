"""``verify`` names everything that is wrong with a log, each with its place; ``read_surviving`` gives all the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from pydantic_core import to_json

from kimi_ray.store.batch_rows import EpochRow, count_events, encode_closed_row, encode_epoch_row
from kimi_ray.store.framing import Framing, encode_rows, framing_of
from kimi_ray.store.fs import RealFs
from kimi_ray.store.layout import REDO_NAME
from kimi_ray.store.seam import Stream, VerifyReport
from kimi_ray.store.verify import verify_log
from tests.conformance.store_contract import fingerprint
from tests.unit.store.damaged_logs import (
    ENCODINGS,
    HEADER,
    OTHER,
    SAME,
    Built,
    note,
    put_together,
    surviving,
    thirty_events,
)

STREAM = Stream("s1", "main")


@pytest.fixture(scope="module", params=ENCODINGS)
def built(request: pytest.FixtureRequest) -> Built:
    return thirty_events(request.param)


def verified(directory: Path, framing: Framing, data: bytes, boot: str = SAME) -> VerifyReport:
    (directory / framing.log_name).write_bytes(data)
    before = fingerprint(directory)
    report = verify_log(RealFs(), str(directory), framing, STREAM, boot)
    assert fingerprint(directory) == before
    for problem in report.problems:
        details = problem["details"]
        assert isinstance(details, dict)
        assert set(details) == {"file", "offset", "seq"}
    return report


def places(report: VerifyReport) -> list[tuple[object, object, object]]:
    return [
        (problem["code"], problem["details"]["offset"], problem["details"]["seq"])  # type: ignore[index]
        for problem in report.problems
    ]


def test_a_whole_log(tmp_path: Path, built: Built) -> None:
    report = verified(tmp_path, built.framing, built.data)
    assert (report.ok, report.events, report.epoch, report.closed, report.problems) == (True, 30, 2, False, ())
    assert (report.bytes, report.torn_bytes, report.batches) == (len(built.data), 0, len(built.batches))


def test_every_damaged_place_is_named(tmp_path: Path, built: Built) -> None:
    """Three batches damaged, and all three are told; the rows in between are not."""
    damaged = bytearray(built.data)
    hit: list[tuple[int, int]] = []
    eventful = [batch for batch in built.batches if batch[3] > batch[1]]
    for start, seq, end, _ in (eventful[1], eventful[2], eventful[4]):
        if built.framing.compression == "none":
            at = built.data.rindex(b'{"seq":', start, end)
            hit.append((at, seq))
        else:
            at = (start + end) // 2
            hit.append((start, seq))
        damaged[at + 12] ^= 1
    report = verified(tmp_path, built.framing, bytes(damaged))
    assert not report.ok
    told = places(report)
    assert [code for code, _, _ in told] == ["store.corrupt"] * 3
    assert [offset for _, offset, _ in told] == [at for at, _ in hit]
    assert all(seq >= first for (_, _, seq), (_, first) in zip(told, hit, strict=True))  # type: ignore[operator]
    lost = 30 - len(surviving(built.framing, bytes(damaged), SAME))
    assert lost == (3 if built.framing.compression == "none" else 9 + 7 + 4)


def test_a_torn_tail_is_told_and_is_no_damage(tmp_path: Path, built: Built) -> None:
    report = verified(tmp_path, built.framing, built.data + b"\0" * 77)
    assert report.ok
    assert report.torn_bytes == 77
    assert places(report) == [("store.torn_tail", len(built.data), 30)]


def test_a_pending_repair_is_told_and_a_damaged_one_is_damage(tmp_path: Path, built: Built) -> None:
    (tmp_path / REDO_NAME).write_bytes(b"no repair of ours")
    report = verified(tmp_path, built.framing, built.data)
    assert not report.ok
    assert places(report) == [("store.corrupt", 0, -1)]
    assert report.events == 30, "the log itself is checked all the same"
    write_redo(tmp_path, len(built.data))
    report = verified(tmp_path, built.framing, built.data + b"torn")
    assert report.ok
    assert places(report) == [("store.repair_pending", 0, -1)]
    assert (report.events, report.torn_bytes) == (30, 0)


def write_redo(directory: Path, offset: int) -> None:
    head = to_json({"offset": offset, "aside": "wire.tail-2-1", "moved": 4, "crc": crc32(b"torn")})
    (directory / REDO_NAME).write_bytes(head + b"\ntorn")


def test_an_unborn_log_is_told(tmp_path: Path, built: Built) -> None:
    report = verified(tmp_path, built.framing, b"")
    assert (report.ok, places(report)) == (False, [("store.unborn", 0, 0)])


def grant(epoch: int, seq: int) -> bytes:
    return encode_epoch_row(EpochRow(epoch, seq, "n", SAME, "disk"))


LOGICAL: dict[str, tuple[Callable[[], list[list[bytes]]], list[str]]] = {
    "an epoch that does not rise": (
        lambda: [[grant(2, 0), note(0) + b"\n"], [grant(2, 1)], [note(1) + b"\n"], [grant(1, 2)]],
        ["log.bad_epoch", "log.bad_epoch"],
    ),
    "a grant that counts other events": (lambda: [[grant(1, 0), note(0) + b"\n", grant(2, 5)]], ["log.bad_epoch"]),
    "a closed row of another grant": (
        lambda: [[grant(1, 0), note(0) + b"\n"], [encode_closed_row(7, 1)]],
        ["log.bad_epoch"],
    ),
    "a seq twice within a batch": (
        lambda: [[grant(1, 0)], [note(0) + b"\n", note(0) + b"\n", note(2) + b"\n"], [note(3) + b"\n"]],
        ["log.bad_seq"],
    ),
    "a row that is no event": (lambda: [[grant(1, 0)], [note(0) + b"\n", b'{"x":1}\n']], ["log.bad_seq"]),
    "a packed row that is none": (
        lambda: [[grant(1, 0)], [note(0) + b"\n", b'{"type":"text-chunks","seq0":1}\n', note(2) + b"\n"]],
        ["store.corrupt"],
    ),
}


@pytest.mark.parametrize("compression", ENCODINGS)
@pytest.mark.parametrize("what", LOGICAL)
def test_what_verifies_and_is_wrong_all_the_same(tmp_path: Path, compression: str, what: str) -> None:
    make, codes = LOGICAL[what]
    framing = framing_of(compression)
    data = assembled(framing, make())
    report = verified(tmp_path, framing, data)
    assert [code for code, _, _ in places(report)] == codes
    assert not report.ok


def assembled(framing: Framing, batches: list[list[bytes]]) -> bytes:
    """Like ``put_together``, for rows that cannot be expanded."""
    first, *rest = batches[0]
    started = framing.begin(HEADER, first, framing.prepare(b"".join(rest), list(map(len, rest))))
    data, number, seq = started.data, started.batches, count_events(b"".join(rest))
    for rows in batches[1:]:
        encoded = encode_rows(framing, number, seq, rows)
        data, number, seq = data + encoded.data, number + encoded.batches, seq + count_events(b"".join(rows))
    return data


def test_an_old_batch_again(tmp_path: Path, built: Built) -> None:
    start, _, end, _ = next(batch for batch in built.batches if batch[1:4:2] == (12, 19))
    data = built.data + built.data[start:end]
    report = verified(tmp_path, built.framing, data)
    codes = [code for code, _, _ in places(report)]
    assert codes[0] == "store.corrupt"
    assert codes[1:] == (["log.bad_batch"] if built.framing.compression == "none" else ["log.bad_seq"])
    assert all(offset == len(built.data) for _, offset, _ in places(report))
    found = surviving(built.framing, data, OTHER)
    assert [line for _, line in found] == built.lines + built.lines[12:19], "both copies: one of them may be damaged"


def test_a_damaged_row_of_checksums_costs_no_event() -> None:
    built = thirty_events("none")
    start, _, _, _ = built.batches[4]
    damaged = bytearray(built.data)
    damaged[start + 4] ^= 1
    assert [line for _, line in surviving(built.framing, bytes(damaged), SAME)] == built.lines


def test_a_damaged_header_costs_no_event(built: Built) -> None:
    damaged = bytearray(built.data)
    damaged[built.batches[0][0] // 2] ^= 1
    assert [line for _, line in surviving(built.framing, bytes(damaged), SAME)] == built.lines


def test_put_together_and_assembled_agree(built: Built) -> None:
    rows = [[grant(1, 0)], [note(0) + b"\n"]]
    assert assembled(built.framing, rows) == put_together(built.framing, rows)
