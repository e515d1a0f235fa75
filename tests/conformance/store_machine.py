"""Random lives of backends in lockstep with a model of one page.

Two store processes share each home; three or more writers have logs of their own and send what they have in any cut,
again, late, out of order and under old grants. Processes die and come back, sessions change hands, logs are loaded and
forked, documents change. Whatever happens, every backend answers as the model does.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from kimi_ray.errors import KimiRayError
from kimi_ray.store.seam import Batch, Store, Stream
from tests.conformance.store_contract import all_lines, batch, header, line

SESSIONS = ("s1", "s2")
STREAMS = [Stream("s1", "main"), Stream("s1", "agent-1"), Stream("s2", "main")]
PROCESSES = 2
MOST_LOGS = 7


class MachineHome(Protocol):
    """One backend's home under the machine."""

    name: str

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run to the end, within a bound."""
        ...

    async def open(self, **options: Any) -> Store:
        """A store process."""
        ...

    async def kill(self, store: Store) -> None:
        """SIGKILL."""
        ...

    def power_cut(self, seed: int) -> bool:
        """End all processes by a power cut; False when this cannot be simulated (they were not touched)."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class Log:
    """The model of one log."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.writer: Writer | None = None
        self.newest: list[int] = []  # by backend
        self.granted_here = False
        self.forked = False

    @property
    def exists(self) -> bool:
        """A fork is there even with no event."""
        return self.forked or bool(self.lines)

    @property
    def turn_open(self) -> bool:
        """Whether the log ends inside a turn."""
        turns = [text for text in self.lines if b'"turn/' in text]
        return bool(turns) and b"turn/start" in turns[-1]

    def expected(self, lines: list[bytes], first: int, writer: Writer) -> str | None:
        """The answer to a batch."""
        if not self.exists and self.writer is None:
            return "store.not_found"
        if writer is not self.writer:
            return "store.fenced"
        if first > len(self.lines):
            return "store.gap"
        overlap = self.lines[first : first + len(lines)]
        return "store.conflict" if overlap != lines[: len(overlap)] else None


class Writer:
    """A writer and the log as it has it, which may not be the stored one."""

    def __init__(self, index: int, nonce: str, epochs: list[int], lines: list[bytes]) -> None:
        self.index = index
        self.nonce = nonce
        self.epochs = epochs
        self.lines = list(lines)
        self.cut_off = False
        """A power cut ended it before its log was there; nothing is promised about such a grant, and nobody has it."""


class Claim:
    """The model of one session."""

    def __init__(self) -> None:
        self.process: int | None = None
        self.nonce = ""
        self.grants: list[int] = []
        self.revision = 0
        self.value: dict[str, Any] | None = None


class StoreMachine(RuleBasedStateMachine):
    """Subclass it with ``make_homes``: one or several backends, which must agree."""

    make_homes: Callable[[], list[MachineHome]]
    writers: Bundle[Writer] = Bundle("writers")
    sent: Bundle[tuple[Writer, int, int]] = Bundle("sent")

    def __init__(self) -> None:
        super().__init__()
        self.homes = type(self).make_homes()
        self.stores: list[list[Any]] = [[None] * PROCESSES for _ in self.homes]
        self.streams = list(STREAMS)
        self.logs = [Log() for _ in STREAMS]
        self.claims = {session: Claim() for session in SESSIONS}
        self.early: list[Writer] = []
        self.count = 0

    # -- in lockstep --------------------------------------------------------------------------------------------------

    def each(self, process: int, work: Callable[[Any, int], Coroutine[Any, Any, Any]]) -> list[Any]:
        """What every backend answers; an error is its code, and the codes are equal."""
        answers: list[Any] = []
        for number, home in enumerate(self.homes):
            try:
                answers.append(home.run(work(self.stores[number][process], number)))
            except KimiRayError as error:
                answers.append(error.code)
        codes = {answer for answer in answers if isinstance(answer, str)}
        assert len(codes) <= 1, (codes, [home.name for home in self.homes])
        assert not codes or all(isinstance(answer, str) for answer in answers), answers
        return answers

    def process_of(self, session: str) -> int:
        """The process that holds a session, claimed by one if nobody does."""
        claim = self.claims[session]
        if claim.process is None:
            self._claim(session, 0, f"c{session}")
        assert claim.process is not None
        return claim.process

    def _claim(self, session: str, process: int, nonce: str) -> None:
        claim = self.claims[session]
        found = self.each(process, lambda store, _: store.open_session(session, nonce, workspace_id="wd_x_0123"))
        claim.process, claim.nonce = process, nonce
        claim.grants = [grant.grant for grant in found]
        assert {grant.revision for grant in found} == {claim.revision}

    def _new_nonce(self) -> str:
        self.count += 1
        return f"w{self.count}"

    @initialize()
    def start(self) -> None:
        for process in range(PROCESSES):
            self._open(process)

    def _open(self, process: int) -> None:
        for number, home in enumerate(self.homes):
            self.stores[number][process] = home.run(home.open(claim_timeout_s=0.0))

    def _forget_process(self, process: int) -> None:
        for session, claim in self.claims.items():
            if claim.process == process:
                claim.process = None
                for stream, log in zip(self.streams, self.logs, strict=True):
                    log.granted_here = log.granted_here and stream.session_id != session

    # -- writers ------------------------------------------------------------------------------------------------------

    @rule(target=writers, index=st.integers(0, MOST_LOGS))
    def grant(self, index: int) -> Writer:
        index %= len(self.logs)
        log, stream, nonce = self.logs[index], self.streams[index], self._new_nonce()
        target = stream if log.exists else header(stream)
        found = self.each(self.process_of(stream.session_id), lambda store, _: store.open_writer(target, nonce))
        assert {grant.next_seq for grant in found} == {len(log.lines)}
        epochs = [grant.epoch for grant in found]
        assert not log.exists or all(new > old for new, old in zip(epochs, log.newest, strict=True))
        log.newest = epochs
        log.writer, log.granted_here = Writer(index, nonce, epochs, log.lines), True
        if not log.exists:
            self.early.append(log.writer)
        return log.writer

    @rule(writer=writers)
    def grant_again(self, writer: Writer) -> None:
        """A lost answer: the nonce that holds the grant asks again."""
        log, stream = self.logs[writer.index], self.streams[writer.index]
        if log.writer is writer:
            target = stream if log.exists else header(stream)
            process = self.process_of(stream.session_id)
            found = self.each(process, lambda store, _: store.open_writer(target, writer.nonce))
            assert [grant.epoch for grant in found] == writer.epochs
            assert {grant.next_seq for grant in found} == {len(log.lines)}
            log.granted_here = True

    @rule(writer=writers, count=st.integers(1, 6), turn=st.sampled_from(["", "", "turn/start", "turn/end"]))
    def produce(self, writer: Writer, count: int, turn: str) -> None:
        """Events that wait in a writer's window."""
        for _ in range(count):
            writer.lines.append(line(len(writer.lines), by=writer.nonce))
        turns = [text for text in writer.lines if b'"turn/' in text]
        is_open = bool(turns) and b"turn/start" in turns[-1]
        if turn and is_open == (turn == "turn/end"):
            writer.lines.append(line(len(writer.lines), turn, turn=0, by=writer.nonce, **_reason(turn)))

    @rule(writer=writers)
    def begin_turn(self, writer: Writer) -> None:
        """A turn whose beginning is durable."""
        self.produce(writer, 1, "turn/start")
        self.flush(writer)

    @rule(target=sent, writer=writers, back=st.integers(0, 9), count=st.integers(0, 12), sync=st.booleans())
    def send(self, writer: Writer, back: int, count: int, sync: bool) -> tuple[Writer, int, int]:
        """Some of what a writer has, from shortly before the stored end: cut anew, with a hole, or empty."""
        stored = len(self.logs[writer.index].lines)
        first = min(max(0, stored - back + 2), len(writer.lines))
        end = min(first + count, len(writer.lines))
        self._deliver(writer, first, end, sync=sync)
        return (writer, first, end)

    @rule(call=sent, sync=st.booleans())
    def deliver_again(self, call: tuple[Writer, int, int], sync: bool) -> None:
        """A call that was sent once arrives again, whatever came between."""
        self._deliver(*call, sync=sync)

    @rule(writer=writers)
    def flush(self, writer: Writer) -> None:
        """Everything that a writer has."""
        self._deliver(writer, 0, len(writer.lines), sync=True)

    def _deliver(self, writer: Writer, first: int, end: int, *, sync: bool, wrong: int | None = None) -> None:
        log, stream = self.logs[writer.index], self.streams[writer.index]
        if writer.cut_off:
            return
        lines = writer.lines[first:end]
        if wrong is not None:
            lines[wrong] = line(first + wrong, by="somebody else")
        expected = log.expected(lines, first, writer)

        def batch_for(number: int) -> Batch:
            return batch(lines, first, epoch=writer.epochs[number], nonce=writer.nonce, stream=stream)

        process = self.process_of(stream.session_id)
        found = self.each(process, lambda store, number: store.append([batch_for(number)], sync=sync))
        assert {result[0].error["code"] if result[0].error else None for result in found} == {expected}
        if expected is None:
            log.lines.extend(lines[max(0, len(log.lines) - first) :])
            for (result,) in found:
                assert result.written == len(log.lines)
                assert result.durable >= (end if sync else 0)

    @rule(writer=writers, at=st.integers(0, 5))
    def send_something_else(self, writer: Writer, at: int) -> None:
        """An event that differs from the one stored under its seq."""
        stored = min(len(self.logs[writer.index].lines), len(writer.lines))
        if stored and writer.lines[:stored] == self.logs[writer.index].lines[:stored]:
            self._deliver(writer, 0, stored, sync=True, wrong=min(at, stored - 1))

    @rule(writer=writers)
    def close_writer(self, writer: Writer) -> None:
        log, stream = self.logs[writer.index], self.streams[writer.index]
        process = self.process_of(stream.session_id)
        self.each(process, lambda store, number: store.close_writer(stream, writer.epochs[number], writer.nonce))
        if log.writer is writer:
            log.writer, log.granted_here = None, False

    # -- loads and forks ----------------------------------------------------------------------------------------------

    @rule(index=st.integers(0, MOST_LOGS), is_live=st.sampled_from([None, True, False]))
    def load(self, index: int, is_live: bool | None) -> None:
        index %= len(self.logs)
        log, stream = self.logs[index], self.streams[index]
        process = self.process_of(stream.session_id)
        found = self.each(process, lambda store, _: store.load(stream, is_live=is_live))
        live = log.granted_here or (log.writer is not None and is_live is not False)
        if not log.exists:
            assert codes(found) == {"store.not_found"}
        elif log.turn_open and live:
            assert codes(found) == {"log.turn_open"}
        else:
            assert {view.cut for view in found} == {len(log.lines)}
            closed = log.turn_open
            assert {len(view.closers) > 0 for view in found} == {closed}
            if closed:
                stored = [home.run(all_lines(self.stores[n][process], stream)) for n, home in enumerate(self.homes)]
                assert all(lines == stored[0] for lines in stored), "backends close a turn alike"
                assert stored[0][: len(log.lines)] == log.lines
                log.lines, log.writer = stored[0], None
                log.newest = [view.epoch for view in found]
                assert not log.turn_open
            assert {view.next_seq for view in found} == {len(log.lines)}

    @precondition(lambda self: len(self.logs) < MOST_LOGS)
    @rule(target=writers, index=st.integers(0, MOST_LOGS), back=st.integers(-1, 8))
    def fork(self, index: int, back: int) -> Writer:
        index %= len(self.logs)
        source, log = self.streams[index], self.logs[index]
        cut = max(0, len(log.lines) - back)
        target, nonce = Stream(source.session_id, f"fork-{len(self.logs)}"), self._new_nonce()
        process = self.process_of(source.session_id)
        found = self.each(process, lambda store, _: store.fork(source, cut, header(target), nonce))
        if not log.exists or cut > len(log.lines):
            assert codes(found) == {"store.gap" if log.exists else "store.not_found"}
            return Writer(index, nonce, [10**6] * len(self.homes), log.lines)
        made = Log()
        made.forked = True
        made.lines = log.lines[:cut]
        made.newest = [grant.epoch for grant in found]
        assert {grant.next_seq for grant in found} == {cut}
        made.writer = Writer(len(self.logs), nonce, [grant.epoch for grant in found], made.lines)
        made.granted_here = True
        self.streams.append(target)
        self.logs.append(made)
        return made.writer

    # -- sessions -----------------------------------------------------------------------------------------------------

    @rule(session=st.sampled_from(SESSIONS), stale=st.booleans(), zombie=st.booleans(), value=st.integers(0, 9))
    def write_document(self, session: str, stale: bool, zombie: bool, value: int) -> None:
        process = self.process_of(session)
        claim = self.claims[session]
        revision = claim.revision + 1 if stale else claim.revision
        nonce = "somebody else" if zombie else claim.nonce
        found = self.each(
            process,
            lambda store, number: store.write_document(
                session, {"v": value}, grant=claim.grants[number], nonce=nonce, revision=revision
            ),
        )
        if zombie or stale:
            assert codes(found) == {"store.fenced" if zombie else "store.conflict"}
        else:
            claim.revision, claim.value = revision + 1, {"v": value}
            assert set(found) == {claim.revision}

    @rule(session=st.sampled_from(SESSIONS))
    def hand_over(self, session: str) -> None:
        """A process gives a session back, and the other claims it."""
        process = self.process_of(session)
        claim = self.claims[session]
        self.each(process, lambda store, _: store.close_session(session, claim.nonce))
        self._forget_session(session)
        self._claim(session, 1 - process, self._new_nonce())

    def _forget_session(self, session: str) -> None:
        self.claims[session].process = None
        for stream, log in zip(self.streams, self.logs, strict=True):
            log.granted_here = log.granted_here and stream.session_id != session

    @rule(index=st.integers(0, MOST_LOGS))
    def the_other_process_is_refused(self, index: int) -> None:
        stream = self.streams[index % len(self.streams)]
        session = stream.session_id
        other = 1 - self.process_of(session)
        for attempt in (
            lambda store, _: store.open_session(session, "other", workspace_id="wd_x_0123"),
            lambda store, _: store.load(stream, is_live=False),
        ):
            assert codes(self.each(other, attempt)) == {"session.in_use"}

    @rule(process=st.integers(0, PROCESSES - 1), gentle=st.booleans())
    def restart(self, process: int, gentle: bool) -> None:
        for number, home in enumerate(self.homes):
            store = self.stores[number][process]
            home.run(store.close() if gentle else home.kill(store))
        self._forget_process(process)
        self._open(process)

    @rule(seed=st.integers(0, 2**20))
    def power_cut(self, seed: int) -> None:
        """After everything was made durable, so that all backends still agree on what is there."""
        for stream, log in zip(self.streams, self.logs, strict=True):
            process, writer = self.process_of(stream.session_id), log.writer
            if writer is not None and not log.exists:
                self.close_writer(writer)
            elif writer is not None:
                end = len(log.lines)
                send = [batch([], end, epoch=e, nonce=writer.nonce, stream=stream) for e in writer.epochs]
                found = self.each(process, lambda store, number, send=send: store.append([send[number]], sync=True))
                assert {result[0].durable for result in found} == {end}
        for writer in self.early:
            writer.cut_off = not self.logs[writer.index].exists
        self.early.clear()
        for number, home in enumerate(self.homes):
            if not home.power_cut(seed):
                for store in self.stores[number]:
                    home.run(home.kill(store))
        for process in range(PROCESSES):
            self._forget_process(process)
            self._open(process)

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def reads_are_the_model(self) -> None:
        """In both processes, and nobody writes by reading."""
        self.count += 1
        present = {stream for stream, log in zip(self.streams, self.logs, strict=True) if log.exists}
        for number, home in enumerate(self.homes):
            store = self.stores[number][self.count % PROCESSES]
            if store is None:
                return
            for stream, log in zip(self.streams, self.logs, strict=True):
                if stream in present:
                    assert home.run(all_lines(store, stream)) == log.lines, (home.name, stream)
                    assert home.run(store.inspect(stream)).cut == len(log.lines), (home.name, stream)
            assert {row.stream for row in home.run(store.list_logs())} == present, home.name
            for session, claim in self.claims.items():
                document = home.run(store.read_document(session))
                value = None if document is None else (document.revision, document.value)
                assert value == (None if claim.value is None else (claim.revision, claim.value)), home.name

    def teardown(self) -> None:
        try:
            for number, home in enumerate(self.homes):
                store = self.stores[number][0]
                for stream, log in zip(self.streams, self.logs, strict=True):
                    if store is not None and log.exists:
                        assert home.run(store.verify(stream)).ok, (home.name, stream)
                for opened in self.stores[number]:
                    if opened is not None:
                        home.run(opened.close())
        finally:
            for home in reversed(self.homes):
                home.close()


def codes(answers: list[Any]) -> set[str]:
    """The codes of answers that are errors; empty for one that is none."""
    return {answer if isinstance(answer, str) else "" for answer in answers}


def _reason(turn: str) -> dict[str, Any]:
    return {"reason": {"kind": "completed"}} if turn == "turn/end" else {}
