"""Making logs durable: from a host's write controller to bytes on a disk that survive its crash. No Ray in here.

The seam (``seam.py``) says what every backend promises; ``tests/conformance/store_contract.py`` holds one to it.

- at a host: ``write_controller`` and ``sender`` cut, retain and send batches; ``wire`` is the call;
- in the store process: ``persistence`` (lazy opening, bounded queue) around ``jsonl``, which joins ``claims`` over
  ``owners`` (which process may write a session), ``stream_table`` over ``stream_log`` (one stream's grant and bytes),
  ``commit`` (group commit), ``documents``, ``blobs``, ``removal``, ``identity``;
- the format: ``framing``, the seam of two encodings (``plain_framing`` over ``batch_rows``, ``zstd_framing`` over
  ``zstd_frames``); ``log_scan`` (the Tail rule), ``log_read`` (pages), ``log_files`` (creation and repair),
  ``recovery`` (first touch), ``forking``, ``survey`` over ``turns``, ``surviving`` and ``verify``;
- the other backend: ``sqlite``, a package of its own; ``backend`` and ``reader`` choose by name, and ``sessions_held``,
  ``named_locks``, ``admission``, ``refusals``, ``stream_table`` are what both share;
- sessions that nobody sees before they are whole: ``publications`` over ``unpublished`` (the markers); a backend makes
  and deletes them (``session_files``, ``sqlite.session_rows``);
- over all documents: ``session_index``, a cache that is made anew when it is lost (its file, its queue and when to
  believe it are in modules beside it), and ``workspace_registry``;
- for readers: ``open.open_store``, and ``session_index_reader`` for the index;
- under all of it: ``fs``, through which every file of the plain store is touched, and ``faults``, which breaks them for
  tests. Databases, and the index with its marks, are files that SQLite or the kernel's locks need as they are.

What may enter: code that makes events durable or reads them back. It treats an event as bytes.
"""

from kimi_ray.store.backend import open_store_for_writing
from kimi_ray.store.fs import Fs, RealFs
from kimi_ray.store.jsonl import JsonlStore
from kimi_ray.store.open import ReadStore, open_store
from kimi_ray.store.persistence import PersistenceService
from kimi_ray.store.seam import (
    AppendResult,
    Batch,
    Document,
    ListedLog,
    LogSnapshot,
    LogView,
    Page,
    SessionGrant,
    Store,
    StoreIdentity,
    StoreOptions,
    Stream,
    SurvivingPage,
    SweepReport,
    VerifyReport,
    WriterGrant,
)
from kimi_ray.store.wire import AppendCall, pack_call, unpack_call

__all__ = [
    "AppendCall",
    "AppendResult",
    "Batch",
    "Document",
    "Fs",
    "JsonlStore",
    "ListedLog",
    "LogSnapshot",
    "LogView",
    "Page",
    "PersistenceService",
    "ReadStore",
    "RealFs",
    "SessionGrant",
    "Store",
    "StoreIdentity",
    "StoreOptions",
    "Stream",
    "SurvivingPage",
    "SweepReport",
    "VerifyReport",
    "WriterGrant",
    "open_store",
    "open_store_for_writing",
    "pack_call",
    "unpack_call",
]
