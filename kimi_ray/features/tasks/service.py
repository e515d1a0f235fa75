"""The background tasks of one agent: started, watched, stopped, and told of once when they end.

A task lives as long as its agent lives here. Its start and its end are in the agent's log, so that a later life knows
what there was: what still runs by the log and does not run here is lost. Its end is told to the model once: by a
notice, or as the answer of a tool that was asked about it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from kimi_ray.agent.background import TaskEnd, TaskWork
from kimi_ray.agent.inbox import Inbox
from kimi_ray.agent.journal import Journal
from kimi_ray.agent.notices import Notices
from kimi_ray.agent.slots import AgentAwake, AgentLeaving, AgentSlots, StepStarting, TaskChanged
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.agent.task_fold import TaskRecord, TaskStatus
from kimi_ray.cancelling import ends_this_task
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import AgentError, KimiRayError, ToolError, as_error
from kimi_ray.features.tasks.output import TAIL_BYTES, OutputRing
from kimi_ray.features.tasks.words import SHOWN_BYTES, notice, notification_id

GRACE_S = 5.0
"""A task that is asked to end has so long before it is killed."""
FORCE_S = GRACE_S + 5.0
"""After so long a task that will not end is left behind and counts as ended."""
FOLLOWING = ("TaskList", "TaskOutput", "TaskStop")
_LETTERS = "abcdefghijkmnopqrstuvwxyz"
_PREFIXES = {"process": "bash", "agent": "agent"}

_logger = logging.getLogger(__name__)


class _Job:
    """A task that runs here."""

    __slots__ = ("asked", "begun", "deadline", "end", "ended", "output", "task", "task_id", "watchers")

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.output = OutputRing()
        self.task: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.end: tuple[TaskStatus, str | None] | None = None
        """What ended it from outside: the status and why."""
        self.begun = asyncio.Event()
        self.asked = False
        """Its work was asked to end."""
        self.ended = asyncio.Event()
        self.watchers = 0
        """Tools that wait for its end: they tell the model, no notice does."""


class TaskService:
    """See ``kimi_ray.agent.background.BackgroundTasks``, which this is; the tools of this Feature ask for more.

    Args:
        journal: The agent's log.
        inbox: Where the notices go.
        slots: Whom to tell, and who says when the agent wakes and leaves.
        notices: Tells them.
        spec: The agent: its tools decide whether tasks are offered.
        config: ``max_background_tasks``.
    """

    def __init__(
        self,
        journal: Journal,
        inbox: Inbox,
        slots: AgentSlots,
        notices: Notices,
        spec: AgentSpec,
        config: RuntimeConfig,
    ) -> None:
        self._journal = journal
        self._inbox = inbox
        self._slots = slots
        self._notices = notices
        self._limit = config.max_background_tasks
        self._running: dict[str, _Job] = {}
        self._kept: dict[str, OutputRing] = {}
        """Output of ended tasks of this life."""
        self._kept_places = 0
        """Tasks that are about to start."""
        self._chores: set[asyncio.Task[Any]] = set()
        self._closed = False
        # the work of a rollout or a subagent is over with its prompt: nobody waits for what a later turn would say
        self._wakes = journal.log.header.run_id is None and journal.log.header.origin != "subagent"
        self._tools = spec.profile.tools
        self._lost = [record for record in self._records.values() if record.status == "running"]
        """What a life before this one left running."""
        self._tell_of_before()
        if self._lost:
            # nothing can be appended yet; a fork's first life is not told that it wakes, but its steps begin
            slots.awake.register("tasks", self._on_awake)
            slots.step.register("tasks", self._on_step)

    @property
    def offered(self) -> bool:
        """Whether the agent has the tools to follow tasks."""
        return all(any(fnmatchcase(tool, name) for name in self._tools) for tool in FOLLOWING)

    # -- starting and ending -----------------------------------------------------------------------------------------

    @contextmanager
    def room(self) -> Generator[None]:
        """See ``BackgroundTasks.room``; a place that is kept counts as a task.

        Raises:
            AgentError: ``task.limit_exceeded`` (retryable), ``agent.closed``.
        """
        self._check_room()
        self._kept_places += 1
        try:
            yield
        finally:
            self._kept_places -= 1

    def _check_room(self) -> None:
        if self._closed:
            raise AgentError("the agent is being closed", code="agent.closed")
        taken = len(self._running) + self._kept_places
        if taken >= self._limit:
            raise AgentError(
                f"the agent has {taken} of at most {self._limit} background tasks at once",
                code="task.limit_exceeded",
                hint="wait for one to end (WaitFor), or stop one (TaskStop)",
                details={"running": sorted(self._running), "limit": self._limit},
                retryable=True,
            )

    def start(
        self,
        kind: str,
        description: str,
        work: TaskWork,
        *,
        agent_id: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Begin a task; see ``BackgroundTasks.start``. A ``timeout_s`` of 0 is kept in the log and bounds nothing."""
        self.mend()
        self._check_room()
        self._leave_in_time()
        task_id = self._new_id(kind)
        data: dict[str, Any] = {"task_id": task_id, "kind": kind, "description": description}
        data |= {key: value for key, value in (("agent_id", agent_id), ("timeout_s", timeout_s)) if value is not None}
        self._journal.append("task/started", data)
        job = self._running[task_id] = _Job(task_id)
        loop = asyncio.get_running_loop()
        job.task = loop.create_task(self._run(job, work), name=f"task {task_id}")
        if timeout_s:
            job.deadline = loop.call_later(timeout_s, self._on_deadline, job, timeout_s)
        self._tell(self._records[task_id])
        return task_id

    async def stop(self, task_id: str, reason: str | None = None, *, by: str | None = None) -> TaskRecord:
        """Stop a task: it is asked to end, has ``GRACE_S`` seconds, and is killed then. One that has ended stays so.

        Args:
            task_id: Which.
            reason: Why, for the log.
            by: The tool that answers with its end: no notice follows.

        Raises:
            ToolError: ``task.not_found``.
        """
        record = self.get(task_id)
        job = self._running.get(task_id)
        if job is not None:
            job.watchers += by is not None
            answered = by is None
            try:
                await self._end(job, "killed", reason or "stopped on request")
                answered = True
            finally:
                job.watchers -= by is not None
                if not answered and job.ended.is_set():
                    self._notify(record)  # nobody hears this answer
        if by is not None:
            self.report(task_id, by)
        return record

    async def close(self, reason: str = "the agent was closed") -> None:
        """Stop all; nothing starts any more. Idempotent."""
        self._closed = True
        jobs = list(self._running.values())
        if jobs:
            await asyncio.gather(*(self._end(job, "killed", reason) for job in jobs))
        for chore in list(self._chores):
            chore.cancel()
        if self._chores:
            await asyncio.wait(list(self._chores))

    # -- asking ------------------------------------------------------------------------------------------------------

    def get(self, task_id: str) -> TaskRecord:
        """A task of this agent, also one of a life before.

        Raises:
            ToolError: ``task.not_found``.
        """
        self.mend()
        record = self._records.get(task_id)
        if record is None:
            known = list(self._records)[-10:]
            raise ToolError(
                f"there is no task {task_id[:80]!r}",
                code="task.not_found",
                hint=f"there are {', '.join(known)}" if known else "no task was started",
            )
        job = self._running.get(task_id)
        if job is not None:
            record.output_bytes = job.output.total
        return record

    def list(self, *, active_only: bool = False, limit: int = 20) -> tuple[list[TaskRecord], int]:
        """The newest tasks, newest first, and how many there are."""
        self.mend()
        found = [task_id for task_id in self._records if not active_only or task_id in self._running]
        return [self.get(task_id) for task_id in reversed(found[-limit:])], len(found)

    def output(self, record: TaskRecord, limit: int) -> str:
        """The last ``limit`` bytes of what a task has written; of one from an earlier life what the log kept."""
        job = self._running.get(record.task_id)
        ring = job.output if job is not None else self._kept.get(record.task_id)
        return ring.tail(limit) if ring is not None else record.output_tail

    def report(self, task_id: str, by: str) -> None:
        """A tool answers with a task's end: the model needs no notice of it."""
        record = self._records.get(task_id)
        if record is None or record.status == "running" or record.told:  # of many, the told ones are forgotten
            return
        self._inbox.withdraw(task_id)
        self._journal.append("task/reported", {"task_id": task_id, "by": by})

    async def wait(
        self, task_ids: Sequence[str] | None, timeout_s: float, cancelled: asyncio.Event, *, by: str
    ) -> list[TaskRecord]:
        """Wait for the first end among tasks; returns those whose end is told by this answer, none at the time-out.

        Args:
            task_ids: Which; None is all that run or have ended untold.
            timeout_s: Longest wait, seconds.
            cancelled: Ends the wait.
            by: The tool that waits.

        Raises:
            ToolError: ``task.not_found``.
        """
        self.mend()
        wanted = [self.get(task_id) for task_id in (list(self._records) if task_ids is None else task_ids)]
        if task_ids is None:
            wanted = [record for record in wanted if not record.told]
        if wanted and all(record.status == "running" for record in wanted):
            await self._first_end([self._running[record.task_id] for record in wanted], timeout_s, cancelled)
        ended = [record for record in wanted if record.status != "running"]
        for record in ended:
            self.report(record.task_id, by)
        return ended

    async def _first_end(self, jobs: Sequence[_Job], timeout_s: float, cancelled: asyncio.Event) -> None:
        for job in jobs:
            job.watchers += 1
        waiters = [asyncio.create_task(event.wait()) for event in (cancelled, *(job.ended for job in jobs))]
        left = True
        try:
            await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            left = cancelled.is_set()
        finally:
            for waiter in waiters:
                waiter.cancel()
            for job in jobs:
                job.watchers -= 1
                if left and job.ended.is_set():
                    self._notify(self._records[job.task_id])  # nobody hears this answer

    # -- the life of a task ------------------------------------------------------------------------------------------

    @property
    def _records(self) -> dict[str, TaskRecord]:
        return self._journal.fold.tasks

    def _new_id(self, kind: str) -> str:
        while True:
            task_id = f"{_PREFIXES.get(kind, 'task')}-{''.join(secrets.choice(_LETTERS) for _ in range(8))}"
            if task_id not in self._records:
                return task_id

    async def _run(self, job: _Job, work: TaskWork) -> None:
        job.begun.set()
        try:
            end = await work(job.output.write)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if ends_this_task(error):
                status, reason = job.end or ("killed", "its host is ending")
                self._finish(job, TaskEnd("killed"), status=status, reason=reason)
                return
            found = as_error(error)
            end = TaskEnd("failed", reason=f"{found.message} ({found.code})")
        status, reason = job.end if job.end is not None and end.status == "killed" else (end.status, end.reason)
        self._finish(job, end, status=status, reason=reason)

    def _on_deadline(self, job: _Job, timeout_s: float) -> None:
        self._chore(self._end(job, "timed_out", f"it ran longer than {timeout_s:g} s"))

    async def _end(self, job: _Job, status: TaskStatus, reason: str) -> None:
        """End a task from outside, within a bound; the first cause stands."""
        assert job.task is not None
        if job.end is None:
            job.end = (status, reason)
        await job.begun.wait()  # what is cancelled before could not clean up
        if not job.asked:
            job.asked = True
            job.task.cancel()  # once: a second time would cut short what it does in its grace
        await asyncio.wait([job.task], timeout=FORCE_S)
        if not job.ended.is_set():
            told, why = job.end
            self._finish(job, TaskEnd("killed"), status=told, reason=f"{why}; it did not end by itself")

    def _finish(self, job: _Job, end: TaskEnd, *, status: TaskStatus, reason: str | None) -> None:
        if job.ended.is_set():
            return
        if job.deadline is not None:
            job.deadline.cancel()
        if end.output:
            job.output.write(end.output)
        self._running.pop(job.task_id, None)
        self._kept[job.task_id] = job.output
        facts = {
            "exit_code": end.exit_code,
            "reason": reason,
            "output_tail": job.output.tail(TAIL_BYTES) or None,
            "output_bytes": job.output.total or None,
        }
        data = {"task_id": job.task_id, "status": status}
        try:
            self._journal.append("task/ended", data | {k: v for k, v in facts.items() if v is not None})
        except KimiRayError as error:
            # The log is somebody else's by now: for its next writer the task is lost, which is true.
            _logger.warning("the end of task %s (%s) could not be kept: %s", job.task_id, status, error)
            return
        finally:
            job.ended.set()
        record = self._records[job.task_id]
        if not job.watchers:
            self._notify(record)
        self._forget_output()
        self._tell(record)

    def _notify(self, record: TaskRecord) -> None:
        """Leave the notice of an end, unless the model has heard of it or nobody is to hear it now."""
        if record.told or record.status == "running" or self._closed:
            return
        self._put_notice(record, wakes=self._wakes)

    def _put_notice(self, record: TaskRecord, *, wakes: bool) -> None:
        source = {
            "kind": "task",
            "task_id": record.task_id,
            "status": record.status,
            "notification_id": notification_id(record),
        }
        text = notice(record, self._shown(record))
        self._inbox.put(record.task_id, text, source, wakes=wakes)

    def _shown(self, record: TaskRecord) -> str:
        ring = self._kept.get(record.task_id)
        return ring.tail(SHOWN_BYTES) if ring is not None else record.output_tail[-SHOWN_BYTES:]

    def _forget_output(self) -> None:
        """Of ended tasks only the newest keep their output in memory; the log has the end of it."""
        while len(self._kept) > 2 * self._limit:
            del self._kept[next(iter(self._kept))]

    # -- a log from before, and its end ------------------------------------------------------------------------------

    def _tell_of_before(self) -> None:
        """Ends that the model has not heard of are told with the next turn.

        They begin none: bringing an agent back to look at it is no reason to ask its model.
        """
        for record in self._records.values():
            if not record.told:
                self._put_notice(record if record.status != "running" else replace(record, status="lost"), wakes=False)

    def mend(self) -> None:
        """Say in the log that what ran in a life before is lost."""
        if self._lost:
            lost, self._lost = self._lost, []
            self._slots.awake.remove("tasks")
            self._slots.step.remove("tasks")
            for record in lost:
                self._journal.append("task/lost", {"task_id": record.task_id})

    async def _on_awake(self, _event: AgentAwake) -> None:
        self.mend()

    async def _on_step(self, _event: StepStarting) -> None:
        self.mend()

    def _leave_in_time(self) -> None:
        """Be told when the agent leaves, before those whose handlers may take long: an end has to be in the log."""
        leaving = self._slots.leaving
        if "tasks" not in leaving.handlers:
            leaving.register("tasks", self._on_leaving, before=leaving.handlers[0] if leaving else None)

    async def _on_leaving(self, _event: AgentLeaving) -> None:
        await self.close()

    def _tell(self, record: TaskRecord) -> None:
        if self._slots.task and not self._closed:
            changed = TaskChanged(record.task_id, record.kind, record.status, record.description or None)
            self._notices.tell(self._slots.task, changed)

    def _chore(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
