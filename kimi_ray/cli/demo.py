"""``demo``: a swarm over real files, offline, to see what a run looks like."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kimi_ray.cli import exits
from kimi_ray.cli.options import Home, InProcess, Json
from kimi_ray.cli.printing import print_json, say, tell

_AGENTS = 24
_CONCURRENCY = 8
_PROMPT = "Review the file {{file}}: how long is it, and what does it define first?"


def demo(
    agents: Annotated[int, typer.Option("--agents", min=1, max=150, help="So many agents, a file each.")] = _AGENTS,
    json: Json = False,
    home: Home = None,
    in_process: InProcess = False,
) -> None:
    """Run a swarm of agents that review the source files of kimi-ray itself, offline with a scripted model.

    Each agent has a log of its own and reads its file with the Read tool. Uses a local Ray, which ends with the
    command. With --json: the document of ``swarm --json``.
    """
    from kimi_ray.cli.results import print_rows, print_summary, report_data
    from kimi_ray.cli.settings_of import runtime_config
    from kimi_ray.cli.swarm_course import run_swarm

    work = _work(runtime_config(home, in_process=in_process), agents)
    where = ", in this process" if in_process else ""
    tell(f"{len(work.plan.keys)} agents review the files in {work.cwd}{where}")
    ended = asyncio.run(run_swarm(work))
    report = ended.report
    if json:
        print_json(report_data(report, home=work.config.home, interrupted=ended.interrupted, kept=0))
    else:
        print_rows(report.rows, shown=max(_AGENTS, 30))
        say()
        print_summary(report)
        run_dir = Path(str(report.run_dir))
        first = report.rows[0]
        home_flag = f" --home {shlex.quote(home)}" if home else ""
        say(f"rows   {run_dir / 'results.jsonl'}")
        say(f"logs   {work.config.home}/sessions (session {report.session_id})")
        say()
        say("Next, look at one agent's log, and run your own prompt over your own files:")
        say(f"  {_command()} sessions tail {report.session_id}/{first.agent_id}{home_flag}")
        say(f"  ls *.md | {_command()} swarm 'Review {{{{item}}}}' --items - --model scripted{home_flag}")
    if ended.interrupted:
        raise typer.Exit(exits.INTERRUPTED)
    if not report.ok:
        raise typer.Exit(exits.FAILED)


def _work(config: Any, agents: int) -> Any:
    """The demo as any swarm: items, settings, a run directory under the home."""
    import kimi_ray
    from kimi_ray.agent.profiles import resolve_profile
    from kimi_ray.cli.swarm_arguments import SwarmArguments
    from kimi_ray.cli.swarm_plan import SwarmWork
    from kimi_ray.ids import new_ulid
    from kimi_ray.llm.models import SCRIPTED, resolve_model
    from kimi_ray.runs import SwarmSettings
    from kimi_ray.runs.plan import plan_run
    from kimi_ray.settings import Item, Workdir

    package = Path(str(kimi_ray.__file__)).parent
    files = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.stat().st_size)
    settings = SwarmSettings(
        profile=resolve_profile("explore"),
        model=SCRIPTED,
        workdir=Workdir.shared(str(package)),
        tags={"demo": "review"},
    )
    plan = plan_run(
        _PROMPT, [Item(id=file, data={"file": file}) for file in files[:agents]], settings, max_concurrency=_CONCURRENCY
    )
    return SwarmWork(
        arguments=SwarmArguments(),
        config=config,
        model=resolve_model(SCRIPTED, {}, None, {}),
        plan=plan,
        cwd=str(package),
        out=Path(config.home, "demo-runs", new_ulid()),
        resumed=False,
        selection={},
    )


def _command() -> str:
    """The program as it was called, so that what is printed can be pasted."""
    called = Path(sys.argv[0])
    return shlex.quote(sys.argv[0]) if called.name.startswith("kimi-ray") and called.parent != Path() else "kimi-ray"
