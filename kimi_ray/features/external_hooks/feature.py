"""The Feature: its services at all three levels."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from dishka import Provider, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.slots import AgentSlots
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.config import RuntimeConfig
from kimi_ray.features.external_hooks.agent_hooks import AgentHooks
from kimi_ray.features.external_hooks.chosen import HookTable
from kimi_ray.features.external_hooks.process import HookProcesses
from kimi_ray.features.external_hooks.session_hooks import SessionHooks
from kimi_ray.scopes import Feature, LifecycleScope
from kimi_ray.tools.contract import Environment


class _App(Provider):
    scope = LifecycleScope.APP

    @provide
    def table(self, config: RuntimeConfig) -> HookTable:
        """The configured hooks."""
        return HookTable(config.hooks)

    @provide
    def processes(self) -> HookProcesses:
        """What runs their commands."""
        return HookProcesses()


class _Session(Provider):
    scope = LifecycleScope.SESSION

    @provide
    async def session(self) -> AsyncIterator[SessionHooks]:
        """The session's heartbeat."""
        session = SessionHooks()
        yield session
        await session.close()


class _Agent(Provider):
    scope = LifecycleScope.AGENT

    @provide
    async def agent(
        self,
        table: HookTable,
        processes: HookProcesses,
        session: SessionHooks,
        spec: AgentSpec,
        journal: Journal,
        slots: AgentSlots,
        environment: Environment,
        config: RuntimeConfig,
    ) -> AsyncIterator[AgentHooks]:
        """The handlers in the agent's slots."""
        hooks = AgentHooks(
            table,
            processes,
            session,
            spec,
            journal,
            slots,
            environment.root,
            leaving_s=min(10.0, config.close_timeout_s / 3),
        )
        yield hooks
        await hooks.close()


class ExternalHooks(Feature):
    """Commands of the user's at the moments of an agent's life (``[[hooks]]``)."""

    name: ClassVar[str] = "external_hooks"

    def services(self) -> Sequence[Provider]:
        """See ``Feature.services``."""
        return (_App(), _Session(), _Agent())

    def on_agent(self) -> Sequence[type]:
        """See ``Feature.on_agent``."""
        return (AgentHooks,)
