"""A session with a long log of realistic turns, written as a host writes it: packed rows, whole batches."""

from __future__ import annotations

from kimi_ray.bench.event_streams import EVENTS_A_TURN, append_turn
from kimi_ray.bench.host_logs import HostLogs
from kimi_ray.bench.workload import PLAIN_MODEL
from kimi_ray.runtime import Runtime
from kimi_ray.settings import Profile

PROFILE = Profile(name="bench", system_prompt="You look at things.")


async def build_session(runtime: Runtime, events: int, flush_every: int = EVENTS_A_TURN) -> tuple[str, int]:
    """A closed session whose main log has at least ``events`` events.

    The session is created and answers one prompt as any other does; then turns are appended to its log, in the place
    of the agent, and flushed as often as a host would at each turn's end.

    Args:
        runtime: Where; best one in this process.
        events: How many.
        flush_every: Events between two flushes.

    Returns:
        The session's id, and how many events its main log has.
    """
    workspace = runtime.workspace(runtime.config.home)
    session = await workspace.create_session(profile=PROFILE, model=PLAIN_MODEL)
    (await (await session.main.submit("look")).result()).raise_for_state()
    await session.close()
    host = HostLogs(runtime)
    opened = await host.open(session.id)
    flushed = opened.log.next_seq
    while opened.log.next_seq < events:
        append_turn(opened.log)
        if opened.log.next_seq - flushed >= flush_every:
            flushed = opened.log.next_seq
            await opened.controller.flush()
    await host.close()
    return session.id, opened.log.next_seq
