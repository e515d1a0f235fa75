"""Operations on sessions whose process is killed at a call that crosses a port, and what the home is like afterwards.

A warm process (``python -m``) forks one child for each job that comes as a line of JSON on stdin: it would take longer
to start a Python for each than to do what it does. Jobs: ``prepare`` fills a home, ``operate`` does one operation and
dies at the named call, ``check`` opens the home again and looks at everything.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kimi_ray.cli.app import run_command
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.local_cluster import LocalCluster
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from kimi_ray.store import open_store
from kimi_ray.workspace_handle import Workspace

MODEL = "scripted:kimi_ray.llm.scripts:echo"
SLOW = "scripted:tests.unit.hosts.operation_crash:slow"
JOB_S = 60.0
BASE = ("cold", "archived", "source")
"""The sessions of every home before the operation."""
SETTINGS: dict[str, Any] = {
    "durability": "none",
    "write_window_ms": 2,
    "close_timeout_s": 10.0,
    "claim_timeout_s": 5.0,
    "hosts_per_node": 1,
}
_UNCOUNTED = frozenset(
    "ping progress wait_any read_events renew hello goodbye stats identity shutdown totals sweep close".split()
)

asked = asyncio.Event()


async def slow(_request: ChatRequest) -> Step:
    """A model that never answers."""
    asked.set()
    return await asyncio.get_running_loop().create_future()


# -- operations ---------------------------------------------------------------------------------------------------


async def _resume(work: Workspace, _session: Session | None) -> None:
    await work.resume("cold", model=MODEL)


async def _close(_work: Workspace, session: Session | None) -> None:
    assert session is not None
    await session.close()


OPERATIONS: dict[str, Callable[[Workspace, Session | None], Awaitable[Any]]] = {
    "create": lambda work, _: work.create_session("new", model=MODEL, profile="bare", title="New"),
    "resume": _resume,
    "close": _close,
    "archive live": lambda work, _: work.archive("cold"),
    "close busy": _close,
    "archive busy": lambda work, _: work.archive("cold"),
    "delete busy": lambda work, _: work.delete("cold"),
    "archive cold": lambda work, _: work.archive("cold"),
    "restore": lambda work, _: work.restore("archived"),
    "delete live": lambda work, _: work.delete("cold"),
    "delete cold": lambda work, _: work.delete("cold"),
    "fork": lambda work, _: work.fork("source", at="0", new_session_id="new", model=MODEL),
    "fork live": lambda work, _: work.fork("cold", new_session_id="new", model=MODEL),
    "fork many": lambda work, _: work.fork_many("source", 3, model=MODEL),
    "create child": lambda work, _: work.create_child("source", new_session_id="new", model=MODEL),
}
BUSY = frozenset({"close busy", "archive busy", "delete busy"})
LIVE = frozenset({"close", "archive live", "delete live", "fork live"}) | BUSY
MADE = {"create": 1, "fork": 1, "fork live": 1, "fork many": 3, "create child": 1}
DELETED = dict.fromkeys(("delete live", "delete busy", "delete cold"), "cold")
ARCHIVED = dict.fromkeys(("archive live", "archive busy", "archive cold"), ("cold", False, True))
ARCHIVED["restore"] = ("archived", True, False)


class Killer:
    """Counts the calls that cross a port while armed, and ends this process before or after the chosen one.

    Args:
        at: ``(method, which of its calls, before or after)``; None only keeps the trace.
    """

    def __init__(self, at: tuple[str, int, str] | None) -> None:
        self.at = at
        self.armed = False
        self.trace: list[tuple[str, int]] = []
        self._seen = Counter[str]()
        self._call = LocalCluster._call
        killer = self

        async def call(self: LocalCluster, name: str, method: str, *args: Any) -> Any:
            return await killer.counted(self, name, method, *args)

        LocalCluster._call = call  # type: ignore[method-assign]

    async def counted(self, cluster: LocalCluster, name: str, method: str, *args: Any) -> Any:
        if not self.armed or method in _UNCOUNTED:
            return await self._call(cluster, name, method, *args)
        which = (method, self._seen[method])
        self._seen[method] += 1
        self.trace.append(which)
        if self.at == (*which, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return await self._call(cluster, name, method, *args)
        finally:
            if self.at == (*which, "after"):
                os.kill(os.getpid(), signal.SIGKILL)


def connect(home: str, store: dict[str, Any]) -> Any:
    return Runtime.connect(home, "in-process", config={**SETTINGS, **store})


async def prepare(home: str, work: str, store: dict[str, Any]) -> None:
    """Three cold sessions, each with a turn; one of them archived, one with the children of a swarm."""
    async with connect(home, store) as runtime:
        place = runtime.workspace(work)
        for name in BASE:
            session = await place.create_session(name, model=MODEL, profile="bare", title=name)
            await (await session.main.submit(f"hello {name}")).result(20)
            if name == "source":
                await session.swarm("{{item}}", ["a", "b"], profile="bare")
                await (await session.main.submit("again")).result(20)
            await session.close()
        await place.archive("archived")


async def operate(home: str, work: str, store: dict[str, Any], operation: str, at: list[Any] | None) -> dict[str, Any]:
    """Do it, and die at a call; gives the trace when it comes to its end."""
    killer = Killer(None if at is None else (at[0], at[1], at[2]))
    async with connect(home, store) as runtime:
        place = runtime.workspace(work)
        busy = operation in BUSY
        session = await place.resume("cold", model=SLOW if busy else MODEL) if operation in LIVE else None
        if busy:
            assert session is not None
            await session.main.submit("runs")
            await session.main.submit("waits")
            await asked.wait()
        killer.armed = True
        await OPERATIONS[operation](place, session)
        killer.armed = False
    return {"trace": killer.trace}


# -- what must hold afterwards ------------------------------------------------------------------------------------


def check(home: str, work: str, store: dict[str, Any], operation: str, done: bool) -> None:
    """The session is wholly there or wholly not, everybody says the same, and nothing is left behind."""
    before = _listed_by_command()
    ids, missing = asyncio.run(_check_open(home, work, store, operation, done))
    _check_files(Path(home), ids, missing)
    assert before == ids == _listed_by_command(), before


async def _check_open(
    home: str, work: str, store: dict[str, Any], operation: str, done: bool
) -> tuple[set[str], set[str]]:
    async with connect(home, store) as runtime:
        place = runtime.workspace(work)
        rows = {row.id: row for row in await runtime.sessions.list_recent(100, archived=None)}
        ids = set(rows)
        made, missing = ids - set(BASE), set(BASE) - ids
        whole = MADE.get(operation, 0)
        assert len(made) == whole or (not done and not made), ids
        allowed = {DELETED[operation]} if operation in DELETED else set[str]()
        assert missing == allowed if done else missing <= allowed, missing
        scanned = {document.session_id for document in await open_store(home).list_documents()}
        logs = {log.stream.session_id for log in await open_store(home).list()}
        assert scanned == ids == logs, (scanned, ids, logs)
        if operation in ARCHIVED:
            session_id, before, after = ARCHIVED[operation]
            assert rows[session_id].archived in ({after} if done else {before, after})
        assert rows["cold"].archived is False if "cold" in ids and not operation.startswith("archive") else True
        for session_id in sorted(ids):
            session = await place.resume(session_id, model=MODEL)
            result = await (await session.main.submit("still there?")).result(20)
            assert result.state == "completed", (session_id, result)
            await _check_children(session)
            await session.close()
        for session_id in missing:
            for gone in (place.resume(session_id), place.delete(session_id)):
                try:
                    await gone
                except KimiRayError as error:
                    assert error.code == "session.not_found", error
                else:
                    raise AssertionError(f"{session_id} came back")
    return ids, missing


async def _check_children(session: Session) -> None:
    rows = await session.agents()
    assert [row for row in rows if row["error"] is not None] == []
    if session.id == "source":
        assert len(rows) == 3, rows


def _check_files(home: Path, ids: set[str], missing: set[str]) -> None:
    names = {
        part: sorted(path.name for path in (home / part).iterdir()) if (home / part).is_dir() else []
        for part in ("owners", "reserved", "tombstones", "unpublished/new", "unpublished/groups")
    }
    assert names["owners"] == [] and names["reserved"] == [], names
    assert names["unpublished/new"] == [] and names["unpublished/groups"] == [], names
    assert set(names["tombstones"]) <= missing, names
    directories = {path.name for path in home.glob("sessions/*/*") if path.is_dir()}
    if json.loads((home / "store.json").read_text())["backend"] == "jsonl":
        assert directories == ids and set(names["tombstones"]) == missing, (directories, names)
    odd = [str(path) for path in home.rglob("*") if path.name.startswith(".") or ".tmp" in path.name]
    assert odd == [], odd


def _listed_by_command() -> set[str]:
    """``sessions list``, which reads without opening anything for writing."""
    read, write = os.pipe()
    kept = os.dup(1)
    os.dup2(write, 1)
    os.close(write)
    try:
        code = run_command(["sessions", "list", "--all", "--limit", "100", "--json"])
        sys.stdout.flush()
    finally:
        os.dup2(kept, 1)
    with os.fdopen(read) as answer:
        text = answer.read()
    assert code == 0, text
    return {row["session_id"] for row in json.loads(text)["sessions"]}


# -- the warm process ---------------------------------------------------------------------------------------------


class Forge:
    """The warm process, from the side of a test."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.hosts.operation_crash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def job(self, kind: str, home: Path, **job: Any) -> dict[str, Any]:
        """Run a job in a child of its own: ``{signal, code, answer, text}``."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps({"kind": kind, "home": str(home), **job}) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(JOB_S)


def _serve() -> None:
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        told = f"{job['home']}.told"
        pid = os.fork()
        if pid == 0:
            _in_child(job, told)
        print(json.dumps(_outcome(pid, told)), flush=True)


def _outcome(pid: int, told: str) -> dict[str, Any]:
    deadline = time.monotonic() + JOB_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGABRT)
            _, status = os.waitpid(pid, 0)
            break
        time.sleep(0.002)
    text = Path(told).read_text(errors="replace") if os.path.exists(told) else ""
    answer = json.loads(text.rpartition("ANSWER ")[2]) if "ANSWER " in text else None
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"signal": number, "code": os.waitstatus_to_exitcode(status), "answer": answer, "text": text}


def _in_child(job: dict[str, Any], told: str) -> None:
    output = os.open(told, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    kind = job.pop("kind")
    os.environ["KIMI_RAY_HOME"] = job["home"]
    code = 1
    try:
        answer: Any = None
        if kind == "check":
            check(**job)
        else:
            answer = asyncio.run({"prepare": prepare, "operate": operate}[kind](**job))
        print(f"ANSWER {json.dumps(answer)}", flush=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # Under its own name: a model that is named by it must be the one that is looked at here.
    from tests.unit.hosts import operation_crash

    operation_crash._serve()
