"""A point of a log as a seq: where somebody wants to see what the model saw."""

from __future__ import annotations

from kimi_ray.errors import ConfigError
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


async def point_of(reader: LogReader, stream: Stream, at: str | None, seq: int | None) -> int | None:
    """The seq that a point or a seq means, or None when neither is given.

    Args:
        reader: Where the log is.
        stream: Which.
        at: See ``seq_at``.
        seq: Of the event that would be the next one: 0 up to how many events there are.

    Raises:
        ConfigError: ``request.conflict`` for both; ``request.invalid`` {at} for a number in ``at``;
            ``request.out_of_range`` {seq, next_seq}. Otherwise as ``seq_at``.
    """
    if seq is None:
        if at is None:
            return None
        if not isinstance(at, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"at={at!r} is no point of a log",
                code="request.invalid",
                hint=f'write at="{at}" for the end of turn {at}, or seq={at} for before the event {at}',
                details={"at": str(at)},
            )
        return await seq_at(reader, stream, at)
    if at is not None:
        raise ConfigError(f"at={at!r} and seq={seq} are two points", code="request.conflict", hint="give one of them")
    if type(seq) is not int or seq < 0:
        raise _out_of_range(seq, None)
    if seq > 0:
        page = await reader.read_from(stream, seq - 1, 1)
        if not page.lines:
            raise _out_of_range(seq, page.next_seq)
    return seq


def _out_of_range(seq: object, next_seq: int | None) -> ConfigError:
    return ConfigError(
        f"the log has no place before an event {seq!r}",
        code="request.out_of_range",
        hint="seqs count from 0" if next_seq is None else f"it has {next_seq} events: the last place is seq {next_seq}",
        details={"seq": str(seq), "next_seq": next_seq},
    )
