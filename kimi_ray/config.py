"""How a runtime is set up: ``RuntimeConfig`` and the four places its values come from.

Each place wins over those before it: the defaults here, ``<home>/config.toml``, the file named by ``KIMI_RAY_CONFIG``,
the environment (``KIMI_RAY_<SETTING>``), and the arguments of the call. A setting has one name in all of them. A key
that does not exist or a value of the wrong type is ``config.invalid`` and names the file, the line and the key.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from pydantic import BaseModel, Field, ValidationError

from kimi_ray.errors import ConfigError
from kimi_ray.settings import (
    Checkpoint,
    Durability,
    HookSettings,
    Isolation,
    McpServer,
    PermissionModeName,
    PermissionRule,
    Settings,
)

if TYPE_CHECKING:
    from kimi_ray.llm.models import ModelSettings

ENV_PREFIX = "KIMI_RAY_"
MIB = 1 << 20

_DRIVER_ONLY = frozenset({"home", "address", "namespace", "default_model", "models", "object_store_memory"})
_NOT_SETTINGS = frozenset({"CONFIG", "CLOCK_OFFSET_MS"})


class RuntimeConfig(Settings):
    """Every setting of a runtime; build it with ``load_config``. Sizes are in bytes, ``_ms`` and ``_s`` are time."""

    home: str = Field(default="~/.kimi-ray", description="Directory of logs, documents and blobs on the storage node.")
    address: str | None = Field(
        default=None, description="Ray cluster to join; none starts a local Ray; `in-process` runs without Ray."
    )
    namespace: str = Field(default="kimi_ray", min_length=1, description="Ray namespace of all actors.")

    backend: Literal["jsonl", "sqlite"] = Field(default="jsonl", description="How logs are stored; fixed at creation.")
    compression: Literal["none", "zstd"] = Field(
        default="none", description="Compression of JSONL logs; fixed at creation."
    )
    shards: int = Field(default=1, ge=1, le=64, description="Store actors (and databases); fixed at creation.")
    durability: Durability = Field(
        default="disk",
        description="What an acknowledged event survives: `disk` a power cut, `os` a killed process, `none` nothing.",
    )
    checkpoint: Checkpoint = Field(
        default="request",
        description="When an agent itself waits until its log is durable: before each model `request` and tool, at each"
        " `turn`'s end, or never (`none`).",
    )
    write_window_ms: int = Field(
        default=200, ge=0, le=60_000, description="How long a pending event waits for company, milliseconds."
    )
    sync_interval_ms: int = Field(
        default=1000, ge=0, le=600_000, description="Longest time between syncs of written events, milliseconds."
    )

    hosts_per_node: int | None = Field(default=None, ge=1, description="Host processes per node; none: its CPUs.")
    agents_per_host: int = Field(
        default=256,
        ge=1,
        description="Soft limit: while a host is below it, nobody waits for another host to start, "
        "but up to 3 s in a burst on a young runtime.",
    )
    max_agents_per_host: int | None = Field(
        default=None, ge=1, description="Hard limit; 1 gives every session and agent an actor of its own."
    )
    isolation: Isolation = Field(
        default="shared",
        description="`dedicated` gives each agent a process of its own: for untrusted or CPU-heavy tools.",
    )
    host_resources: dict[str, float] = Field(
        default_factory=dict, description="Ray resources that each host asks for; `num_cpus` and `memory` included."
    )
    object_store_memory: int = Field(default=256 * MIB, ge=80 * MIB, description="Object store of a local Ray, bytes.")

    home_shared: bool = Field(default=False, description="The home is on a file system that every node sees.")
    workspace_shared: bool = Field(default=False, description="Working directories are seen by every node.")
    network_home: bool = Field(
        default=False, description="Accept a home on nfs, cifs, fuse or lustre if a two-process lock probe passes."
    )

    lease_timeout_s: float = Field(
        default=60.0, gt=0, description="The runtime ends this many seconds after its last driver was heard."
    )
    store_timeout_s: float = Field(
        default=30.0, gt=0, description="Longest wait of a flush before `store.unavailable`, seconds."
    )
    close_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Longest wait of a close, seconds; then it names the streams that are not durable.",
    )
    claim_timeout_s: float = Field(
        default=15.0, ge=0, description="Longest wait for a session whose owner is dying, seconds."
    )

    max_event_bytes: int = Field(default=16 * MIB, ge=1024, description="Largest single event, bytes.")
    batch_bytes: int = Field(default=4 * MIB, ge=1024, description="Largest batch of one log, bytes.")
    call_bytes: int = Field(default=32 * MIB, ge=1024, description="Largest call of a host to the store, bytes.")
    log_bytes: int = Field(default=64 * MIB, ge=1024, description="Events of one log not yet durable, bytes.")
    host_bytes: int = Field(default=256 * MIB, ge=1024, description="Events of one host not yet durable, bytes.")
    store_queue_bytes: int = Field(default=256 * MIB, ge=1024, description="Events waiting in a store actor, bytes.")

    default_model: str | None = Field(default=None, description="Model of agents and profiles that name none.")
    models: dict[str, dict[str, Any]] = Field(
        default_factory=dict, repr=False, description="`[models.X]` tables: how to reach model X."
    )
    features: tuple[str, ...] = Field(default=(), description="Features to load, `package.module:Class`.")
    hooks: tuple[HookSettings, ...] = Field(default=(), description="`[[hooks]]` tables: commands told of events.")
    permission_mode: PermissionModeName = Field(
        default="auto",
        description="Which tool calls run unasked: `auto` and `yolo` all that no rule forbids, `manual` those that only"
        " look, and the others when somebody agrees.",
    )
    permissions: tuple[PermissionRule, ...] = Field(
        default=(), description="`[[permissions]]` tables: what is allowed, asked about and denied."
    )
    permission_wait_s: float = Field(
        default=0.0,
        ge=0,
        description="Longest wait for an answer to a question, seconds; 0: the call is denied.",
    )
    mcp_servers: dict[str, McpServer] = Field(
        default_factory=dict, repr=False, description="`[mcp_servers.X]` tables: servers whose tools agents may have."
    )
    repeat_guard: bool = Field(
        default=True,
        description="An agent that makes the same tool call again and again is told so, then stopped; never rollouts.",
    )
    max_background_tasks: int = Field(default=8, ge=1, description="Background tasks of one agent at once.")
    subagent_timeout_s: float = Field(
        default=7200.0, ge=0, description="Longest run of a subagent that a model started, seconds; 0: no bound."
    )
    max_delegation_depth: int = Field(default=4, ge=0, description="How deep agents may start agents.")
    agent_swarm_max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="Most subagents at once of one call of the tool `AgentSwarm`; none: as many as it asks for.",
    )
    fs_spec: str | None = Field(default=None, description="Fault injection of the file system, for tests.")

    def runtime_fingerprint(self) -> dict[str, Any]:
        """The settings that all drivers of one runtime must share, as plain JSON.

        A second ``connect`` compares its own with the running one's; ``differing`` names what is not equal.
        """
        return self.model_dump(mode="json", exclude=set(_DRIVER_ONLY))


def differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What two fingerprints do not agree on: ``{setting: {"mine": ..., "theirs": ...}}``."""
    return {
        key: {"mine": mine.get(key), "theirs": theirs.get(key)}
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    }


def resolve_home(home: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> str:
    """The home as an absolute path: the argument, else ``KIMI_RAY_HOME``, else ``~/.kimi-ray``.

    Nothing is created and links are not followed.
    """
    env = os.environ if environ is None else environ
    text = os.fspath(home) if home is not None else env.get(ENV_PREFIX + "HOME") or "~/.kimi-ray"
    if not text or "\0" in text:
        raise ConfigError(
            f"{text!r} is not a path for the home",
            code="config.invalid",
            hint="give a directory, or leave the home out for ~/.kimi-ray",
            details={"key": "home"},
        )
    return os.path.abspath(os.path.expanduser(text))


def load_config(
    home: str | os.PathLike[str] | None = None,
    config: RuntimeConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    **arguments: Any,
) -> RuntimeConfig:
    """The settings of a runtime, from all places.

    Args:
        home: The home; None takes ``KIMI_RAY_HOME``, a ``home`` key of the ``KIMI_RAY_CONFIG`` file, ``~/.kimi-ray``.
        config: A ready config (taken as it is, with ``arguments`` on top), a mapping of settings, or the path of a
            TOML file to use in place of ``KIMI_RAY_CONFIG``.
        environ: The environment; None is this process's.
        arguments: Single settings; None means "not said".

    Raises:
        ConfigError: ``config.invalid`` {file, line, key} or {key}; ``config.not_found`` for a file named on purpose.
    """
    env = dict(os.environ if environ is None else environ)
    said = {key: value for key, value in arguments.items() if value is not None}
    if isinstance(config, RuntimeConfig):
        values = config.model_dump()
        values.update(said)
        if home is not None:
            values["home"] = home
        values["home"] = resolve_home(values["home"], env)
        return _validated(values, "the arguments")

    named = env.get(ENV_PREFIX + "CONFIG") or None
    if isinstance(config, Mapping):
        said = {**config, **said}
    elif config is not None:
        named = os.fspath(config)
    chosen = _TomlFile.read(Path(named).expanduser(), required=True) if named is not None else None
    if home is None:
        home = cast("str | None", said.get("home"))
    if home is None and chosen is not None and not env.get(ENV_PREFIX + "HOME"):
        home = cast("str | None", chosen.values.get("home"))
    resolved = resolve_home(home, env)

    own = _TomlFile.read(Path(resolved, "config.toml"), required=False)
    if own is not None and "home" in own.values and resolve_home(own.values["home"], env) != resolved:
        raise own.invalid("home", f"a file in the home {resolved} names another home", "delete the key")
    values: dict[str, Any] = {}
    for layer in (own.values if own else {}, chosen.values if chosen else {}, _from_environment(env), said):
        values = _merged(values, layer)
    values["home"] = resolved
    return _validated(values, "the arguments")


def load_models(config: RuntimeConfig) -> dict[str, ModelSettings]:
    """The ``[models.X]`` tables, checked.

    Raises:
        ConfigError: ``config.invalid`` naming the model and the key.
    """
    from kimi_ray.llm.models import ModelSettings

    loaded: dict[str, ModelSettings] = {}
    for name, table in config.models.items():
        try:
            loaded[name] = ModelSettings.model_validate(table)
        except ValidationError as error:
            where, text, hint = _first_problem(error, ModelSettings, f"models.{name}")
            raise _invalid(where, text, hint=hint) from None
    return loaded


def without_models(config: RuntimeConfig) -> RuntimeConfig:
    """The settings for a host of agents, sessions or logs: model tables may hold keys, and stay with drivers."""
    return config.model_copy(update={"models": {}, "default_model": None})


def settings_table() -> str:
    """Every setting with its default and meaning as a Markdown table: the docs hold a copy, and a test compares."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in RuntimeConfig.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "" if default is None or default in ({}, ()) else f"`{default}`"
        lines.append(f"| `{name}` | {shown} | {field.description} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _TomlFile:
    """One parsed file and its text, to say where a key stands."""

    path: Path
    text: str
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path, *, required: bool) -> _TomlFile | None:
        text = ""
        try:
            text = path.read_bytes().decode()
            values = tomllib.loads(text)
        except (FileNotFoundError, NotADirectoryError):
            if not required:
                return None  # a home that cannot be is told by the store
            raise ConfigError(
                f"the config file {path} does not exist",
                code="config.not_found",
                hint="create it, or unset KIMI_RAY_CONFIG",
                details={"file": str(path)},
            ) from None
        except UnicodeDecodeError as error:
            raise _invalid(None, f"{path} is not UTF-8 (byte {error.start})", file=str(path)) from None
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"at line (\d+)", str(error))
            line = int(found.group(1)) if found else text.count("\n") + 1
            raise _invalid(None, f"{path} line {line} is not TOML: {error}", file=str(path), line=line) from None
        except OSError as error:
            raise ConfigError(
                f"the config file {path} cannot be read: {error.strerror}",
                code="config.unreadable",
                hint="check its permissions",
                details={"file": str(path)},
            ) from None
        file = cls(path, text, values)
        file.check()
        return file

    def check(self) -> None:
        """Refuse what is wrong in this file while its lines can still be named."""
        for key in self.values:
            if key not in RuntimeConfig.model_fields:
                raise self.invalid(key, "there is no such setting", _near_hint(key, RuntimeConfig.model_fields))
        try:
            # As JSON, strict mode takes an array for a tuple and still no text for a number.
            checked = RuntimeConfig.model_validate_json(json.dumps(self.values, default=str), strict=True)
        except ValidationError as error:
            where, text, hint = _first_problem(error, RuntimeConfig)
            raise self.invalid(where, text, hint) from None
        if checked.models:
            try:
                load_models(checked)
            except ConfigError as error:
                raise self.invalid(error.details["key"], error.details["problem"], error.hint) from None

    def invalid(self, key: str, problem: str, hint: str | None) -> ConfigError:
        line = _line_of(self.text, key)
        return _invalid(key, problem, hint=hint, file=str(self.path), line=line)


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    names = {name.upper(): name for name in RuntimeConfig.model_fields}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or not text:
            continue
        upper = variable.removeprefix(ENV_PREFIX)
        name = names.get(upper)
        if name is None:
            close = difflib.get_close_matches(upper, names, n=1, cutoff=0.85)
            if close and upper not in _NOT_SETTINGS:
                raise _invalid(variable, "there is no such setting", hint=f"did you mean {ENV_PREFIX}{close[0]}?")
            continue
        values[name] = _parsed(variable, name, text)
    if values:
        _validated(values, "the environment", prefix=ENV_PREFIX)
    return values


def _parsed(variable: str, name: str, text: str) -> Any:
    """Text of a variable: tables and lists are JSON (a list may also be comma-separated), the rest is as it is."""
    default = RuntimeConfig.model_fields[name].get_default(call_default_factory=True)
    if isinstance(default, tuple) and not text.lstrip().startswith("["):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if not isinstance(default, dict | tuple):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise _invalid(variable, f"not JSON: {error}", hint="write a JSON object") from None


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on ``under``; the tables of ``models`` are joined by name."""
    both = {**under, **over}
    mine, theirs = under.get("models"), over.get("models")
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        both["models"] = {**cast("Mapping[str, Any]", mine), **cast("Mapping[str, Any]", theirs)}
    return both


def _validated(values: Mapping[str, Any], place: str, *, prefix: str = "") -> RuntimeConfig:
    for key in values:
        if key not in RuntimeConfig.model_fields:
            raise _invalid(
                key, f"there is no such setting (in {place})", hint=_near_hint(key, RuntimeConfig.model_fields)
            )
    try:
        config = RuntimeConfig.model_validate(dict(values))
    except ValidationError as error:
        where, text, hint = _first_problem(error, RuntimeConfig)
        raise _invalid(prefix + where.upper() if prefix else where, f"{text} (in {place})", hint=hint) from None
    if config.models:
        load_models(config)
    return config


def _first_problem(error: ValidationError, model: type[BaseModel], table: str = "") -> tuple[str, str, str | None]:
    """Where pydantic's first complaint is, what is wrong, and a hint when it is the key that is wrong.

    The input itself is not shown, it may be a secret. ``table`` is where ``model`` stands in a file.
    """
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    loc = first["loc"]
    where = ".".join(str(part) for part in (*([table] if table else []), *loc))
    if first["type"] not in ("extra_forbidden", "missing"):
        text = first["msg"].removeprefix("Value error, ")
        return where, text[0].lower() + text[1:], None
    for part in loc[:-1]:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        model = (_model_within(field.annotation) if field is not None else None) or model
    names = model.model_fields
    keys = f"the keys of {where.rpartition('.')[0]} are: {', '.join(names)}"
    if first["type"] == "missing":
        return where, "is missing", keys
    return where, "there is no such key", _near_hint(str(loc[-1]), names, keys)


def _model_within(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds: itself, or in a tuple, a dict or an option."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for one in get_args(annotation) if (found := _model_within(one)) is not None), None)


def _near_hint(key: str, names: Mapping[str, Any], otherwise: str | None = None) -> str:
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else otherwise or f"settings are: {', '.join(names)}"


def _invalid(
    key: str | None, problem: str, *, hint: str | None = None, file: str | None = None, line: int | None = None
) -> ConfigError:
    place = f"{file} line {line}: " if file and line else f"{file}: " if file else ""
    message = f"{place}{key}: {problem}" if key else problem
    details = {"key": key, "problem": problem, "file": file, "line": line}
    return ConfigError(
        message,
        code="config.invalid",
        hint=hint or "docs/configuration.md has every setting with its type and default",
        details={name: value for name, value in details.items() if value is not None},
    )


def _line_of(text: str, dotted: str) -> int | None:
    """The line where a dotted key is set (or its table begins), by a look at the text; None if it is written oddly."""
    parts = dotted.split(".")
    table: list[str] = []
    counts: dict[tuple[str, ...], int] = {}  # of arrays of tables: how many of each began
    best: tuple[int, int] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$", line)
        if header:
            named = _key_parts(header.group(2))
            table = []
            for at, part in enumerate(named, start=1):
                table.append(part)
                if at == len(named) and header.group(1) == "[[":
                    counts[tuple(table)] = counts.get(tuple(table), 0) + 1
                if tuple(table) in counts:
                    table.append(str(counts[tuple(table)] - 1))
            here = table
        else:
            assigned = re.match(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=", line)
            if not assigned:
                continue
            here = table + _key_parts(assigned.group(1))
        if here == parts[: len(here)] and (best is None or len(here) > best[0]):
            best = (len(here), number)
    return best[1] if best else None


def _key_parts(text: str) -> list[str]:
    return [part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", text)]
