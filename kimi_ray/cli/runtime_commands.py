"""``status``, ``drain``, ``down`` and ``logs``: looking at running runtimes, emptying nodes, ending runtimes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kimi_ray.cli import exits
from kimi_ray.cli.options import Address, Home, Json, Namespace
from kimi_ray.cli.printing import counted, one_line, print_json, safe, say, table, tell
from kimi_ray.cli.settings_of import runtime_config

_SHOWN = 5
_NO_CLUSTER = "no cluster: name one with --address (a local Ray ends with its own command)"


def status(json: Json = False, home: Home = None, address: Address = None, namespace: Namespace = None) -> None:
    """What runs in a cluster: runtimes, their hosts, sessions, agents, drivers, limits of models, and orphans.

    With --json: {"address", "namespace", "runtimes": [{"home_id", "home", "hosts", "leases", "limits", "actors",
    "error"?}]}.
    """
    from kimi_ray.actors.operate import status as ask

    told = ask(runtime_config(home, address, namespace))
    if json:
        print_json({"address": told["address"], "namespace": told["namespace"], "runtimes": told["runtimes"]})
        return
    if told["address"] is None:
        say(_NO_CLUSTER)
        return
    say(f"{counted(len(told['runtimes']), 'runtime')} in namespace {told['namespace']} at {told['address']}")
    for runtime in told["runtimes"]:
        _print_runtime(runtime)


def down(
    everything: Annotated[bool, typer.Option("--all", help="Every runtime of the namespace.")] = False,
    json: Json = False,
    home: Home = None,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """End the runtime of a home now: sessions are flushed and closed, then its actors end.

    With --json: {"address", "namespace", "ended": [home_id], "failed": {home_id: error}}.
    """
    from kimi_ray.actors.operate import down as end

    told = end(runtime_config(home, address, namespace), everything)
    told = {name: told[name] for name in ("address", "namespace", "ended", "failed")}
    if json:
        print_json(told)
    elif told["address"] is None:
        say(_NO_CLUSTER)
    else:
        say(f"ended {len(told['ended'])}: {', '.join(told['ended'])}" if told["ended"] else "nothing was running")
        for home_id, error in told["failed"].items():
            tell(f"{home_id} did not end well and was killed: {safe(str(error.get('message')))}")
    if told["failed"]:
        raise typer.Exit(exits.FAILED)


def drain(
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="A node's id, its beginning, its address, or `here`; see status.")
    ],
    deadline: Annotated[float, typer.Option("--deadline", min=0, help="Longest wait for what runs, seconds.")] = 300.0,
    force: Annotated[bool, typer.Option("--force", help="Cancel what still runs at the deadline.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Let a drained node take work again.")] = False,
    json: Json = False,
    home: Home = None,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """Empty a node before it goes: nothing new starts there, agents and sessions leave when they are idle, and its
    hosts end. Exit 1 while something is left there.

    With --json: {"address", "namespace", "node_id", "done", "drained": [{"home_id", "done", "moved", "handed_over",
    "stopped", "running", "pinned", "sessions", "cancelled", "errors"}], "failed": {home_id: error}}.
    """
    from kimi_ray.actors.operate import drain as empty

    told = empty(runtime_config(home, address, namespace), node, deadline_s=deadline, force=force, undo=undo)
    told = {name: told[name] for name in ("address", "namespace", "node_id", "done", "drained", "failed")}
    if json:
        print_json(told)
    elif told["address"] is None:
        say(_NO_CLUSTER)
    else:
        say(
            f"node {told['node_id']} " + ("takes work again" if undo else "is empty" if told["done"] else "is draining")
        )
        for report in told["drained"]:
            _print_drain(report)
        for home_id, error in told["failed"].items():
            tell(f"{home_id}: {safe(str(error.get('message')))}")
    if not told["done"]:
        raise typer.Exit(exits.FAILED)


def logs(
    host: Annotated[str, typer.Argument(metavar="HOST", help="An actor's name, or the end of it; see status.")],
    max_bytes: Annotated[int, typer.Option("--max-bytes", min=1, help="Of each file, from its end.")] = 64 << 10,
    json: Json = False,
    home: Home = None,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """The ends of the log files of one actor's process (what Ray and libraries printed there).

    With --json: {"host", "files": {name: text}}.
    """
    from kimi_ray.actors.operate import host_logs

    told = host_logs(runtime_config(home, address, namespace), host, max_bytes=max_bytes)
    if json:
        print_json({"host": told.get("host"), "files": told.get("files") or {}})
    elif told["address"] is None:
        say(_NO_CLUSTER)
    else:
        for name, text in told["files"].items():
            say(f"--- {one_line(name)}")
            say(safe(text).rstrip("\n"))


def _print_runtime(runtime: dict[str, Any]) -> None:
    say()
    say(f"{runtime['home_id']}  {one_line(str(runtime.get('home') or ''))}")
    if runtime.get("error"):
        say(f"  its registry does not answer ({runtime['error'].get('code')}), so these actors are orphans;")
        say("  kimi-ray down --all ends them:")
        for name in runtime["actors"]:
            say(f"    {one_line(str(name))}")
        return
    drivers = [f"{lease.get('host')} pid {lease.get('pid')}" for lease in runtime.get("leases") or ()]
    say(f"  drivers   {', '.join(one_line(one) for one in drivers) or 'none: it ends soon'}")
    alive = [node for node in runtime.get("nodes") or () if node.get("alive")]
    say(f"  nodes     {len(alive)}")
    for node in alive:
        say(f"    {_node_line(node)}")
    for limit in runtime.get("limits") or ():
        say(f"  limit     {_limit_line(limit)}")
    if runtime.get("ending"):
        say("  it is ending")
    failures: dict[str, dict[str, Any]] = runtime.get("failures") or {}
    for kind, error in failures.items():
        say(f"  the last start of {kind} failed: {one_line(str(error.get('message')), 200)}")
    rows = [
        [
            str(host["name"]).partition("/")[2],
            str(host.get("kind")),
            str(host.get("load")),
            str(len(host.get("sessions") or ())),
            "yes" if host.get("dedicated") else "",
            str(host.get("fingerprint") or "")[:8],
            str(host.get("pid")),
            str(host.get("node_id"))[:12],
        ]
        for host in runtime.get("hosts") or ()
    ]
    told = table(["host", "kind", "load", "sessions", "dedicated", "code", "pid", "node"], rows, right="..rr..r")
    say("\n".join(f"  {line}" for line in told.splitlines()))


def _node_line(node: dict[str, Any]) -> str:
    marks = [word for word, key in (("head", "is_head"), ("home", "has_storage")) if node.get(key)]
    draining: dict[str, Any] | None = node.get("draining")
    if draining is not None:
        left = len(draining["running"]) + len(draining["pinned"]) + len(draining["sessions"])
        marks.append("drained" if draining["done"] else f"draining ({left} left)")
    told = f"{str(node['node_id'])[:12]}  {one_line(str(node.get('address')))}  {node.get('cpus'):g} CPUs"
    return "  ".join([told, *marks])


def _limit_line(limit: dict[str, Any]) -> str:
    """How many requests at once a model gets now, of how many that are wanted."""
    told = f"{one_line(str(limit['model']), 40)}: {counted(limit['limit'], 'request')} at once, {limit['in_use']} under"
    told += f" way, {max(0, limit['wanted'] - limit['in_use'])} waiting"
    if limit["cuts"]:
        told += f", {counted(limit['cuts'], 'cut')}"
    return told + (f", paused for {limit['paused_s']:.1f} s" if limit["paused_s"] else "")


def _print_drain(report: dict[str, Any]) -> None:
    say(
        f"  {report['home_id']}  {report['moved']} agents let go, {report['handed_over']} sessions handed over,"
        f" {len(report['stopped'])} hosts ended in {report['elapsed_s']:.1f} s"
    )
    words = {"running": "still running", "pinned": "only here", "sessions": "with a swarm", "cancelled": "cancelled"}
    for key, word in words.items():
        if report[key]:
            more = f" and {len(report[key]) - _SHOWN} more" if len(report[key]) > _SHOWN else ""
            say(f"    {word}: {', '.join(one_line(str(one)) for one in report[key][:_SHOWN])}{more}")
    for name, error in report["errors"].items():
        tell(f"{one_line(str(name))}: {safe(str(error.get('message')))}")
