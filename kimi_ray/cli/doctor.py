"""``doctor``: what could be in the way of a run, and how to mend it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kimi_ray.cli import exits
from kimi_ray.cli.doctor_settings import hook_line, permission_line, programs_not_there, settings_facts
from kimi_ray.cli.options import Address, BaseUrl, Home, Json, Model, Namespace
from kimi_ray.cli.printing import print_json, safe, say
from kimi_ray.cli.settings_of import IN_PROCESS, runtime_config
from kimi_ray.errors import KimiRayError

if TYPE_CHECKING:
    from kimi_ray.config import RuntimeConfig

Grade = Literal["OK", "WARN", "FAIL"]

_LEAST_PYTHON = (3, 11)
_LEAST_RAY = (2, 50)
_LOW_DISK = 1 << 30
_LEAST_FILES = 4096
_MODEL_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``fix`` says how to mend what is not OK."""

    check: str
    status: Grade
    detail: str
    fix: str | None = None


def doctor(
    model: Model = None,
    base_url: BaseUrl = None,
    fix: Annotated[bool, typer.Option("--fix", help="Remove locks that dead processes left in the home.")] = False,
    json: Json = False,
    home: Home = None,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """Check this machine, the home, the cluster of --address and the model of --model; show what applies to agents.

    Hooks (with their program only), permissions, MCP servers (by name) and Features are those of the settings.
    Exit 1 when something is a FAIL. With --json: {"ok", "checks": [{"check", "status", "detail", "fix"}], "settings":
    {"hooks", "permission_mode", "permissions", "mcp_servers", "mcp_installed", "features"}}.
    """
    config = runtime_config(home, address, namespace)
    findings: list[Finding] = []

    def note(finding: Finding) -> None:
        findings.append(finding)
        if not json:
            say(f"{finding.status:<5} {finding.check:<13} {safe(finding.detail)}")
            if finding.fix:
                say(f"      {'':<13} -> {safe(finding.fix)}")

    settings = settings_facts(config)
    checks: list[Callable[[], Iterator[Finding]]] = [
        _programs,
        lambda: _settings(config, settings),
        lambda: _home(config, fix=fix),
        lambda: _memory(config),
        lambda: _cluster(config),
        lambda: _model(config, model, base_url),
    ]
    for check in checks:
        for finding in check():
            note(finding)
    ok = all(finding.status != "FAIL" for finding in findings)
    if json:
        rows = [{name: getattr(one, name) for name in ("check", "status", "detail", "fix")} for one in findings]
        print_json({"ok": ok, "checks": rows, "settings": settings})
    if not ok:
        raise typer.Exit(exits.FAILED)


def _programs() -> Iterator[Finding]:
    from kimi_ray.runs.manifest import versions
    from kimi_ray.version import __version__

    found = versions()
    python = str(found["python"])
    yield Finding(
        "python",
        "OK" if sys.version_info >= _LEAST_PYTHON else "FAIL",
        f"{python} on {found['platform']}",
        None if sys.version_info >= _LEAST_PYTHON else "use Python 3.11 or newer",
    )
    yield Finding("kimi-ray", "OK", __version__)
    ray = found["ray"]
    if ray is None:
        yield Finding("ray", "FAIL", "not installed", "pip install -c constraints.txt kimi-ray; in-process needs none")
    elif _numbers(ray) < _LEAST_RAY:
        yield Finding("ray", "FAIL", ray, "pip install -U 'ray>=2.50', the same on every node")
    else:
        yield Finding("ray", "OK", ray)


def _settings(config: RuntimeConfig, facts: dict[str, Any]) -> Iterator[Finding]:
    for hook in facts["hooks"]:
        fix = "correct its matcher: until then it never runs" if hook["problem"] else None
        told = hook_line(hook) + (f" ({hook['problem']})" if hook["problem"] else "")
        yield Finding("hook", "WARN" if hook["problem"] else "OK", told, fix)
    if not facts["hooks"]:
        yield Finding("hooks", "OK", "none")
    yield Finding("permissions", "OK", permission_line(facts))
    missing = bool(facts["mcp_servers"]) and not facts["mcp_installed"]
    yield Finding(
        "MCP servers",
        "FAIL" if missing else "OK",
        ", ".join(facts["mcp_servers"]) or "none",
        'pip install "kimi-ray[mcp]", on every node' if missing else None,
    )
    for name, program in programs_not_there(config):
        yield Finding(
            "MCP server",
            "WARN",
            f"{name}: there is no program {program!r} on this machine, so agents here do without its tools",
            f"install it, or correct the command of [mcp_servers.{name}]",
        )
    if facts["features"]:
        from kimi_ray.hosts.features import load_features

        try:
            load_features(config)
        except KimiRayError as error:
            yield _of_error("features", error)
            return
    yield Finding("features", "OK", ", ".join(facts["features"]) or "none")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _home(config: RuntimeConfig, *, fix: bool) -> Iterator[Finding]:
    from kimi_ray.store.fs import RealFs
    from kimi_ray.store.identity import check_filesystem, read_identity

    fs, home = RealFs(), config.home
    existing = next(path for path in (Path(home), *Path(home).parents) if path.exists())
    if not existing.is_dir():
        yield Finding("home", "FAIL", f"{existing} is a file, so {home} cannot be", "choose another --home")
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("home", "FAIL", f"{existing} cannot be written", "choose another --home, or change its rights")
        return
    if str(existing) != home:
        yield Finding("home", "OK", f"{home} does not exist yet and can be made")
    else:
        try:
            identity = read_identity(fs, home)
        except KimiRayError as error:
            yield _of_error("home", error)
            return
        told = "no store yet" if identity is None else f"{identity.backend}, store {identity.home_id}"
        yield Finding("home", "OK", f"{home} ({told})")
    kind = fs.fs_type(str(existing)) or "unknown"
    try:
        check_filesystem(fs, str(existing), network_home=config.network_home)
        yield Finding("file system", "OK", kind)
    except KimiRayError as error:
        yield _of_error("file system", error)
    free = fs.free_space(str(existing))
    low = free < _LOW_DISK
    yield Finding(
        "disk",
        "WARN" if low else "OK",
        f"{free / (1 << 30):.1f} GiB free",
        "free some space: a full disk stops agents until there is room" if low else None,
    )
    if Path(home, "store.json").exists():
        yield from _locks(home, fix=fix)


def _locks(home: str, *, fix: bool) -> Iterator[Finding]:
    from kimi_ray.store.fs import RealFs
    from kimi_ray.store.layout import Layout
    from kimi_ray.store.owners import is_held, orphans, remove_orphans

    fs = RealFs()
    layout = Layout(fs, home)
    writers = Path(layout.writers)
    held = [one for one in (writers.iterdir() if writers.is_dir() else ()) if is_held(fs, str(one))]
    left = remove_orphans(fs, home) if fix else orphans(fs, home)
    if left and not fix:
        yield Finding(
            "locks",
            "WARN",
            f"{len(left)} of dead processes, {len(held)} in use",
            "harmless; kimi-ray doctor --fix removes them",
        )
    else:
        removed = f", {len(left)} of dead processes removed" if left else ""
        yield Finding("locks", "OK", f"{len(held)} in use{removed}")


def _memory(config: RuntimeConfig) -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted_files = min(4 * _LEAST_FILES, hard) if hard > 0 else 4 * _LEAST_FILES
    few = soft != resource.RLIM_INFINITY and soft < _LEAST_FILES
    yield Finding(
        "open files",
        "WARN" if few else "OK",
        f"limit {soft}",
        f"ulimit -n {wanted_files} before large swarms" if few else None,
    )
    if config.address is not None:
        return
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return
    facts = os.statvfs(shm)
    free = facts.f_bavail * facts.f_frsize
    wanted = config.object_store_memory
    yield Finding(
        "object store",
        "OK" if free >= wanted else "WARN",
        f"{wanted >> 20} MiB wanted, {free >> 20} MiB free in {shm}",
        None if free >= wanted else "Ray falls back to slow files in /tmp: enlarge /dev/shm or set object_store_memory",
    )


def _cluster(config: RuntimeConfig) -> Iterator[Finding]:
    if config.address in (None, IN_PROCESS):
        return
    from kimi_ray.actors.node_facts import node_facts
    from kimi_ray.actors.operate import status
    from kimi_ray.hosts.driver_leases import program_versions

    try:
        nodes = node_facts(config)
        runtimes: list[dict[str, Any]] = status(config)["runtimes"]
    except KimiRayError as error:
        yield _of_error("cluster", error)
        return
    yield Finding("cluster", "OK", f"{len(nodes)} nodes at {config.address}")
    mine = program_versions()
    for node in nodes:
        name = f"node {str(node['node_id'])[:8]}"
        if node.get("error"):
            yield Finding(name, "FAIL", str(node["error"]["message"]), "look at that node: it takes no work")
            continue
        theirs: dict[str, Any] = node["versions"]
        other = {key: theirs.get(key) for key in mine if theirs.get(key) != mine[key]}
        told = f"{node['address']}: " + ", ".join(f"{key} {value}" for key, value in theirs.items())
        here = f" (here {', '.join(f'{key} {mine[key]}' for key in other)})" if other else ""
        yield Finding(
            name,
            "FAIL" if other else "OK",
            told + here,
            "install the same versions on every node" if other else None,
        )
    if len(nodes) > 1 and not config.home_shared and not any(node["has_storage"] for node in nodes):
        yield Finding(
            "storage node",
            "FAIL",
            "no node says that it keeps the home",
            "start one with ray start --resources '{\"kimi_ray_storage\": 1}', or set home_shared = true",
        )
    stored = [f"{str(node['node_id'])[:8]} at {node['address']}" for node in nodes if node["has_storage"]]
    if stored:
        yield Finding("storage node", "OK", f"{', '.join(stored)} keeps the home")
    leaving = {
        str(node["node_id"])[:8]: node["draining"]
        for runtime in runtimes
        for node in runtime.get("nodes") or ()
        if node.get("draining") and node.get("alive")
    }
    leaving |= {str(node["node_id"])[:8]: {"done": False, "by": "cluster"} for node in nodes if node["draining"]}
    if leaving:
        told = ", ".join(f"{name} ({'empty' if one['done'] else 'draining'})" for name, one in leaving.items())
        yield Finding("draining", "WARN", told, "they take no work: kimi-ray drain NODE --undo takes it back")
    fingerprints = {
        str(host.get("fingerprint"))
        for runtime in runtimes
        for host in runtime.get("hosts") or ()
        if host.get("fingerprint")
    }
    if fingerprints:
        yield Finding("user code", "OK", f"{len(fingerprints)} fingerprints on the hosts; status shows which")
    orphaned = [one for one in runtimes if one.get("error")]
    yield Finding(
        "runtimes",
        "WARN" if orphaned else "OK",
        f"{len(runtimes)} running, {len(orphaned)} of them without a registry",
        f"kimi-ray down --all --address {config.address} ends them" if orphaned else None,
    )


def _model(config: RuntimeConfig, name: str | None, base_url: str | None) -> Iterator[Finding]:
    from kimi_ray.app import ModelCatalogue

    asked = name or config.default_model
    if asked is None and not config.models and base_url is None:
        yield Finding("model", "OK", "none asked for (--model checks one; `scripted` is always there)")
        return
    try:
        resolved = ModelCatalogue(config).resolve(asked, base_url)
        if not resolved.base_urls:
            kind = f"a {resolved.provider} model of the settings" if resolved.name in config.models else "built in"
            yield Finding("model", "OK", f"{resolved.name} is {kind}")
            return
        served = asyncio.run(_served(resolved))
    except KimiRayError as error:
        yield _of_error("model", error)
        return
    where = f"{resolved.model} at {resolved.base_urls[0]}"
    if served and resolved.model not in served:
        yield Finding("model", "WARN", f"{where}: the server lists {', '.join(served[:5])}", "check the model's name")
    else:
        yield Finding("model", "OK", where)


async def _served(resolved: Any) -> list[str]:
    from kimi_ray.llm.openai import OpenAIProvider

    provider = OpenAIProvider(
        resolved.base_urls,
        api_key=resolved.api_key.get_secret_value() if resolved.api_key is not None else None,
        settings=resolved.settings,
        key_env=resolved.key_env,
    )
    try:
        return await provider.served_models(timeout_s=_MODEL_WAIT_S)
    finally:
        await provider.close()


def _of_error(check: str, error: KimiRayError) -> Finding:
    return Finding(check, "FAIL", f"{error.message} [{error.code}]", error.hint)
