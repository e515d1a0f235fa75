"""The drivers of a runtime: who is there, whether their settings fit, and the code that they brought."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from typing import Any

from kimi_ray.config import RuntimeConfig, differing
from kimi_ray.errors import RuntimeFault
from kimi_ray.hosts.ports import HostEnvironment
from kimi_ray.ids import new_ulid
from kimi_ray.version import __version__


@dataclass(slots=True)
class _Lease:
    info: dict[str, Any]
    heard: float


class DriverLeases:
    """Leases by id; each lasts ``lease_timeout_s`` from when its driver was last heard.

    Args:
        config: The runtime's settings.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._leases: dict[str, _Lease] = {}
        self._code: str | None = None
        self._heard = time.monotonic()
        self.environment = HostEnvironment()
        """What the drivers' code needs around it: new hosts are started with it."""

    def hear(self) -> None:
        """Count the time without a driver from now on."""
        self._heard = time.monotonic()

    def check(self, info: dict[str, Any]) -> None:
        """See ``Registry.hello``.

        Raises:
            RuntimeFault: ``runtime.mismatch``.
        """
        mine: dict[str, Any] = {**(info.get("fingerprint") or {}), **(info.get("versions") or program_versions())}
        theirs = {**self._config.runtime_fingerprint(), **program_versions()}
        code = info.get("code")
        if self._leases and code != self._code:
            mine["runtime_env"], theirs["runtime_env"] = code, self._code
        other = differing(mine, theirs)
        if other:
            raise RuntimeFault(
                f"the runtime that serves this home runs with other settings: {', '.join(other)}",
                code="runtime.mismatch",
                hint="connect with the same settings, or end that runtime with `kimi-ray down`",
                details={"settings": other},
            )

    def begin(self, info: dict[str, Any]) -> str:
        """A new lease's id."""
        lease_id = f"lease_{new_ulid()}"
        self.renew(lease_id, info)
        return lease_id

    def renew(self, lease_id: str, info: dict[str, Any]) -> None:
        """A driver is still there; a lease that is not known is taken in."""
        self.hear()
        if "code" in info:
            self._code = info["code"]
            self.environment = HostEnvironment(self._code or "", info.get("runtime_env"))
        shown = {k: v for k, v in info.items() if k not in ("fingerprint", "runtime_env")}
        self._leases[lease_id] = _Lease(shown, self._heard)

    def end(self, lease_id: str) -> None:
        """A driver went. Idempotent."""
        self.hear()
        self._leases.pop(lease_id, None)

    def all_gone(self) -> bool:
        """Forget who was not heard for too long; whether nobody was."""
        now, bound = time.monotonic(), self._config.lease_timeout_s
        self._leases = {key: lease for key, lease in self._leases.items() if now - lease.heard < bound}
        return now - self._heard >= bound

    def report(self) -> list[dict[str, Any]]:
        """Each lease as ``status`` tells it."""
        now = time.monotonic()
        return [
            {"lease_id": key, "heard_s_ago": round(now - lease.heard, 3), **lease.info}
            for key, lease in self._leases.items()
        ]


def program_versions() -> dict[str, str]:
    """What drivers and hosts must have in common to understand each other's data; a Python's patch level may differ."""
    return {"kimi_ray": __version__, "python": ".".join(platform.python_version_tuple()[:2])}
