"""Joining, sharing, losing and ending a runtime on a local Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from kimi_ray.actors import connect, down, host_logs, ray_session, status
from kimi_ray.actors.connect import storage_resource
from kimi_ray.actors.ray_cluster import RaySpec, config_for_actors
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import ConfigError, RuntimeFault, StoreError
from kimi_ray.hosts.ports import NodeInfo, registry_name, store_name
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.store.seam import Batch, Stream
from kimi_ray.store.wire import pack_call
from tests.actors.conftest import until

STREAM = Stream("session_a", "main")
HEADER = {
    "type": "log",
    "version": 1,
    "session_id": "session_a",
    "agent_id": "main",
    "created_at": 1,
}


async def pid_of(connection, name: str) -> int:
    return (await connection.cluster.peer(name).call("ping", timeout_s=10, group="control"))["pid"]


async def place(connection, n: int = 1, **said) -> list[str]:
    wishes = [PlaceAgent(Stream(f"session_{i}", "main"), **said) for i in range(n)]
    return await connection.registry.call("place_agents", wishes, timeout_s=90)


async def gone(connection) -> bool:
    return await connection.cluster.list_hosts() == []


async def test_two_drivers_at_once_make_one_runtime(joined):
    one, two = await asyncio.gather(joined(), joined())
    assert one.home_id == two.home_id
    assert await pid_of(one, registry_name(one.home_id)) == await pid_of(two, registry_name(two.home_id))
    told = await one.registry.call("status", timeout_s=10)
    assert {lease["lease_id"] for lease in told["leases"]} == {one.lease_id, two.lease_id}
    names = [host.name for host in await one.cluster.list_hosts()]
    assert names.count(store_name(one.home_id, 0)) == 1


async def test_other_settings_are_refused_and_the_runtime_goes_on(shared):
    connection = await shared()
    with pytest.raises(RuntimeFault) as caught:
        await shared(durability="none")
    assert caught.value.code == "runtime.mismatch"
    assert caught.value.details["settings"] == {"durability": {"mine": "none", "theirs": "disk"}}
    assert (await connection.registry.call("status", timeout_s=10))["ending"] is False


async def test_a_killed_store_comes_back_with_what_was_durable(shared):
    connection = await shared()
    name = store_name(connection.home_id, 0)
    store = connection.cluster.peer(name)
    await store.call("open_session", STREAM.session_id, "s1", "wd_x", timeout_s=30)
    (grant,) = await store.call("open_writers", [(HEADER, "w1", None)], timeout_s=30)
    rows = [b'{"seq":%d,"time":1,"type":"x","data":{}}\n' % seq for seq in range(3)]
    batch = Batch(STREAM, grant.epoch, "w1", grant.next_seq, b"".join(rows), tuple(map(len, rows)), (1, 1, 1))
    (result,) = await store.call("append", pack_call([batch], sync=True), timeout_s=30, group="store")
    assert (result.error, result.durable) == (None, 3)

    before = await pid_of(connection, name)
    os.kill(before, signal.SIGKILL)
    page = await until(lambda: store.call("read_from", STREAM, 0, timeout_s=30))
    assert [line + b"\n" for line in page.lines] == rows
    assert await pid_of(connection, name) != before


async def test_a_killed_registry_comes_back_and_knows_hosts_and_drivers(shared):
    connection = await shared()
    (host,) = await place(connection)
    session_host = await connection.registry.call("place_session", "session_a", None, timeout_s=90)
    os.kill(await pid_of(connection, registry_name(connection.home_id)), signal.SIGKILL)

    async def told() -> dict | None:
        answer = await connection.registry.call("status", timeout_s=30)
        return answer if answer["leases"] else None

    answer = await until(told)
    assert {host, session_host} <= {known["name"] for known in answer["hosts"]}
    assert connection.lease_id in {lease["lease_id"] for lease in answer["leases"]}
    assert (await place(connection))[0] in {known["name"] for known in answer["hosts"]}


async def test_a_killed_host_is_replaced_under_a_new_name(shared):
    connection = await shared()
    (host,) = await place(connection)
    assert await connection.registry.call("report_lost", host, timeout_s=30) is False
    os.kill(await pid_of(connection, host), signal.SIGKILL)
    await until(lambda: connection.registry.call("report_lost", host, timeout_s=30))
    (other,) = await place(connection)
    assert other != host
    assert await pid_of(connection, other) > 0


async def test_a_dedicated_host_ends_with_its_agent(shared):
    connection = await shared()
    (own,) = await place(connection, isolation="dedicated")
    (shared,) = await place(connection)
    assert own != shared
    await connection.registry.call("released", own, 1, timeout_s=10, group="control")

    async def ended() -> bool:
        names = {host.name for host in await connection.cluster.list_hosts()}
        return own not in names and shared in names

    await until(ended)


async def test_a_runtime_lives_as_long_as_somebody_drives_it(joined):
    connection = await joined(lease_timeout_s=2)
    await place(connection)
    await asyncio.sleep(2.5)
    assert (await connection.registry.call("status", timeout_s=10))["ending"] is False
    assert connection._lease is not None
    connection._lease.cancel()
    await until(lambda: gone(connection), 60)


async def test_a_goodbye_leaves_the_runtime_to_the_others(shared):
    one = await shared()
    two = await shared()
    await two.disconnect(end_runtime=False)
    await two.disconnect()
    told = await one.registry.call("status", timeout_s=10)
    leases = {lease["lease_id"] for lease in told["leases"]}
    assert one.lease_id in leases
    assert two.lease_id not in leases


async def test_disconnect_of_the_owner_leaves_no_actor_and_no_other_runtime_is_touched(joined, config):
    connection = await joined()
    await place(connection)
    other = await joined(home=config.home + "-2")
    assert other.home_id != connection.home_id
    await connection.disconnect()

    async def gone() -> bool:
        return not [a for a in await other.cluster.list_actors() if a.name.startswith(connection.home_id)]

    await until(gone, 5)
    assert await pid_of(other, store_name(other.home_id, 0)) > 0
    again = await joined()
    assert again.home_id == connection.home_id


async def test_a_connect_that_is_given_up_lets_ray_go(local_ray, config, monkeypatch):
    entered, go, let_go = threading.Event(), threading.Event(), threading.Event()

    def open_slowly(*args):
        entered.set()
        assert go.wait(30)
        return "the session"

    monkeypatch.setattr(ray_session, "open_session", open_slowly)
    monkeypatch.setattr(ray_session, "close_session", lambda session: let_go.set())
    connecting = asyncio.create_task(connect(config))
    assert await asyncio.to_thread(entered.wait, 30)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert not let_go.is_set()
    go.set()
    assert await asyncio.to_thread(let_go.wait, 30)


async def test_status_logs_and_down(joined, config):
    connection = await joined()
    (host,) = await place(connection)
    told = await asyncio.to_thread(status, config)
    (runtime,) = told["runtimes"]
    assert runtime["home_id"] == connection.home_id
    assert {host, registry_name(connection.home_id)} <= set(runtime["actors"])
    logs = await asyncio.to_thread(host_logs, config, host[-12:])
    assert logs["host"] == host
    assert logs["files"]
    with pytest.raises(ConfigError) as caught:
        await asyncio.to_thread(host_logs, config, "nobody")
    assert caught.value.code == "request.unknown_host"
    ended = await asyncio.to_thread(down, config)
    assert ended["ended"] == [connection.home_id]
    assert ended["failed"] == {}
    await until(lambda: gone(connection))
    assert (await asyncio.to_thread(status, config))["runtimes"] == []


async def test_down_ends_orphans_too(joined, config):
    connection = await joined()
    await place(connection)
    await connection.cluster.stop_host(registry_name(connection.home_id))
    told = (await asyncio.to_thread(status, config))["runtimes"][0]
    assert told["error"]["code"] == "infra.actor_died"
    assert (await asyncio.to_thread(down, config, all=True))["ended"] == [connection.home_id]
    await until(lambda: gone(connection))


async def test_a_home_that_cannot_be_used_is_named(joined, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        await joined(home=str(tmp_path / "file" / "home"))
    assert caught.value.code.startswith("store.")


async def test_an_address_where_nobody_listens_is_refused_at_once(local_ray, config):
    with pytest.raises(RuntimeFault) as caught:
        await connect(config.model_copy(update={"address": "127.0.0.1:1"}))
    assert caught.value.code in ("runtime.unreachable", "runtime.other_cluster")


def node(address: str, *, storage: bool = False) -> NodeInfo:
    return NodeInfo(address, address, 2, is_head=False, has_storage=storage)


def test_where_the_store_is_pinned():
    config = RuntimeConfig(home="/h")
    assert storage_resource(config, [node("1.1.1.1")]) == {"node:1.1.1.1": 0.001}
    both = [node("1.1.1.1"), node("2.2.2.2", storage=True)]
    assert storage_resource(config, both) == {"kimi_ray_storage": 0.001}
    shared = config.model_copy(update={"home_shared": True})
    assert storage_resource(shared, [node("1.1.1.1"), node("2.2.2.2")]) == {}
    with pytest.raises(StoreError) as caught:
        storage_resource(config, [node("1.1.1.1"), node("2.2.2.2")])
    assert caught.value.code == "store.no_storage_node"


def test_actors_are_given_no_secret():
    secret = "sk-very-secret"
    models = {"m": {"provider": "openai", "extra_headers": {"authorization": secret}}}
    config = RuntimeConfig(models=models, default_model="m")
    spec = RaySpec("h", "n", config_for_actors(config), {}, {"env_vars": {"KEY": secret}})
    assert secret not in repr(spec)
    assert secret not in config_for_actors(config).model_dump_json()
    assert config_for_actors(config).runtime_fingerprint() == config.runtime_fingerprint()
