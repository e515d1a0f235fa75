"""The session's document: its queue, its order of changes, its fields."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kimi_ray.errors import SessionError, StoreError
from kimi_ray.session import Activity, AgentEntry, SessionDocument, lineage_of, loaded_document, new_document
from kimi_ray.session.document_value import LISTED_AGENTS


class Disk:
    """Compare-and-set, with a gate and failures to come."""

    def __init__(self) -> None:
        self.revision = 0
        self.values: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[Exception] = []

    async def write(self, value: dict[str, Any], revision: int) -> int:
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        assert revision == self.revision
        self.revision += 1
        self.values.append(value)
        return self.revision


def made(disk: Disk, *, spacing_s: float = 0.01, now: list[int] | None = None, **fields: Any) -> SessionDocument:
    clock = now or [1000]
    value = new_document("s", workspace_id="w", cwd="/work", now=clock[0], **fields)
    return SessionDocument(value, disk.revision, disk.write, clock=lambda: clock[0], spacing_s=spacing_s)


async def test_the_first_flush_writes_a_new_document_and_the_next_writes_nothing() -> None:
    disk = Disk()
    document = made(disk, title="T")
    await document.flush()
    await document.flush()
    assert len(disk.values) == 1 and document.revision == 1
    assert disk.values[0] == {
        "id": "s",
        "version": 1,
        "created_at": 1000,
        "updated_at": 1000,
        "archived": False,
        "workspace_id": "w",
        "agents": {},
        "agent_count": 0,
        "custom": {},
        "tags": {},
        "title": "T",
        "title_kind": "custom",
        "cwd": "/work",
    }


async def test_an_update_is_on_disk_when_it_returns_and_listeners_hear_after() -> None:
    disk = Disk()
    document = made(disk)
    order: list[str] = []
    document.observe(lambda value: order.append(f"told {len(disk.values)}"))
    value = await document.update({"metadata": {"a": 1}, "tags": {"k": "v"}, "title": "Mine"})
    assert order == ["told 1"]
    assert value["custom"] == {"a": 1} and disk.values[-1]["title_kind"] == "custom"


async def test_changes_during_a_write_share_the_next_one() -> None:
    disk = Disk()
    document = made(disk)
    disk.gate.clear()
    updates = [asyncio.create_task(document.update({"tags": {f"t{n}": "x"}})) for n in range(20)]
    await asyncio.sleep(0)
    disk.gate.set()
    await asyncio.gather(*updates)
    assert len(disk.values) <= 2
    assert len(disk.values[-1]["tags"]) == 20


async def test_a_failed_write_raises_and_the_next_carries_it() -> None:
    disk = Disk()
    document = made(disk)
    disk.failures = [StoreError("full", code="store.no_space")]
    with pytest.raises(StoreError):
        await document.update({"tags": {"a": "1"}})
    await document.update({"tags": {"b": "2"}})
    assert disk.values[-1]["tags"] == {"a": "1", "b": "2"}


async def test_a_caller_that_gives_up_does_not_cut_the_write_in_two() -> None:
    disk = Disk()
    document = made(disk)
    disk.gate.clear()
    update = asyncio.create_task(document.update({"tags": {"a": "1"}}))
    await asyncio.sleep(0.01)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    disk.gate.set()
    await document.update({"tags": {"b": "2"}})
    assert document.revision == disk.revision == len(disk.values)


async def test_what_the_log_has_is_written_soon_and_not_for_each() -> None:
    disk = Disk()
    document = made(disk, spacing_s=0.05)
    await document.flush()
    for number in range(200):
        document.register([AgentEntry(f"agent-{number}", labels={"item": str(number)})])
        if number % 20 == 0:
            await asyncio.sleep(0.001)
    async with asyncio.timeout(5):
        while len(disk.values[-1]["agents"]) < 200:
            await asyncio.sleep(0.01)
    assert len(disk.values) <= 4
    assert disk.values[-1]["updated_at"] == 1000


async def test_agents_beyond_what_is_listed_are_counted() -> None:
    disk = Disk()
    document = made(disk)
    document.register([AgentEntry(f"agent-{n}") for n in range(LISTED_AGENTS + 500)])
    document.register([AgentEntry("agent-3")])
    await document.close()
    assert len(disk.values[-1]["agents"]) == LISTED_AGENTS
    assert disk.values[-1]["agent_count"] == LISTED_AGENTS + 500


async def test_activity_gives_title_and_prompt_once_and_old_news_is_no_news() -> None:
    now = [1000]
    disk = Disk()
    document = made(disk, now=now)
    document.note(Activity("s", 2000, last_prompt="first " * 100))
    document.note(Activity("s", 3000, last_prompt="second", last_turn_reason="failed"))
    document.note(Activity("s", 2500, last_prompt="late"))
    now[0] = 9000
    value = document.snapshot()
    assert value["title"] == ("first " * 100)[:200].strip() and value["title_kind"] == "replaceable"
    assert value["last_prompt"] == "second" and value["last_turn_reason"] == "failed" and value["updated_at"] == 3000
    await document.update({"tags": {"k": "v"}})
    document.note(Activity("s", 3500, last_prompt="third"))
    assert document.snapshot()["last_prompt"] == "third"
    await document.close()
    named = made(Disk(), title="Mine")
    named.note(Activity("s", 2000, last_prompt="other"))
    assert named.snapshot()["title"] == "Mine"
    await named.close()


async def test_close_writes_what_is_left_and_drops_what_comes_after() -> None:
    disk = Disk()
    document = made(disk, spacing_s=60.0)
    await document.flush()
    document.register([AgentEntry("agent-1")])
    await asyncio.wait_for(document.close(), 5)
    assert "agent-1" in disk.values[-1]["agents"]
    document.register([AgentEntry("agent-2")])
    document.note(Activity("s", 9000, last_prompt="x"))
    await document.close()
    assert len(disk.values) == 2
    with pytest.raises(SessionError) as caught:
        await document.update({"title": "x"})
    assert caught.value.code == "session.closed"


@pytest.mark.parametrize(
    ("patch", "code"),
    [
        ({"agents": {}}, "session.bad_update"),
        ({"metadata": {"x": float("nan")}}, "session.bad_metadata"),
        ({"metadata": {"x": object()}}, "session.bad_metadata"),
        ({"tags": {"x": 1}}, "session.bad_metadata"),
    ],
)
async def test_bad_changes_change_nothing(patch: dict[str, Any], code: str) -> None:
    disk = Disk()
    document = made(disk)
    before = document.snapshot()
    with pytest.raises(SessionError) as caught:
        await document.update(patch)
    assert caught.value.code == code and document.snapshot() == before


async def test_archive_keeps_updated_at_and_metadata_touches_it() -> None:
    now = [1000]
    document = made(Disk(), now=now)
    now[0] = 5000
    value = await document.update({"archived": True, "title": "T"})
    assert value["archived"] is True and value["archived_at"] == 5000 and value["updated_at"] == 1000
    value = await document.update({"archived": False})
    assert "archived_at" not in value
    assert (await document.update({"metadata": {"a": 1}}))["updated_at"] == 5000


def test_a_stored_document_is_completed_and_a_newer_one_refused() -> None:
    value = loaded_document("s", {"id": "other", "agents": None, "created_at": 1, "updated_at": 2, "strange": [1]})
    assert value["id"] == "s" and value["agents"] == {} and value["archived"] is False and value["strange"] == [1]
    with pytest.raises(SessionError) as caught:
        loaded_document("s", {"version": 2})
    assert caught.value.code == "session.version_unsupported"


class LosingDisk(Disk):
    """A disk whose answer is lost now and then, before or after it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.lose: list[str] = []

    async def write(self, value: dict[str, Any], revision: int) -> int:
        how = self.lose.pop(0) if self.lose else "never"
        if how == "before":
            raise StoreError("away", code="store.unavailable", retryable=True)
        if revision != self.revision:
            details = {"revision": self.revision, "expected": revision}
            raise StoreError("at another revision", code="store.conflict", details=details, retryable=True)
        await super().write(value, revision)
        if how == "after":
            raise StoreError("no space for the sync of the directory", code="store.disk_full", retryable=True)
        return self.revision


@pytest.mark.parametrize("lost", [["after"], ["before"], ["after", "before"], ["before", "after", "before"]])
async def test_a_write_that_happened_though_it_failed_does_not_stop_those_after_it(lost: list[str]) -> None:
    disk = LosingDisk()
    document = made(disk)
    await document.flush()
    disk.lose = list(lost)
    for n in range(len(lost)):
        with pytest.raises(StoreError):
            await document.update({"tags": {f"t{n}": "x"}})
    value = await document.update({"title": "at last"})
    assert disk.values[-1] == value and set(value["tags"]) == {f"t{n}" for n in range(len(lost))}
    assert document.revision == disk.revision
    await document.update({"title": "and again"})
    await document.close()


async def test_a_conflict_without_an_unknown_outcome_is_told() -> None:
    disk = LosingDisk()
    document = made(disk)
    await document.flush()
    disk.revision += 3  # somebody else wrote
    for _ in range(5):
        with pytest.raises(StoreError) as caught:
            await document.update({"title": "mine"})
        assert caught.value.code == "store.conflict" and len(disk.values) == 1


async def test_an_explicit_time_wins_and_titles_archive_and_agents_keep_it() -> None:
    now = [1000]
    document = made(Disk(), now=now)
    now[0] = 5000
    assert (await document.update({"metadata": {"a": 1}, "updated_at": 42}))["updated_at"] == 42
    assert (await document.update({"title": "T", "archived": True}))["updated_at"] == 42
    document.register([AgentEntry("agent-1")])
    assert document.snapshot()["updated_at"] == 42
    assert (await document.update({"tags": {"k": "v"}}))["updated_at"] == 5000
    await document.close()


@pytest.mark.parametrize("patch", [{"updated_at": "now"}, {"updated_at": -1}, {"title_kind": "mine", "title": "x"}])
async def test_a_patch_that_means_nothing_is_refused(patch: dict[str, Any]) -> None:
    document = made(Disk())
    before = document.snapshot()
    with pytest.raises(SessionError) as caught:
        await document.update(patch)
    assert caught.value.code == "session.bad_update" and document.snapshot() == before


async def test_a_custom_title_beats_a_later_generated_one() -> None:
    now = [1000]
    disk = Disk()
    document = made(disk, now=now)
    document.note(Activity("s", 1000, last_prompt="from a prompt"))
    assert document.snapshot()["title_kind"] == "replaceable"
    now[0] = 2000
    value = await document.set_generated_title_if_uncustomized("made")
    assert (value["title"], value["title_kind"], value["updated_at"]) == ("made", "generated", 2000)
    document.note(Activity("s", 2000, last_prompt="another prompt"))
    assert document.snapshot()["title"] == "made"
    disk.gate.clear()  # the custom title waits in the queue when the generated one comes
    mine = asyncio.create_task(document.update({"title": "Mine"}))
    await asyncio.sleep(0)
    theirs = asyncio.create_task(document.set_generated_title_if_uncustomized("late"))
    await asyncio.sleep(0)
    disk.gate.set()
    await asyncio.gather(mine, theirs)
    assert disk.values[-1]["title"] == "Mine" and disk.values[-1]["title_kind"] == "custom"
    now[0] = 3000
    value = await document.set_generated_title_if_uncustomized("forced", force=True)
    assert (value["title"], value["title_kind"], value["updated_at"]) == ("forced", "generated", 3000)
    await document.close()


@pytest.mark.parametrize("blank", ["", "  ", "New Session"])
async def test_a_blank_title_is_replaced_by_the_first_prompt(blank: str) -> None:
    value = {**new_document("s", workspace_id="w", cwd=None, now=1), "title": blank, "title_kind": "replaceable"}
    document = SessionDocument(value, 1, Disk().write, clock=lambda: 1, spacing_s=60)
    document.note(Activity("s", 2, last_prompt="hello"))
    assert document.snapshot()["title"] == "hello"


async def test_registering_again_drops_neither_labels_nor_parent() -> None:
    disk = Disk()
    document = made(disk)
    document.register([AgentEntry("agent-2", "sub", "agent-1", {"item": "7"}, forked_from="agent-1")])
    await document.flush()
    writes = len(disk.values)
    document.register([AgentEntry("agent-2")])  # as it comes back after a restart, with nothing but its id
    document.register([AgentEntry("agent-2", "sub", "agent-1", {"item": "7"}, forked_from="agent-1")])
    await document.flush()
    assert len(disk.values) == writes
    document.register([AgentEntry("agent-2", labels={"run": "r"})])
    await document.close()
    assert disk.values[-1]["agents"]["agent-2"] == {
        "type": "sub",
        "parent_agent_id": "agent-1",
        "labels": {"item": "7", "run": "r"},
        "forked_from": "agent-1",
    }
    assert disk.values[-1]["agent_count"] == 1


async def test_a_hundred_changes_of_several_drivers_all_survive() -> None:
    disk = Disk()
    document = made(disk, now=[1000])

    async def driver(number: int) -> None:
        for n in range(number, 100, 4):
            patch: dict[str, Any] = {"metadata": {f"m{n}": n}, "tags": {f"t{n}": str(n)}}
            if n % 10 == 0:
                patch["title"] = f"title {n}"
            document.register([AgentEntry(f"agent-{n}")])
            await document.update(patch)
            await asyncio.sleep(0)

    await asyncio.gather(*(driver(number) for number in range(4)))
    value = disk.values[-1]
    assert value["custom"] == {f"m{n}": n for n in range(100)}
    assert value["tags"] == {f"t{n}": str(n) for n in range(100)}
    assert value["agents"].keys() == {f"agent-{n}" for n in range(100)}
    assert value["title_kind"] == "custom"
    await document.close()


async def test_listeners_hear_nothing_of_a_write_that_failed() -> None:
    disk = Disk()
    document = made(disk)
    told: list[dict[str, Any]] = []
    document.observe(told.append)
    disk.failures = [StoreError("full", code="store.disk_full")]
    with pytest.raises(StoreError):
        await document.update({"title": "A"})
    assert told == [] and disk.values == [] and document.snapshot()["title"] == "A"
    await document.update({"tags": {"k": "v"}})
    assert [(value["title"], value["tags"]) for value in told] == [("A", {"k": "v"})]
    await document.close()


ODD: dict[str, Any] = {
    "id": "other",
    "created_at": "2025-01-02T03:04:05Z",
    "updated_at": 1735787046000.5,
    "archived": "yes",
    "archived_at": 5,
    "agents": {"main": {"type": "main"}, "agent-1": None},
    "agent_count": "many",
    "custom": [],
    "tags": {"a": "b", "c": 1},
    "title": "T",
    "title_kind": "theirs",
    "cwd": 3,
    "last_turn_reason": "exploded",
    "strange": {"kept": True},
}


async def test_an_odd_document_is_put_right_and_written_once() -> None:
    value = loaded_document("s", ODD)
    assert value == {
        "id": "s",
        "version": 1,
        "created_at": 1735787045000,
        "updated_at": 1735787046000,
        "archived": False,
        "agents": {"main": {"type": "main"}},
        "agent_count": 1,
        "custom": {},
        "tags": {"a": "b"},
        "title": "T",
        "title_kind": "replaceable",
        "strange": {"kept": True},
    }
    assert loaded_document("s", value) == value
    disk = Disk()
    disk.revision = 7
    document = SessionDocument(value, 7, disk.write, clock=lambda: 9, changed=True, spacing_s=0.01)
    await document.flush()
    await document.flush()
    await document.close()
    assert disk.values == [value]
    again = SessionDocument(value, 8, disk.write, clock=lambda: 9, changed=loaded_document("s", value) != value)
    await again.flush()
    await again.close()
    assert len(disk.values) == 1


@pytest.mark.parametrize("field", ["created_at", "updated_at"])
@pytest.mark.parametrize("odd", [None, True, "yesterday", [], float("inf")])
def test_a_time_that_is_none_is_taken_from_the_other(field: str, odd: object) -> None:
    value = loaded_document("s", {"version": 1, "created_at": 5, "updated_at": 6, field: odd})
    assert (value["created_at"], value["updated_at"]) == ((6, 6) if field == "created_at" else (5, 5))


def test_lineage_is_readable_in_every_shape() -> None:
    source = {"session_id": "a", "agent_id": "main", "at": "3"}
    value = new_document("s", workspace_id="w", cwd=None, now=1, forked_from=source)
    value |= {"fork_group": "g", "fork_index": 2}
    value["custom"] = {"parent_session_id": "p", "child_session_kind": "child"}
    found = lineage_of(loaded_document("s", value))
    assert found.forked_from == source and (found.fork_group, found.fork_index) == ("g", 2)
    assert found.parent_session_id == "p"
    assert lineage_of({"forked_from": "a"}).forked_from == {"session_id": "a"}
    odd = lineage_of({"forked_from": 3, "fork_group": 1, "fork_index": True, "custom": {"parent_session_id": "p"}})
    assert odd == lineage_of({})


async def test_an_error_that_nobody_foresaw_is_kept_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    document = made(disk)
    await document.flush()
    disk.failures = [ValueError("odd")]
    document.note(Activity("s", 2000, last_prompt="one"))
    async with asyncio.timeout(5):
        while document.last_error is None:
            await asyncio.sleep(0.005)
    assert document.last_error.details == {"exception": "ValueError"} and "odd" in caplog.text
    await document.close()
    assert disk.values[-1]["last_prompt"] == "one"
