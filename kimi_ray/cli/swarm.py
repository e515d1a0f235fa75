"""``swarm``: one prompt over many items, an agent each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.cli import exits
from kimi_ray.cli.options import Address, BaseUrl, Home, InProcess, Json, Model, Namespace
from kimi_ray.cli.printing import counted, one_line, print_json, safe, say, tell
from kimi_ray.cli.settings_of import IN_PROCESS
from kimi_ray.errors import ConfigError

if TYPE_CHECKING:
    from kimi_ray.cli.swarm_course import Ended
    from kimi_ray.cli.swarm_plan import SwarmWork
    from kimi_ray.runs import SwarmReport

_PROMPTS_SHOWN = 3
_NO_LIMIT = "no limit is set: --max-steps, --time-s, --total-cost-usd ... bound what is asked of the model"


def swarm(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT|@FILE", help="With {{item}} or a {{column}} of the items. Not with --resume."),
    ] = None,
    items: Annotated[
        str | None,
        typer.Option("--items", metavar="FILE|-", help=".jsonl (an object or string a line), .csv, .txt, or stdin."),
    ] = None,
    id_column: Annotated[str | None, typer.Option("--id-column", metavar="NAME", help="The column of ids.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Only so many items.")] = None,
    shuffle: Annotated[int | None, typer.Option("--shuffle", metavar="SEED", help="In a seeded order.")] = None,
    filter: Annotated[
        list[str] | None, typer.Option("--filter", metavar="COND", help="column=value, column!=value or column~regex.")
    ] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", metavar="N", help="Each item so often. [1]")] = None,
    model: Model = None,
    base_url: BaseUrl = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="NAME", help="agent, coder, explore, plan, bare, or of a feature. [explore]"),
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", metavar="TEXT|@FILE", help="In place of the profile's.")
    ] = None,
    tools: Annotated[
        list[str] | None,
        typer.Option(
            "--tools",
            metavar="NAMES",
            help="Read,Grep,package.module:function ...; none. [the profile's less Bash, Write, Edit]",
        ),
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(
            "--rollout", metavar="MODULE:FUNCTION", help="Runs in place of the loop; PROMPT may then be left out."
        ),
    ] = None,
    output_schema: Annotated[
        str | None,
        typer.Option(
            "--output-schema", metavar="FILE|MODULE:MODEL", help="A JSON schema that each final answer must fit."
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", metavar="X", help="Of the model.")] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option("--max-output-tokens", metavar="N", help="Of each model request.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Seeds are derived from it and sent; else only recorded.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", metavar="N", help="Each rollout: model requests.")
    ] = None,
    max_tool_calls: Annotated[int | None, typer.Option("--max-tool-calls", metavar="N", help="Each rollout.")] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option("--max-total-tokens", metavar="N", help="Each rollout.")
    ] = None,
    max_cost_usd: Annotated[float | None, typer.Option("--max-cost-usd", metavar="X", help="Each rollout.")] = None,
    time_s: Annotated[float | None, typer.Option("--time-s", metavar="S", help="Each rollout: wall seconds.")] = None,
    total_cost_usd: Annotated[
        float | None, typer.Option("--total-cost-usd", metavar="X", help="The whole run.")
    ] = None,
    total_time_s: Annotated[float | None, typer.Option("--total-time-s", metavar="S", help="The whole run.")] = None,
    total_tokens: Annotated[int | None, typer.Option("--total-tokens", metavar="N", help="The whole run.")] = None,
    max_concurrency: Annotated[
        int | None, typer.Option("--max-concurrency", metavar="N", help="Most rollouts at once. [32]")
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option("--retries", metavar="N", help="After infra, provider, rate_limit, store errors. [0]"),
    ] = None,
    retry_on: Annotated[
        list[str] | None,
        typer.Option(
            "--retry-on", metavar="CLASSES", help="What --retries tries again. [infra,provider,rate_limit,store]"
        ),
    ] = None,
    fail_on: Annotated[
        str | None, typer.Option("--fail-on", metavar="N|P%", help="End the run early after so many failed rollouts.")
    ] = None,
    on_interrupted: Annotated[
        str | None,
        typer.Option("--on-interrupted", metavar="continue|restart", help="A rollout whose host was lost. [continue]"),
    ] = None,
    workdir: Annotated[
        str | None,
        typer.Option(
            "--workdir",
            metavar="SPEC",
            help="none, shared[:DIR], copy[:DIR], git:REPO@REF, factory:MODULE:FUNCTION; may hold {{column}}."
            " [the current directory, shared, for agents with tools]",
        ),
    ] = None,
    keep_workdirs: Annotated[bool, typer.Option("--keep-workdirs", help="Leave private directories in place.")] = False,
    allow_shared_writes: Annotated[
        bool, typer.Option("--allow-shared-writes", help="Several writing agents in one directory.")
    ] = False,
    isolation: Annotated[
        str | None,
        typer.Option("--isolation", metavar="shared|dedicated", help="dedicated: a process for each. [shared]"),
    ] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="KEY=VALUE", help="On every row.")] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="The run directory. [./runs/<utc>-<slug>]")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="DIR", help="Go on with a run: do what is missing.")
    ] = None,
    retry: Annotated[
        list[str] | None,
        typer.Option("--retry", metavar="CLASSES", help="With --resume: failures of these classes again, too."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the first prompts, the settings and the number of requests.")
    ] = False,
    json: Json = False,
    home: Home = None,
    address: Address = None,
    in_process: InProcess = False,
    namespace: Namespace = None,
) -> None:
    """Run one prompt over many items, each by an agent of its own, in parallel.

    Rows are written to RUN_DIR/results.jsonl as they come. Ctrl-C once: nothing new starts, what runs goes to its end;
    twice: leave at once. Exit 0 when every rollout completed (or ended at a limit of its own), 1 when some did not,
    2 for bad input, 130 when interrupted.

    With --json: {"run_id", "session_id", "run_dir", "home", "ok", "interrupted", "rollouts", "kept", "totals", "usage",
    "cost_usd", "wall_s", "scores"}.
    """
    from kimi_ray.cli.settings_of import runtime_config
    from kimi_ray.cli.swarm_arguments import SwarmArguments, split_names
    from kimi_ray.cli.swarm_plan import find_schema, make_work, text_or_file

    if in_process:
        runtime_config(home, address, in_process=True)  # refuses another address beside it
    said = SwarmArguments.of(
        prompt=text_or_file(prompt),
        items=_items_path(items),
        id_column=id_column,
        limit=limit,
        shuffle=shuffle,
        filter=_tuple(filter),
        repeats=repeats,
        model=model,
        base_url=base_url,
        profile=profile,
        system_prompt=text_or_file(system_prompt),
        tools=split_names(tools),
        rollout=rollout,
        output_schema=find_schema(output_schema, str(Path.cwd())),
        temperature=temperature,
        max_output_tokens=max_output_tokens,
        seed=seed,
        max_steps=max_steps,
        max_tool_calls=max_tool_calls,
        max_total_tokens=max_total_tokens,
        max_cost_usd=max_cost_usd,
        time_s=time_s,
        total_cost_usd=total_cost_usd,
        total_time_s=total_time_s,
        total_tokens=total_tokens,
        max_concurrency=max_concurrency,
        retries=retries,
        retry_on=split_names(retry_on),
        fail_on=fail_on,
        on_interrupted=_one_of("--on-interrupted", on_interrupted, "continue", "restart"),
        workdir=workdir,
        keep_workdirs=keep_workdirs or None,
        allow_shared_writes=allow_shared_writes or None,
        isolation=_one_of("--isolation", isolation, "shared", "dedicated"),
        tag=_tuple(tag),
        home=home,
        address=IN_PROCESS if in_process else address,
        namespace=namespace,
    )
    if retry and resume is None:
        raise ConfigError(
            "--retry is for --resume", code="request.conflict", hint="within a run, --retries N tries again by itself"
        )
    work = make_work(said, out=out, resume=resume)
    if dry_run:
        _show_plan(work, json=json)
        return
    _run(work, split_names(retry) or (), json=json)


def _run(work: SwarmWork, retry: tuple[str, ...], *, json: bool) -> None:
    from kimi_ray.cli.results import report_data
    from kimi_ray.cli.swarm_course import run_swarm

    size = f"{counted(len(work.plan.keys), 'rollout')} of {counted(len(work.plan.items), 'item')}"
    tell(f"{size}, run directory {work.out}")
    _print_left_out(work)
    ended = asyncio.run(run_swarm(work, retry=retry))
    if json:
        print_json(report_data(ended.report, home=work.config.home, interrupted=ended.interrupted, kept=ended.kept))
    else:
        _print_end(work, ended)
    if ended.interrupted:
        raise typer.Exit(exits.INTERRUPTED)
    if not ended.report.ok:
        raise typer.Exit(exits.FAILED)


def _print_end(work: SwarmWork, ended: Ended) -> None:
    from kimi_ray.cli.results import limiter_line, print_rows, print_summary
    from kimi_ray.runs import read_manifest

    report = ended.report
    home = f" --home {_quoted(work.arguments.home)}" if work.arguments.home else ""
    print_rows(report.rows)
    say()
    print_summary(report)
    if ended.kept:
        say(f"{ended.kept} rows were there before")
    say(f"rows     {Path(str(report.run_dir)) / 'results.jsonl'}")
    if report.session_id:
        say(f"logs     kimi-ray sessions show {report.session_id}{home}")
    limits = limiter_line(read_manifest(str(report.run_dir)))
    if limits is not None:
        say(f"limits   {limits}")
    if not report.ok:
        _print_again(report)
    if ended.log_path:
        say(f"ray      {ended.log_path}")


def _print_again(report: SwarmReport) -> None:
    """How what did not complete is done again; a plain resume leaves failures of some classes as they are."""
    from kimi_ray.runs.resume import what_resumes

    plainly, only_asked = what_resumes(report.rows)
    command = f"kimi-ray swarm --resume {_quoted(str(report.run_dir))}"
    if plainly:
        say(f"again    {command}")
    if only_asked:
        retry = f"--retry {','.join(only_asked)}"
        say(f"         {retry} beside it does those failures again, too" if plainly else f"again    {command} {retry}")


def _print_left_out(work: SwarmWork) -> None:
    settings = work.plan.settings
    left = [name for name in settings.profile.tools if name not in settings.tool_names]
    if left:
        tell(f"left out: {', '.join(left)} (--tools keeps {'it' if len(left) == 1 else 'them'})")


def _show_plan(work: SwarmWork, *, json: bool) -> None:
    plan, settings = work.plan, work.plan.settings
    keys = plan.keys[:_PROMPTS_SHOWN]
    shown = [(one.key, one.prompt) for one in plan.rollouts(keys, work.cwd)]
    steps = None if settings.limits is None else settings.limits.max_steps
    single = not settings.tool_names and plan.rollout is None and plan.output_schema is None
    bounded = single or _is_bounded(work)
    told: dict[str, Any] = {
        "items": len(plan.items),
        "repeats": plan.repeats,
        "rollouts": len(plan.keys),
        "requests_at_least": len(plan.keys) if plan.rollout is None else 0,
        "requests_at_most": len(plan.keys) if single else steps and steps * len(plan.keys),
        "run_dir": str(work.out),
        "model": {"name": work.model.name, "provider": work.model.provider, "base_urls": list(work.model.base_urls)},
        "profile": settings.profile.name,
        "tools": list(settings.tool_names),
        "rollout": None if plan.rollout is None else plan.rollout.name,
        "output_schema": plan.output_schema,
        "workdir": None if settings.workdir is None else settings.workdir.said(),
        "sampling": None if settings.sampling is None else settings.sampling.said(),
        "limits": None if settings.limits is None else settings.limits.said(),
        "total_limits": None if plan.total_limits is None else plan.total_limits.said(),
        "seed": {"value": plan.seed.value, "sent": plan.seed.sent},
        "max_concurrency": plan.max_concurrency,
        "retries": plan.retries,
        "retry_on": list(plan.retry_on) if plan.retries else None,
        "home": work.config.home,
        "address": work.config.address,
    }
    if json:
        rows = [{"item_id": key.item_id, "repeat": key.repeat, "prompt": text} for key, text in shown]
        print_json({"dry_run": True, **told, "bounded": bounded, "prompts": rows})
        return
    for name, value in told.items():
        if value not in (None, [], {}):
            say(f"{name:<18} {one_line(_plain(value), 200)}")
    if not bounded:
        say(_NO_LIMIT)
    for key, text in shown:
        say()
        say(f"--- {one_line(str(key))}")
        say(safe(text))
    say()
    say("nothing was started and nothing was written")


def _is_bounded(work: SwarmWork) -> bool:
    """Whether a limit of the run, of its rollouts or of every single item ends what would not end by itself."""
    said = [one for one in (work.plan.settings.limits, work.plan.total_limits) if one is not None and one.said()]
    return bool(said) or all(one.item.limits is not None and one.item.limits.said() for one in work.plan.items)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items() if item not in (None, []))  # pyright: ignore[reportUnknownVariableType]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType]


def _items_path(items: str | None) -> str | None:
    return items if items in (None, "-") else str(Path(items).expanduser().absolute())


def _tuple(texts: list[str] | None) -> tuple[str, ...] | None:
    return tuple(texts) if texts else None


def _one_of(flag: str, value: str | None, *allowed: str) -> Any:
    if value is not None and value not in allowed:
        raise ConfigError(
            f"{flag} cannot be {value!r}", code="request.bad_usage", hint=f"it is one of {', '.join(allowed)}"
        )
    return value


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)
