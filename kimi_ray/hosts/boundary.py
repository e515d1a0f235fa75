"""Crossing an actor's boundary: which methods may be called, and errors as plain data.

An answer is ``("ok", value)`` or ``("err", data)`` with the data of ``KimiRayError.to_data``. Errors never travel as
exceptions: what carries the call would copy their type but not their code, hint and details.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from typing import Any, ClassVar, Literal, Protocol, cast

from kimi_ray.errors import KimiRayError, RuntimeFault, error_from_data
from kimi_ray.hosts.ports import Group, HostKind

Answer = tuple[Literal["ok"], Any] | tuple[Literal["err"], dict[str, Any]]

LIFECYCLE: dict[str, Group] = {"ping": "control", "close": "control"}
"""What every core answers, whether its ``PORT`` names it or not."""

TRACEBACK_CHARS = 4000

_logger = logging.getLogger(__name__)


class CorePart(Protocol):
    """Some calls of a core, in an object of their own."""

    PORT: ClassVar[dict[str, Group]]
    """As of a ``Core``."""


class Core(Protocol):
    """What an actor holds. One that has ``parts`` (objects with a ``PORT``) answers their calls as its own."""

    PORT: ClassVar[dict[str, Group]]
    """The methods that others may call, each with its concurrency group."""

    async def start(self) -> None:
        """Begin; called once, before any other method."""
        ...

    async def close(self) -> None:
        """End: flush, let go of everything. Idempotent."""
        ...

    async def ping(self) -> dict[str, Any]:
        """Proof of life and what the core holds: ``{kind, agents, sessions, node_id, pid}``."""
        ...


async def answer(core: Core, method: str, args: tuple[Any, ...]) -> Answer:
    """Run a method of the core for a caller beyond the boundary; whatever it raises is data."""
    try:
        return ("ok", await _method(core, method)(*args))
    except KimiRayError as error:
        return ("err", error.to_data())
    except Exception as error:  # noqa: BLE001  recorded as data, nothing is lost
        return ("err", unexpected(error, f"{type(core).__name__}.{method}").to_data())


def group_of(kind: HostKind, method: str, said: Group) -> Group:
    """The concurrency group of a call: what the callee's port says where that is known without importing agents."""
    if method in LIFECYCLE:
        return LIFECYCLE[method]
    if kind == "store":
        from kimi_ray.hosts.store_host import StoreHost

        return StoreHost.PORT.get(method, said)
    if kind == "registry":
        from kimi_ray.hosts.registry import Registry

        return Registry.PORT.get(method, said)
    return said


def kind_of(name: str) -> HostKind | None:
    """What an actor is, by its name ``<home_id>/<kind>...``; None for a name that is not one of ours."""
    if "/" not in name:
        return None
    word = name.rsplit("/", 1)[-1].split("-", 1)[0]
    kinds: tuple[HostKind, ...] = ("agents", "sessions", "store", "registry")
    return next((kind for kind in kinds if kind == word), None)


def with_calls(reply: Answer, method: str, calls: Counter[str]) -> Answer:
    """A ping's answer also tells how many calls of each method the actor has received; benches count them."""
    if method == "ping" and reply[0] == "ok":
        return ("ok", {**reply[1], "calls": dict(calls)})
    return reply


def unwrap(reply: Answer) -> Any:
    """What the callee returned.

    Raises:
        KimiRayError: what it raised, with the same class, code, details, hint and retryable.
    """
    if reply[0] == "err":
        raise error_from_data(reply[1])
    return reply[1]


def unexpected(error: BaseException, where: str) -> KimiRayError:
    """An exception that nobody meant to raise, as ``internal`` with its type and the end of its traceback."""
    trace = "".join(traceback.format_exception(error))
    return KimiRayError(
        f"{where} failed: {type(error).__name__}: {error}",
        code="internal",
        hint="this is a bug of kimi_ray or of code it was given; details.traceback says where",
        details={"exception": type(error).__name__, "where": where, "traceback": trace[-TRACEBACK_CHARS:]},
    )


def noted(error: Exception, where: str) -> KimiRayError:
    """What a loop that goes on keeps of an error: itself, or ``unexpected``, which is logged: nobody else tells it."""
    if isinstance(error, KimiRayError):
        return error
    _logger.error("%s met %r and goes on", where, error, exc_info=error)
    return unexpected(error, where)


def actor_died(name: str, why: str) -> RuntimeFault:
    """``infra.actor_died`` for an actor of that name."""
    return RuntimeFault(
        f"the actor {name} is gone: {why}", code="infra.actor_died", details={"actor": name}, retryable=True
    )


def timed_out(name: str, method: str, timeout_s: float) -> RuntimeFault:
    """``infra.timeout`` for a call; the callee may still be at it."""
    return RuntimeFault(
        f"{method} of {name} did not answer within {timeout_s:g} s",
        code="infra.timeout",
        details={"actor": name, "method": method, "timeout_s": timeout_s},
        retryable=True,
    )


def _method(core: Core, method: str) -> Any:
    if method in LIFECYCLE:
        return getattr(core, method)
    holders: list[CorePart] = [core, *cast("tuple[CorePart, ...]", getattr(core, "parts", ()))]
    for holder in holders:
        if method in holder.PORT:
            return getattr(holder, method)
    raise KimiRayError(
        f"{type(core).__name__} has no method {method!r} for callers",
        code="internal",
        details={"method": method, "port": sorted({name for holder in holders for name in holder.PORT})},
    )
