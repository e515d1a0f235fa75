"""Mark and sweep of blobs: what no log refers to and nobody touched for the grace goes.

The mark reads bytes, not events: every ``sha256:<64 hex>`` that a log or a document names is kept, also in a damaged
log. A blob that a writer is about to refer to is young: storing it, or asking whether it is stored, makes it so.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic_core import to_json

from kimi_ray.errors import KimiRayError
from kimi_ray.store.blobs import Blobs
from kimi_ray.store.seam import Store, Stream, SweepReport

_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")
_PAGE_EVENTS = 2_000

Run = Callable[..., Awaitable[Any]]
"""Runs blocking work in a thread of the store."""


async def sweep_blobs(store: Store, blobs: Blobs, run: Run, *, grace_s: float, dry_run: bool) -> SweepReport:
    """See ``Store.sweep_blobs``."""
    began = time.time()
    named: set[str] = set()
    problems: list[dict[str, object]] = []
    logs = 0
    for row in await store.list_logs():
        try:
            problems.extend(await _mark(store, row.stream, named))
            logs += 1
        except KimiRayError as error:
            problems.append(error.to_data())
    for document in await store.list_documents():
        named.update(digest.decode() for digest in _DIGEST.findall(to_json(document.value)))
    swept = await run(blobs.sweep, named, began - grace_s, dry_run)
    return SweepReport(
        logs=logs,
        kept=swept.kept,
        young=swept.young,
        deleted=swept.deleted,
        deleted_bytes=swept.deleted_bytes,
        dry_run=dry_run,
        problems=tuple(problems),
    )


async def _mark(store: Store, stream: Stream, named: set[str]) -> list[dict[str, Any]]:
    damage: list[dict[str, Any]] = []
    cursor: int | None = 0
    while cursor is not None:
        page = await store.read_surviving(stream, cursor, _PAGE_EVENTS)
        damage.extend(page.damage)
        for _, line in page.events:
            if b"sha256:" in line:
                named.update(digest.decode() for digest in _DIGEST.findall(line))
        cursor = page.cursor
    return damage
