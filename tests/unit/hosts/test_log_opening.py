"""A stored log on its way into an agent host: read once, streamed, refused by name, and back again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.events import make_event
from kimi_ray.hosts import log_opening
from kimi_ray.hosts.log_opening import LogOpener
from kimi_ray.hosts.specs import PromptSpec, RunRequest
from kimi_ray.llm.models import ModelSettings, ResolvedModel
from kimi_ray.store.seam import Batch, Stream, WriterGrant
from kimi_ray.store.wire import pack_call
from tests.unit.hosts.test_agent_host import Place, ended, ran


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path / "home")
    await place.start()
    yield place
    await place.cluster.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The logs that were read, one entry a time."""
    found: list[Stream] = []
    read = LogOpener._restore  # pyright: ignore[reportPrivateUsage]

    async def counted(self: LogOpener, stream: Stream, grant: WriterGrant) -> Any:
        found.append(stream)
        return await read(self, stream, grant)

    monkeypatch.setattr(LogOpener, "_restore", counted)
    return found


@pytest.fixture
async def counted_place(tmp_path: Path, reads: list[Stream]) -> AsyncIterator[Place]:
    place = Place(tmp_path / "home")
    await place.start()
    yield place
    await place.cluster.close()


async def store_lines(place: Place, agent: str, lines: list[bytes]) -> None:
    """A cold log of these lines, whatever they say."""
    header = place.spec(agent).header
    (grant,) = await place.store.call("open_writers", [(header, "w", None)], timeout_s=10)
    rows = [line + b"\n" for line in lines]
    batch = Batch(
        place.stream(agent), grant.epoch, "w", 0, b"".join(rows), tuple(map(len, rows)), tuple(1 for _ in rows)
    )
    (answer,) = await place.store.call("append", pack_call([batch], sync=True), timeout_s=10, group="store")
    assert answer.error is None
    await place.store.call("close_writers", [(place.stream(agent), grant.epoch, "w")], timeout_s=10)


async def one_prompt(place: Place, host: str, prompt_id: str, **spec: Any) -> None:
    await ran(place.peer(host), RunRequest(place.spec(**spec), (PromptSpec(prompt_id, "hi"),)))
    await ended(place.peer(host), place.stream("main"), prompt_id)


async def close(place: Place, host: str = "a") -> None:
    (ack,) = await place.peer(host).call("close_agents", [place.stream("main")], False, timeout_s=20)
    assert ack.error is None


async def test_a_log_that_this_host_gave_back_is_not_read_again(counted_place: Place, reads: list[Stream]) -> None:
    place = counted_place
    await one_prompt(place, "a", "one")
    await close(place)
    await one_prompt(place, "a", "two", new=False)
    assert reads == []
    totals = await place.peer().call("totals", place.stream("main"), timeout_s=10)
    assert totals.turns == 2
    messages = await place.peer().call("messages", place.stream("main"), None, timeout_s=10)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    await close(place)
    await place.host("b")
    await one_prompt(place, "b", "three", new=False)
    await close(place, "b")
    assert reads == [place.stream("main")]
    await one_prompt(place, "a", "four", new=False)
    assert reads == [place.stream("main")] * 2  # another host wrote meanwhile
    events = await place.lines()
    assert [event.data["turn"] for event in events if event.type == "turn/start"] == [0, 1, 2, 3]


async def test_an_agent_that_cannot_be_built_leaves_its_log_for_the_next_try(
    counted_place: Place, reads: list[Stream]
) -> None:
    place = counted_place
    await one_prompt(place, "a", "one")
    await close(place)
    await place.host("b")
    settings = ModelSettings(provider="scripted", script="no.such.module:script")
    broken = place.spec(new=False)
    model = ResolvedModel(name="scripted", provider="scripted", model="scripted", settings=settings)
    (ack,) = await place.peer("b").call(
        "run_many",
        [RunRequest(type(broken)(broken.stream, broken.nonce, broken.profile, model), (PromptSpec("p", "x"),))],
        timeout_s=20,
    )
    assert ack.error is not None
    assert reads == [place.stream("main")]
    before = len(await place.lines())
    await one_prompt(place, "b", "two", new=False)
    assert reads == [place.stream("main")]
    assert len(await place.lines()) > before


async def test_many_small_pages_make_the_same_agent(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        await one_prompt(place, "a", f"p{number}", new=number == 0)
    messages = await place.peer().call("messages", place.stream("main"), None, timeout_s=10)
    totals = await place.peer().call("totals", place.stream("main"), timeout_s=10)
    await close(place)
    monkeypatch.setattr(log_opening, "PAGE_EVENTS", 7)
    monkeypatch.setattr(log_opening, "_SLICE_EVENTS", 3)
    await place.host("b")
    await ran(place.peer("b"), RunRequest(place.spec(new=False), ()))
    assert await place.peer("b").call("messages", place.stream("main"), None, timeout_s=10) == messages
    again = await place.peer("b").call("totals", place.stream("main"), timeout_s=10)
    assert again.usage == totals.usage and again.turns == totals.turns == 5


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"seq":1,"time":1,"type":"new/thing","data":{}}', "log.unknown_type"),
        (b'{"seq":1,"time":1,"type":"turn/start","data":{"turn":0,"turn":0}}', "log.not_json"),
        (b'{"seq":1,"time":1,"type":"turn/start","data":{}}', "log.bad_payload"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_type_seq_and_file(place: Place, line: bytes, code: str) -> None:
    first = make_event(0, 1, "note/added", {"text": "x"}, ignorable=True).line
    await store_lines(place, "main", [first, line])
    raw = await place.store.call("read_raw", place.stream("main"), timeout_s=10)
    (ack,) = await place.peer().call("run_many", [RunRequest(place.spec(new=False), ())], timeout_s=20)
    error = KimiRayError.from_data(ack.error)
    path = await place.store.call("locate", place.stream("main"), timeout_s=10)
    assert error.code == code and str(path) in error.message and error.details["path"] == path
    if code == "log.unknown_type":
        assert "new/thing" in error.message and error.details["seq"] == 1
    assert (await place.store.call("read_raw", place.stream("main"), timeout_s=10)).startswith(raw)
    report = await place.store.call("verify", place.stream("main"), timeout_s=10)
    assert report.ok and report.events == 2 and report.closed and report.epoch == 2


@pytest.mark.parametrize(("key", "hint"), [("version", "upgrade"), ("enc", "upgrade")])
@pytest.mark.parametrize("value", [2, 0])
async def test_another_version_is_refused_before_anything_is_written(
    place: Place, key: str, hint: str, value: int
) -> None:
    header = {**(place.spec("main").header or {}), key: value}
    (grant,) = await place.store.call("open_writers", [(header, "w", None)], timeout_s=10)
    row = make_event(0, 1, "note/added", {"text": "x"}, ignorable=True).line + b"\n"
    batch = Batch(place.stream("main"), grant.epoch, "w", 0, row, (len(row),), (1,))
    await place.store.call("append", pack_call([batch], sync=True), timeout_s=10, group="store")
    await place.store.call("close_writers", [(place.stream("main"), grant.epoch, "w")], timeout_s=10)
    before = await place.store.call("read_raw", place.stream("main"), timeout_s=10)
    (ack,) = await place.peer().call("run_many", [RunRequest(place.spec(new=False), ())], timeout_s=20)
    error = KimiRayError.from_data(ack.error)
    assert error.code == "log.version_unsupported"
    assert (hint if value == 2 else "any more") in (error.hint or "")
    assert await place.store.call("read_raw", place.stream("main"), timeout_s=10) == before


async def test_an_ignorable_unknown_event_is_kept_byte_for_byte(place: Place) -> None:
    odd = b'{"seq":0,"time":1,"type":"new/thing","data":{"x": [1,  2]},"ignorable":true}'
    await store_lines(place, "main", [odd])
    await one_prompt(place, "a", "p", new=False)
    await close(place)
    header = {**(place.spec("agent-1").header or {}), "origin": "fork"}
    await place.store.call("fork", place.stream("main"), 3, header, "f", timeout_s=10)
    for agent in ("main", "agent-1"):
        page = await place.store.call("read_from", place.stream(agent), 0, 1, timeout_s=10)
        assert page.lines == (odd,)


@pytest.mark.parametrize("cut", [1, 10, 200])
async def test_a_torn_end_is_mended_before_anything_is_written_behind_it(place: Place, cut: int) -> None:
    """K's W1: a fragment that is tolerated once, then written behind, makes the log unreadable the second time."""
    await one_prompt(place, "a", "one")
    place.kill("a")
    path = Path(str(await place.store.call("locate", place.stream("main"), timeout_s=10)))
    await place.restart_store()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    for name, prompt in (("b", "two"), ("c", "three")):
        await place.host(name)
        await one_prompt(place, name, prompt, new=False)
        await close(place, name)
    events = await place.lines()
    ended_prompts = [event.data["prompt_id"] for event in events if event.type == "prompt/completed"]
    assert ended_prompts[-2:] == ["two", "three"]
    report = await place.store.call("verify", place.stream("main"), timeout_s=10)
    assert report.ok and report.torn_bytes == 0 and report.events == len(events)
