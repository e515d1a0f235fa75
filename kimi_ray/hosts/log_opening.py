"""Opening logs for writing: grants, stored events, write controllers; and giving the grants back.

Calls are coalesced: all logs that are opened (or closed) in one pass of the event loop travel in one call a shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

from kimi_ray.agent.fold import FOLLOWED, AgentFold, living_fold
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError, LogError, error_from_data
from kimi_ray.events import CORE, Catalog, parse_header
from kimi_ray.hosts.agent_services import OpenedLog
from kimi_ray.hosts.coalescing import Coalesced
from kimi_ray.hosts.ports import Cluster, store_name
from kimi_ray.hosts.prepared_logs import Preparation, PreparedLogs
from kimi_ray.hosts.steady_calls import StoreCalls
from kimi_ray.log import EventLog
from kimi_ray.store.host_budget import HostBudget
from kimi_ray.store.seam import AppendResult, Batch, Page, Stream, WriterGrant
from kimi_ray.store.sender import Sender
from kimi_ray.store.sharding import shard_of
from kimi_ray.store.wire import pack_call
from kimi_ray.store.write_controller import WriteController
from kimi_ray.store.writer_settings import WriterSettings

PAGE_EVENTS = 8_000
PAGE_BYTES = 2 << 20
"""Of a log that is brought into memory: two pages are, at a time."""
_SLICE_EVENTS = 500
"""So many events are read back before the others on the loop have their turn."""


class LogOpener:
    """Opens and closes the logs of one host.

    Args:
        cluster: Where the store lives.
        store: Calls to it.
        config: Bounds and time-outs.
        catalog: The event types that logs may have.
    """

    def __init__(self, cluster: Cluster, store: StoreCalls, config: RuntimeConfig, catalog: Catalog = CORE) -> None:
        self._catalog = catalog
        self._cluster = cluster
        self._store = store
        self._config = config
        self._settings = WriterSettings(
            write_window_ms=config.write_window_ms,
            sync_interval_ms=config.sync_interval_ms,
            store_timeout_s=config.store_timeout_s,
            close_timeout_s=config.close_timeout_s,
            log_max_bytes=config.log_bytes,
            host_max_bytes=config.host_bytes,
            batch_max_bytes=config.batch_bytes,
            call_max_bytes=config.call_bytes,
        )
        self._budget = HostBudget(config.host_bytes)
        self._senders: dict[int, Sender] = {}
        self._open: dict[Stream, OpenedLog] = {}
        self._prepared = PreparedLogs(self._restore)
        self._grants = Coalesced(store.open_writers)
        self._returns = Coalesced(store.close_writers)

    def stats(self) -> dict[str, Any]:
        """Counters over all senders."""
        total: dict[str, Any] = {"retained_bytes": self._budget.retained, "open_logs": len(self._open)}
        for sender in self._senders.values():
            for key in ("calls", "batches", "calls_lost"):
                total[key] = total.get(key, 0) + sender.stats()[key]
        return total

    async def open(self, spec: AgentSpec, on_fenced: Callable[[KimiRayError], None]) -> OpenedLog:
        """Take the grant and bring the log into memory.

        A header for a log that exists already (an activation sent twice, or after a crash) opens that log, if it is
        the log of the same agent with the same question. A stored log refuses events until ``publish``.

        Raises:
            KimiRayError: ``store.*``, ``session.in_use``, ``session.fenced``, ``log.*``.
        """
        stream = Stream(*spec.stream)
        shard = shard_of(stream.session_id, self._config.shards)
        is_new = spec.header is not None
        try:
            grant = await self._grant(shard, spec.header if spec.header is not None else stream, spec)
        except KimiRayError as error:
            if spec.header is None or error.code != "store.exists":
                raise
            if not _is_same((await self._store.inspect(stream)).header, spec.header):
                raise
            grant = await self._grant(shard, stream, spec)
            is_new = False
        if is_new and grant.next_seq > 0:
            is_new = False
        preparation: Preparation | None = None
        if is_new:
            fold, log = living_fold(), self._new_log(spec.header)
        else:
            try:
                preparation = await self._prepared.prepare(stream, grant)
            except BaseException:
                # Nobody will write under this grant: the log is as cold as it was.
                await asyncio.shield(self._return_unused(shard, stream, grant, spec.nonce))
                raise
            log, fold = preparation.log, preparation.fold
        controller = WriteController(
            stream,
            epoch=grant.epoch,
            nonce=spec.nonce,
            first_seq=grant.next_seq,
            sender=self._sender(shard),
            settings=self._settings,
            on_fenced=on_fenced,
        )
        log.observe(controller.enqueue)
        opened = OpenedLog(log, fold, controller, grant.epoch, is_new, preparation)
        self._open[stream] = opened
        return opened

    def publish(self, stream: Stream) -> None:
        """The agent of an opened log is there: its events may come."""
        opened = self._open.get(stream)
        if opened is not None and opened.preparation is not None:
            self._prepared.publish(opened.preparation)

    def nonce_of(self, stream: Stream) -> str | None:
        """The nonce under which a log is open here, or None."""
        opened = self._open.get(stream)
        return None if opened is None else opened.controller.nonce

    async def confirm(self, stream: Stream, claim: str) -> bool:
        """Whether nobody else was granted a log that is open here, asked on behalf of a session's claim.

        Raises:
            KimiRayError: ``session.fenced`` when another claim is in force; why the store cannot be asked.
        """
        opened = self._open.get(stream)
        if opened is None:
            return False
        shard = shard_of(stream.session_id, self._config.shards)
        # Granted to this nonce already, so nothing changes but that the claim is looked at.
        answer = await self._grants.add(shard, (stream, opened.controller.nonce, claim))
        if isinstance(answer, dict):
            raise error_from_data(cast("dict[str, Any]", answer))
        return answer.epoch == opened.epoch

    def end(self, stream: Stream) -> None:
        """The agent's work is done for good."""
        opened = self._open.get(stream)
        if opened is not None:
            opened.ended = True

    async def give_back(self, stream: Stream, *, force: bool) -> None:
        """Make the log durable, detach its controller, close the grant.

        Raises:
            StoreError: the log is not durable (it stays open); with ``force`` what is left is discarded.
        """
        opened = self._open.get(stream)
        if opened is None:
            return
        controller = opened.controller
        fenced = controller.state in ("fenced", "failed")
        await controller.close(0.0 if force else None, force=force or fenced)
        opened.log.detach()
        self._open.pop(stream, None)
        stored = not fenced and controller.durable_seq == opened.log.next_seq
        try:
            if not fenced and opened.log.next_seq > 0:
                stored = await self._close_grant(opened, force=force) and stored
        except BaseException:
            stored = False
            raise
        finally:
            self._put_by(opened, stored=stored)

    async def _return_unused(self, shard: int, stream: Stream, grant: WriterGrant, nonce: str) -> None:
        try:
            await self._returns.add(shard, (stream, grant.epoch, nonce))
        except KimiRayError:
            pass  # why the log could not be opened is what the caller hears

    async def _close_grant(self, opened: OpenedLog, *, force: bool) -> bool:
        controller = opened.controller
        shard = shard_of(controller.stream.session_id, self._config.shards)
        failed = await self._returns.add(shard, (controller.stream, opened.epoch, controller.nonce))
        if failed is None:
            return True
        error = error_from_data(cast("dict[str, Any]", failed))
        if not force and error.code != "store.fenced":
            raise error
        return False

    def _put_by(self, opened: OpenedLog, *, stored: bool) -> None:
        """A log without its agent waits for the next one, if the store has all of it and the grant was given back.

        One whose agent's work is done for good does not: nobody is likely to come, and a swarm leaves thousands.
        """
        preparation = opened.preparation
        if preparation is not None and not preparation.settled.done():
            self._prepared.rollback(preparation, closed=stored)
        elif stored and opened.log.next_seq > 0 and not opened.ended:
            self._prepared.keep(opened.controller.stream, opened.log, opened.fold, opened.epoch)

    async def close(self) -> None:
        """Stop the senders; what is not durable was named by ``give_back``."""
        for sender in self._senders.values():
            await sender.close(0.0, force=True)

    async def _grant(self, shard: int, target: dict[str, Any] | Stream, spec: AgentSpec) -> WriterGrant:
        answer = await self._grants.add(shard, (target, spec.nonce, spec.claim))
        if isinstance(answer, dict):
            raise error_from_data(cast("dict[str, Any]", answer))
        return answer

    async def _restore(self, stream: Stream, grant: WriterGrant) -> tuple[EventLog, AgentFold]:
        header = grant.header if grant.header is not None else (await self._store.inspect(stream)).header
        log = self._new_log(header)
        fold = living_fold(header.get("bind"))
        try:
            async with aclosing(self._pages(stream, grant.next_seq)) as pages:
                async for lines in pages:
                    for start in range(0, len(lines), _SLICE_EVENTS):
                        log.read_back(lines[start : start + _SLICE_EVENTS], follow=fold.apply, types=FOLLOWED)
                        await asyncio.sleep(0)
        except LogError as error:
            raise await self._with_path(stream, error) from error
        return log, fold

    def _new_log(self, header: dict[str, Any] | None) -> EventLog:
        return EventLog(parse_header(header), catalog=self._catalog, max_event_bytes=self._config.max_event_bytes)

    async def _pages(self, stream: Stream, end: int) -> AsyncGenerator[tuple[bytes, ...]]:
        """The stored lines below ``end``, in pages; while one is read back the store fetches the next."""

        def fetch(seq: int) -> asyncio.Task[Page]:
            return asyncio.create_task(self._store.read_from(stream, seq, min(PAGE_EVENTS, end - seq), PAGE_BYTES))

        seq = 0
        ahead = fetch(seq) if end else None
        try:
            while ahead is not None:
                lines = (await ahead).lines
                if not lines:
                    raise KimiRayError(f"{stream} has no event {seq}", code="store.corrupt", details={"seq": seq})
                seq += len(lines)
                ahead = fetch(seq) if seq < end else None
                yield lines
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _with_path(self, stream: Stream, error: LogError) -> LogError:
        """The same error naming the file, where the store keeps one for a log."""
        path = await self._store.locate(stream)
        if path is None:
            return error
        return LogError(
            f"{error} (in {path})", code=error.code, hint=error.hint, details={**error.details, "path": path}
        )

    def _sender(self, shard: int) -> Sender:
        sender = self._senders.get(shard)
        if sender is None:
            peer = self._cluster.peer(store_name(self._cluster.home_id, shard))
            timeout_s = self._settings.call_timeout_s

            async def transport(batches: list[Batch], sync: bool) -> list[AppendResult]:
                return await peer.call("append", pack_call(batches, sync=sync), timeout_s=timeout_s, group="store")

            async def transport_blobs(blobs: Any) -> None:
                await peer.call("put_blobs", dict(blobs), timeout_s=timeout_s, group="store")

            sender = self._senders[shard] = Sender(
                transport, transport_blobs, settings=self._settings, budget=self._budget
            )
        return sender


def _is_same(stored: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Whether two headers are of one log: they may differ in when and by which program they were made."""
    passing = ("created_at", "writer")
    one, other = (parse_header(header).to_data() for header in (stored, asked))
    return all(one.get(key) == other.get(key) for key in {*one, *other}.difference(passing))
