"""Where a swarm stands, on stderr: a live display on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from kimi_ray.cli.printing import columns, one_line, terminal_width

if TYPE_CHECKING:
    from kimi_ray.hosts.swarm_words import SwarmProgress
    from kimi_ray.runs import ResultRow

_LINE_EVERY_S = 5.0
_BAR = 30
_STALLED_SHOWN = 5
_FAILURES_SHOWN = 20
_TOLD_AGAIN_AT = 2
"""Times as many steps, before a long turn is told of again."""


class ProgressView(Protocol):
    """Somebody who looks on."""

    def update(self, progress: SwarmProgress) -> None:
        """Where it stands now."""
        ...

    def row(self, row: ResultRow) -> None:
        """A rollout is done."""
        ...

    def say(self, text: str) -> None:
        """A remark, above the display."""
        ...

    def close(self) -> None:
        """It is over. Idempotent."""
        ...


def progress_view(stream: TextIO | None = None, *, quiet: bool = False) -> ProgressView:
    """The view that suits a stream; None is stderr."""
    to = stream if stream is not None else sys.stderr
    if quiet:
        return Silence()
    return LiveView(to) if to.isatty() else LineView(to)


def counts_line(progress: SwarmProgress) -> str:
    """All counts in one line; what is zero and says nothing is left out."""
    done = ", ".join(
        f"{count} {name.replace('_', ' ')}"
        for name in ("completed", "limit", "failed", "cancelled", "not_started")
        if (count := getattr(progress, name))
    )
    parts = [f"{progress.done}/{progress.total} done" + (f" ({done})" if done else "")]
    parts += [f"{progress.running} running", f"{progress.queued} queued"]
    if progress.retries or progress.request_retries:
        parts.append(f"{progress.retries} rollouts and {progress.request_retries} requests retried")
    if progress.interruptions:
        parts.append(f"{progress.interruptions} interruptions")
    if progress.steps:
        parts.append(f"{progress.steps} steps")
    parts.append(f"{progress.tokens_per_s:.0f} tokens/s")
    if progress.cost_usd is not None:
        parts.append(f"${progress.cost_usd:.4f}")
    if progress.stopped:
        parts.append(f"stopping: {progress.stopped}")
    return ", ".join(parts)


def stalled_lines(progress: SwarmProgress) -> list[str]:
    """The agents that have not got anywhere for a while, by name."""
    lines = [
        f"{one.agent_id} ({one_line(one.item_id, 40)}#{one.repeat}) {_PHASES.get(one.phase, one.phase)} for "
        f"{one.since_ms / 1000:.0f} s"
        for one in progress.stalled[:_STALLED_SHOWN]
    ]
    more = len(progress.stalled) - _STALLED_SHOWN
    return [*lines, f"... and {more} more"] if more > 0 else lines


class LongTurns:
    """Tells of each agent whose turn is long once, and again each time its steps have doubled."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def lines(self, progress: SwarmProgress) -> list[str]:
        """What has not been told yet."""
        from kimi_ray.hosts.swarm_words import LONG_TURN_STEPS

        told: list[str] = []
        for one in progress.long_turns:
            mark = self._next.get(one.agent_id, LONG_TURN_STEPS)
            if one.steps < mark:
                continue
            while mark * _TOLD_AGAIN_AT <= one.steps:
                mark *= _TOLD_AGAIN_AT
            self._next[one.agent_id] = mark * _TOLD_AGAIN_AT
            name = f"{one.agent_id} ({one_line(one.item_id, 40)}#{one.repeat})"
            told.append(f"{name} has made {mark} steps in this turn; --max-steps bounds it")
        return told


def failure_line(row: ResultRow) -> str:
    """A rollout that did not complete, and why."""
    from kimi_ray.cli.results import name_of

    why = f"{row.error.code}: {row.error.message}" if row.error is not None else row.stop
    return one_line(f"{name_of(row)}#{row.repeat} {row.status}: {why}", 200)


_PHASES = {
    "model": "waits for the model",
    "tools": "is in a tool",
    "retry": "is in a retry loop",
    "store": "waits for the store",
    "limiter": "waits for a free connection",
    "idle": "is idle",
}


class Silence:
    """Nobody looks on."""

    def update(self, progress: SwarmProgress) -> None:
        """Nothing."""

    def row(self, row: ResultRow) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class LineView:
    """A line when something changed, at most every few seconds, and the last state at the end."""

    def __init__(self, stream: TextIO, *, every_s: float = _LINE_EVERY_S) -> None:
        self._stream = stream
        self._every_s = every_s
        self._said_at = time.monotonic()
        self._said: str = ""
        self._last: SwarmProgress | None = None
        self._failures = 0
        self._long = LongTurns()

    def update(self, progress: SwarmProgress) -> None:
        """A line if it is time for one."""
        self._last = progress
        for line in self._long.lines(progress):
            self.say(line)
        if time.monotonic() - self._said_at >= self._every_s:
            self._line(progress)

    def row(self, row: ResultRow) -> None:
        """The first failures, one by one."""
        if row.status in ("failed", "cancelled"):
            self._failures += 1
            if self._failures <= _FAILURES_SHOWN:
                self.say(failure_line(row))
            elif self._failures == _FAILURES_SHOWN + 1:
                self.say("further failures are only counted")

    def say(self, text: str) -> None:
        """A line of its own."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """The last state."""
        if self._last is not None:
            self._line(self._last)
            self._last = None

    def _line(self, progress: SwarmProgress) -> None:
        told = counts_line(progress)
        stalled = stalled_lines(progress)
        if told != self._said or stalled:
            self.say(f"[{progress.elapsed_s:6.0f} s] {told}")
            for line in stalled:
                self.say(f"           {line}")
        self._said, self._said_at = told, time.monotonic()


class LiveView:
    """A few lines that are drawn over each other, with what happened above them."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._stream = stream
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._live.start()
        self._failures = 0
        self._long = LongTurns()
        self._open = True

    def update(self, progress: SwarmProgress) -> None:
        """Draw it."""
        from rich.text import Text

        for line in self._long.lines(progress):
            self._print(line, "yellow")
        width = (terminal_width(self._stream) or 80) - 1
        lines = [_bar_line(progress), *_wrapped(counts_line(progress), width)]
        text = Text("\n".join(one_line(line, width) for line in lines), no_wrap=True)
        for line in stalled_lines(progress):
            text.append("\n" + one_line(line, width), style="yellow")
        self._live.update(text)

    def row(self, row: ResultRow) -> None:
        """Failures go above the display."""
        if row.status in ("failed", "cancelled"):
            self._failures += 1
            if self._failures <= _FAILURES_SHOWN:
                self._print(failure_line(row), "red")

    def say(self, text: str) -> None:
        """A remark above the display."""
        self._print(text, "bold")

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._open:
            self._open = False
            self._live.stop()

    def _print(self, text: str, style: str) -> None:
        from rich.text import Text

        self._console.print(Text(text, style=style))


def _bar_line(progress: SwarmProgress) -> str:
    share = progress.done / progress.total if progress.total else 1.0
    full = int(share * _BAR)
    minutes, seconds = divmod(int(progress.elapsed_s), 60)
    return f"{'█' * full}{'░' * (_BAR - full)} {progress.done}/{progress.total}  {minutes}:{seconds:02d}"


def _wrapped(text: str, width: int) -> Sequence[str]:
    lines: list[str] = [""]
    for part in text.split(", "):
        joined = f"{lines[-1]}, {part}" if lines[-1] else part
        if columns(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines
