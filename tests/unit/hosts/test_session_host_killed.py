"""The host of a session is killed in the middle of an operation: the runtime goes on, the caller gets its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.local_cluster import LocalCluster
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running


@contextmanager
def killing(cluster: LocalCluster, host: str, method: str, side: str) -> Iterator[list[str]]:
    """Kill a host before or after its first call of a method; yields what happened."""
    happened: list[str] = []
    call = cluster._call

    async def counted(name: str, called: str, args: Any, timeout_s: float, caller: Any) -> Any:
        ours = called == method and caller is not None and caller.listing.name == host and not happened
        if ours:
            happened.append(side)
        if ours and side == "before":
            await die()
        try:
            return await call(name, called, args, timeout_s, caller)
        finally:
            if ours and side == "after":
                await die()

    async def die() -> None:
        """From outside: a task that kills its own host would be the one that goes on."""
        asyncio.get_running_loop().call_soon(cluster.kill_host, host)
        await asyncio.Event().wait()

    cluster._call = counted  # type: ignore[method-assign]
    try:
        yield happened
    finally:
        cluster._call = call  # type: ignore[method-assign]


CASES = [
    ("create", "open_session"),
    ("create", "run_many"),
    ("create", "write_documents"),
    ("resume", "open_session"),
    ("resume", "run_many"),
    ("archive", "open_session"),
    ("archive", "write_documents"),
    ("archive", "close_session"),
    ("restore", "write_documents"),
    ("delete", "open_session"),
    ("delete", "remove"),
    ("delete", "close_session"),
    ("fork", "copy_session"),
    ("fork", "publish"),
]


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize(("operation", "method"), CASES)
async def test_the_operation_comes_to_its_end(tmp_path: Path, operation: str, method: str, side: str) -> None:
    async with running(tmp_path, hosts_per_node=1) as (runtime, _, model), asyncio.timeout(60):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare")
        await (await session.main.submit("hello")).result(10)
        await session.close()
        if operation == "restore":
            await work.archive("s1")
        (host,) = await hosts_of(runtime, "sessions")
        operations = {
            "create": lambda: work.create_session("s2", model=model, profile="bare"),
            "resume": lambda: work.resume("s1", model=model),
            "archive": lambda: work.archive("s1"),
            "restore": lambda: work.restore("s1"),
            "delete": lambda: work.delete("s1"),
            "fork": lambda: work.fork("s1", at="0", new_session_id="s2", model=model),
        }
        with killing(cluster_of(runtime), host, method, side) as happened:
            await operations[operation]()
        assert happened == [side]

        expected = {"create": {"s1", "s2"}, "fork": {"s1", "s2"}, "delete": set[str]()}.get(operation, {"s1"})
        rows = {row.id: row for row in await runtime.sessions.list_recent(10, archived=None)}
        assert set(rows) == expected
        if "s1" in rows:
            assert rows["s1"].archived is (operation == "archive")
        for session_id in expected:
            again = await work.resume(session_id, model=model)
            assert (await (await again.main.submit("go on")).result(10)).text == "did go on"
            await again.close()
        if operation == "delete":
            with pytest.raises(KimiRayError) as caught:
                await work.resume("s1", model=model)
            assert caught.value.code == "session.not_found"
        assert {path.name for path in (tmp_path / "home").glob("sessions/*/*")} == expected
        assert not list((tmp_path / "home" / "owners").iterdir())
        status = await runtime.connection.registry.call("status", timeout_s=5, group="control")
        assert sum(row["load"] for row in status["hosts"] if row["kind"] == "sessions") == 0
