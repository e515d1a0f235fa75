"""The contract of sessions that come to be: nobody sees them before they are whole, and nothing is left of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError, StoreError
from kimi_ray.store import open_store
from kimi_ray.store.blobs import digest_of
from kimi_ray.store.seam import LogCopy, SessionCopy, Store, Stream
from tests.conformance.contract_home import MAIN, Contract, Home, all_lines, batch, code, header, line, notes, ok

W = "wd_x_0123"
FORKS = {f"f{n}": W if n % 2 else "wd_y_4567" for n in range(4)}


def fork_of(
    session_id: str, *, cut: int = 5, tail: int = 2, source: Stream = MAIN, agents: tuple[str, ...] = ("main",)
) -> SessionCopy:
    lines = tuple(line(seq, "log/forked", n=seq) for seq in range(cut, cut + tail))
    logs = tuple(LogCopy(source, cut, header(Stream(session_id, agent)), lines) for agent in agents)
    return SessionCopy(session_id, FORKS.get(session_id, W), {"title": f"Fork {session_id}"}, logs)


async def refused(attempt: Awaitable[Any]) -> str:
    with pytest.raises(KimiRayError) as caught:
        await attempt
    return caught.value.code


async def seen(store: Any) -> tuple[set[str], set[str]]:
    """The sessions with a document, and those with a log, that a store shows."""
    logs = {row.stream.session_id for row in await store.list_logs()}
    assert logs == {row.stream.session_id for row in await store.snapshots()}
    return {document.session_id for document in await store.list_documents()}, logs


def names_below(home: Path) -> set[str]:
    """Every file and directory of a home that a session's id is part of, and every marker. Workspaces that are empty
    stay while several processes may use them."""
    found: set[str] = set()
    for path in home.rglob("*"):
        name = str(path.relative_to(home))
        if name.count("/") == 1 and path.is_dir() and not any(path.iterdir()):
            continue
        if name.startswith(("sessions/", "owners/", "reserved/", "tombstones/")) or (
            name.startswith("unpublished/") and path.is_file() and not name.startswith("unpublished/published/")
        ):
            found.add(name)
    return found


class PublicationContract(Contract):
    """``create``, and groups of sessions that appear together."""

    @staticmethod
    async def publish(store: Store, group: str, sessions: dict[str, str]) -> None:
        await store.begin_publication(group, sessions)
        for session_id in sessions:
            await store.copy_session(group, fork_of(session_id))
        await store.publish(group)

    @staticmethod
    async def unseen(store: Any, session_id: str) -> None:
        """Nobody sees a session, by any call."""
        stream = Stream(session_id, "main")
        assert await store.read_document(session_id) is None
        for call in (store.read_from(stream, 0), store.inspect(stream), store.verify(stream), store.revision(stream)):
            assert await refused(call) == "store.not_found"
        assert await refused(store.read_surviving(stream)) == "store.not_found"
        assert await refused(store.read_raw(stream)) == "store.not_found"
        assert await store.locate(stream) is None
        documents, logs = await seen(store)
        assert session_id not in documents | logs

    # -- one session, shown by its first document ----------------------------------------------------------------------

    async def test_a_new_session_is_seen_by_nobody_else_before_its_first_document(self, home: Home) -> None:
        store, other = await home.open(), await home.open()
        claim = await store.open_session("s1", "n", workspace_id=W, create=True)
        assert (claim.grant, claim.revision) == (1, 0)
        grant = await store.open_writer(header(), "w", claim="n")
        assert (grant.epoch, grant.next_seq) == (1, 0)
        ok(await store.append([notes(0, 3)], sync=True))
        reader = open_store(home.path)
        for who in (other, reader):
            await self.unseen_by_reader(who)
        assert (await store.read_from(MAIN, 0)).next_seq == 3, "its maker works on it"
        assert [row.stream for row in await store.list_logs(session_id="s1")] == [MAIN]
        assert await store.list_logs() == [] and await store.list_documents() == []
        assert (await store.open_session("s1", "n", workspace_id=W, create=True)).grant == 1
        assert await store.write_document("s1", {"title": "a"}, grant=1, nonce="n", revision=0) == 1
        for who in (store, other):
            assert await seen(who) == ({"s1"}, {"s1"})
            assert len(await all_lines(who)) == 3
        assert (await store.open_session("s1", "n", workspace_id=W, create=True)).revision == 1
        await other.close()
        await store.close()
        again = await home.open()
        assert await seen(again) == ({"s1"}, {"s1"})
        await again.close()

    async def unseen_by_reader(self, who: Any) -> None:
        stream = MAIN
        assert await who.read_document("s1") is None
        for call in (who.read_from(stream, 0), who.inspect(stream), who.verify(stream), who.revision(stream)):
            assert await refused(call) == "store.not_found"
        listed = who.list(session_id="s1") if hasattr(who, "list") else who.list_logs(session_id="s1")
        assert await listed == []
        everything = who.list() if hasattr(who, "list") else who.list_logs()
        assert await everything == []
        assert await who.list_documents() == []

    async def test_a_new_session_whose_process_dies_is_gone_and_its_id_is_free(self, home: Home) -> None:
        first = await home.open()
        before = names_below(home.path)
        await first.open_session("s1", "n", workspace_id=W, create=True)
        await first.open_writer(header(), "w")
        await first.open_writer(header(Stream("s1", "agent-1")), "w")
        ok(await first.append([notes(0, 3)], sync=True))
        await home.kill(first)
        second = await home.open()
        assert await seen(second) == (set(), set())
        assert names_below(home.path) == before
        assert await refused(second.open_session("s1", "m")) == "store.not_found"
        assert code((await second.append([notes(3, 4)], sync=True))[0]) == "store.not_found", "a zombie"
        claim = await second.open_session("s1", "m", workspace_id="wd_other", create=True)
        assert claim.revision == 0
        await second.open_writer(header(), "w2")
        ok(await second.append([notes(0, 1, nonce="w2")], sync=True))
        await second.write_document("s1", {}, grant=claim.grant, nonce="m", revision=0)
        document = await second.read_document("s1")
        assert document is not None and document.workspace_id == "wd_other"
        await second.close()

    async def test_a_process_that_is_there_already_takes_the_id_of_a_dead_one_too(self, home: Home) -> None:
        first, second = await home.open(), await home.open(claim_timeout_s=5.0)
        await first.open_session("s1", "n", workspace_id=W, create=True)
        await first.open_writer(header(), "w")
        ok(await first.append([notes(0, 3)], sync=True))
        assert await refused((await home.open(claim_timeout_s=0.1)).open_session("s1", "m", workspace_id=W)) == (
            "session.in_use"
        )
        await home.kill(first)
        await second.open_session("s1", "m", workspace_id=W, create=True)
        assert await second.list_logs(session_id="s1") == []
        await second.close()

    async def test_a_new_id_must_be_free(self, home: Home) -> None:
        store = await home.open(claim_timeout_s=0.1)
        await self.start(store, count=1)
        await store.open_session("gone", "n", workspace_id=W, create=True)
        await store.write_document("gone", {}, grant=1, nonce="n", revision=0)
        await store.remove("gone")
        for session_id, wanted in (("s1", "store.exists"), ("gone", "store.deleted"), ("S1", "store.invalid_id")):
            assert await refused(store.open_session(session_id, "m", workspace_id=W, create=True)) == wanted
            assert await refused(store.begin_publication("g", {"fresh": W, session_id: W})) in (
                wanted,
                "session.in_use",
            )
            assert await refused(store.publish("g")) == "store.not_found"
        await self.unseen(store, "fresh")
        assert await refused(store.open_session("a/b", "m", workspace_id=W, create=True)) == "store.invalid_id"
        assert await refused(store.begin_publication("a/b", {})) == "store.invalid_id"
        await store.open_session("fresh", "m", workspace_id=W, create=True)
        assert await refused(store.begin_publication("g", {"fresh": W})) == "session.in_use"
        assert await refused(store.begin_publication("g", {"FRESH": W})) == "store.invalid_id"
        other = await home.open(claim_timeout_s=0.1)
        for attempt in (
            other.open_session("fresh", "x", workspace_id=W, create=True),
            other.open_session("fresh", "x", workspace_id=W),
            other.remove("fresh"),
            store.open_session("fresh", "x", workspace_id=W),
        ):
            assert await refused(attempt) == "session.in_use"
        await other.close()
        await store.close()

    async def test_a_later_maker_of_an_id_takes_it_from_an_earlier_one(self, store: Store) -> None:
        await store.open_session("s1", "n", workspace_id=W, create=True)
        await store.open_writer(header(), "w", claim="n")
        ok(await store.append([notes(0, 3)], sync=True))
        claim = await store.open_session("s1", "m", workspace_id=W, create=True)
        assert claim.revision == 0 and await store.list_logs(session_id="s1") == []
        assert await refused(store.write_document("s1", {}, grant=1, nonce="n", revision=0)) == "store.fenced"
        assert await refused(store.open_writer(header(), "z", claim="n")) == "session.fenced"
        assert code((await store.append([notes(3, 4)], sync=True))[0]) in ("store.not_found", "store.deleted")
        await store.open_writer(header(), "w2", claim="m")
        ok(await store.append([notes(0, 1, nonce="w2")], sync=True))
        await store.write_document("s1", {"v": 1}, grant=claim.grant, nonce="m", revision=0)
        assert await seen(store) == ({"s1"}, {"s1"})

    async def test_a_new_session_that_is_closed_or_removed_was_never_there(self, home: Home) -> None:
        store = await home.open()
        before = names_below(home.path)
        for number in range(4):
            await store.open_session("s1", "n", workspace_id=W, create=True)
            if number % 2:
                await store.open_writer(header(), "w")
                ok(await store.append([notes(0, 3)], sync=True))
            await (store.remove("s1") if number < 2 else store.close_session("s1", "n"))
            assert names_below(home.path) == before
            assert await refused(store.read_from(MAIN, 0)) == "store.not_found"
            assert code((await store.append([notes(3, 4)], sync=True))[0]) == "store.not_found"
        assert await refused(store.remove("s1")) == "store.not_found"
        await store.close()

    async def test_a_hundred_new_sessions_at_once(self, store: Store) -> None:
        async def make(number: int) -> None:
            session_id = f"new-{number}"
            claim = await store.open_session(session_id, "n", workspace_id=W, create=True)
            await store.write_document(session_id, {"n": number}, grant=claim.grant, nonce="n", revision=0)

        await asyncio.gather(*map(make, range(100)))
        assert (await seen(store))[0] == {f"new-{number}" for number in range(100)}

    # -- sessions that appear together ---------------------------------------------------------------------------------

    async def test_sessions_of_a_publication_appear_together(self, home: Home) -> None:
        store, other = await home.open(shards=1), await home.open()
        await self.start(store, count=8)
        await store.begin_publication("g", FORKS)
        await store.begin_publication("g", FORKS)
        for session_id in FORKS:
            await store.copy_session("g", fork_of(session_id, agents=("main", "agent-1")))
            for who in (store, other):
                await self.unseen(who, session_id)
                assert await seen(who) == (set(), {"s1"})
        await store.publish("g")
        await store.publish("g")
        for who in (store, other):
            assert await seen(who) == (set(FORKS), {"s1", *FORKS})
        for session_id, workspace_id in FORKS.items():
            document = await other.read_document(session_id)
            assert document is not None
            assert (document.value, document.revision) == ({"title": f"Fork {session_id}"}, 1)
            assert document.workspace_id == workspace_id
            for agent in ("main", "agent-1"):
                stream = Stream(session_id, agent)
                assert await all_lines(other, stream) == [
                    *(line(seq, text=f"n{seq}") for seq in range(5)),
                    *(line(seq, "log/forked", n=seq) for seq in (5, 6)),
                ]
                report = await other.verify(stream)
                assert (report.ok, report.closed, report.events) == (True, True, 7), report
            assert (await other.open_session(session_id, "m")).revision == 1
            grant = await other.open_writer(Stream(session_id, "main"), "w2")
            assert grant.next_seq == 7 and grant.epoch > 1
            more = notes(7, 9, stream=Stream(session_id, "main"), epoch=grant.epoch, nonce="w2")
            ok(await other.append([more], sync=True))
        await other.close()
        await store.close()

    async def test_what_another_process_took_back_is_made_again(self, home: Home) -> None:
        """As the stores of several shards do it: each copies its own sessions, the first one discards them all."""
        store, other = await home.open(shards=1), await home.open()
        await self.start(store, count=8)
        for attempt in range(3):
            group = f"g{attempt}"
            await store.begin_publication(group, FORKS)
            for number, session_id in enumerate(FORKS):
                await (store, other)[number % 2].copy_session(group, fork_of(session_id))
            if attempt < 2:
                await store.discard_publication(group)
        await store.publish("g2")
        for who in (store, other):
            assert await seen(who) == (set(FORKS), {"s1", *FORKS})
        await other.close()
        await store.close()

    async def test_a_copy_is_made_once_however_often_it_is_told(self, store: Store) -> None:
        await self.start(store, count=8)
        await store.begin_publication("g", FORKS)
        await asyncio.gather(*(store.copy_session("g", fork_of(name)) for name in FORKS for _ in range(3)))
        await store.publish("g")
        assert await seen(store) == (set(FORKS), {"s1", *FORKS})
        await store.copy_session("g", fork_of("f1"))
        await store.begin_publication("g", FORKS)
        await store.discard_publication("g")
        assert await seen(store) == (set(FORKS), {"s1", *FORKS})
        assert len(await all_lines(store, Stream("f1", "main"))) == 7

    async def test_a_copy_is_taken_of_a_live_log_as_far_as_it_is_written(self, home: Home) -> None:
        store, other = await home.open(), await home.open()
        await self.start(store, count=2)
        ok(await store.append([notes(2, 9)], sync=False))
        await other.begin_publication("g", {"f0": FORKS["f0"]})
        assert await refused(other.copy_session("g", fork_of("f0", cut=10))) == "store.gap"
        await self.unseen(other, "f0")
        await other.copy_session("g", fork_of("f0", cut=9, tail=0))
        await other.publish("g")
        assert len(await all_lines(other, Stream("f0", "main"))) == 9
        ok(await store.append([notes(9, 12)], sync=True))
        await other.close()
        await store.close()

    async def test_packed_rows_are_cut_where_the_copy_ends(self, store: Store) -> None:
        from kimi_ray.store.chunk_rows import pack_rows
        from kimi_ray.store.seam import Batch
        from tests.conformance.contract_home import chunk_events

        events = chunk_events(30)
        await self.start(store)
        rows = pack_rows(events)
        packed = Batch(
            MAIN, 1, "w", 0, b"".join(row for row, _ in rows),
            tuple(len(row) for row, _ in rows), tuple(count for _, count in rows),
        )  # fmt: skip
        ok(await store.append([packed], sync=True))
        ok(await store.append([batch([line(30), line(31)], 30)], sync=True))
        await store.begin_publication("g", FORKS)
        for name, cut in zip(FORKS, (0, 1, 17, 32), strict=True):
            await store.copy_session("g", fork_of(name, cut=cut, tail=1))
        await store.publish("g")
        texts = [*(event.line for event in events), line(30), line(31)]
        for name, cut in zip(FORKS, (0, 1, 17, 32), strict=True):
            stream = Stream(name, "main")
            assert await all_lines(store, stream) == [*texts[:cut], line(cut, "log/forked", n=cut)]
            assert (await store.verify(stream)).ok

    async def test_a_discarded_publication_leaves_nothing(self, home: Home) -> None:
        store = await home.open()
        await self.start(store, count=8)
        before = names_below(home.path)
        await store.begin_publication("g", FORKS)
        await store.copy_session("g", fork_of("f1"))
        await store.copy_session("g", fork_of("f2"))
        await store.discard_publication("g")
        await store.discard_publication("g")
        await store.discard_publication("never")
        assert names_below(home.path) == before
        assert await seen(store) == (set(), {"s1"})
        for attempt in (store.publish("g"), store.copy_session("g", fork_of("f1")), store.publish("never")):
            assert await refused(attempt) == "store.not_found"
        await self.publish(store, "g", FORKS)
        assert await seen(store) == (set(FORKS), {"s1", *FORKS})
        await store.close()

    async def test_a_publication_of_a_dead_process_is_rolled_back(self, home: Home) -> None:
        first, bystander = await home.open(), await home.open(claim_timeout_s=3.0)
        await self.start(first, count=8)
        before = names_below(home.path)
        await first.begin_publication("g", FORKS)
        await first.copy_session("g", fork_of("f1"))
        await bystander.copy_session("g", fork_of("f2"))
        await home.kill(first)
        await self.unseen(bystander, "f1")
        assert await refused(bystander.copy_session("g", fork_of("f3"))) == "store.not_found"
        assert names_below(home.path) == before
        second = await home.open()
        for attempt in (second.publish("g"), second.copy_session("g", fork_of("f1"))):
            assert await refused(attempt) == "store.not_found"
        assert await seen(second) == (set(), {"s1"})
        await self.publish(second, "g", FORKS)
        assert await seen(bystander) == (set(FORKS), {"s1", *FORKS})
        await home.kill(second)
        third = await home.open()
        await third.publish("g")
        await third.copy_session("g", fork_of("f1"))
        assert await seen(third) == (set(FORKS), {"s1", *FORKS})
        await third.close()
        await bystander.close()

    async def test_an_opener_rolls_back_what_a_dead_process_left(self, home: Home) -> None:
        first = await home.open()
        await self.start(first, count=8)
        before = names_below(home.path)
        await first.begin_publication("g", FORKS)
        for name in FORKS:
            await first.copy_session("g", fork_of(name))
        await first.begin_publication("empty", {})
        await home.kill(first)
        openers = await asyncio.gather(*(home.open() for _ in range(3)))
        assert names_below(home.path) == before
        for store in openers:
            assert await seen(store) == (set(), {"s1"})
            await store.close()

    async def test_markers_of_a_living_process_are_left_alone(self, home: Home) -> None:
        first = await home.open()
        await self.start(first, count=8)
        await first.open_session("new", "n", workspace_id=W, create=True)
        await first.begin_publication("g", FORKS)
        await first.copy_session("g", fork_of("f1"))
        second = await home.open(claim_timeout_s=0.1)
        await self.unseen(second, "f1")
        assert await refused(second.open_session("f1", "m", workspace_id=W)) == "session.in_use"
        assert await refused(second.open_session("f3", "m", workspace_id=W, create=True)) == "session.in_use"
        assert await refused(second.begin_publication("h", {"f3": W})) == "session.in_use"
        assert await refused(first.remove("f1")) == "session.in_use"
        await first.write_document("new", {}, grant=1, nonce="n", revision=0)
        for name in FORKS:
            await first.copy_session("g", fork_of(name))
        await first.publish("g")
        assert await seen(second) == ({"new", *FORKS}, {"s1", *FORKS})
        await second.close()
        await first.close()

    async def test_a_publication_that_is_not_whole_is_not_published(self, store: Store) -> None:
        await self.start(store, count=8)
        await store.begin_publication("g", FORKS)
        await store.copy_session("g", fork_of("f1"))
        assert await refused(store.publish("g")) == "store.not_found"
        assert await refused(store.copy_session("g", fork_of("stranger"))) == "store.not_found"
        assert await refused(store.begin_publication("g", {"f1": W})) == "store.exists"
        await self.unseen(store, "f1")
        for source in (Stream("nowhere", "main"), Stream("f1", "main")):
            assert await refused(store.copy_session("g", fork_of("f0", source=source))) == "store.not_found"
        for name in FORKS:
            await store.copy_session("g", fork_of(name))
        await store.publish("g")
        assert await seen(store) == (set(FORKS), {"s1", *FORKS})

    async def test_an_empty_publication(self, store: Store) -> None:
        await store.begin_publication("g", {})
        await store.publish("g")
        await store.publish("g")
        await store.begin_publication("h", {})
        await store.discard_publication("h")
        with pytest.raises(StoreError):
            await store.publish("h")

    async def test_blobs_of_unpublished_logs_are_kept(self, store: Store) -> None:
        content = b"c" * 100
        digest = digest_of(content)
        await store.put_blobs({digest: content})
        await store.open_session("s1", "n", workspace_id=W, create=True)
        await store.open_writer(header(), "w")
        ok(await store.append([batch([line(0, blob={"$blob": digest, "bytes": 100})], 0)], sync=True))
        report = await store.sweep_blobs(grace_s=-60.0)
        assert (report.kept, report.deleted, report.problems) == (1, 0, ())
        assert await store.read_blob(digest) == content
        await store.remove("s1")
        assert (await store.sweep_blobs(grace_s=-60.0)).deleted == 1
