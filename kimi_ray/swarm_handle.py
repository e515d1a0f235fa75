"""A swarm that runs, as its driver holds it: rows in order of completion, the report in order of input."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_ray.errors import KimiRayError, RunError, as_error, error_from_data
from kimi_ray.hosts.ports import is_lost
from kimi_ray.hosts.swarm_words import CancelMode, KeyEnd, Rollout, RowPage, SwarmKey, SwarmProgress, SwarmSpec
from kimi_ray.ids import new_ulid
from kimi_ray.llm.models import ResolvedModel
from kimi_ray.runs.items import RolloutKey
from kimi_ray.runs.plan import RunPlan
from kimi_ray.runs.report import SwarmReport
from kimi_ray.runs.rows import AttemptRow, ResultRow
from kimi_ray.session_link import SessionLink
from kimi_ray.settings import Isolation, Profile

Sink = Callable[[list[ResultRow], list[AttemptRow]], Awaitable[None]]
"""Keeps rows and attempts somewhere durable, before anybody is told of them."""

PICTURE_S = 0.5
"""How old a picture of ``progress`` may be while somebody asks, seconds."""

_FORGOTTEN_S = 5.0
_PAGE = 2000
_READ_S = 10.0
_CALL_S = 60.0
_FEED_S = 24 * 3600.0
_CHUNK = 500
_CHUNK_CHARS = 4 << 20
_RESTARTS = 5
_ELSEWHERE = ("swarm.not_found", "session.fenced")


@dataclass(frozen=True, slots=True)
class SwarmAgent:
    """What all rollouts of a swarm have in common, resolved."""

    profile: Profile
    model: ResolvedModel
    isolation: Isolation | None = None
    node_id: str | None = None
    cwd: str | None = None
    price_date: str | None = None
    denied_paths: tuple[str, ...] = ()
    parent: str = "main"
    """The agent to which the swarm belongs."""


class SwarmHandle:
    """A running swarm.

    Iterate over it for rows in order of completion, ``await result()`` for the report. Cancelling an await on it
    cancels the swarm (what ran by then is in the rows of its run directory and in the logs).
    """

    def __init__(
        self,
        link: SessionLink,
        plan: RunPlan,
        agent: SwarmAgent,
        *,
        sink: Sink | None = None,
        run_dir: str | None = None,
        on_end: Callable[[], Awaitable[None]] | None = None,
        wake_parent: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        """Use ``session.start_swarm``."""
        self._wake_parent = wake_parent
        self._link = link
        self._plan = plan
        self._key = SwarmKey(link.id, plan.run_id, new_ulid())
        self._agent = agent
        self._sink = sink
        self._run_dir = run_dir
        self._on_end = on_end
        self._items = plan.by_id()
        self._rows: list[ResultRow] = []
        self._attempts: dict[RolloutKey, list[AttemptRow]] = {}
        self._left = dict.fromkeys(plan.again)
        self._news = asyncio.Event()
        self._failure: BaseException | None = None
        self._feed_error: KimiRayError | None = None
        self._cancelled: tuple[float, CancelMode] | None = None
        self._ended = False
        self._last_progress: SwarmProgress | None = None
        self._picture = SwarmProgress(total=len(plan.keys), queued=len(plan.again))
        self._watching: asyncio.Task[None] | None = None
        self._asked_at = 0.0
        self._report: SwarmReport | None = None
        self._began = time.monotonic()
        self._wall_s = 0.0
        self._main: asyncio.Task[None] | None = None

    @property
    def run_id(self) -> str:
        """The run's id: in the header of every log of it."""
        return self._plan.run_id

    @property
    def run_dir(self) -> str | None:
        """The run directory, if there is one."""
        return self._run_dir

    @property
    def done(self) -> bool:
        """Whether all rows are there."""
        return self._ended

    @property
    def asked(self) -> int:
        """How many rollouts this command runs (a resume leaves out what is finished)."""
        return len(self._plan.again)

    async def start(self) -> None:
        """Begin. Called once, by ``session.start_swarm``.

        Raises:
            KimiRayError: what the session host refused.
        """
        await self._begin(())
        self._main = self._link.courier.spawn(self._follow())

    def __aiter__(self) -> AsyncIterator[ResultRow]:
        """Rows in order of completion, from the first one on; several loops over one handle are fine."""
        return self._iterate()

    async def result(self, timeout_s: float | None = None) -> SwarmReport:
        """Wait for the end; all rows in the order of the items.

        Args:
            timeout_s: Seconds; at their end the swarm is cancelled and ``swarm.timeout`` raised.

        Raises:
            RunError: ``swarm.incomplete``, ``swarm.timeout``; ``run.write_failed`` of the run directory.
            KimiRayError: why the swarm as a whole cannot go on (never a failing rollout).
        """
        main = self._started()
        try:
            done, _ = await asyncio.wait({main}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._link.courier.afterwards(self.cancel())
            raise
        if not done:
            await self.cancel()
            raise RunError(
                f"swarm {self.run_id} did not end within {timeout_s:g} s and was cancelled", code="swarm.timeout"
            )
        self._raise_failure()
        if self._report is None:
            self._report = SwarmReport.of(
                self._plan.keys,
                [*self._plan.kept, *self._rows],
                run_id=self.run_id,
                session_id=self._link.id,
                wall_s=round(self._wall_s, 3),
                run_dir=self._run_dir,
            )
        return self._report

    def progress(self) -> SwarmProgress:
        """Where it stands, or stood at its end: the newest picture this driver has.

        Asking costs nothing; while somebody asks, a new picture is fetched every ``PICTURE_S``. See ``refresh`` for
        one of this moment.
        """
        if self._last_progress is not None:
            return self._last_progress
        self._asked_at = time.monotonic()
        if not self._ended and (self._watching is None or self._watching.done()):
            self._watching = self._link.courier.spawn(self._watch())
        return self._picture

    async def refresh(self) -> SwarmProgress:
        """Where it stands at this moment: a call to the session's host.

        Raises:
            KimiRayError: the host could not be asked (``infra.*``, ``swarm.not_found`` while it is being replaced).
        """
        if self._last_progress is None:
            self._picture = await self._link.call("swarm_progress", self._key, group="control", timeout_s=_CALL_S)
        return self._last_progress or self._picture

    async def _watch(self) -> None:
        while not self._ended and time.monotonic() - self._asked_at < _FORGOTTEN_S:
            try:
                await self.refresh()
            except KimiRayError as error:
                if not is_lost(error.code) and error.code != "swarm.not_found":
                    return
            await asyncio.sleep(PICTURE_S)

    async def cancel(self, grace_s: float = 5.0, *, mode: CancelMode = "cancel") -> None:
        """Stop it; returns when that is under way, the rows follow.

        Args:
            grace_s: Seconds that running rollouts have to say how they ended (with their text so far).
            mode: ``cancel`` ends what runs, ``drain`` lets it go to its end; nothing new starts in both.
        """
        self._cancelled = (grace_s, mode)
        if not self.done:
            try:
                await self._link.call("cancel_swarm", self._key, grace_s, mode, group="control", timeout_s=_CALL_S)
            except RunError as error:
                if error.code not in ("swarm.not_found", "swarm.taken_over"):
                    raise

    async def _iterate(self) -> AsyncIterator[ResultRow]:
        self._started()
        number = 0
        while True:
            while number < len(self._rows):
                yield self._rows[number]
                number += 1
            if self._ended:
                self._raise_failure()
                return
            news = self._news
            try:
                await news.wait()
            except asyncio.CancelledError:
                self._link.courier.afterwards(self.cancel())
                raise

    def _started(self) -> asyncio.Task[None]:
        if self._main is None:
            raise RunError("the swarm was not started", code="swarm.not_started", hint="use session.start_swarm")
        return self._main

    # -- the course -------------------------------------------------------------------------------------------------

    async def _begin(self, done: Sequence[RolloutKey]) -> None:
        plan, agent = self._plan, self._agent
        for key in done:
            self._left.pop(key, None)
        before = dict(plan.attempts_before)
        for key, attempts in self._attempts.items():
            before[key] = max(before.get(key, 0), attempts[-1].attempt)
        spec = SwarmSpec(
            session_id=self._link.id,
            run_id=plan.run_id,
            keys=tuple(self._left),
            profile=agent.profile,
            model=agent.model,
            seed=plan.seed,
            max_concurrency=plan.max_concurrency,
            retries=plan.retries,
            retry_on=plan.retry_on,
            fail_on=plan.fail_on,
            total_limits=plan.total_limits,
            attempts_before=before,
            on_interrupted=plan.on_interrupted,
            isolation=agent.isolation,
            node_id=agent.node_id,
            cwd=agent.cwd,
            user_tools=plan.user_tools,
            rollout=plan.rollout,
            output_schema=plan.output_schema,
            denied_paths=agent.denied_paths,
            keep_workdirs=plan.keep_workdirs,
            price_date=agent.price_date,
            parent=agent.parent,
            command=self._key.command,
        )
        if self._wake_parent is not None:
            await self._wake_parent()
        await self._link.call("start_swarm", spec)

    async def _follow(self) -> None:
        """Feed and read until every key has its row. The session host may be lost on the way."""
        failure: BaseException | None = None
        try:
            for attempt in range(_RESTARTS + 1):
                feeder = self._link.courier.spawn(self._feed(tuple(self._left)))
                try:
                    await self._read()
                    break
                except KimiRayError as error:
                    if error.code not in _ELSEWHERE or attempt == _RESTARTS:
                        raise
                    # The session lives on another host now; what has no row there begins again.
                    await self._begin([row.key for row in self._rows])
                    if self._cancelled is not None:
                        await self.cancel(*self._cancelled[:1], mode=self._cancelled[1])
                finally:
                    feeder.cancel()
                    await asyncio.gather(feeder, return_exceptions=True)
            self._last_progress = await self.refresh()
            await self._link.call("forget_swarm", self._key, group="control", timeout_s=_CALL_S)
        except asyncio.CancelledError as error:
            failure = error
            raise
        except Exception as error:  # noqa: BLE001  told by `result`
            failure = as_error(error)
            # A full disk under the run directory, say: what cannot be kept must not go on costing money.
            self._link.courier.afterwards(self.cancel(0.0))
        finally:
            self._wall_s = time.monotonic() - self._began
            try:
                if self._on_end is not None:
                    await self._on_end()
            finally:
                self._failure = failure
                self._ended = True
                self._tell()

    async def _feed(self, keys: Sequence[RolloutKey]) -> None:
        try:
            await self._feed_all(keys)
        except KimiRayError as error:
            if error.code in (*_ELSEWHERE, "session.closed", "swarm.taken_over"):
                # The reader hears the same and knows what to do.
                return
            await self._stop_for(error)
        except Exception as error:  # noqa: BLE001  whatever breaks here, nobody else tells of it
            await self._stop_for(as_error(error))

    async def _stop_for(self, error: KimiRayError) -> None:
        """No more rollouts come (a prompt function failed half way): what runs is stopped, and the user hears why."""
        self._feed_error = error
        await self.cancel(0.0)

    async def _feed_all(self, keys: Sequence[RolloutKey]) -> None:
        chunk: list[Rollout] = []
        chars = 0
        for rollout in self._plan.rollouts(keys, self._agent.cwd):
            chunk.append(rollout)
            chars += len(rollout.prompt)
            if len(chunk) >= _CHUNK or chars >= _CHUNK_CHARS:
                await self._send(chunk)
                chunk, chars = [], 0
        if chunk:
            await self._send(chunk)

    async def _send(self, chunk: list[Rollout]) -> None:
        await self._link.call("feed_swarm", self._key, chunk, group="wait", timeout_s=_FEED_S)

    async def _read(self) -> None:
        cursor = 0
        while True:
            page: RowPage = await self._link.call(
                "read_rows", self._key, cursor, _PAGE, _READ_S, group="wait", timeout_s=_READ_S + 10.0
            )
            cursor = page.next_cursor
            await self._take(page)
            if page.done:
                if self._feed_error is not None:
                    raise self._feed_error
                if page.error is not None:
                    raise error_from_data(page.error)
                return

    async def _take(self, page: RowPage) -> None:
        attempts: list[AttemptRow] = []
        rows: list[ResultRow] = []
        for entry in page.entries:
            if isinstance(entry, KeyEnd):
                rows.append(self._row(entry))
            else:
                attempts.append(entry)
                self._attempts.setdefault(entry.key, []).append(entry)
        if self._sink is not None and (rows or attempts):
            await self._sink(rows, attempts)
        if rows:
            self._rows.extend(rows)
            self._tell()

    def _row(self, end: KeyEnd) -> ResultRow:
        item = self._items[end.key.item_id]
        attempts = tuple(self._attempts.pop(end.key, ()))
        shared: dict[str, Any] = {
            "item": item.item.data,
            "tags": self._plan.tags_of(item),
            "metadata": self._plan.settings.metadata,
        }
        if attempts and end.stop is None:
            return ResultRow.of_attempts(attempts, **shared)
        return ResultRow.not_started(
            run_id=self.run_id,
            key=end.key,
            index=item.index,
            stop=end.stop or "cancelled",
            attempts=attempts,
            **shared,
        )

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _raise_failure(self) -> None:
        if isinstance(self._failure, KimiRayError):
            raise self._failure
        if self._failure is not None:
            raise RunError(
                f"swarm {self.run_id} was left before its end", code="swarm.abandoned", hint="the runtime was closed"
            )
