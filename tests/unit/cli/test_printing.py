"""Text made safe, tables that fit, progress in words."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.bench.report import BenchReport
from kimi_ray.cli import bench
from kimi_ray.cli.event_lines import event_line, event_text
from kimi_ray.cli.printing import clip, columns, one_line, print_json, safe, table
from kimi_ray.cli.progress import LineView, LiveView, counts_line, progress_view, stalled_lines
from kimi_ray.events import CORE, make_event
from kimi_ray.hosts.swarm_words import Stalled, SwarmProgress
from kimi_ray.runs import ResultRow, RowError


@given(st.text())
def test_safe_text_holds_no_command(text: str) -> None:
    shown = safe(text)
    assert not any((ord(char) < 0x20 and char not in "\t\n") or 0x7F <= ord(char) <= 0x9F for char in shown)
    assert not any("\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069" for char in shown)
    shown.encode()  # a lone surrogate would fail here


def test_a_document_of_what_utf8_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    row = RowError.model_construct(code="x", message="a\udcffb")
    print_json({"\udcff": [("x\ud800", 1.5, None, True)], "path": Path("/p/\udcfe"), "row": row, "nan": float("nan")})
    told = json.loads(capsys.readouterr().out)
    assert (told["\ufffd"], told["path"], told["nan"]) == ([["x\ufffd", 1.5, None, True]], "/p/\ufffd", None)
    assert told["row"]["message"] == "a\ufffdb"


@given(st.text(), st.integers(1, 40))
def test_clip_fits(text: str, width: int) -> None:
    assert columns(clip(text, width)) <= width
    assert "\n" not in one_line(text, width)


def test_table_fits_and_aligns() -> None:
    rows = [["a", "1", "x" * 100], ["bb", "22", "表" * 30]]
    told = table(["name", "n", "text"], rows, width=40, right=".r")
    lines = told.splitlines()
    assert all(columns(line) <= 40 for line in lines)
    assert lines[1].startswith("a      1  xxx")
    assert lines[2].startswith("bb    22  表")
    assert "x" * 100 in table(["name", "n", "text"], rows)


def picture(**values: object) -> SwarmProgress:
    return SwarmProgress.model_validate({"total": 10, "queued": 4, "running": 3, "done": 3, "completed": 3, **values})


def test_counts_in_one_line() -> None:
    assert counts_line(picture()) == "3/10 done (3 completed), 3 running, 4 queued, 0 tokens/s"
    told = counts_line(
        picture(completed=2, failed=1, retries=2, request_retries=7, cost_usd=0.5, tokens_per_s=12.3, stopped="fail_on")
    )
    assert "2 completed, 1 failed" in told
    assert "2 rollouts and 7 requests retried" in told
    assert told.endswith("12 tokens/s, $0.5000, stopping: fail_on")


def test_stalled_agents_are_named() -> None:
    stalled = [
        Stalled(agent_id=f"agent-{n}", item_id=f"it\x1bem {n}", repeat=0, phase="retry", since_ms=32_000)
        for n in range(7)
    ]
    lines = stalled_lines(picture(stalled=stalled))
    assert lines[0] == "agent-0 (it\\x1bem 0#0) is in a retry loop for 32 s"
    assert lines[-1] == "... and 2 more"


def failed_row(number: int) -> ResultRow:
    error = RowError.model_validate(
        {"code": "provider.auth", "class": "auth", "origin": "provider", "retryable": False, "message": "no\x1b key"}
    )
    return ResultRow(
        run_id="r", item_id=f"i{number}", index=number, repeat=0, attempt=1, status="failed", stop="failed",
        error=error, item={"a": "x"},
    )  # fmt: skip


def test_lines_when_nobody_sits_at_a_terminal() -> None:
    stream = io.StringIO()
    view = progress_view(stream)
    assert isinstance(view, LineView)
    view.update(picture())
    assert stream.getvalue() == ""  # not every half second
    for number in range(25):
        view.row(failed_row(number))
    view.update(picture(done=10, running=0, queued=0, elapsed_s=3.2))
    view.close()
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "i0#0 failed: provider.auth: no\\x1b key"
    assert lines[20] == "further failures are only counted"
    assert lines[21] == "[     3 s] 10/10 done (3 completed), 0 running, 0 queued, 0 tokens/s"
    assert len(lines) == 22


def test_lines_come_every_few_seconds_only_when_something_changed() -> None:
    stream = io.StringIO()
    view = LineView(stream, every_s=0.0)
    view.update(picture())
    view.update(picture())
    view.update(picture(done=4, completed=4))
    assert len(stream.getvalue().splitlines()) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    view = progress_view(stream)
    assert isinstance(view, LiveView)
    view.update(
        picture(stalled=[Stalled(agent_id="agent-9", item_id="slow", repeat=0, phase="model", since_ms=20_000)])
    )
    view.row(failed_row(1))
    view.say("a remark")
    view.close()
    shown = stream.getvalue()
    assert "3/10" in shown
    assert "agent-9 (slow#0) waits for the model for 20 s" in shown
    assert "i1#0 failed: provider.auth" in shown
    assert "a remark" in shown
    assert "\x1b key" not in shown


def test_every_event_type_has_a_line() -> None:
    """Also one with unexpected data: a log of a newer version must not break the view."""
    for number, kind in enumerate(CORE):
        event = make_event(number, 1_700_000_000_000, kind.name, {"odd": "\x1b[2J", "list": [1, 2], "table": {"a": 1}})
        line = event_line(event, 100) + event_text(event)
        assert kind.name in line
        assert "\x1b" not in line


def _line(kind: str, data: dict[str, Any], replaces: tuple[int, int] | None = None, *, whole: bool = False) -> str:
    surface: Any = {"replace": list(replaces)} if replaces else None
    event = make_event(99, 1_700_000_000_000, kind, data, surface, sorted(set(replaces)) if replaces else None)
    return (event_text(event) if whole else event_line(event, 300)).split(kind)[1].strip()


def test_a_compaction_and_an_undo_are_told_in_words() -> None:
    span = {"start": 94, "end": 89}
    start = {"compaction_id": "c", "trigger": "manual", "shadowed_range": span, "tokens": 700}
    prune = {"shadowed_range": {"start": 7, "end": 7}, "shadowed_seqs": [7], "shadowed_tokens": 650}
    shortened = "a long result is shortened: 1 event of 650 tokens by estimate, seq 7"
    assert _line("compaction/prune", prune) == shortened
    due = {**prune, "tokens": 600, "threshold": 500}
    assert _line("compaction/prune", due) == f"{shortened} at 600 tokens (threshold 500)"
    assert _line("compaction/start", start) == "manual of events 94 to 89 in the conversation's order at 700 tokens"
    summary = {
        "compaction_id": "c",
        "summary": [{"type": "text", "text": "Goal\nsee"}],
        "shadowed_range": span,
        "shadowed_seqs": [94, 13, 89],
        "shadowed_tokens": 650,
    }
    assert (
        _line("compaction/summary", summary)
        == "stands for 3 events of 650 tokens by estimate, seq 94, 13, 89: Goal see"
    )
    whole = _line("compaction/summary", summary, whole=True)
    assert "        stands for 3 events of 650 tokens by estimate, seq 94, 13, 89\n        Goal\n        see" in whole
    message = {"id": "m", "role": "user", "content": [{"type": "text", "text": "hello"}]}
    assert _line("user/message", message, (13, 17)) == "(in place of events 13 to 17) hello"
    assert "(in place of events 13 to 17)" in _line("user/message", message, (13, 17), whole=True)
    cut = {"reason": "undo", "prompts": ["msg_1", "msg_2"]}
    assert _line("surface/cut", cut, (5, 5)) == "(takes out event 5) undo of 2 prompts: msg_1, msg_2"
    assert _line("compaction/end", {"compaction_id": "c"}) == "done"
    error = {"code": "compaction.summary", "message": "cut off"}
    assert _line("compaction/end", {"compaction_id": "c", "error": error}) == "failed: compaction.summary cut off"


def test_lists_are_counted_on_a_line_and_told_in_full() -> None:
    data = {"todos": ["a", "b"], "one": [7]}
    assert _line("x/unknown", data) == "todos=(2 items) one=(1 item)"
    assert _line("x/unknown", data, whole=True) == 'todos=["a","b"] one=[7]'


def test_cases_of_a_bench_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    async def measured() -> BenchReport:
        cases = {"disk flushes": {"kills": 3, "lost_ms": 7.5}, "os none": {"kills": 3, "lost_ms": 12.0}}
        facts = {"value": 1, "floor": 1, "ratio": 1, "wall_s": 1, "cpu_s": 1, "peak_pss_mb": 1}
        return BenchReport.model_validate({"bench": "loss", "unit": "ms", **facts, "figures": {"cases": cases}})

    bench._measure(measured(), False)
    told = capsys.readouterr().out
    assert "disk flushes      3      7.5\nos none           3     12.0" in told and "{" not in told


def test_facts_of_a_bench_that_are_no_cases_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    async def measured() -> BenchReport:
        figures: dict[str, Any] = {"cpu_by_role": {"driver": 1.25, "AgentHostActor": 10}, "actor_calls": {}}
        facts = {"value": 1, "floor": 1, "ratio": 1, "wall_s": 1, "cpu_s": 1, "peak_pss_mb": 1}
        return BenchReport.model_validate({"bench": "turns", "unit": "turns/s", **facts, "figures": figures})

    bench._measure(measured(), False)
    told = capsys.readouterr().out
    assert "cpu_by_role\ndriver          1.25\nAgentHostActor    10" in told and "actor_calls" not in told
