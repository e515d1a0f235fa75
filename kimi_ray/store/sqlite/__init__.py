"""The SQLite backend: the same promises as JSONL, in one database a shard.

- what is stored: ``schema`` (tables and checksums), ``catalogue`` (sessions and logs by name), ``granting``,
  ``appending``, ``paging`` (rows back into events), ``listing``, ``leftovers`` (deleting);
- how: ``database_file`` (the file), ``connections`` (the writer and its readers), ``transactions`` (group commit),
  ``beside`` (reading what another process writes), ``wal_check``, ``failures`` (errors in the store's codes);
- together: ``shard``, ``reader``, ``verifying``, ``surviving``, ``forking``, ``store``.

What may enter: what knows SQL. Claims, blobs, the admission of batches and everything about events are shared with the
other backend and lie outside.
"""

from kimi_ray.store.sqlite.reader import SqliteReader, sqlite_reader
from kimi_ray.store.sqlite.store import SqliteStore

__all__ = ["SqliteReader", "SqliteStore", "sqlite_reader"]
