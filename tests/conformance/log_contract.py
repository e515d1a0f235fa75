"""The contract of logs: grants and fencing, appends, restarts, repair by ``load``, pages."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store.seam import Batch, Store, Stream
from tests.conformance.contract_home import (
    MAIN,
    Contract,
    Home,
    all_lines,
    batch,
    chunk_events,
    code,
    fingerprint,
    header,
    interrupted_turn,
    line,
    notes,
    ok,
)


class LogContract(Contract):
    """Everything about one log, and about many at once."""

    # -- grants and fencing ------------------------------------------------------------------------------------------

    async def test_a_new_log_is_invisible_before_its_first_batch(self, store: Store) -> None:
        await self.start(store)
        assert await store.list_logs() == []
        with pytest.raises(StoreError) as caught:
            await store.read_from(MAIN, 0)
        assert caught.value.code == "store.not_found"
        ok(await store.append([notes(0, 1)], sync=False))
        assert [row.stream for row in await store.list_logs()] == [MAIN]

    async def test_a_grant_is_idempotent_by_nonce(self, store: Store) -> None:
        await self.start(store, count=3)
        again = await store.open_writer(MAIN, "w")
        by_header = await store.open_writer(header(), "w")
        assert (again.epoch, again.next_seq) == (by_header.epoch, by_header.next_seq) == (1, 3)

    async def test_an_existing_log_is_not_created_twice(self, store: Store) -> None:
        await self.start(store, count=1)
        with pytest.raises(StoreError) as caught:
            await store.open_writer(header(), "other")
        assert caught.value.code == "store.exists"

    async def test_an_unknown_stream_and_session_are_not_found(self, store: Store) -> None:
        for stream in (Stream("nope", "main"), MAIN):
            with pytest.raises(StoreError) as caught:
                await store.open_writer(stream, "w")
            assert caught.value.code == "store.not_found"
        with pytest.raises(StoreError) as caught:
            await store.open_session("nope", "n")
        assert caught.value.code == "store.not_found"

    async def test_a_later_grant_fences_the_earlier(self, store: Store) -> None:
        await self.start(store, count=2)
        grant = await store.open_writer(MAIN, "w2")
        assert (grant.epoch, grant.next_seq) == (2, 2)
        assert code((await store.append([notes(2, 3)], sync=True))[0]) == "store.fenced"
        assert code((await store.append([notes(0, 2)], sync=True))[0]) == "store.fenced", "not even equal events"
        ok(await store.append([notes(2, 4, epoch=2, nonce="w2")], sync=True))
        assert len(await all_lines(store)) == 4

    async def test_the_same_epoch_under_another_nonce_is_fenced(self, store: Store) -> None:
        await self.start(store, count=1)
        assert code((await store.append([notes(1, 2, nonce="twin")], sync=True))[0]) == "store.fenced"

    async def test_two_opens_of_one_new_stream_with_a_restart_between(self, home: Home) -> None:
        first = await home.open()
        await self.start(first, nonce="a")
        await home.kill(first)
        second = await home.open()
        await second.open_session("s1", "n", workspace_id="wd_x_0123")
        grant = await second.open_writer(header(), "b")
        assert (grant.epoch, grant.next_seq) == (2, 0)
        ok(await second.append([notes(0, 2, epoch=2, nonce="b")], sync=True))
        assert code((await second.append([notes(0, 2, nonce="a")], sync=True))[0]) == "store.fenced"
        await second.close()

    async def test_a_closed_grant_is_over(self, store: Store) -> None:
        await self.start(store, count=2)
        await store.close_writer(MAIN, 1, "w")
        await store.close_writer(MAIN, 1, "w")
        assert code((await store.append([notes(2, 3)], sync=True))[0]) == "store.fenced"
        grant = await store.open_writer(MAIN, "w2")
        assert (grant.epoch, grant.next_seq) == (2, 2)
        await store.close_writer(MAIN, 1, "w")
        ok(await store.append([notes(2, 3, epoch=2, nonce="w2")], sync=True))

    async def test_closing_what_was_never_written_leaves_nothing(self, store: Store) -> None:
        await self.start(store)
        await store.close_writer(MAIN, 1, "w")
        assert await store.list_logs() == []
        await self.start(store, nonce="w2", count=1)

    # -- appends -----------------------------------------------------------------------------------------------------

    async def test_what_was_synced_is_durable_and_what_was_written_is_readable(self, store: Store) -> None:
        await self.start(store, count=2)
        written = ok(await store.append([notes(2, 5)], sync=False))
        assert (written.written, written.durable <= 5) == (5, True)
        assert len(await all_lines(store)) == 5
        durable = ok(await store.append([notes(5, 6)], sync=True))
        assert (durable.written, durable.durable) == (6, 6)

    async def test_an_empty_synced_batch_makes_what_was_written_durable(self, store: Store) -> None:
        await self.start(store, count=1)
        ok(await store.append([notes(1, 4)], sync=False))
        assert ok(await store.append([notes(4, 4)], sync=True)).durable == 4

    async def test_an_equal_overlap_is_skipped_and_the_rest_appended(self, store: Store) -> None:
        await self.start(store, count=4)
        assert ok(await store.append([notes(0, 4)], sync=True)).written == 4
        assert ok(await store.append([notes(1, 3)], sync=True)).written == 4
        assert ok(await store.append([notes(2, 7)], sync=True)).written == 7
        assert await all_lines(store) == [line(seq, text=f"n{seq}") for seq in range(7)]

    async def test_a_different_overlap_is_a_conflict_and_changes_nothing(self, store: Store) -> None:
        await self.start(store, count=4)
        bad = batch([line(3, text="n3"), line(4, text="x")], 3)
        ok(await store.append([notes(4, 5)], sync=True))
        before = await all_lines(store)
        result = (await store.append([bad], sync=True))[0]
        assert code(result) == "store.conflict"
        assert result.error is not None
        assert result.error["details"]["seq"] == 4
        assert await all_lines(store) == before

    async def test_a_hole_is_a_gap_that_says_what_is_expected(self, store: Store) -> None:
        await self.start(store, count=2)
        result = (await store.append([notes(3, 5)], sync=True))[0]
        assert code(result) == "store.gap"
        assert result.error is not None
        assert result.error["details"]["expected"] == 2

    async def test_one_bad_batch_does_not_fail_the_others(self, store: Store) -> None:
        streams = [Stream("s1", f"agent-{n}") for n in range(1, 5)]
        for stream in streams:
            await self.start(store, stream, count=1)
        answers = await store.append(
            [
                notes(1, 3, stream=streams[0]),
                notes(5, 6, stream=streams[1]),
                notes(1, 3, stream=streams[2], nonce="zombie"),
                notes(1, 3, stream=Stream("unknown", "main")),
                notes(1, 3, stream=streams[3]),
            ],
            sync=True,
        )
        codes = [None if answer.error is None else answer.error["code"] for answer in answers]
        assert codes == [None, "store.gap", "store.fenced", "store.not_found", None]
        assert [answer.stream for answer in answers][:2] == streams[:2]

    async def test_several_batches_of_one_stream_in_one_call_keep_their_order(self, store: Store) -> None:
        await self.start(store)
        cuts = [(0, 2), (2, 3), (1, 5), (5, 9)]
        answers = await store.append([notes(a, b) for a, b in cuts], sync=True)
        assert [answer.error for answer in answers] == [None] * 4
        assert await all_lines(store) == [line(seq, text=f"n{seq}") for seq in range(9)]

    async def test_packed_rows_come_back_as_canonical_lines_and_overlap_by_event(self, store: Store) -> None:
        from kimi_ray.store.chunk_rows import pack_rows

        events = chunk_events(40)
        await self.start(store)
        rows = pack_rows(events)
        assert len(rows) < len(events), "the test needs a packed row"
        texts = [event.line for event in events]
        packed = Batch(
            MAIN, 1, "w", 0, b"".join(row for row, _ in rows),
            tuple(len(row) for row, _ in rows), tuple(count for _, count in rows),
        )  # fmt: skip
        ok(await store.append([batch(texts[:7], 0)], sync=True))
        assert ok(await store.append([packed], sync=True)).written == 40
        assert ok(await store.append([packed], sync=True)).written == 40
        assert ok(await store.append([batch(texts[11:40], 11)], sync=True)).written == 40
        assert await all_lines(store) == texts
        page = await store.read_from(MAIN, 23, 5)
        assert page.lines == tuple(texts[23:28])
        await store.close_writer(MAIN, 1, "w")
        assert (await store.open_writer(MAIN, "w2")).next_seq == 40
        wrong = batch([texts[30].replace(b"t30", b"tXX")], 30, epoch=2, nonce="w2")
        assert code((await store.append([wrong], sync=True))[0]) == "store.conflict"

    async def test_malformed_batches_are_refused(self, store: Store) -> None:
        await self.start(store, count=1)
        good = notes(1, 2)
        for payload, sizes in (
            (bytes(good.payload)[:-1], (len(good.payload) - 1,)),
            (good.payload, (len(good.payload) + 1,)),
            (b'{"epoch":9,"seq":1,"writer":"w","boot":"","mode":"disk"}\n', (57,)),
            (b'{"batch":9,"seq":1}\n', (20,)),
        ):
            bad = Batch(MAIN, 1, "w", 1, payload, sizes, (1,))
            assert code((await store.append([bad], sync=True))[0]) == "store.bad_batch"
        assert len(await all_lines(store)) == 1

    # -- restarts ----------------------------------------------------------------------------------------------------

    async def test_a_grant_of_a_dead_store_goes_on_and_a_zombie_does_not(self, home: Home) -> None:
        first = await home.open()
        await self.start(first, count=2)
        await first.open_writer(MAIN, "w2")
        ok(await first.append([notes(2, 4, epoch=2, nonce="w2")], sync=True))
        await home.kill(first)
        second = await home.open()
        assert code((await second.append([notes(4, 5)], sync=True))[0]) == "store.fenced"
        assert ok(await second.append([notes(3, 6, epoch=2, nonce="w2")], sync=True)).durable == 6
        assert (await second.open_writer(MAIN, "w2")).epoch == 2
        await home.kill(second)
        third = await home.open()
        assert (await third.open_writer(MAIN, "w3")).epoch == 3
        assert code((await third.append([notes(6, 7, epoch=2, nonce="w2")], sync=True))[0]) == "store.fenced"
        assert len(await all_lines(third)) == 6
        await third.close()

    async def test_the_grant_of_a_new_log_survives_a_restart_before_its_first_batch(self, home: Home) -> None:
        first = await home.open()
        await self.start(first)
        await home.kill(first)
        second = await home.open()
        assert await second.list_logs() == []
        assert code((await second.append([notes(0, 2, nonce="twin")], sync=True))[0]) == "store.fenced"
        ok(await second.append([notes(0, 2)], sync=True))
        assert [row.header for row in await second.list_logs()] == [header()]
        await home.kill(second)
        third = await home.open()
        assert ok(await third.append([notes(1, 3)], sync=True)).durable == 3
        await third.close()

    async def test_sigkill_of_a_writing_process_loses_nothing_acknowledged(self, home: Home) -> None:
        for round_ in range(3):
            acknowledged = await self._killed_writer(home, round_)
            assert acknowledged > 0
            store = await home.open()
            stored = await all_lines(store)
            assert len(stored) >= acknowledged
            assert stored == [line(seq, text=f"n{seq}") for seq in range(len(stored))]
            await store.close()

    async def _killed_writer(self, home: Home, round_: int) -> int:
        how = home.options()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _WRITER, str(home.path), how.backend, how.compression, str(how.shards), f"w{round_}",
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        assert process.stdout is not None
        acknowledged = 0
        async with asyncio.timeout(60):
            for _ in range(20 + 7 * round_):
                acknowledged = int(await process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            for rest in (await process.stdout.read()).split():
                acknowledged = max(acknowledged, int(rest))
            await process.wait()
        return acknowledged

    # -- load and inspect --------------------------------------------------------------------------------------------

    async def _interrupted(self, store: Store) -> None:
        await store.open_session(MAIN.session_id, "n", workspace_id="wd_x_0123")
        await store.open_writer(header(), "w")
        ok(await store.append([batch(interrupted_turn(), 0)], sync=True))

    async def test_loading_twice_is_loading_once(self, home: Home) -> None:
        first = await home.open()
        await self._interrupted(first)
        await home.kill(first)
        store = await home.open()
        seen = await store.inspect(MAIN)
        assert [closer["type"] for closer in seen.closers] == ["step/end", "turn/end"]
        loaded = await store.load(MAIN, is_live=False)
        assert (loaded.cut, loaded.next_seq, loaded.closers) == (seen.cut, seen.next_seq, seen.closers)
        assert loaded.epoch == 2
        lines = await all_lines(store)
        assert len(lines) == loaded.next_seq
        assert json.loads(lines[-1])["data"]["reason"]["kind"] == "interrupted"
        again = await store.load(MAIN)
        assert (again.cut, again.closers, again.epoch) == (loaded.next_seq, (), 2)
        assert await all_lines(store) == lines
        assert code((await store.append([notes(2, 3)], sync=True))[0]) == "store.fenced"
        await store.close()

    async def test_an_open_turn_whose_writer_may_live_is_not_repaired(self, home: Home) -> None:
        first = await home.open()
        await self._interrupted(first)
        with pytest.raises(KimiRayError) as caught:
            await first.load(MAIN, is_live=False)
        assert caught.value.code == "log.turn_open", "granted here and not closed: live, whatever the caller says"
        await home.kill(first)
        store = await home.open()
        before = fingerprint(home.path / "sessions")
        for knowledge in (None, True):
            with pytest.raises(KimiRayError) as caught:
                await store.load(MAIN, is_live=knowledge)
            assert caught.value.code == "log.turn_open"
        assert fingerprint(home.path / "sessions") == before
        stored = len(interrupted_turn())
        assert ok(await store.append([notes(stored, stored + 1)], sync=True)).written == stored + 1, "it goes on"
        await store.close()

    async def test_a_live_log_between_turns_can_be_loaded(self, store: Store) -> None:
        await self.start(store, count=3)
        view = await store.load(MAIN)
        assert (view.next_seq, view.closers, view.epoch) == (3, (), 1)
        ok(await store.append([notes(3, 4)], sync=True))

    async def test_inspect_writes_nothing(self, home: Home) -> None:
        first = await home.open()
        await self._interrupted(first)
        await home.kill(first)
        store = await home.open()
        before = fingerprint(home.path)
        await store.inspect(MAIN)
        await store.read_from(MAIN, 0)
        await store.list_logs()
        await store.list_documents()
        assert fingerprint(home.path) == before
        await store.close()

    # -- reading -----------------------------------------------------------------------------------------------------

    async def test_pages(self, store: Store) -> None:
        await self.start(store)
        for first in range(0, 3000, 25):
            ok(await store.append([notes(first, first + 25)], sync=False))
        wanted = [line(seq, text=f"n{seq}") for seq in range(3000)]
        for seq, limit in ((0, 10), (24, 3), (1499, 700), (2990, 50), (2999, 1)):
            page = await store.read_from(MAIN, seq, limit)
            assert (page.first_seq, page.next_seq) == (seq, 3000)
            assert list(page.lines) == wanted[seq : seq + limit]
        assert (await store.read_from(MAIN, 3000)).lines == ()
        assert (await store.read_from(MAIN, 9999)).lines == ()
        small = await store.read_from(MAIN, 100, 1000, 200)
        assert 1 <= len(small.lines) <= 4
        one = await store.read_from(MAIN, 100, 1000, 1)
        assert list(one.lines) == wanted[100:101], "one event always fits"

    # -- load --------------------------------------------------------------------------------------------------------

    async def test_many_concurrent_writers(self, store: Store) -> None:
        streams = [Stream(f"m{n % 7}", f"agent-{n}") for n in range(60)]
        await asyncio.gather(*(self.start(store, stream) for stream in streams))

        async def write(stream: Stream) -> None:
            for first in range(0, 40, 5):
                ok(await store.append([notes(first, first + 5, stream=stream)], sync=first % 10 == 0))
            ok(await store.append([notes(40, 40, stream=stream)], sync=True))

        await asyncio.gather(*map(write, streams))
        for stream in streams:
            assert await all_lines(store, stream) == [line(seq, text=f"n{seq}") for seq in range(40)]

    async def test_close_finishes_what_was_accepted_and_refuses_the_rest(self, home: Home) -> None:
        store = await home.open()
        await self.start(store, count=1)
        pending = asyncio.create_task(store.append([notes(1, 50)], sync=True))
        await asyncio.sleep(0)
        await store.close()
        await store.close()
        assert ok(await pending).durable == 50
        with pytest.raises(StoreError) as caught:
            await store.append([notes(50, 51)], sync=True)
        assert caught.value.code == "store.closed"


_WRITER = """
import asyncio, sys
from kimi_ray.store import StoreOptions, Stream, open_store_for_writing
from tests.conformance.store_contract import MAIN, header, notes

async def main():
    home, backend, compression, shards, nonce = sys.argv[1:]
    options = StoreOptions(backend=backend, compression=compression, shards=int(shards))
    store = await open_store_for_writing(home, options)
    await store.open_session("s1", nonce, workspace_id="wd_x_0123")
    known = bool(await store.list_logs())
    grant = await store.open_writer(MAIN if known else header(), nonce)
    seq = grant.next_seq
    while True:
        for size, sync in ((3, False), (5, True)):
            answer = (await store.append([notes(seq, seq + size, epoch=grant.epoch, nonce=nonce)], sync=sync))[0]
            assert answer.error is None, answer.error
            seq += size
            if sync:
                print(answer.durable, flush=True)

asyncio.run(main())
"""
