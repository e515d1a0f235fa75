"""Random lives of two stores and three writers against a model of one page.

The model: a log is a list of lines and a newest grant. Writers send what they have in any cut, again, late, out of
order, under old grants; stores die and come back. Whatever happens, the answers are the model's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kimi_ray.errors import KimiRayError
from kimi_ray.store.seam import AppendResult, Stream
from tests.conformance.store_contract import Home, all_lines, batch, header, line

STREAMS = [Stream("s1", "main"), Stream("s1", "agent-1"), Stream("s2", "main")]


class Model:
    """One log."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.epoch = 0
        self.nonce = ""
        self.closed = True
        self.durable = 0

    @property
    def exists(self) -> bool:
        return bool(self.lines)

    def expected(self, lines: list[bytes], first: int, epoch: int, nonce: str) -> str | None:
        if self.epoch == 0 or (not self.exists and self.closed):
            return "store.not_found"
        if (epoch, nonce) != (self.epoch, self.nonce) or self.closed:
            return "store.fenced"
        if first > len(self.lines):
            return "store.gap"
        overlap = self.lines[first : first + len(lines)]
        return "store.conflict" if overlap != lines[: len(overlap)] else None


class StoreMachine(RuleBasedStateMachine):
    """Subclass it with ``make_home``."""

    make_home: Callable[[], Home]
    grants: Bundle[tuple[int, int, str]] = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.home = type(self).make_home()
        self.models = [Model() for _ in STREAMS]
        self.nonces = 0
        self.store: Any = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    @initialize()
    def start(self) -> None:
        self._open()

    def _open(self) -> None:
        async def work() -> None:
            self.store = await self.home.open(claim_timeout_s=5)
            for session_id in ("s1", "s2"):
                await self.store.open_session(session_id, "n", workspace_id="wd_x_0123")

        self.run(work())

    @rule(target=grants, index=st.integers(0, len(STREAMS) - 1))
    def grant(self, index: int) -> tuple[int, int, str]:
        model = self.models[index]
        self.nonces += 1
        nonce = f"w{self.nonces}"
        found = self.run(self.store.open_writer(STREAMS[index] if model.exists else header(STREAMS[index]), nonce))
        assert found.next_seq == len(model.lines)
        assert found.epoch > model.epoch if model.exists else found.epoch >= 1
        model.epoch, model.nonce, model.closed = found.epoch, nonce, False
        if model.exists:
            model.durable = len(model.lines)
        return (index, found.epoch, nonce)

    @rule(grant=grants)
    def grant_again(self, grant: tuple[int, int, str]) -> None:
        """A lost answer: the same nonce asks again; an old nonce would be a new grant and is not asked for."""
        index, epoch, nonce = grant
        model = self.models[index]
        if model.nonce == nonce and not model.closed:
            found = self.run(self.store.open_writer(STREAMS[index] if model.exists else header(STREAMS[index]), nonce))
            assert (found.epoch, found.next_seq) == (epoch, len(model.lines))

    @rule(
        grant=grants,
        back=st.integers(0, 6),
        skip=st.sampled_from([0, 0, 0, 0, 2]),
        count=st.integers(1, 8),
        wrong=st.sampled_from([False, False, False, True]),
        sync=st.booleans(),
    )
    def append(self, grant: tuple[int, int, str], back: int, skip: int, count: int, wrong: bool, sync: bool) -> None:
        index, epoch, nonce = grant
        model = self.models[index]
        first = max(0, len(model.lines) - back) + skip
        lines = [
            model.lines[seq] if seq < len(model.lines) else line(seq, by=nonce) for seq in range(first, first + count)
        ]
        if wrong:
            lines[0] = line(first, by="somebody else")
        expected = model.expected(lines, first, epoch, nonce)
        send = batch(lines, first, epoch=epoch, nonce=nonce, stream=STREAMS[index])
        result: AppendResult = self.run(self.store.append([send], sync=sync))[0]
        assert (None if result.error is None else result.error["code"]) == expected
        if expected is None:
            model.lines.extend(lines[max(0, len(model.lines) - first) :])
            assert result.written == len(model.lines)
            assert result.durable >= (first + count if sync else model.durable)
            model.durable = max(model.durable, result.durable)

    @rule(grant=consumes(grants))
    def close(self, grant: tuple[int, int, str]) -> None:
        index, epoch, nonce = grant
        model = self.models[index]
        self.run(self.store.close_writer(STREAMS[index], epoch, nonce))
        if (epoch, nonce) == (model.epoch, model.nonce):
            model.closed = True
            if not model.exists:
                model.epoch = 0

    @rule(index=st.integers(0, len(STREAMS) - 1))
    def load(self, index: int) -> None:
        model = self.models[index]
        try:
            view = self.run(self.store.load(STREAMS[index]))
        except KimiRayError as error:
            assert (error.code, model.exists) == ("store.not_found", False)
            return
        assert (view.next_seq, view.closers, view.epoch) == (len(model.lines), (), model.epoch)

    @rule(gentle=st.booleans())
    def restart(self, gentle: bool) -> None:
        if gentle:
            self.run(self.store.close())
        else:
            self.run(self.home.kill(self.store))
        self._open()

    @invariant()
    def reads_are_the_model(self) -> None:
        if self.store is None:
            return
        for stream, model in zip(STREAMS, self.models, strict=True):
            if model.exists:
                assert self.run(all_lines(self.store, stream)) == model.lines
        listed = {row.stream for row in self.run(self.store.list_logs())}
        assert listed == {stream for stream, model in zip(STREAMS, self.models, strict=True) if model.exists}

    def teardown(self) -> None:
        if self.store is not None:
            self.run(self.store.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
