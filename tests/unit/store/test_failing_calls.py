"""Any file call may fail at any time: what comes out of the store is a ``StoreError``, and soon."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store import StoreOptions, Stream
from kimi_ray.store.faults import FaultyFs, Rule
from kimi_ray.store.jsonl import JsonlStore
from kimi_ray.store.persistence import PersistenceService
from kimi_ray.store.seam import AppendResult
from tests.conformance.store_contract import MAIN, header, notes

OPERATIONS = (
    "open", "create", "pread", "pwrite", "truncate", "fsync", "fdatasync", "sync_dir", "rename", "link", "unlink",
    "mkdir", "rmdir", "listdir", "stat", "fstat", "flock",
)  # fmt: skip
OPTIONS = StoreOptions(claim_timeout_s=0.2)


async def use(home: Path, fs: FaultyFs) -> list[KimiRayError]:
    """Everything that a store can be asked, each whether or not the one before it worked."""
    errors: list[KimiRayError] = []

    async def ask(work: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await work()
        except KimiRayError as error:
            errors.append(error)
            return None

    store: JsonlStore | None = await ask(lambda: JsonlStore.open(str(home), OPTIONS, fs=fs))
    if store is None:
        return errors
    grant = await ask(lambda: store.open_session("s1", "n", workspace_id="wd_x_0123"))
    await ask(lambda: store.open_writer(header(), "w"))
    for first in (0, 2):
        results: list[AppendResult] | None = await ask(
            lambda first=first: store.append([notes(first, first + 2)], sync=True)
        )
        errors.extend(KimiRayError.from_data(result.error) for result in results or [] if result.error is not None)
    blob = f"sha256:{'0' * 64}"
    await ask(lambda: store.put_blobs({blob: b"x"}))
    await ask(lambda: store.has_blob(blob))
    await ask(lambda: store.read_blob(blob))
    if grant is not None:
        await ask(lambda: store.write_document("s1", {"a": 1}, grant=grant.grant, nonce="n", revision=grant.revision))
    await ask(lambda: store.read_document("s1"))
    await ask(lambda: store.verify(MAIN))
    await ask(lambda: store.read_from(MAIN, 0))
    await ask(lambda: store.inspect(MAIN))
    await ask(lambda: store.load(MAIN))
    await ask(store.list_documents)
    await ask(lambda: store.list_logs())
    await ask(lambda: store.locate(MAIN))
    await ask(lambda: store.read_raw(MAIN))
    await ask(lambda: store.fork(MAIN, 2, header(Stream("s1", "agent-1")), "f"))
    await ask(lambda: store.close_writer(MAIN, 1, "w"))
    await ask(lambda: store.close_session("s1", "n"))
    await ask(lambda: store.remove("s1"))
    await ask(store.close)
    return errors


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_failing_call_is_a_store_error_wherever_it_fails(tmp_path: Path, operation: str) -> None:
    for skip in (0, 1, 2, 3, 5, 8, 13, 21):
        home = tmp_path / str(skip)
        fs = FaultyFs(rules=[Rule(operation, errno.EIO, skip, 0)])
        for error in await asyncio.wait_for(use(home, fs), 30):
            assert error.code.startswith(("store.", "session.")), (skip, error)
            assert error.code == "store.corrupt" or isinstance(error, StoreError)


@pytest.mark.parametrize("operation", ["pread", "listdir", "flock", "pwrite"])
async def test_a_home_that_cannot_be_opened_says_so_at_once(tmp_path: Path, operation: str) -> None:
    fs = FaultyFs(rules=[Rule(operation, errno.EIO, 0, 0)])
    service = PersistenceService(str(tmp_path), OPTIONS, queue_bytes=1 << 20, fs=fs)
    began = time.monotonic()
    with pytest.raises(StoreError) as failed:
        await service.open_session("s1", "n", "wd_x_0123")
    assert failed.value.code in ("store.io_failed", "store.home_not_writable")
    assert time.monotonic() - began < 5
    await service.close()


async def test_too_many_open_files_are_not_called_a_bad_disk(tmp_path: Path) -> None:
    fs = FaultyFs(rules=[Rule("open", errno.EMFILE, 8, 0)])
    errors = await use(tmp_path, fs)
    told = [error for error in errors if error.code == "store.io_failed"]
    assert told and all("ulimit" in (error.hint or "") for error in told)
