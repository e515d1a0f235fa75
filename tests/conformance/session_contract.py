"""The contract of sessions: claims, documents, removal, ids, blobs."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import Any

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.store.seam import Store, Stream
from tests.conformance.contract_home import MAIN, Contract, Home, all_lines, code, header, notes, ok


class SessionContract(Contract):
    """Everything about sessions but how they come to be."""

    # -- sessions, documents, removal --------------------------------------------------------------------------------

    async def test_a_document_changes_by_compare_and_set_under_its_claim(self, store: Store) -> None:
        grant = await store.open_session("s1", "n", workspace_id="wd_x_0123")
        assert (grant.grant, grant.revision) == (1, 0)
        assert await store.read_document("s1") is None

        async def write(value: dict[str, Any], revision: int, claim: int = 1, nonce: str = "n") -> int:
            return await store.write_document("s1", value, grant=claim, nonce=nonce, revision=revision)

        assert await write({"title": "a"}, 0) == 1
        assert await write({"title": "b"}, 1) == 2
        for revision in (0, 1, 3):
            with pytest.raises(StoreError) as caught:
                await write({"title": "lost"}, revision)
            assert (caught.value.code, caught.value.details["revision"]) == ("store.conflict", 2)
        again = await store.open_session("s1", "n")
        assert (again.grant, again.revision) == (1, 2), "idempotent by nonce"
        newer = await store.open_session("s1", "m")
        assert newer.grant == 2
        with pytest.raises(StoreError) as caught:
            await write({"title": "zombie"}, 2)
        assert caught.value.code == "store.fenced"
        assert await write({"title": "c"}, 2, 2, "m") == 3
        document = await store.read_document("s1")
        assert document is not None
        assert (document.value, document.revision, document.workspace_id) == ({"title": "c"}, 3, "wd_x_0123")
        assert await store.list_documents() == [document]

    async def test_racing_document_writes_have_one_winner(self, store: Store) -> None:
        await store.open_session("s1", "n", workspace_id="wd_x_0123")
        answers = await asyncio.gather(
            *(store.write_document("s1", {"n": n}, grant=1, nonce="n", revision=0) for n in range(8)),
            return_exceptions=True,
        )
        assert sum(answer == 1 for answer in answers) == 1
        assert sum(isinstance(answer, StoreError) and answer.code == "store.conflict" for answer in answers) == 7

    async def test_a_session_claim_survives_a_restart_of_the_store(self, home: Home) -> None:
        first = await home.open()
        await first.open_session("s1", "n", workspace_id="wd_x_0123")
        await first.write_document("s1", {"v": 1}, grant=1, nonce="n", revision=0)
        await home.kill(first)
        second = await home.open()
        assert await second.write_document("s1", {"v": 2}, grant=1, nonce="n", revision=1) == 2
        with pytest.raises(StoreError) as caught:
            await second.write_document("s1", {"v": 3}, grant=1, nonce="zombie", revision=2)
        assert caught.value.code == "store.fenced"
        await second.close()

    async def test_a_session_in_use_by_a_living_process_is_refused_and_a_dead_one_taken_over(self, home: Home) -> None:
        first = await home.open()
        await self.start(first, count=2)
        second = await home.open(claim_timeout_s=0.2)
        for attempt in (
            second.open_session("s1", "m"),
            second.open_writer(MAIN, "m"),
            second.load(MAIN, is_live=False),
            second.remove("s1"),
            second.write_document("s1", {}, grant=1, nonce="n", revision=0),
        ):
            with pytest.raises(StoreError) as caught:
                await attempt
            assert caught.value.code == "session.in_use"
            assert caught.value.details["pid"] == os.getpid()
        assert code((await second.append([notes(2, 3)], sync=True))[0]) == "session.in_use"
        assert len(await all_lines(second)) == 2, "reading is allowed"
        ok(await first.append([notes(2, 3)], sync=True))
        await home.kill(first)
        assert (await second.open_writer(MAIN, "m")).epoch == 2
        await second.close()

    async def test_a_claim_waits_for_a_dying_owner(self, home: Home) -> None:
        first = await home.open()
        await self.start(first, count=1)
        second = await home.open(claim_timeout_s=20)
        waiting = asyncio.create_task(second.open_session("s1", "m"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await home.kill(first)
        assert (await asyncio.wait_for(waiting, 10)).grant == 2
        await second.close()

    async def test_a_claim_that_was_given_back_is_free(self, home: Home) -> None:
        first = await home.open(claim_timeout_s=0.2)
        await self.start(first, count=1)
        await first.close_writer(MAIN, 1, "w")
        await first.close_session("s1", "n")
        await first.close_session("s1", "n")
        second = await home.open(claim_timeout_s=0.2)
        await second.open_session("s1", "m")
        assert (await second.open_writer(MAIN, "m")).epoch == 2
        with pytest.raises(StoreError) as caught:
            await first.open_writer(MAIN, "w9")
        assert caught.value.code == "session.in_use"
        await second.close()
        await first.close()

    async def test_stores_on_one_home_write_different_sessions(self, home: Home) -> None:
        stores = [await home.open() for _ in range(2)]
        streams = [Stream(f"s{n}", "main") for n in range(2)]
        for store, stream in zip(stores, streams, strict=True):
            await self.start(store, stream, count=3)
        assert stores[0].identity == stores[1].identity
        assert {row.stream for row in await stores[0].list_logs()} == set(streams)
        assert len(await all_lines(stores[0], streams[1])) == 3
        for store in stores:
            await store.close()

    async def test_a_removed_session_stays_removed(self, home: Home) -> None:
        store = await home.open()
        await self.start(store, count=2)
        await store.write_document("s1", {"v": 1}, grant=1, nonce="n", revision=0)
        await store.remove("s1")
        await store.remove("s1")
        assert (await store.list_logs(), await store.list_documents()) == ([], [])
        for again in (store, await home.open()):
            assert code((await again.append([notes(2, 3)], sync=True))[0]) == "store.deleted", "a zombie"
            for attempt in (
                again.open_session("s1", "n", workspace_id="wd_x_0123"),
                again.open_writer(header(), "w"),
                again.open_writer(MAIN, "w"),
                again.write_document("s1", {}, grant=1, nonce="n", revision=1),
                again.read_from(MAIN, 0),
                again.load(MAIN),
            ):
                with pytest.raises(StoreError) as caught:
                    await attempt
                assert caught.value.code == "store.deleted"
            await again.close()

    async def test_ids_that_cannot_be_paths_are_refused(self, store: Store) -> None:
        for bad in ("", "a/b", "..", "a b", "x" * 129, "é"):
            with pytest.raises(StoreError) as caught:
                await store.open_session(bad, "n", workspace_id="wd_x_0123")
            assert caught.value.code == "store.invalid_id"
            with pytest.raises(StoreError):
                await store.open_writer(header(Stream("s1", bad)), "w")
        await self.start(store, Stream("Same", "main"), count=1)
        for twin in (Stream("same", "main"), Stream("Same", "MAIN")):
            with pytest.raises(StoreError) as caught:
                await store.open_session(twin.session_id, "n", workspace_id="wd_x_0123")
                await store.open_writer(header(twin), "w")
            assert caught.value.code == "store.invalid_id"

    async def test_ids_that_differ_only_in_case_are_refused_also_when_the_first_is_closed(self, store: Store) -> None:
        await self.start(store, count=1)
        for closed in (False, True):
            if closed:
                await store.close_writer(MAIN, 1, "w")
                await store.close_session("s1", "n")
            with pytest.raises(StoreError) as caught:
                await store.open_session("S1", "n", workspace_id="wd_x_0123")
            assert caught.value.code == "store.invalid_id"
            assert await store.read_document("S1") is None and await store.list_logs(session_id="S1") == []

    # -- blobs -------------------------------------------------------------------------------------------------------

    async def test_blobs(self, home: Home) -> None:
        store = await home.open()
        content = os.urandom(50_000)
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert not await store.has_blob(digest)
        with pytest.raises(StoreError) as caught:
            await store.read_blob(digest)
        assert caught.value.code == "store.blob_missing"
        await asyncio.gather(*(store.put_blobs({digest: content}) for _ in range(4)))
        await home.kill(store)
        again = await home.open()
        assert await again.has_blob(digest)
        assert await again.read_blob(digest) == content
        with pytest.raises(StoreError):
            await again.put_blobs({digest: b"other"})
        await again.close()
