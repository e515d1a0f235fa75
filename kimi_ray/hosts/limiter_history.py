"""What the limiter did during a run, in the run's directory: the driver's part.

The registry keeps the newest changes of all limits; whoever writes a run directory asks for those of its model now and
then while rows come, and at the end. A model whose requests nobody counts costs no call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import Cluster, registry_name
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.runs.execute import RunSink
from kimi_ray.runs.rows import AttemptRow, ResultRow

COLLECT_S = 10.0
"""Between two questions while rows come."""
CALL_S = 10.0

_logger = logging.getLogger(__name__)


class LimiterHistory:
    """A run's sink that also keeps what the limiter did.

    Args:
        cluster: Where the registry is.
        model: The run's model.
        sink: The run's directory; closed with this.
    """

    def __init__(self, cluster: Cluster, model: ResolvedModel, sink: RunSink) -> None:
        self._cluster = cluster
        self._key = model.limiter_key()
        self._sink = sink
        self._cursor = 0
        self._asked = time.monotonic()
        self._summary: dict[str, Any] = {}

    async def begin(self) -> None:
        """What was before this run is not part of its history, but for the limit that it finds."""
        if self._key is not None:
            self._take(await self._changes())
            self._summary = {"first": last} if (last := self._summary.get("last")) is not None else {}

    async def write(self, rows: list[ResultRow], attempts: list[AttemptRow]) -> None:
        """``RunSink.write``."""
        await self._sink.write(rows, attempts)
        if self._key is not None and time.monotonic() - self._asked >= COLLECT_S:
            await self._collect()

    async def close(self) -> None:
        """The rest of the history, its summary in the manifest; then the sink is closed. Idempotent."""
        try:
            if self._key is not None:
                await self._collect()
                if self._summary:
                    await self._sink.amend({"limiter": self._summary})
                self._key = None
        except KimiRayError as error:
            # A run whose rows are all written does not fail for this.
            _logger.warning("%s: the limiter's history is not complete: %s", self._sink.path, error)
        finally:
            await self._sink.close()

    async def _collect(self) -> None:
        self._asked = time.monotonic()
        lines = self._take(await self._changes())
        if lines:
            await self._sink.write_limiter(lines)

    async def _changes(self) -> list[dict[str, Any]]:
        registry = self._cluster.peer(registry_name(self._cluster.home_id))
        try:
            self._cursor, changes = await registry.call(
                "limiter_changes", self._cursor, timeout_s=CALL_S, group="control"
            )
        except KimiRayError as error:
            _logger.warning("the limiter's history cannot be read now: %s", error)
            return []
        return changes

    def _take(self, changes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """The lines of this run's model; the summary follows them."""
        lines: list[dict[str, Any]] = []
        summary = self._summary
        for change in changes:
            if change["key"] != self._key:
                continue
            lines.append({name: value for name, value in change.items() if name != "key"})
            limit = change["limit"]
            summary.setdefault("first", limit)
            summary["last"] = limit
            summary["lowest"] = min(summary.get("lowest", limit), limit)
            summary["highest"] = max(summary.get("highest", limit), limit)
            summary["cuts"] = summary.get("cuts", 0) + (change["reason"] == "cut")
            summary["paused_s"] = round(summary.get("paused_s", 0.0) + change.get("pause_s", 0.0), 3)
        return lines
