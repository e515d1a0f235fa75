"""Many operations on sessions at once: nothing lost, nothing twice, no deadlock. Everything in this process."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.connection import Connection
from kimi_ray.ids import new_ulid
from kimi_ray.runtime import Runtime
from kimi_ray.session_handle import Session
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running

BOUND_S = 60.0


@asynccontextmanager
async def driver_of(runtime: Runtime) -> AsyncGenerator[Runtime]:
    """Another driver of the same runtime: its own handles, courier and lease."""

    async def nothing() -> None:
        """The runtime is another's."""

    connection = Connection(
        cluster_of(runtime), runtime.config, in_process=True, owns_runtime=False, log_path=None, end=nothing
    )
    await connection.greet()
    async with Runtime(connection, runtime.config) as driver:
        yield driver


async def holders(runtime: Runtime, session_id: str) -> tuple[list[str], list[str]]:
    """The hosts that say they hold the session, and those that hold its main agent."""
    told = [
        await cluster_of(runtime).peer(name).call("ping", timeout_s=5, group="control")
        for kind in ("sessions", "agents")
        for name in await hosts_of(runtime, kind)
    ]
    return (
        [one["name"] for one in told if session_id in one["sessions"]],
        [one["name"] for one in told if (session_id, "main") in one.get("streams", [])],
    )


async def loads(runtime: Runtime) -> int:
    status = await runtime.connection.registry.call("status", timeout_s=5, group="control")
    return sum(row["load"] for row in status["hosts"])


async def test_a_hundred_creates_forks_and_deletes_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, agents_per_host=64) as (runtime, _, model), asyncio.timeout(BOUND_S):
        work = runtime.workspace(tmp_path / "work")
        source = await work.create_session("source", model=model, profile="bare")
        await (await source.main.submit("hello")).result(10)
        old = [f"old-{number}" for number in range(34)]
        for created in await asyncio.gather(*(work.create_session(one, model=model, profile="bare") for one in old)):
            if created.id[-1] in "02468":
                await created.close()
        made, forked, deleted = await asyncio.gather(
            asyncio.gather(*(work.create_session(f"new-{n}", model=model, profile="bare") for n in range(33))),
            asyncio.gather(*(work.fork("source", at="0", new_session_id=f"fork-{n}") for n in range(33))),
            asyncio.gather(*(work.delete(one) for one in old)),
        )
        assert len(deleted) == 34
        expected = {"source", *(f"new-{n}" for n in range(33)), *(f"fork-{n}" for n in range(33))}
        listed = {row.id for row in await runtime.sessions.list_recent(1000)}
        assert listed == expected == {path.name for path in (tmp_path / "home").glob("sessions/*/*")}
        for session in (*made[:3], *forked[:3], source):
            assert (await (await session.main.submit("go on")).result(10)).state == "completed"
        await asyncio.gather(*(session.close() for session in (*made, *forked, source)))
        assert await loads(runtime) == 0
        assert not list((tmp_path / "home" / "owners").iterdir())


async def test_twenty_resumes_of_one_id_from_four_drivers_make_one_live_session(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=3) as (runtime, _, model), AsyncExitStack() as stack:
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare")
        await (await session.main.submit("hello")).result(10)
        await session.close()
        drivers = [runtime, *[await stack.enter_async_context(driver_of(runtime)) for _ in range(3)]]

        async def resume(number: int) -> Session:
            resumed = await drivers[number % 4].workspace(tmp_path / "work").resume("s1", model=model)
            await resumed.update(metadata={f"m{number}": number}, tags={f"t{number}": "x"})
            return resumed

        async with asyncio.timeout(BOUND_S):
            resumed = await asyncio.gather(*(resume(number) for number in range(20)))
            assert len({id(one) for one in resumed}) == 4  # one handle for each driver
            at = await holders(runtime, "s1")
            assert [len(names) for names in at] == [1, 1]
            assert sum(one._link.opened for one in {id(one): one for one in resumed}.values()) == 1
            document = await session_document(tmp_path, "s1")
            assert document["custom"] == {f"m{n}": n for n in range(20)}
            assert document["tags"] == {f"t{n}": "x" for n in range(20)}
            turns = await asyncio.gather(*(run_turn(one, f"from {n}") for n, one in enumerate(resumed[:4])))
            assert sorted(turns) == [1, 2, 3, 4]


async def session_document(tmp_path: Path, session_id: str) -> dict[str, Any]:
    (path,) = (tmp_path / "home").glob(f"sessions/*/{session_id}/state.json")
    return json.loads(path.read_text())


async def run_turn(session: Session, text: str) -> int | None:
    return (await (await session.main.submit(text)).result(20)).turn


@pytest.mark.parametrize("seed", range(3))
async def test_drivers_that_open_change_and_close_one_session_lose_no_change(tmp_path: Path, seed: int) -> None:
    """Each driver opens, changes, and closes or archives as it likes; every change that was answered is there."""
    chance = random.Random(seed)
    async with running(tmp_path, hosts_per_node=3) as (runtime, _, model), AsyncExitStack() as stack:
        await (await runtime.workspace(tmp_path / "work").create_session("s1", model=model, profile="bare")).close()
        drivers = [runtime, *[await stack.enter_async_context(driver_of(runtime)) for _ in range(3)]]
        answered: dict[str, int] = {}
        codes = Counter[str]()

        async def drive(driver: Runtime, number: int) -> None:
            work = driver.workspace(tmp_path / "work")
            for step in range(12):
                try:
                    session = await work.resume("s1", model=model)
                    key = f"d{number}s{step}"
                    await session.update(metadata={key: step})
                    answered[key] = step
                    what = chance.choice(("close", "close", "archive", "restore", "stay"))
                    if what == "close":
                        await session.close()
                    elif what in ("archive", "restore"):
                        await getattr(work, what)("s1")
                except KimiRayError as error:
                    codes[error.code] += 1
                await asyncio.sleep(chance.random() * 0.01)

        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*(drive(driver, number) for number, driver in enumerate(drivers)))
            # A driver's own handle may be closed under it by another task; nothing else is an answer.
            assert set(codes) <= {"session.closed", "session.not_live"}, codes
            assert len(answered) >= 24, codes
            session_hosts, agent_hosts = await holders(runtime, "s1")
            assert len(session_hosts) <= 1 and len(agent_hosts) == len(session_hosts)
            last = await runtime.workspace(tmp_path / "work").resume("s1", model=model)
            custom = (await last.metadata())["custom"]
            assert {key: custom.get(key) for key in answered} == answered
            assert await run_turn(last, "still") == 0


async def test_a_caller_that_was_sent_to_a_host_before_the_session_was_forgotten(tmp_path: Path) -> None:
    async with running(tmp_path, hosts_per_node=2) as (runtime, _, model), asyncio.timeout(BOUND_S):
        work = runtime.workspace(tmp_path / "work")
        session = await work.create_session("s1", model=model, profile="bare")
        spec, first = session._link.spec, session._link.host
        await session.close()
        registry = runtime.connection.registry
        other = f"{runtime.connection.home_id}/sessions-other"
        await cluster_of(runtime).start_host("sessions", other)
        assert await registry.call("hold_session", "s1", other, timeout_s=5, group="control") == other
        for method, args in (
            ("resume_session", (_again(spec),)),
            ("archive_session", ("s1",)),
            ("restore_session", ("s1",)),
            ("delete_session", ("s1",)),
        ):
            with pytest.raises(KimiRayError) as caught:
                await cluster_of(runtime).peer(first).call(method, *args, timeout_s=10)
            assert caught.value.code == "session.not_live"
        assert await registry.call("find_session", "s1", timeout_s=5, group="control") == other
        again = await work.resume("s1", model=model)
        assert again._link.host == other


def _again(spec: Any) -> Any:
    from dataclasses import replace

    return replace(spec, nonce=new_ulid(), main=replace(spec.main, nonce=new_ulid()))


async def test_operations_on_one_id_follow_each_other(tmp_path: Path) -> None:
    """Archive, restore, resume, close and delete of one id at once, in many orders: each sees a whole session."""
    async with running(tmp_path) as (runtime, _, model), asyncio.timeout(BOUND_S):
        work = runtime.workspace(tmp_path / "work")
        for seed in range(6):
            session_id = f"s{seed}"
            session = await work.create_session(session_id, model=model, profile="bare")
            if seed % 2:
                await session.close()
            calls = [
                *(work.archive(session_id) for _ in range(3)),
                *(work.restore(session_id) for _ in range(3)),
                *(work.resume(session_id, model=model) for _ in range(3)),
                work.delete(session_id),
                work.delete(session_id),
            ]
            random.Random(seed).shuffle(calls)
            results = await asyncio.gather(*calls, return_exceptions=True)
            codes = Counter(result.code for result in results if isinstance(result, KimiRayError))
            assert not [one for one in results if isinstance(one, BaseException) and not isinstance(one, KimiRayError)]
            assert set(codes) <= {"session.not_found"} and codes["session.not_found"] >= 1, codes
            assert list((tmp_path / "home").glob(f"sessions/*/{session_id}")) == []
            assert await holders(runtime, session_id) == ([], [])
        assert await loads(runtime) == 0
