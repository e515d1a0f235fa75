"""The only place that waits for an object reference: with a bound, and with Ray's errors told in our codes.

A call to an actor whose node is gone neither returns nor fails, so nobody else may await a reference (a test forbids
it).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, cast

from kimi_ray.errors import ConfigError, KimiRayError, RuntimeFault, ToolError, error_from_data
from kimi_ray.hosts.boundary import actor_died, timed_out

AUTH_HINT = (
    "the cluster asks for its token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, or put it in ~/.ray/auth_token"
    " (and leave RAY_AUTH_MODE unset or 'token')"
)
TEXT_CHARS = 2000


async def call(submit: Callable[[], Any], timeout_s: float, *, target: str, method: str) -> Any:
    """Submit a remote call and wait for its value.

    Args:
        submit: Gives the object reference, ``lambda: handle.method.remote(...)``; refusals at submission count too.
        timeout_s: Longest wait, seconds. The callee is not told when it is over.
        target: The actor's (or task's) name, for messages.
        method: The method's name, for messages.

    Raises:
        KimiRayError: ``infra.timeout``, ``infra.actor_died``, ``infra.actor_unavailable``, ``infra.unschedulable``,
            ``infra.pending_limit``, ``infra.object_store_full``, ``infra.out_of_memory``, ``infra.ray``,
            ``runtime.auth``, ``runtime.env_failed``, ``request.not_picklable``; or what the remote code raised.
    """
    from ray.exceptions import RayError

    bound = asyncio.timeout(timeout_s)
    try:
        async with bound:
            return await submit()
    except RayError as error:
        raise translated(error, target, method) from None
    except TimeoutError:
        if bound.expired():
            raise timed_out(target, method, timeout_s) from None
        raise
    except TypeError as error:
        raise _not_picklable(error, target, method) from error


def call_at_exit(submit: Callable[[], Any], timeout_s: float, *, target: str, method: str) -> Any:
    """``call`` without a loop and without threads, for the last word of a program; raises as ``call`` does."""
    import ray
    from ray.exceptions import RayError

    try:
        return cast("Any", ray).get(submit(), timeout=timeout_s)
    except RayError as error:
        raise translated(error, target, method) from None


async def in_thread(executor: Executor, work: Callable[[], Any], timeout_s: float, *, target: str, method: str) -> Any:
    """Run a blocking call of Ray's client in a thread and wait for it; raises as ``call`` does."""
    from ray.exceptions import RayError

    loop = asyncio.get_running_loop()
    bound = asyncio.timeout(timeout_s)
    try:
        async with bound:
            return await loop.run_in_executor(executor, work)
    except RayError as error:
        raise translated(error, target, method) from None
    except TimeoutError:
        if bound.expired():
            raise timed_out(target, method, timeout_s) from None
        raise


def translated(error: Exception, target: str, method: str) -> KimiRayError:
    """An error of Ray in our words."""
    from ray import exceptions as ray_errors

    if isinstance(error, ray_errors.RayTaskError):
        return _of_remote_code(error, target, method)
    text = _short(error)
    if isinstance(error, ray_errors.ActorDiedError):
        return actor_died(target, text)
    known: list[tuple[type[Exception] | tuple[type[Exception], ...], str, bool]] = [
        (ray_errors.ActorUnavailableError, "infra.actor_unavailable", True),
        (ray_errors.GetTimeoutError, "infra.timeout", True),
        ((ray_errors.ActorUnschedulableError, ray_errors.TaskUnschedulableError), "infra.unschedulable", True),
        (ray_errors.PendingCallsLimitExceeded, "infra.pending_limit", True),
        ((ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError), "infra.object_store_full", True),
        (ray_errors.OutOfMemoryError, "infra.out_of_memory", True),
        (ray_errors.AuthenticationError, "runtime.auth", False),
        (ray_errors.RuntimeEnvSetupError, "runtime.env_failed", False),
        ((ray_errors.WorkerCrashedError, ray_errors.NodeDiedError, ray_errors.RayActorError), "infra.actor_died", True),
        ((ray_errors.ObjectLostError, ray_errors.LocalRayletDiedError), "infra.actor_unavailable", True),
    ]
    code, retryable = next(((c, r) for kinds, c, r in known if isinstance(error, kinds)), ("infra.ray", False))
    hint = AUTH_HINT if code == "runtime.auth" else None
    return RuntimeFault(
        f"{method} of {target} failed in Ray: {text}",
        code=code,
        hint=hint,
        details={"actor": target, "method": method, "exception": type(error).__name__},
        retryable=retryable,
    )


def _of_remote_code(error: Exception, target: str, method: str) -> KimiRayError:
    cause = getattr(error, "cause", None)
    if isinstance(cause, KimiRayError):
        return error_from_data(cause.to_data())
    trace = str(getattr(error, "traceback_str", ""))
    # Ray wraps what fails while it unpickles arguments into a RaySystemError that has the trace as its text.
    text = str(cause)
    if type(cause).__name__ == "RaySystemError" and "deserialize_objects" in text:
        return _not_importable(text.splitlines()[-1], target, method)
    return KimiRayError(
        f"{method} of {target} failed: {type(cause).__name__}: {cause}",
        code="internal",
        hint="this is a bug of kimi_ray or of code it was given; details.traceback says where",
        details={
            "actor": target,
            "method": method,
            "exception": type(cause).__name__,
            "traceback": trace[-TEXT_CHARS:],
        },
    )


def _not_importable(why: str, target: str, method: str) -> ToolError:
    """What a driver sent cannot be loaded where it arrived: most often a tool of a module that is only here."""
    return ToolError(
        f"an argument of {method} cannot be loaded by {target}: {why}",
        code="tool.not_importable",
        hint="the code of a tool must be importable on every node: install its package there, or connect with"
        ' runtime_env={"py_modules": [...]}',
        details={"actor": target, "method": method},
    )


def _not_picklable(error: TypeError, target: str, method: str) -> ConfigError:
    return ConfigError(
        f"an argument of {method} cannot be sent to {target}: {_short(error)}",
        code="request.not_picklable",
        hint="tools, factories and items must be picklable: no open files, locks, clients or generators inside",
        details={"actor": target, "method": method},
    )


def _short(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if len(text) <= TEXT_CHARS else text[:TEXT_CHARS] + " ..."
