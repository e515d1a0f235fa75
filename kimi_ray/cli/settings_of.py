"""From the shared flags to the settings of a runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kimi_ray.errors import ConfigError

if TYPE_CHECKING:
    from kimi_ray.config import RuntimeConfig

IN_PROCESS = "in-process"


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
