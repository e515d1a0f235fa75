"""A whole runtime in one process, real store included: connect, write, lose hosts, leave."""

from __future__ import annotations

import asyncio

import pytest

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import StoreError
from kimi_ray.hosts.connection import Connection, connect_in_process
from kimi_ray.hosts.ports import Peer, store_name
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.hosts.store_host import StoreHost
from kimi_ray.store.seam import Batch, Stream
from kimi_ray.store.wire import pack_call
from tests.unit.hosts.fakes import until

STREAM = Stream("session_a", "main")


def header(agent: str = "main") -> dict:
    return {"type": "log", "version": 1, "session_id": "session_a", "agent_id": agent, "created_at": 1}


def rows(first: int, count: int) -> list[bytes]:
    return [b'{"seq":%d,"time":1,"type":"x","data":{}}\n' % seq for seq in range(first, first + count)]


@pytest.fixture
def config(tmp_path):
    return RuntimeConfig(home=str(tmp_path / "home"), address="in-process", close_timeout_s=5, claim_timeout_s=2)


@pytest.fixture
async def connection(config):
    connection = await connect_in_process(config)
    yield connection
    await connection.disconnect()


def store(connection: Connection) -> Peer:
    return connection.cluster.peer(store_name(connection.home_id, 0))


async def write(connection: Connection, count: int = 3) -> None:
    peer = store(connection)
    await peer.call("open_session", STREAM.session_id, "s", "wd_x", timeout_s=5)
    (grant,) = await peer.call("open_writers", [(header(), "w", None)], timeout_s=5)
    lines = rows(grant.next_seq, count)
    batch = Batch(STREAM, grant.epoch, "w", grant.next_seq, b"".join(lines), tuple(map(len, lines)), (1,) * count)
    (result,) = await peer.call("append", pack_call([batch]), timeout_s=5, group="store")
    assert result.error is None


async def test_what_one_runtime_wrote_the_next_one_reads(config):
    first = await connect_in_process(config)
    await write(first)
    await first.disconnect()
    await first.disconnect()
    second = await connect_in_process(config)
    assert second.home_id == first.home_id
    page = await store(second).call("read_from", STREAM, 0, timeout_s=5)
    assert [line + b"\n" for line in page.lines] == rows(0, 3)
    await second.disconnect()


async def test_nothing_is_left_running(config):
    before = asyncio.all_tasks()
    connection = await connect_in_process(config)
    await connection.registry.call("place_agents", [PlaceAgent(STREAM)], timeout_s=10)
    await connection.disconnect()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_one_refused_writer_does_not_fail_the_others(connection):
    peer = store(connection)
    await peer.call("open_session", "session_a", "s", "wd_x", timeout_s=5)
    wishes = [(header(), "w1", None), (Stream("session_a", "ghost"), "w2", None), (header("agent-1"), "w3", None)]
    good, refused, also = await peer.call("open_writers", wishes, timeout_s=5)
    assert good.epoch > 0
    assert also.epoch > 0
    assert refused["code"] == "store.not_found"
    closed = await peer.call("close_writers", [(STREAM, good.epoch, "w1")], timeout_s=5)
    assert closed == [None]


async def test_a_store_error_crosses_whole(connection):
    with pytest.raises(StoreError) as caught:
        await store(connection).call("read_from", Stream("nobody", "main"), 0, timeout_s=5)
    assert caught.value.code == "store.not_found"
    assert caught.value.hint


async def test_another_home_behind_the_same_path_is_refused(config):
    connection = await connect_in_process(config)
    other = StoreHost("x/store-0", _Named("another-id"), config)
    with pytest.raises(StoreError) as caught:
        await other.identity()
    assert caught.value.code == "store.wrong_home"
    await other.close()
    await connection.disconnect()


async def test_a_store_that_cannot_open_still_answers_pings(tmp_path):
    (tmp_path / "file").write_text("")
    host = StoreHost("x/store-0", _Named(None), RuntimeConfig(home=str(tmp_path / "file" / "home")))
    await host.start()
    assert (await host.ping())["kind"] == "store"
    with pytest.raises(StoreError):
        await host.list_logs()
    await host.close()


async def test_every_method_of_the_port_exists(config):
    for name in StoreHost.PORT:
        assert callable(getattr(StoreHost, name))


async def test_a_home_that_cannot_be_used_leaves_the_loop_as_it_was(tmp_path):
    (tmp_path / "file").write_text("")
    before = asyncio.get_running_loop().get_task_factory()
    with pytest.raises(StoreError):
        await connect_in_process(RuntimeConfig(home=str(tmp_path / "file" / "home")))
    assert asyncio.get_running_loop().get_task_factory() is before


class _Named:
    """As much of a cluster as a store needs."""

    node_id = "local"

    def __init__(self, home_id: str | None) -> None:
        self.home_id = home_id
