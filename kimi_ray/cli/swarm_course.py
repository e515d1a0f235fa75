"""Running a checked swarm to its end, with Ctrl-C once or twice on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_ray.cli import exits
from kimi_ray.cli.printing import tell
from kimi_ray.cli.progress import ProgressView, progress_view
from kimi_ray.cli.settings_of import IN_PROCESS
from kimi_ray.errors import KimiRayError, RunError
from kimi_ray.hosts.ports import is_lost

if TYPE_CHECKING:
    from kimi_ray.cli.swarm_plan import SwarmWork
    from kimi_ray.config import RuntimeConfig
    from kimi_ray.hosts.swarm_words import SwarmProgress
    from kimi_ray.llm.models import ResolvedModel
    from kimi_ray.runs import SwarmReport
    from kimi_ray.runs.execute import RunSink
    from kimi_ray.runs.plan import RunPlan
    from kimi_ray.runtime import Runtime
    from kimi_ray.swarm_handle import SwarmHandle

_LOOK_EVERY_S = 0.5
_TELL_S = 1.0
"""What running rollouts have to say how far they came, when everybody leaves: their rows then tell it."""
_LEAVE_S = 5.0
_TITLE_COLUMNS = 120
_SERVED_S = 10.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a swarm command ended."""

    report: SwarmReport
    interrupted: bool
    kept: int
    log_path: str | None


class Interrupts:
    """Ctrl-C and SIGTERM while a swarm runs: the first lets what runs go to its end, the second leaves at once."""

    def __init__(self) -> None:
        self.count = 0
        self._listeners: list[Callable[[int], None]] = []

    def listen(self, listener: Callable[[int], None]) -> None:
        """Call ``listener`` with 1, 2 ... at each."""
        self._listeners.append(listener)

    def hit(self) -> None:
        """One more. From the third on the process ends here and now."""
        self.count += 1
        if self.count > 2:
            os._exit(exits.INTERRUPTED)
        for listener in self._listeners:
            listener(self.count)

    def install(self) -> Callable[[], None]:
        """Take the signals over; returns what gives them back."""
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            loop.add_signal_handler(number, self.hit)

        def give_back() -> None:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

        return give_back


async def run_swarm(
    work: SwarmWork, *, retry: tuple[str, ...] = (), quiet: bool = False, interrupts: Interrupts | None = None
) -> Ended:
    """Connect, open the run directory, run what is to run, close everything.

    Args:
        work: The checked command.
        retry: Error classes that a resume runs again, beyond those that it always does.
        quiet: Show no progress.
        interrupts: For tests; None makes one and takes the signals.

    Raises:
        KimiRayError: why it could not begin, or go on.
    """
    from kimi_ray.runs.execute import reopen_run

    await check_home(work.config)
    if not work.resumed:
        served = await check_model(work.model)
        return await _connected(work, work.plan, None, quiet, interrupts, served)
    plan, sink = await reopen_run(work.plan, work.out, retry=retry, durability=work.config.durability)
    try:
        if not plan.again:
            return Ended(_finished(plan, str(sink.path)), False, len(plan.kept), None)
        served = await check_model(work.model)
        return await _connected(work, plan, sink, quiet, interrupts, served)
    finally:
        await sink.close()


async def check_home(config: RuntimeConfig) -> None:
    """Tell of a home that cannot be used before Ray is started for it; one on another node is checked there.

    Raises:
        StoreError: ``store.*``.
    """
    if config.address in (None, IN_PROCESS):
        from kimi_ray.actors.connect import home_id_here

        await asyncio.to_thread(home_id_here, config)


async def _connected(
    work: SwarmWork,
    plan: RunPlan,
    sink: RunSink | None,
    quiet: bool,
    interrupts: Interrupts | None,
    served: list[str] | None,
) -> Ended:
    from kimi_ray.runtime import Runtime

    if work.config.address is None and not quiet:
        tell("starting a local Ray, which takes some seconds")
    async with Runtime.connect(config=work.config) as runtime:
        opened = sink if sink is not None else await _open(work, plan, served)
        try:
            session = await runtime.workspace(work.cwd).create_session(
                title=plan.prompt[:_TITLE_COLUMNS] if isinstance(plan.prompt, str) else None,
                profile="bare",
                model=work.model,
                metadata={"run_id": plan.run_id, "run_dir": str(opened.path)},
                tags=work.arguments.tags,
            )
            handle = await session.start_plan(plan, work.model, sink=opened)
            async with watched(handle, quiet=quiet, interrupts=interrupts) as watch:
                report = await watch.result()
        finally:
            await opened.close()
        if watch.leave:
            await _leave(runtime)
        return Ended(report, watch.interrupted, len(plan.kept), runtime.connection.log_path)


async def _open(work: SwarmWork, plan: RunPlan, served: list[str] | None) -> RunSink:
    from kimi_ray.runs.execute import open_run
    from kimi_ray.runs.run_directory import default_run_directory

    out = work.out
    while True:
        try:
            return await open_run(
                plan,
                out,
                arguments=work.arguments.model_copy(update={"prompt": None, "output_schema": None}).said(),
                config=work.config.model_dump(mode="json"),
                model=work.model,
                cwd=work.cwd,
                items_source=work.arguments.items,
                selection=work.selection,
                served_models=served,
                argv=sys.argv,
                durability=work.config.durability,
            )
        except RunError as error:
            if work.named or error.code not in ("run.exists", "run.in_use"):
                raise
        # Another command began in the same second with the same prompt.
        out = await asyncio.to_thread(default_run_directory, str(plan.prompt))


async def check_model(model: ResolvedModel) -> list[str] | None:
    """Ask the server for its list of models before anything is started for it.

    Returns:
        The list; None for a scripted model, and for a server that has none or is busy: it may still answer requests.

    Raises:
        ProviderError: ``provider.connection`` when nobody is there, ``provider.auth`` for a key that is wrong (401).
    """
    if model.provider != "openai":
        return None
    from kimi_ray.llm.models import build_provider

    provider: Any = build_provider(model)
    try:
        return await provider.served_models(timeout_s=_SERVED_S)
    except KimiRayError as error:
        if error.code == "provider.connection" or (
            error.code == "provider.auth" and error.details.get("status") == 401
        ):
            error.hint = error.hint or f"start the server at {model.base_urls[0]}, or name another with --base-url"
            raise
        return None
    finally:
        await provider.close()


def _finished(plan: RunPlan, run_dir: str) -> SwarmReport:
    from kimi_ray.runs import SwarmReport

    session_id = next((row.session_id for row in plan.kept if row.session_id), None)
    return SwarmReport.of(plan.keys, plan.kept, run_id=plan.run_id, session_id=session_id, run_dir=run_dir)


async def _leave(runtime: Runtime) -> None:
    """At once, but with what can be made durable in a few seconds."""
    try:
        async with asyncio.timeout(_LEAVE_S):
            await runtime.close()
    except TimeoutError:
        os._exit(exits.INTERRUPTED)


class Watch:
    """A running swarm with somebody who looks on and may interrupt it."""

    def __init__(self, handle: SwarmHandle, view: ProgressView, interrupts: Interrupts) -> None:
        self._handle = handle
        self._view = view
        self._interrupts = interrupts
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: SwarmProgress | None = None
        interrupts.listen(self._interrupted)

    @property
    def interrupted(self) -> bool:
        """Whether the user asked for the end."""
        return self._interrupts.count > 0

    @property
    def leave(self) -> bool:
        """Whether the user asked to leave at once."""
        return self._interrupts.count > 1

    async def result(self) -> SwarmReport:
        """Wait for the end, showing rows and progress."""
        rows = asyncio.create_task(self._rows())
        look = asyncio.create_task(self._look())
        try:
            report = await self._handle.result()
        finally:
            look.cancel()
            await asyncio.gather(rows, look, *self._tasks, return_exceptions=True)
        self._view.update(self._final(report))
        return report

    async def _rows(self) -> None:
        async for row in self._handle:
            self._view.row(row)

    async def _look(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def look(self) -> None:
        """Show where it stands; a session host that is being replaced is asked again the next time."""
        try:
            self._last = await self._handle.refresh()
            self._view.update(self._last)
        except KimiRayError as error:
            if not is_lost(error.code) and error.code != "swarm.not_found":
                raise

    def _final(self, report: SwarmReport) -> SwarmProgress:
        """The last picture, which the session host no longer has."""
        from kimi_ray.hosts.swarm_words import SwarmProgress

        last = self._last or SwarmProgress()
        counts: dict[str, Any] = dict(report.totals)
        return last.model_copy(
            update={
                **counts,
                "total": len(report.rows),
                "done": len(report.rows),
                "running": 0,
                "queued": 0,
                "retrying": 0,
                "stalled": (),
                "long_turns": (),
                "steps": max(last.steps, sum(row.steps for row in report.rows)),
                "elapsed_s": report.wall_s,
                "tokens_per_s": round(report.usage.output / report.wall_s, 1) if report.wall_s else 0.0,
                "cost_usd": report.cost_usd,
            }
        )

    def _interrupted(self, count: int) -> None:
        if count == 1:
            self._view.say("interrupted: nothing new starts, what runs goes to its end (Ctrl-C again leaves at once)")
            self._spawn(self._handle.cancel(mode="drain"))
        else:
            self._view.say("leaving")
            self._spawn(self._handle.cancel(_TELL_S))
            asyncio.get_running_loop().call_later(_LEAVE_S, os._exit, exits.INTERRUPTED)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)


@asynccontextmanager
async def watched(
    handle: SwarmHandle, *, quiet: bool = False, interrupts: Interrupts | None = None
) -> AsyncGenerator[Watch]:
    """Show a swarm on stderr while it runs, and let Ctrl-C end it."""
    view = progress_view(quiet=quiet)
    mine = interrupts if interrupts is not None else Interrupts()
    give_back = mine.install() if interrupts is None else None
    watch = Watch(handle, view, mine)
    try:
        yield watch
    finally:
        if give_back is not None:
            give_back()
        view.close()
