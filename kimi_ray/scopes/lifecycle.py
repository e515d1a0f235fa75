"""Scopes: how long a service lives, and the containers that hold services of one lifetime.

``APP < SESSION < AGENT``: a service may depend on services of its own or an outer scope. Containers are dishka's;
missing, cyclic and wrong-scope dependencies are found when the App container is assembled, not in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dishka import AsyncContainer, BaseScope, Provider, make_async_container, new_scope
from dishka.exception_base import DishkaError

from kimi_ray.errors import ConfigError


class LifecycleScope(BaseScope):
    """The lifetime of a service."""

    APP = new_scope("APP")
    """As long as the process."""
    SESSION = new_scope("SESSION")
    """As long as a session lives here."""
    AGENT = new_scope("AGENT")
    """As long as one agent holds its log."""


def assemble(providers: Iterable[Provider], values: Mapping[type, Any]) -> AsyncContainer:
    """The App container of this process, checked as a whole.

    Args:
        providers: What contributes services, of any scope.
        values: Services that exist already (the config, the cluster), by type.

    Raises:
        ConfigError: ``config.assembly`` naming the missing, cyclic or wrong-scope dependency and its path.
    """
    try:
        return make_async_container(*providers, scopes=LifecycleScope, context=dict(values))
    except DishkaError as error:
        raise ConfigError(
            f"the services do not fit together: {error}",
            code="config.assembly",
            hint="look at the constructor named above: each of its parameters needs a provider of the same or an outer "
            "scope",
        ) from error
