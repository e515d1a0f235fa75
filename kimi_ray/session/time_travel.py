"""A point of a log as a seq: where somebody wants to see what the model saw."""

from __future__ import annotations

from kimi_ray.log.slicing import LogScanner
from kimi_ray.session.fork_plan import no_such_point
from kimi_ray.session.fork_point import parse_fork_point
from kimi_ray.session.log_reader import LogReader, header_of, scan
from kimi_ray.store.seam import Stream


async def seq_at(reader: LogReader, stream: Stream, at: str) -> int:
    """The seq behind a point of a log: what stands below it is what a fork there begins with.

    Args:
        reader: Where the log is.
        stream: Which.
        at: ``"3"`` for through turn 3, ``"3.2"`` for through step 2 of it, ``"^3"`` for before its prompt.

    Raises:
        ConfigError: ``request.invalid`` {at}.
        SessionError: ``session.not_found``; ``session.fork_point_not_found`` {at, turns, steps}.
        AgentError: ``agent.not_found``; StoreError: ``store.corrupt``.
    """
    point = parse_fork_point(at)
    assert point is not None
    logs = {log.stream.agent_id: log for log in await reader.list_logs(stream.session_id)}
    header = header_of(logs, stream)
    scanner = await scan(reader, stream, LogScanner(point.where, header.seed_length or 0))
    if scanner.slice is not None:
        return scanner.slice.cut
    raise no_such_point(stream, point, scanner)
