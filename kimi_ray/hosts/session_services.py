"""What a session is made of: the services of the Session scope and those of the App scope that they need.

The counterpart of ``agent_services`` on a host of sessions: one App container a host, one Session container a session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dishka import Provider, from_context, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.config import RuntimeConfig
from kimi_ray.hosts.live_session import HostServices, LiveAgent, LiveSession
from kimi_ray.hosts.ports import Cluster
from kimi_ray.hosts.specs import SessionSpec
from kimi_ray.hosts.steady_calls import RegistryCalls, StoreCalls
from kimi_ray.ids import MAIN
from kimi_ray.log import epoch_ms
from kimi_ray.scopes import LifecycleScope
from kimi_ray.session import AgentEntry, SessionDocument
from kimi_ray.store.seam import SessionGrant


@dataclass(frozen=True, slots=True)
class HostName:
    """The name of the session host."""

    name: str


@dataclass(frozen=True, slots=True)
class ClaimedSession:
    """A session under this host's claim, its main agent alive, its document as it was read or made."""

    spec: SessionSpec
    grant: SessionGrant
    value: dict[str, Any]
    main_host: str
    known_empty: bool
    """Whether the session is new, so that no subagent can exist."""
    mended: bool = False
    """Whether ``value`` was put right at the load, so that the store has another one."""


class SessionHostServices(Provider):
    """App scope: one of each in a session host."""

    scope = LifecycleScope.APP

    config = from_context(RuntimeConfig, scope=LifecycleScope.APP)
    cluster = from_context(Cluster, scope=LifecycleScope.APP)
    name = from_context(HostName, scope=LifecycleScope.APP)

    @provide
    def registry(self, cluster: Cluster, config: RuntimeConfig) -> RegistryCalls:
        """The way to the registry."""
        return RegistryCalls(cluster, config.store_timeout_s)

    @provide
    def store(self, cluster: Cluster, config: RuntimeConfig) -> StoreCalls:
        """The way to the store; a claim may wait for a dying owner."""
        return StoreCalls(cluster, config.shards, max(config.store_timeout_s, config.claim_timeout_s + 5.0))

    @provide
    def services(
        self, name: HostName, cluster: Cluster, config: RuntimeConfig, registry: RegistryCalls, store: StoreCalls
    ) -> HostServices:
        """What the host lends its sessions."""
        return HostServices(name.name, cluster, config, registry, store)


class LiveSessionServices(Provider):
    """Session scope: one of each for a live session."""

    scope = LifecycleScope.SESSION

    claimed = from_context(ClaimedSession, scope=LifecycleScope.SESSION)

    @provide
    def document(self, claimed: ClaimedSession, store: StoreCalls) -> SessionDocument:
        """The session's document, written under its grant."""
        spec, grant = claimed.spec, claimed.grant

        async def write(value: dict[str, Any], over: int) -> int:
            return await store.write_document(spec.session_id, value, grant.grant, spec.nonce, over)

        document = SessionDocument(claimed.value, grant.revision, write, clock=epoch_ms, changed=claimed.mended)
        document.register([AgentEntry(MAIN, "main", None)])
        return document

    @provide
    def session(self, claimed: ClaimedSession, services: HostServices, document: SessionDocument) -> LiveSession:
        """The session itself."""
        spec = claimed.spec
        main = LiveAgent(spec.main, claimed.main_host, spec.isolation, spec.node_id)
        return LiveSession(services, spec, document, main, known_empty=claimed.known_empty)
