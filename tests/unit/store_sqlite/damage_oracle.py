"""A small home, and what may be said about it after its bytes were damaged: the truth, or an error; never less."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_ray.errors import KimiRayError
from kimi_ray.store.fs import RealFs
from kimi_ray.store.identity import require_identity
from kimi_ray.store.seam import Batch, Stream
from kimi_ray.store.sqlite import SqliteReader, sqlite_reader
from tests.conformance.store_contract import chunk_events, header, line, notes, ok
from tests.unit.store_sqlite.sqlite_home import SqliteHome

REFUSALS = {
    "store.corrupt",
    "store.foreign_database",
    "store.format_unsupported",
    "store.wrong_home",
    "store.permission_denied",
    "store.not_found",
}
STREAMS = [Stream("s1", "main"), Stream("s1", "agent-1"), Stream("s2", "main")]
DOCUMENT = {"title": "a title", "n": [1, 2, 3]}


@dataclass
class Written:
    """What was acknowledged."""

    home: SqliteHome
    lines: dict[Stream, list[bytes]] = field(default_factory=dict)
    said: Counter[str] = field(default_factory=Counter)

    def reader(self) -> SqliteReader:
        fs = RealFs()
        return sqlite_reader(fs, str(self.home.path), require_identity(fs, str(self.home.path)))

    def check(self, where: str) -> set[str]:
        """Compare everything that can be read; the codes of what was refused."""
        reader = self.reader()
        codes: set[str] = set()

        def ask(work: Any) -> Any:
            try:
                return work()
            except KimiRayError as error:
                assert error.code in REFUSALS, (where, error)
                if error.code == "store.corrupt":
                    assert {"file"} <= error.details.keys(), (where, error)
                codes.add(error.code)
                return None

        for stream, expected in self.lines.items():
            self._check_log(reader, stream, expected, ask, where, codes)
        listed = ask(lambda: reader.list_logs(None))
        if listed is not None:
            whole = {row.stream: row.header for row in listed if row.error is None}
            broken = [row for row in listed if row.error is not None]
            assert all(whole[stream] == header(stream) for stream in whole), where
            assert len(whole) + len(broken) >= len(self.lines), (where, listed)
            codes.update(row.error["code"] for row in broken)
        document = ask(lambda: reader.read_document("s1"))
        assert (document is None and codes) or document.value == DOCUMENT, where
        documents = ask(reader.list_documents)
        assert documents is None or [row.value for row in documents if row.revision != -1] in ([DOCUMENT], []), where
        assert documents is None or documents, where
        reader.close()
        self.said.update(codes or {"nothing"})
        return codes

    def _check_log(
        self, reader: SqliteReader, stream: Stream, expected: list[bytes], ask: Any, where: str, codes: set[str]
    ) -> None:
        seq = 0
        while seq < len(expected):
            page = ask(lambda seq=seq: reader.read_from(stream, seq, 500, 8 << 20))
            if page is None:
                break
            assert page.next_seq == len(expected), (where, stream, page.next_seq)
            assert page.lines, (where, stream)
            assert list(page.lines) == expected[seq : seq + len(page.lines)], (where, stream, seq)
            seq += len(page.lines)
        cursor: int | None = 0
        told, found = 0, 0
        while cursor is not None:
            page = ask(lambda cursor=cursor: reader.read_surviving(stream, cursor, 50))
            if page is None:
                return
            assert all(expected[at] == text for at, text in page.events), (where, stream)
            found += len(page.events)
            told += len(page.damage)
            codes.update(error["code"] for error in page.damage)
            assert page.cursor is None or page.cursor > cursor, where
            cursor = page.cursor
        assert found == len(expected) or told, (where, stream, found)
        report = ask(lambda: reader.verify(stream))
        assert report is None or report.ok is False or found == len(expected), (where, stream)


async def write_home(home: SqliteHome, *, in_log: bool) -> Written:
    """A killed home: what was acknowledged is in its database, or with ``in_log`` partly in the log of that."""
    from kimi_ray.store.chunk_rows import pack_rows

    store = await home.open()
    written = Written(home)
    grant = await store.open_session("s1", "n", workspace_id="wd_x_0123")
    await store.open_session("s2", "n", workspace_id="wd_x_0123")
    await store.write_document("s1", DOCUMENT, grant=grant.grant, nonce="n", revision=0)
    for stream in STREAMS:
        await store.open_writer(header(stream), "w")
        written.lines[stream] = []
    if in_log:
        store._shards[0].transactions._truncate()
    events = chunk_events(40)
    rows = pack_rows(events)
    packed = Batch(
        STREAMS[1], 1, "w", 0, b"".join(row for row, _ in rows),
        tuple(len(row) for row, _ in rows), tuple(count for _, count in rows),
    )  # fmt: skip
    ok(await store.append([packed], sync=True))
    written.lines[STREAMS[1]] = [event.line for event in events]
    for first in range(0, 60, 12):
        for stream in (STREAMS[0], STREAMS[2]):
            ok(await store.append([notes(first, first + 12, stream=stream)], sync=True))
            written.lines[stream].extend(line(seq, text=f"n{seq}") for seq in range(first, first + 12))
    if not in_log:
        store._shards[0].transactions._truncate()
        assert not Path(f"{home.database()}-wal").stat().st_size
    await home.kill(store)
    return written
