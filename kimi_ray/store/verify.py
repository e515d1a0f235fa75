"""Checking everything about one log, and reporting instead of stopping."""

from __future__ import annotations

from kimi_ray.errors import KimiRayError
from kimi_ray.store.batch_rows import EPOCH_START, expand_row, parse_epoch_row
from kimi_ray.store.fs import Fs
from kimi_ray.store.layout import not_found
from kimi_ray.store.log_files import open_log
from kimi_ray.store.log_read import seq_of
from kimi_ray.store.log_scan import LogScan
from kimi_ray.store.seam import Stream, VerifyReport


def verify_log(fs: Fs, directory: str, stream: Stream, boot: str, *, size: int | None = None) -> VerifyReport:
    """Check header, checksums, batch numbers, seqs, epochs of a log.

    Raises:
        StoreError: ``store.not_found``; damage is in the report.
    """
    problems: list[dict[str, object]] = []
    try:
        source = open_log(fs, directory, size=size)
    except (FileNotFoundError, NotADirectoryError):
        raise not_found(stream) from None
    with source:
        scan = LogScan(source.read, source.size, source.path)
        torn = 0
        epoch = 0
        try:
            for batch in scan:
                offset, seq = batch.payload_offset, batch.seq
                for row in batch.rows:
                    if row.startswith(EPOCH_START):
                        granted = parse_epoch_row(row)
                        if granted is None or granted.epoch <= epoch or granted.seq != seq:
                            problems.append(
                                _problem("log.bad_epoch", "an epoch does not rise", source.path, offset, seq)
                            )
                        else:
                            epoch = granted.epoch
                    for line in expand_row(row):
                        if seq_of(line) != seq:
                            problems.append(_problem("log.bad_seq", "a seq is not its index", source.path, offset, seq))
                        seq += 1
                    offset += len(row)
            tail = scan.tail(boot)
            torn = tail.size - sum(map(len, tail.kept))
            if tail.unborn:
                problems.append(_problem("store.unborn", "the log never came to be", source.path, 0, 0))
        except KimiRayError as error:
            problems.append(error.to_data())
    return VerifyReport(
        session_id=stream.session_id,
        agent_id=stream.agent_id,
        ok=not problems,
        events=scan.next_seq,
        batches=scan.batches_read,
        bytes=scan.good,
        epoch=epoch,
        closed=scan.closed,
        torn_bytes=torn,
        problems=tuple(problems),
    )


def _problem(code: str, why: str, file: str, offset: int, seq: int) -> dict[str, object]:
    return {
        "code": code,
        "message": f"{file}: {why} at byte {offset} (seq {seq})",
        "details": {"file": file, "offset": offset, "seq": seq},
    }
