"""From the arguments of a ``swarm`` command to a checked plan. Nothing is started and nothing is written."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kimi_ray.cli.settings_of import runtime_config
from kimi_ray.cli.swarm_arguments import SwarmArguments
from kimi_ray.errors import ConfigError, RunError

if TYPE_CHECKING:
    from kimi_ray.config import RuntimeConfig
    from kimi_ray.llm.models import ResolvedModel
    from kimi_ray.runs import RunSeed
    from kimi_ray.runs.plan import RunPlan
    from kimi_ray.settings import Limits, Workdir

PROFILE = "explore"
MAX_CONCURRENCY = 32


@dataclass(frozen=True, slots=True)
class SwarmWork:
    """A swarm command, checked: what is to run, with what, and where its rows go."""

    arguments: SwarmArguments
    config: RuntimeConfig
    model: ResolvedModel
    plan: RunPlan
    cwd: str
    out: Path
    resumed: bool
    selection: dict[str, Any]
    named: bool = True
    """Whether ``out`` is the user's wish; else another name will do when somebody was quicker."""


def make_work(said: SwarmArguments, *, out: str | None, resume: str | None) -> SwarmWork:
    """Check everything that can be checked before something starts.

    Args:
        said: The command line's arguments.
        out: The run directory of a new run; None makes a name.
        resume: The run directory of a run to go on with: its own arguments count where ``said`` says nothing.

    Raises:
        KimiRayError: ``items.*``, ``swarm.*``, ``run.*``, ``model.*``, ``config.*``, ``tool.*``, ``workdir.*``.
    """
    from kimi_ray.runs import default_run_directory, read_manifest, seed_of

    if resume is None:
        arguments, cwd, run_id, seed = said, os.getcwd(), None, None
        if out is not None and not out.strip():
            raise ConfigError("--out names no directory", code="request.bad_usage", hint="leave it out, or name one")
        slug = said.prompt or said.rollout or ""
        directory = Path(out).expanduser() if out is not None else default_run_directory(slug)
        _check_free(directory)
    else:
        if out is not None:
            raise ConfigError("--out and --resume exclude each other", code="request.conflict", hint="leave out --out")
        if not resume.strip():
            raise ConfigError("--resume names no directory", code="request.bad_usage", hint="name the run directory")
        directory = Path(resume).expanduser()
        manifest = read_manifest(directory)
        arguments, cwd, run_id = _recorded(said, manifest, directory)
        seed = seed_of(manifest)
        if said.seed is not None:
            seed = None
    if arguments.prompt is None and arguments.rollout is None:
        raise ConfigError(
            "there is no prompt", code="request.bad_usage", hint="kimi-ray swarm 'Review {{item}}' --items FILE"
        )
    if arguments.items is None:
        raise ConfigError(
            "there are no items", code="request.bad_usage", hint="name a file with --items FILE (.jsonl, .csv, .txt, -)"
        )
    if arguments.retry_on is not None and not arguments.retries:
        raise ConfigError(
            "--retry-on says what --retries tries again", code="request.conflict", hint="give --retries N beside it"
        )
    config = runtime_config(arguments.home, arguments.address, arguments.namespace)
    model = find_model(config, arguments.model, arguments.base_url)
    plan = _plan(arguments, config, model, cwd, run_id, seed)
    check_price(model, plan.settings.limits, plan.total_limits, *(item.item.limits for item in plan.items))
    selection = {
        name: value
        for name in ("id_column", "limit", "shuffle", "filter")
        if (value := getattr(arguments, name)) is not None
    }
    named = out is not None or resume is not None
    return SwarmWork(arguments, config, model, plan, cwd, directory, resume is not None, selection, named)


def find_model(config: RuntimeConfig, name: str | None, base_url: str | None) -> ResolvedModel:
    """The model that a command means: --model, else ``default_model``, else the only table.

    A script that it names can be imported from the current directory.

    Raises:
        ConfigError: ``model.*``.
    """
    from kimi_ray.app import ModelCatalogue

    model = ModelCatalogue(config).resolve(name, base_url)
    if isinstance(model.settings.script, str):
        make_importable((model.settings.script,), os.getcwd())
    return model


def find_workdir(text: str | None, cwd: str, *, writes: bool = False) -> Workdir | None:
    """The form of the command line, with ``cwd`` where no directory is named; it must exist unless it has placeholders.

    Raises:
        ToolError: ``workdir.invalid``; ConfigError: ``workdir.not_found``.
    """
    from kimi_ray.tools.workdirs import check_factory, parse_workdir

    if text is None:
        return None
    workdir = parse_workdir(text, cwd)
    if workdir.kind == "factory":
        make_importable((workdir.path or "",), cwd)
        check_factory(workdir)
    elif workdir.path is not None and "{{" not in workdir.path:
        workdir = workdir.within(cwd)
        if not os.path.isdir(str(workdir.path)):
            what = "repository" if workdir.kind == "git" else "working directory"
            raise ConfigError(
                f"the {what} {workdir.path} does not exist",
                code="workdir.not_found",
                hint="--workdir git:REPO@REF takes a repository on the node where the agent works"
                if workdir.kind == "git"
                else "--workdir copy and --workdir shared without a path take the current directory",
                details={"path": workdir.path},
            )
    return workdir.model_copy(update={"writes": True}) if writes and workdir.kind == "shared" else workdir


def find_schema(text: str | None, cwd: str) -> dict[str, Any] | None:
    """The JSON schema that ``--output-schema`` means: a file of it, or ``package.module:Model``.

    Raises:
        ConfigError: ``output.bad_schema``, ``request.unreadable_file``.
    """
    import json

    from kimi_ray.tools.output_schema import load_schema, schema_of

    if text is None:
        return None
    if ":" in text and not os.path.exists(text):
        make_importable((text,), cwd)
        return load_schema(text)
    content = text_or_file(f"@{text}")
    try:
        return schema_of(json.loads(content or ""))
    except ValueError as error:
        raise ConfigError(
            f"{text} is not JSON: {error}",
            code="output.bad_schema",
            hint="--output-schema takes a file with a JSON schema, or package.module:Model",
            details={"file": text},
        ) from None


def make_importable(names: tuple[str, ...], cwd: str) -> None:
    """Let ``package.module:function`` be found beside the user's files, as with ``python -m``."""
    if any(":" in name for name in names) and cwd not in sys.path:
        sys.path.insert(0, cwd)


def check_price(model: ResolvedModel, *limits: Limits | None) -> None:
    """A bound of the cost without a price would never be reached.

    Raises:
        ConfigError: ``limit.needs_price``.
    """
    if model.settings.price is None and any(one is not None and one.max_cost_usd is not None for one in limits):
        raise ConfigError(
            f"the cost of the model {model.name!r} cannot be bounded: its price is not known",
            code="limit.needs_price",
            hint=f"write price = {{input = ..., output = ...}} (dollars per million tokens) into [models.{model.name}]",
        )


def text_or_file(text: str | None) -> str | None:
    """A text as it is, or with ``@FILE`` the file's content.

    Raises:
        ConfigError: ``request.unreadable_file``.
    """
    if text is None or not text.startswith("@"):
        return text
    path = Path(text[1:]).expanduser()
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{path} cannot be read: {why}",
            code="request.unreadable_file",
            hint="@FILE takes the text from a file; a text that begins with @ is given with a space before it",
            details={"file": str(path)},
        ) from None


def _plan(
    arguments: SwarmArguments,
    config: RuntimeConfig,
    model: ResolvedModel,
    cwd: str,
    run_id: str | None,
    seed: RunSeed | None,
) -> RunPlan:
    from kimi_ray.hosts.features import load_features
    from kimi_ray.runs import Filter, SwarmSettings, read_items
    from kimi_ray.runs.plan import plan_run
    from kimi_ray.runs.prompts import checked_prompt
    from kimi_ray.runs.schedule import DEFAULT_RETRY_ON
    from kimi_ray.session_handle import bind_profile
    from kimi_ray.settings import Workdir
    from kimi_ray.tools.rollout_function import carried_rollout

    make_importable((*(arguments.tools or ()), arguments.model or "", arguments.rollout or ""), cwd)
    rollout = None if arguments.rollout is None else carried_rollout(arguments.rollout)
    profile, user_tools = bind_profile(
        arguments.profile or PROFILE, arguments.system_prompt, arguments.tools, load_features(config)
    )
    filters = [Filter.parse(text) for text in arguments.filter or ()]
    items, sources = read_items(str(arguments.items))
    workdir = find_workdir(arguments.workdir, cwd, writes=bool(arguments.allow_shared_writes))
    settings = SwarmSettings(
        profile=profile,
        model=model.name,
        system_prompt=arguments.system_prompt,
        tools=None if arguments.tools is None else profile.tools,
        sampling=arguments.sampling,
        limits=arguments.limits,
        workdir=workdir,
        isolation=arguments.isolation,
        tags=arguments.tags,
    )
    if settings.workdir is None and settings.tool_names:
        shared = Workdir.shared(cwd, writes=bool(arguments.allow_shared_writes))
        settings = settings.model_copy(update={"workdir": shared})
    return plan_run(
        checked_prompt(arguments.prompt, needed=rollout is None),
        items,
        settings,
        run_id=run_id,
        repeats=1 if arguments.repeats is None else arguments.repeats,
        seed=seed if seed is not None else arguments.seed,
        max_concurrency=MAX_CONCURRENCY if arguments.max_concurrency is None else arguments.max_concurrency,
        total_limits=arguments.total_limits,
        retries=arguments.retries or 0,
        retry_on=DEFAULT_RETRY_ON if arguments.retry_on is None else arguments.retry_on,
        fail_on=arguments.fail_on,
        on_interrupted=arguments.on_interrupted or "continue",
        keep_workdirs=bool(arguments.keep_workdirs),
        user_tools=user_tools,
        rollout=rollout,
        output_schema=arguments.output_schema,
        denied_paths=_denied(arguments),
        id_column=arguments.id_column,
        filters=filters,
        shuffle=arguments.shuffle,
        limit=arguments.limit,
        sources=sources,
    )


def _denied(arguments: SwarmArguments) -> list[str]:
    """An agent must not read the items file: the other items, and what they may say about the answer, are in it."""
    return [] if arguments.items in (None, "-") else [str(arguments.items)]


def _recorded(said: SwarmArguments, manifest: Mapping[str, Any], directory: Path) -> tuple[SwarmArguments, str, str]:
    """Arguments, current directory and run id of the command that began a run."""
    try:
        recorded = SwarmArguments.model_validate(manifest["arguments"])
        prompt = cast("Mapping[str, Any]", manifest["prompt"])["text"]
        output_schema = manifest.get("output_schema")
        cwd, run_id = str(manifest["cwd"]), str(manifest["run_id"])
        config: dict[str, Any] = manifest["config"]
        # Where it ran counts more than what the environment says now: its logs and claims are there.
        place = {name: config.get(name) for name in ("home", "address", "namespace")}
    except (KeyError, TypeError, ValueError):
        raise RunError(
            f"{directory} is not of a kimi-ray swarm command",
            code="run.not_resumable",
            hint="go on with it from Python, as it was begun: start_swarm(..., out=..., resume=True)",
            details={"run_dir": str(directory)},
        ) from None
    texts = {"prompt": prompt, "output_schema": output_schema}
    return said.over(recorded.model_copy(update={**texts, **place})), cwd, run_id


def _check_free(directory: Path) -> None:
    """The same refusal as of the directory itself, before anything was started."""
    from kimi_ray.runs.run_directory import MANIFEST

    # `os.path` and not `Path.exists`: a name that no file can have is told by the directory itself
    if os.path.exists(directory / MANIFEST):
        raise RunError(
            f"{directory} already has a run",
            code="run.exists",
            hint="choose another --out, or go on with --resume",
            details={"run_dir": str(directory)},
        )
