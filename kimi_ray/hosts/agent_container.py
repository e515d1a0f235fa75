"""The App container of a host of agents: kimi-ray's own services and those that Features bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dishka import AsyncContainer, Provider

from kimi_ray.hosts.agent_services import AgentServices, AppServices, SessionServices
from kimi_ray.hosts.agent_subagents import SubagentServices
from kimi_ray.hosts.features import Features
from kimi_ray.scopes import assemble


def host_services() -> list[Provider]:
    """The providers of the services that kimi-ray itself brings to a host of agents."""
    return [AppServices(), SessionServices(), AgentServices(), SubagentServices()]


def host_container(features: Features, values: Mapping[type, Any]) -> AsyncContainer:
    """The App container of a host of agents, with what Features bring.

    Raises:
        ConfigError: ``config.assembly`` for services that do not fit together; ``config.feature``.
    """
    own = host_services()
    return assemble([*own, *features.services(own)], values, features.asked())
