"""A driver's tie to a runtime: the cluster, the registry, and the lease that keeps the runtime alive."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError, error_from_data
from kimi_ray.hosts.boundary import noted
from kimi_ray.hosts.driver_leases import program_versions
from kimi_ray.hosts.local_cluster import LocalCluster
from kimi_ray.hosts.ports import Cluster, HostEnvironment, Peer, registry_name
from kimi_ray.hosts.store_host import store_options

CALL_BOUND_S = 30.0
GOODBYE_BOUND_S = 5.0


class Connection:
    """What ``connect`` gives. End it with ``disconnect``.

    Args:
        end: What ends what this connection started: a local Ray, the cores of this process.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: RuntimeConfig,
        *,
        in_process: bool,
        owns_runtime: bool,
        log_path: str | None,
        environment: HostEnvironment | None = None,
        bare_calls: Callable[[int], Awaitable[float]] | None = None,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self.cluster = cluster
        self.config = config
        self.registry: Peer = cluster.peer(registry_name(cluster.home_id))
        self.in_process = in_process
        self.owns_runtime = owns_runtime
        """Whether the runtime ends with this connection: in process, or on a local Ray that it started."""
        self.log_path = log_path
        """Where lines of Ray that would have gone to the terminal are, or None."""
        self.lease_id: str | None = None
        self.lost: KimiRayError | None = None
        """Why the runtime is over while the driver lives (``runtime.ending``), else None."""
        self.failures: list[KimiRayError] = []
        """What ``disconnect`` could not close as it should when it ended the runtime (``details.host``)."""
        self._environment = environment or HostEnvironment()
        self._bare_calls = bare_calls
        self._end = end
        self._lease: asyncio.Task[None] | None = None
        self._ended: asyncio.Task[None] | None = None

    @property
    def home_id(self) -> str:
        """The runtime's id."""
        return self.cluster.home_id

    async def greet(self, timeout_s: float = CALL_BOUND_S) -> None:
        """Take the lease and keep it.

        Raises:
            RuntimeFault: ``runtime.mismatch``, ``runtime.ending``, ``infra.*``.
        """
        told = await self.registry.call("hello", self._info(), timeout_s=timeout_s)
        self.lease_id = str(told["lease_id"])
        self._lease = asyncio.create_task(self._renew(float(told["renew_s"])), name="kimi_ray.lease")

    async def actor_calls(self) -> Counter[str]:
        """How many calls of each method all actors of the runtime have received so far."""
        hosts = await self.cluster.list_hosts()
        told = await asyncio.gather(
            *(self.cluster.peer(host.name).call("ping", timeout_s=CALL_BOUND_S, group="control") for host in hosts)
        )
        calls = Counter[str]()
        for ping in told:
            calls.update(ping["calls"])
        return calls

    async def bare_calls(self, count: int) -> float | None:
        """Seconds that ``count`` empty actor calls of this driver take; None where calls cost nothing."""
        return None if self._bare_calls is None else await self._bare_calls(count)

    async def disconnect(self, *, end_runtime: bool | None = None) -> None:
        """Give the lease back and end what ends with this connection. Idempotent and bounded; never raises for a
        runtime that is already gone.

        Args:
            end_runtime: Let the hosts flush and stop first; None does so when the connection owns the runtime.
        """
        if self._ended is None:
            self._ended = asyncio.create_task(
                self._disconnect(self.owns_runtime if end_runtime is None else end_runtime)
            )
        await asyncio.shield(self._ended)

    async def _disconnect(self, end_runtime: bool) -> None:
        if self._lease is not None:
            self._lease.cancel()
            await asyncio.gather(self._lease, return_exceptions=True)
        try:
            if end_runtime:
                # Sessions, agents and stores are closed one after the other, each within its own bound.
                told = await self.registry.call("shutdown", timeout_s=4 * self.config.close_timeout_s)
                self.failures = [error_from_data(data) for data in told]
            elif self.lease_id is not None:
                await self.registry.call("goodbye", self.lease_id, timeout_s=GOODBYE_BOUND_S, group="control")
        except KimiRayError as error:
            self.lost = self.lost or error
        finally:
            await self._end()

    async def _renew(self, every_s: float) -> None:
        """Lost calls are no reason to stop: the registry may be restarting and takes any lease in."""
        info = self._info()
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.registry.call("renew", self.lease_id, info, timeout_s=every_s, group="control")
            except KimiRayError as error:
                if error.code == "runtime.ending":
                    self.lost = error
                    return
            except Exception as error:  # noqa: BLE001  logged: without its lease the runtime would end under this driver
                noted(error, "keeping the lease")

    def _info(self) -> dict[str, Any]:

        return {
            "fingerprint": self.config.runtime_fingerprint(),
            "versions": program_versions(),
            "code": self._environment.digest or None,
            "runtime_env": self._environment.runtime_env,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }


async def connect_in_process(config: RuntimeConfig) -> Connection:
    """A runtime of its own in this process and loop, without Ray.

    Raises:
        KimiRayError: why the home cannot be used (``store.*``).
    """
    from kimi_ray.store.fs import RealFs
    from kimi_ray.store.identity import open_identity

    identity = await asyncio.to_thread(open_identity, RealFs(), config.home, store_options(config))
    cluster = LocalCluster(identity.home_id, config)
    connection = Connection(cluster, config, in_process=True, owns_runtime=True, log_path=None, end=cluster.close)
    try:
        await cluster.start_host("registry", registry_name(identity.home_id))
        await connection.greet()
    except BaseException:
        await cluster.close()
        raise
    return connection
