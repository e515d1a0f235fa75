"""From the shared flags to the settings of a runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kimi_ray.errors import ConfigError

if TYPE_CHECKING:
    from kimi_ray.config import RuntimeConfig

IN_PROCESS = "in-process"

_CLAIM_S = 5.0
"""A detached actor outlives its driver by some seconds; whoever holds a session for longer is at work."""


def runtime_config(
    home: str | None, address: str | None = None, namespace: str | None = None, *, in_process: bool = False
) -> RuntimeConfig:
    """The settings: flags over the environment over ``config.toml``.

    Raises:
        ConfigError: ``config.*``; ``request.conflict`` for --in-process beside another address.
    """
    from kimi_ray.config import load_config

    if in_process and address not in (None, IN_PROCESS):
        raise ConfigError(
            f"--in-process and --address {address} exclude each other",
            code="request.conflict",
            hint="leave one of them out",
        )
    return load_config(home, address=IN_PROCESS if in_process else address, namespace=namespace)


def operation_config(home: str, address: str | None, namespace: str | None) -> RuntimeConfig:
    """The settings for an operation on sessions by id: without Ray unless an address is given, and without it no long
    wait for whoever has them.

    Raises:
        ConfigError: ``config.*``.
    """
    config = runtime_config(home, address or IN_PROCESS, namespace)
    if config.address != IN_PROCESS:
        return config
    return config.model_copy(update={"claim_timeout_s": min(config.claim_timeout_s, _CLAIM_S)})
