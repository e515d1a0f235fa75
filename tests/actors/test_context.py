"""Compaction and undo on Ray: the host dies in the middle, and whoever asked is answered all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kimi_ray import Runtime
from kimi_ray.config import RuntimeConfig
from kimi_ray.log import EventLog
from tests.actors.conftest import until
from tests.actors.context_models import TALKER
from tests.actors.faults import counts, kill, read_session
from tests.unit.log.scripts import HEADER


async def test_a_host_that_is_killed_while_a_summary_is_written_leaves_a_log_that_explains_it(
    config: RuntimeConfig, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    async with Runtime.connect(config=config) as runtime:
        session = await runtime.workspace(tmp_path).create_session(model=TALKER, profile="bare")
        for text in (str(gate), "second", "third"):
            (await (await session.main.submit(text)).result(60)).raise_for_state()
        before = await session.main.messages()
        compacting = asyncio.ensure_future(session.main.compact("short"))

        async def asked() -> bool:
            return "compaction/request" in [event.type async for event in session.main.events()]

        await until(asked)
        await kill(runtime, await session._link.call("find_agent", session.id, "main", group="control"))
        gate.unlink()
        result = await compacting
        assert result is not None and len(result.shadowed_seqs) == len(before) - 1
        (await (await session.main.submit("fourth")).result(60)).raise_for_state()
        assert (await session.main.undo()).prompts
        after = await session.main.messages()
        await session.close()
    (main,) = (await read_session(config.home, session.id)).values()
    found = counts(main)
    assert (found["compaction/start"], found["compaction/end"], found["runtime/activated"]) == (2, 1, 2)
    log = EventLog.restore(HEADER, main)
    assert log.messages() == after and [m["source"]["kind"] for m in after] == ["compaction", "model"]
