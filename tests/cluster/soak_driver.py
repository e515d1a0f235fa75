"""The load of the soak, as a program of its own: swarms, prompts and raw logs, until it is told to end.

``python -m tests.cluster.soak_driver SETTINGS``, with settings as JSON. It notes what it was told in journals below
``settings["notes"]``, prints one JSON line when it is ready and one at its end, and ends when a line comes on stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from kimi_ray import Item, Profile, Runtime, Session, Workdir
from kimi_ray.actors import connect
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import store_name
from tests.actors.store_load import StoreLoad
from tests.cluster.soak_models import LOOKER, touch
from tests.conformance.oracle_checker import Journal

PROFILE = Profile(name="looker", system_prompt="You look at things.")
FULL = frozenset({"store.disk_full", "store.io_failed", "store.unavailable"})
PATIENCE_S = 240.0
"""Nothing that is asked of the runtime takes longer, whatever is done to it."""


class Soak:
    """One driver's load."""

    def __init__(self, runtime: Runtime, settings: dict[str, Any]) -> None:
        self.runtime = runtime
        self.settings = settings
        self.notes = Path(settings["notes"])
        self.journal = Journal(self.notes / "driver")
        self.ends = asyncio.Event()
        self.dice = random.Random(settings["seed"])
        self.swarms: list[dict[str, Any]] = []
        self.prompts: list[dict[str, Any]] = []
        self.errors: Counter[str] = Counter()
        self.unusual: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.load: StoreLoad | None = None

    async def run(self) -> None:
        """Everything, until the end."""
        connection = self.runtime.connection
        peer = connection.cluster.peer(store_name(connection.home_id, 0))
        self.load = StoreLoad(
            peer, Journal(self.notes / "raw"), random.Random(self.dice.random()),
            prefix="raw", sessions=3, agents=4, pause_s=0.3, tolerated=FULL,
        )  # fmt: skip
        await self.load.start()
        print(json.dumps({"ready": True, "home_id": connection.home_id}), flush=True)
        works = [self.swarming(n) for n in range(self.settings["swarms"])]
        works += [self.prompting(n) for n in range(self.settings["prompters"])]
        tasks = [asyncio.create_task(self._noted(work)) for work in works]
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        self.ends.set()
        await asyncio.gather(*tasks)
        await self._noted(self.load.stop())

    async def _noted(self, work: Any) -> None:
        try:
            await work
        except Exception:
            self.failures.append(traceback.format_exc()[-3000:])

    async def session(self) -> Session:
        """A new session, as often as it takes."""
        return await self.steadily(
            lambda: self.runtime.workspace(self.settings["cwd"]).create_session(
                model=LOOKER, profile="bare", tools=[touch]
            )
        )

    async def resumed(self, session_id: str) -> Session:
        """The session again, as often as it takes."""
        workspace = self.runtime.workspace(self.settings["cwd"])
        return await self.steadily(lambda: workspace.resume(session_id, tools=[touch]))

    async def steadily(self, make: Any) -> Any:
        """What ``make`` gives, asked again after an error that says why; each is counted."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return await make()
                except KimiRayError as error:
                    self._count(error)
                await asyncio.sleep(0.5)

    async def swarming(self, number: int) -> None:
        """One swarm after the other."""
        turn = 0
        while not self.ends.is_set():
            session = await self.session()
            items = [Item(id=f"i{n}", data=f"thing {number} {turn} {n}") for n in range(self.settings["items"])]
            turn += 1
            told: dict[str, Any] = {"session_id": session.id, "asked": [item.id for item in items], "rows": []}
            try:
                async with asyncio.timeout(PATIENCE_S):
                    report = await session.swarm(
                        "{{item}}", items, profile=PROFILE, model=LOOKER, tools=[touch], workdir=Workdir.none(),
                        max_concurrency=8,
                    )  # fmt: skip
                for row in report.rows:
                    code = row.error.code if row.error else None
                    told["rows"].append([row.item_id, row.agent_id, row.last_seq, row.status, code, row.interruptions])
                    if row.agent_id is not None and row.last_seq is not None:
                        self.journal.told((session.id, row.agent_id), row.last_seq + 1)
            except KimiRayError as error:
                self._count(error)
                told["error"] = error.to_data()
            self.swarms.append(told)
            await self._leave(session)

    async def prompting(self, number: int) -> None:
        """One session, prompt after prompt; after a refusal it is resumed."""
        session = await self.session()
        count = 0
        while not self.ends.is_set():
            count += 1
            on_interrupt = self.dice.choice(("fail", "continue"))
            told: dict[str, Any] = {"session_id": session.id, "accepted": False, "state": None}
            try:
                async with asyncio.timeout(PATIENCE_S):
                    handle = session.main.submit(f"thing p{number} {count}", on_interrupt=on_interrupt)
                    prompt = await handle
                    told |= {"prompt_id": prompt.id, "accepted": True}
                    result = await prompt.result()
                    told |= {"state": result.state, "code": result.error["code"] if result.error else None}
            except KimiRayError as error:
                self._count(error)
                told["code"] = error.code
                with contextlib.suppress(KimiRayError):
                    await session.close()
                session = await self.resumed(session.id)
            self.prompts.append(told)
            if count % 10 == 0:
                await self._leave(session)
                session = await self.session()
            await asyncio.sleep(self.dice.random() * 0.2)
        await self._leave(session)

    def _count(self, error: KimiRayError, where: str = "") -> None:
        self.errors[where + error.code] += 1
        if error.code not in FULL:
            self.unusual.append(error.to_data())

    async def _leave(self, session: Session) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await session.close()
        except KimiRayError as error:
            self._count(error, "close ")


async def main() -> None:
    """See the module."""
    settings = json.loads(sys.argv[1])
    async with Runtime.connect(settings["home"], address=settings["address"], **settings["config"]) as runtime:
        soak = Soak(runtime, settings)
        await soak.run()
        assert soak.load is not None
        told = {
            "swarms": soak.swarms, "prompts": soak.prompts, "errors": soak.errors, "failures": soak.failures,
            "unusual": soak.unusual,
            "raw_events": soak.load.events, "raw_flushes": soak.load.flushes,
            "zombies": sum(log.fenced for log in soak.load.streams),
        }  # fmt: skip
        (soak.notes / "told.json").write_text(json.dumps(told))
    again = await connect(runtime.connection.config)
    await again.disconnect(end_runtime=True)
    print(json.dumps({"ended": [failure.to_data() for failure in again.failures]}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
