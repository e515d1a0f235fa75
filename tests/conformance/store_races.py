"""The races that a store must win, each by its name, through the ``Store`` seam and ``PersistenceService``.

A backend subclasses ``StoreRaces`` and gives it the ``home`` of ``StoreContract``.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.persistence import PersistenceService
from kimi_ray.store.seam import AppendResult, Store, Stream
from tests.conformance.store_contract import MAIN, Home, all_lines, batch, header, interrupted_turn, line, notes, ok

PATIENCE_S = 30


async def codes_of(store: Store, **batches: Any) -> dict[str, str | None]:
    """The answer to each batch, sent one after the other."""
    found: dict[str, str | None] = {}
    for name, one in batches.items():
        result: AppendResult = (await store.append([one], sync=True))[0]
        found[name] = None if result.error is None else result.error["code"]
    return found


async def opened(store: Store, stream: Stream = MAIN, nonce: str = "w", *, count: int = 0) -> None:
    await store.open_session(stream.session_id, "n", workspace_id="wd_x_0123")
    await store.open_writer(header(stream), nonce)
    if count:
        ok(await store.append([notes(0, count, stream=stream, nonce=nonce)], sync=True))


class StoreRaces:
    """Subclass it and give the fixture ``home``."""

    async def test_two_opens_of_one_new_stream_with_a_restart_between(self, home: Home) -> None:
        """Whichever of the two batches arrives first after the restart: only the newest grant may create the log."""
        for late_first in (False, True):
            stream = Stream(f"s{late_first:d}", "main")
            first = await home.open()
            await opened(first, stream, "a")
            await home.kill(first)
            second = await home.open()
            await second.open_session(stream.session_id, "n", workspace_id="wd_x_0123")
            grant = await second.open_writer(header(stream), "b")
            assert (grant.epoch, grant.next_seq) == (2, 0)
            await home.kill(second)
            third = await home.open()
            old = notes(0, 2, nonce="a", stream=stream)
            new = notes(0, 3, epoch=2, nonce="b", stream=stream)
            order = {"old": old, "new": new} if late_first else {"new": new, "old": old}
            assert await codes_of(third, **order) == {"old": "store.fenced", "new": None}
            for nonce, expected in (("a", "store.exists"), ("b", None)):
                try:
                    again = await third.open_writer(header(stream), nonce)
                except StoreError as error:
                    assert error.code == expected
                else:
                    assert (again.epoch, again.next_seq, expected) == (2, 3, None)
            assert await all_lines(third, stream) == [line(seq, text=f"n{seq}") for seq in range(3)]
            await third.close()

    async def test_a_zombie_after_a_restart(self, home: Home) -> None:
        """Fenced by the log itself, through any number of stores, whatever it tries; the newest grant goes on."""
        store = await home.open()
        await opened(store, count=4)
        assert (await store.open_writer(MAIN, "w2")).epoch == 2
        for _ in range(3):
            await home.kill(store)
            store = await home.open()
            seq = len(await all_lines(store))
            found = await codes_of(
                store,
                late=notes(seq, seq + 2),
                resent=notes(0, 4),
                flush=notes(seq, seq),
                twin=notes(seq, seq + 1, epoch=2, nonce="twin"),
                mine=notes(seq, seq + 1, epoch=2, nonce="w2"),
            )
            assert found == {**dict.fromkeys(("late", "resent", "flush", "twin"), "store.fenced"), "mine": None}
            await store.close_writer(MAIN, 1, "w")
            ok(await store.append([notes(seq + 1, seq + 2, epoch=2, nonce="w2")], sync=True))
        await store.close()

    async def test_overlapping_resends_at_once(self, home: Home) -> None:
        """One writer's events, cut in many ways, in flight together."""
        store = await home.open()
        await opened(store, count=3)
        cuts = [(0, 12), (2, 9), (3, 5), (1, 12), (3, 12), (0, 3), (2, 12)]
        answers = await asyncio.gather(*(store.append([notes(*cut)], sync=True) for cut in cuts))
        assert [(answer[0].error, answer[0].durable >= cut[1]) for answer, cut in zip(answers, cuts, strict=True)] == [
            (None, True)
        ] * len(cuts)
        assert await all_lines(store) == [line(seq, text=f"n{seq}") for seq in range(12)]
        await store.close()

    async def test_overlapping_resends_that_differ_have_one_winner(self, home: Home) -> None:
        """Two copies of a writer made different events under one grant."""
        store = await home.open()
        await opened(store, count=3)
        twins = [batch([line(2, text="n2"), *(line(seq, by=twin) for seq in range(3, 8))], 2) for twin in ("a", "b")]
        answers = [answer[0] for answer in await asyncio.gather(*(store.append([twin], sync=True) for twin in twins))]
        assert sorted(str(answer.error and answer.error["code"]) for answer in answers) == ["None", "store.conflict"]
        winner = next(name for name, answer in zip("ab", answers, strict=True) if answer.error is None)
        assert (await all_lines(store))[3:] == [line(seq, by=winner) for seq in range(3, 8)]
        await store.close()

    @pytest.mark.parametrize("writer_lives", [True, False])
    async def test_a_load_at_a_restart_with_a_live_turn(self, home: Home, writer_lives: bool) -> None:
        """The store cannot know whether the writer of an open turn lives; what the caller says decides."""
        first = await home.open()
        await first.open_session("s1", "n", workspace_id="wd_x_0123")
        await first.open_writer(header(), "w")
        ok(await first.append([batch(interrupted_turn(), 0)], sync=True))
        await home.kill(first)
        store = await home.open()
        more = batch([line(2, "step/end", turn=0, step=0)], 2)
        if writer_lives:
            loads = [store.load(MAIN, is_live=knowledge) for knowledge in (None, True, None)]
            *refused, answer = await asyncio.gather(*loads, store.append([more], sync=True), return_exceptions=True)
            assert [error.code for error in refused if isinstance(error, KimiRayError)] == ["log.turn_open"] * 3
            assert isinstance(answer, list)
            ok(answer)
            end = line(3, "turn/end", turn=0, reason={"kind": "completed"})
            ok(await store.append([batch([end], 3)], sync=True))
            view = await store.load(MAIN)
            assert (view.cut, view.closers, view.epoch) == (4, (), 1), "no closer was written"
        else:
            view = await store.load(MAIN, is_live=False)
            assert [closer["type"] for closer in view.closers] == ["step/end", "turn/end"]
            assert (await codes_of(store, zombie=more))["zombie"] == "store.fenced"
            assert len(await all_lines(store)) == 4
        await store.close()

    async def test_a_load_and_an_append_at_the_same_time(self, home: Home) -> None:
        """A writer that was taken for dead: it is fenced, or its event is in front of the closers. Never in between."""
        for turn in range(6):
            session = f"r{turn}"
            stream = Stream(session, "main")
            first = await home.open()
            await first.open_session(session, "n", workspace_id="wd_x_0123")
            await first.open_writer(header(stream), "w")
            ok(await first.append([batch(interrupted_turn(), 0, stream=stream)], sync=True))
            await home.kill(first)
            store = await home.open()
            late = store.append([batch([line(2, text="late")], 2, stream=stream)], sync=True)
            load = store.load(stream, is_live=False)
            results = await asyncio.gather(*((late, load) if turn % 2 else (load, late)), return_exceptions=True)
            answer = next(result for result in results if isinstance(result, list))[0]
            lines = await all_lines(store, stream)
            kinds = [json.loads(text)["type"] for text in lines]
            accepted = answer.error is None
            assert accepted or answer.error["code"] == "store.fenced"
            closed = ["turn/start", "step/start", *(["note/added"] if accepted else []), "step/end", "turn/end"]
            assert kinds in (closed, closed[: 2 + accepted]), kinds
            view = await store.load(stream, is_live=False)
            assert view.next_seq == len(closed)
            assert [json.loads(text)["type"] for text in await all_lines(store, stream)] == closed
            await store.close()

    async def test_eight_loads_of_one_interrupted_log_at_once(self, home: Home) -> None:
        """The turn is closed once, and everybody sees it closed."""
        first = await home.open()
        await first.open_session("s1", "n", workspace_id="wd_x_0123")
        await first.open_writer(header(), "w")
        ok(await first.append([batch(interrupted_turn(), 0)], sync=True))
        await home.kill(first)
        store = await home.open()
        views = await asyncio.gather(*(store.load(MAIN, is_live=False) for _ in range(8)))
        assert {view.next_seq for view in views} == {4}
        kinds = [json.loads(text)["type"] for text in await all_lines(store)]
        assert kinds == ["turn/start", "step/start", "step/end", "turn/end"]
        assert (await store.open_writer(MAIN, "w2")).next_seq == 4
        await store.close()

    async def test_a_log_that_becomes_live_while_a_load_waits(self, home: Home) -> None:
        """A grant that was given is not taken by a load that was asked for when the log was still cold."""
        for pauses in range(12):
            session = f"p{pauses}"
            stream = Stream(session, "main")
            first = await home.open()
            await first.open_session(session, "n", workspace_id="wd_x_0123")
            await first.open_writer(header(stream), "w")
            ok(await first.append([batch(interrupted_turn(), 0, stream=stream)], sync=True))
            await home.kill(first)
            store = await home.open()
            load = asyncio.create_task(store.load(stream, is_live=False))
            for _ in range(pauses):
                await asyncio.sleep(0)
            grant = await store.open_writer(stream, "w2")
            try:
                view = await load
            except KimiRayError as error:
                assert error.code == "log.turn_open"
                assert (grant.epoch, grant.next_seq) == (2, 2)
            else:
                assert (view.next_seq, grant.next_seq, grant.epoch) == (4, 4, 3), (pauses, view, grant)
            seq = grant.next_seq
            mine = batch([line(seq, text="mine")], seq, epoch=grant.epoch, nonce="w2", stream=stream)
            ok(await store.append([mine], sync=True))
            await store.close()

    async def test_a_load_after_an_inspection_includes_what_came_between(self, home: Home) -> None:
        """What was read once is known to be old by its revision, and the closers follow the newest event."""
        first = await home.open()
        await first.open_session("s1", "n", workspace_id="wd_x_0123")
        await first.open_writer(header(), "w")
        ok(await first.append([batch(interrupted_turn(), 0)], sync=True))
        await home.kill(first)
        store = await home.open()
        seen, revision = await store.inspect(MAIN), await store.revision(MAIN)
        assert (await store.inspect(MAIN), await store.revision(MAIN)) == (seen, revision)
        ok(await store.append([batch([line(2, text="in between")], 2)], sync=True))
        assert await store.revision(MAIN) != revision
        view = await store.load(MAIN, is_live=False)
        assert (view.cut, [closer["seq"] for closer in view.closers]) == (3, [3, 4])
        assert [json.loads(text)["seq"] for text in await all_lines(store)] == [0, 1, 2, 3, 4]
        await store.close()

    async def test_a_zombie_after_a_delete(self, home: Home) -> None:
        """Appends in flight while the session is removed, and everything that comes later."""
        store = await home.open()
        await opened(store, count=2)
        await opened(store, Stream("s2", "main"), count=2)
        flying = [asyncio.create_task(store.append([notes(2, 2 + n)], sync=n % 2 == 0)) for n in range(1, 9)]
        await store.remove("s1")
        for (answer,) in await asyncio.gather(*flying):
            assert answer.error is None or answer.error["code"] == "store.deleted", answer.error
        for _ in range(2):
            assert (await codes_of(store, late=notes(2, 4), again=notes(0, 2))) == dict.fromkeys(
                ("late", "again"), "store.deleted"
            )
            for attempt in (
                store.open_session("s1", "n", workspace_id="wd_x_0123"),
                store.open_writer(header(), "w"),
                store.open_writer(MAIN, "w"),
                store.fork(MAIN, 1, header(Stream("s3", "main")), "f"),
                store.fork(Stream("s2", "main"), 1, header(Stream("s1", "agent-1")), "f"),
                store.load(MAIN, is_live=False),
                store.write_document("s1", {}, grant=1, nonce="n", revision=0),
            ):
                with pytest.raises(StoreError) as caught:
                    await attempt
                assert caught.value.code == "store.deleted"
            assert {row.stream.session_id for row in await store.list_logs()} == {"s2"}
            await home.kill(store)
            store = await home.open()
        await store.close()

    async def test_eight_live_loads_at_concurrency_four(self, home: Home) -> None:
        """A load waits for its writer's flush, which needs the store too: nobody waits for anybody in a circle."""
        service = PersistenceService(str(home.path), home.options())
        streams = [Stream(f"s{n}", "main") for n in range(8)]
        four = asyncio.Semaphore(4)
        for stream in streams:
            await service.open_session(stream.session_id, "n", "wd_x_0123")
            await service.open_writer(header(stream), "w")

        async def write(stream: Stream, flushed: asyncio.Event) -> None:
            for first in range(0, 40, 4):
                ok(await service.append([notes(first, first + 4, stream=stream)], sync=False))
            ok(await service.append([notes(40, 40, stream=stream)], sync=True))
            flushed.set()
            for first in range(40, 80, 4):
                ok(await service.append([notes(first, first + 4, stream=stream)], sync=first % 8 == 0))

        async def load(stream: Stream, flushed: asyncio.Event) -> None:
            async with four:
                await flushed.wait()
                view = await service.load(stream)
                assert view.cut >= 40
                assert (view.closers, view.epoch) == ((), 1)

        async with asyncio.timeout(PATIENCE_S):
            events = [asyncio.Event() for _ in streams]
            loads = [load(stream, event) for stream, event in zip(streams, events, strict=True)]
            writes = [write(stream, event) for stream, event in zip(streams, events, strict=True)]
            await asyncio.gather(*loads, *writes)
        for stream in streams:
            assert await all_lines(service, stream) == [line(seq, text=f"n{seq}") for seq in range(80)]
        await service.close()

    async def test_a_child_is_lost_after_its_report_and_then_forked_there(self, home: Home) -> None:
        """What a child reported is durable, so its parent's cut can be forked, whatever became of the rest."""
        child, store = Stream("s1", "agent-1"), await home.open()
        await opened(store)
        await opened(store, child, "c")
        reported = ok(await store.append([notes(0, 9, stream=child, nonce="c")], sync=True)).durable
        completed = line(0, "subagent/completed", agent_id="agent-1", position={"seq": reported, "epoch": 1})
        ok(await store.append([batch([completed], 0)], sync=True))
        ok(await store.append([notes(9, 30, stream=child, nonce="c")], sync=False))
        await home.kill(store)
        after = await home.open()
        await after.open_session("s1", "n2")
        (text,) = await all_lines(after)
        position = json.loads(text)["data"]["position"]
        copy = Stream("s1", "agent-2")
        grant = await after.fork(child, position["seq"], header(copy), "f")
        assert (grant.next_seq, grant.epoch > position["epoch"]) == (reported, True)
        assert await all_lines(after, copy) == [line(seq, text=f"n{seq}") for seq in range(reported)]
        ok(await after.append([notes(9, 12, stream=copy, nonce="f", epoch=grant.epoch)], sync=True))
        await after.close()
