"""The Feature: its services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dishka import Provider, provide  # pyright: ignore[reportUnknownVariableType]

from kimi_ray.agent.journal import Journal
from kimi_ray.agent.slots import AgentSlots
from kimi_ray.agent.specs import AgentSpec
from kimi_ray.config import RuntimeConfig
from kimi_ray.features.permissions.agent_permissions import AgentPermissions
from kimi_ray.features.permissions.rules import RuleBook
from kimi_ray.scopes import Feature, LifecycleScope
from kimi_ray.tools.contract import Environment


class _App(Provider):
    scope = LifecycleScope.APP

    @provide
    def rules(self, config: RuntimeConfig) -> RuleBook:
        """The configured rules."""
        return RuleBook(config.permissions)


class _Agent(Provider):
    scope = LifecycleScope.AGENT

    @provide
    def agent(
        self,
        rules: RuleBook,
        spec: AgentSpec,
        journal: Journal,
        slots: AgentSlots,
        environment: Environment,
        config: RuntimeConfig,
    ) -> AgentPermissions:
        """What decides about the agent's calls."""
        return AgentPermissions(
            rules,
            spec,
            journal,
            slots,
            environment,
            default=config.permission_mode,
            wait_s=config.permission_wait_s,
        )


class Permissions(Feature):
    """Which tool calls may start: modes, rules, questions (``permission_mode``, ``[[permissions]]``)."""

    name: ClassVar[str] = "permissions"

    def services(self) -> Sequence[Provider]:
        """See ``Feature.services``."""
        return (_App(), _Agent())

    def on_agent(self) -> Sequence[type]:
        """See ``Feature.on_agent``."""
        return (AgentPermissions,)
