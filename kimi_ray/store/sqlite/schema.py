"""What a shard's database holds, and the checksums that guard it.

SQLite's own checks look at the structure of pages, not at their content: a bit that flips inside a row passes them. So
every row here carries a CRC-32 of its bytes and of what it is about (stream, seq, session ...), and the head of each
log says independently how many events it has.

A row of events has the rowid ``stream << 40 | seq``: the rows of a log lie together in seq order, and no second index
is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from zlib import crc32

from pydantic_core import to_json

APPLICATION_ID = 0x4B52_5331  # "KRS1"
FORMAT = 1
PAGE_SIZE = 4096
SEQ_BITS = 40
MAX_SEQ = 1 << SEQ_BITS
MAX_STREAM = 1 << (63 - SEQ_BITS)

_SCHEMA = """
CREATE TABLE store (
    one INTEGER PRIMARY KEY CHECK (one = 1), home_id TEXT NOT NULL, shard INTEGER NOT NULL, shards INTEGER NOT NULL,
    syncs INTEGER NOT NULL
) STRICT;
CREATE TABLE sessions (
    session_id TEXT NOT NULL COLLATE NOCASE PRIMARY KEY, workspace_id TEXT NOT NULL, removed INTEGER NOT NULL,
    revision INTEGER NOT NULL, document BLOB, crc INTEGER NOT NULL
) STRICT;
CREATE TABLE streams (
    id INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL, agent_id TEXT NOT NULL COLLATE NOCASE,
    incarnation TEXT NOT NULL, created_at INTEGER NOT NULL, header BLOB NOT NULL, crc INTEGER NOT NULL,
    UNIQUE (session_id, agent_id)
) STRICT;
CREATE TABLE heads (
    stream INTEGER PRIMARY KEY, next_seq INTEGER NOT NULL, epoch INTEGER NOT NULL, nonce TEXT NOT NULL,
    closed INTEGER NOT NULL, published INTEGER NOT NULL, copied_by TEXT NOT NULL, revision INTEGER NOT NULL,
    crc INTEGER NOT NULL
) STRICT;
CREATE TABLE grants (
    stream INTEGER NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, nonce TEXT NOT NULL, boot TEXT NOT NULL,
    mode TEXT NOT NULL, closed_seq INTEGER NOT NULL, crc INTEGER NOT NULL,
    PRIMARY KEY (stream, epoch)
) STRICT, WITHOUT ROWID;
CREATE TABLE rows (
    id INTEGER PRIMARY KEY, events INTEGER NOT NULL, crc INTEGER NOT NULL, data BLOB NOT NULL
) STRICT;
"""
TABLES = tuple(table.strip() for table in _SCHEMA.split(";") if table.strip())
"""The whole schema; that of an opened database must be spelled like this."""

_suffix = Struct("<qqq").pack


def row_id(stream: int, seq: int) -> int:
    """Where the row lies whose first event has this seq."""
    return stream << SEQ_BITS | seq


def row_crc(stream: int, seq: int, events: int, data: bytes) -> int:
    """The checksum of a row of events."""
    return crc32(_suffix(stream, seq, events), crc32(data))


def moved_crc(source: int, target: int) -> int:
    """What turns the checksum of a row of one stream into that of its copy in another, by exclusive or.

    CRC-32 is linear: two messages of one length that differ only in the stream have checksums that always differ alike.
    """
    return crc32(_suffix(source, 0, 0)) ^ crc32(_suffix(target, 0, 0))


def facts_crc(*facts: object) -> int:
    """The checksum of any other row, over its columns in order."""
    return crc32(to_json(facts))


@dataclass(frozen=True, slots=True)
class Head:
    """How far a log is, and who may write it.

    ``published``: the log exists for readers; before that it is a grant that waits for its first batch, or, with the
    writer that makes it in ``copied_by``, a fork in the making. ``revision`` counts every change.
    """

    stream: int
    next_seq: int
    epoch: int
    nonce: str
    closed: bool
    published: bool
    copied_by: str
    revision: int

    @property
    def crc(self) -> int:
        """The checksum that is stored with it."""
        return facts_crc(
            self.stream, self.next_seq, self.epoch, self.nonce, self.closed, self.published, self.copied_by,
            self.revision,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredGrant:
    """A grant in the history of a log. ``closed_seq`` is -1 while it was not given back."""

    stream: int
    epoch: int
    seq: int
    nonce: str
    boot: str
    mode: str
    closed_seq: int

    @property
    def crc(self) -> int:
        """The checksum that is stored with it."""
        return facts_crc(self.stream, self.epoch, self.seq, self.nonce, self.boot, self.mode, self.closed_seq)
