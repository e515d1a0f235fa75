"""This process's tie to Ray: start a local one, join one, or use the one that the program has; and end it.

Ray belongs to the process, so this module counts who uses the Ray it started and ends it with the last. A local Ray's
processes ask the kernel to be killed when the *thread* that started them ends; they are started from a thread that
lives as long as they do, and die with a driver that is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from kimi_ray.actors.calls import AUTH_HINT
from kimi_ray.actors.ray_environment import (
    LOG_FORMAT,
    driver_log_path,
    found_token,
    inherited,
    own_token,
    pushed_messages_logged,
    quiet_environment,
    quiet_logger,
    session_directory,
)
from kimi_ray.actors.undertaker import dismiss, start_undertaker, tell_directory
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError, RuntimeFault

T = TypeVar("T")

START_BOUND_S = 120.0
JOIN_BOUND_S = 60.0
KNOCK_BOUND_S = 5.0
STOP_BOUND_S = 15.0


@dataclass(slots=True)
class RaySession:
    """The Ray that this process uses.

    ``started``: it was started here and ends with its last user. ``joined``: this process was attached to a running
    cluster here and is detached by its last user. Neither: the program's own, never touched.
    """

    started: bool
    joined: bool
    address: str
    log_path: str | None
    runtime_env_applied: bool
    users: int = 1


class _RayThread:
    """One daemon thread that does Ray's blocking calls and lives as long as a local Ray."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kimi_ray.ray", daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def _run(self) -> None:
        while True:
            work, future = self._work.get()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  it is the caller's
                future.set_exception(error)


_lock = threading.Lock()
_thread: _RayThread | None = None
_session: RaySession | None = None
_while_ours = contextlib.ExitStack()


def open_session(config: RuntimeConfig, runtime_env: dict[str, Any] | None) -> RaySession:
    """Have Ray in this process; blocks for seconds when one has to be started.

    Raises:
        RuntimeFault: ``runtime.unreachable``, ``runtime.auth``, ``runtime.version_mismatch``,
            ``runtime.start_failed``, ``runtime.other_cluster``.
    """
    global _session  # noqa: PLW0603  Ray itself is one per process
    with _lock:
        log_path = driver_log_path(config)
        quiet_environment()
        if _ray().is_initialized():
            _check_same_cluster(config.address)
            if _session is not None:
                _session.users += 1
                return _session
            return RaySession(False, False, _gcs_address(), None, False)
        quiet_logger(log_path)
        try:
            _while_ours.enter_context(pushed_messages_logged())
            start = _start_local if config.address is None else _join
            _session = start(config, runtime_env, log_path)
        except BaseException:
            _while_ours.close()
            raise
        return _session


def is_running() -> bool:
    """Whether this process has Ray already."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def close_session(session: RaySession) -> None:
    """Let go of Ray; the last user of one that was started or joined here ends or leaves it. Bounded."""
    global _session  # noqa: PLW0603  Ray itself is one per process
    with _lock:
        session.users -= 1
        if session.users > 0 or not (session.started or session.joined):
            return
        _session = None
        _shutdown()


def _shutdown() -> None:
    future = _ray_thread().submit(lambda: _ray().shutdown())
    with contextlib.suppress(TimeoutError):
        future.result(STOP_BOUND_S)
    _while_ours.close()


def _at_exit() -> None:
    """A program that ends without ``disconnect`` leaves no process of a local Ray behind."""
    if _session is not None:
        _shutdown()


atexit.register(_at_exit)


def _start_local(config: RuntimeConfig, runtime_env: dict[str, Any] | None, log_path: str) -> RaySession:
    mark = secrets.token_hex(16)
    _while_ours.enter_context(own_token())
    undertaker = start_undertaker(mark)
    _while_ours.callback(dismiss, undertaker)

    def start() -> str:
        with inherited(mark):
            _ray().init(
                address="local",
                namespace=config.namespace,
                object_store_memory=config.object_store_memory,
                include_dashboard=False,
                logging_format=LOG_FORMAT,
                log_to_driver=False,
                runtime_env=runtime_env,
            )
        tell_directory(undertaker, session_directory())
        return _gcs_address()

    address = _bounded(start, START_BOUND_S, "a local Ray", "runtime.start_failed", log_path)
    return RaySession(True, False, address, log_path, True)


def _join(config: RuntimeConfig, runtime_env: dict[str, Any] | None, log_path: str) -> RaySession:
    address = str(config.address)
    if "://" in address:
        raise RuntimeFault(
            f"{address} is a Ray Client address",
            code="runtime.unreachable",
            hint="run on a machine of the cluster (or submit a job there) and give host:port or 'auto'",
            details={"address": address},
        )
    _knock(address)
    _while_ours.enter_context(found_token())

    def join() -> str:
        _ray().init(
            address=address,
            namespace=config.namespace,
            logging_format=LOG_FORMAT,
            log_to_driver=False,
            runtime_env=runtime_env,
        )
        return _gcs_address()

    joined = _bounded(join, JOIN_BOUND_S, f"the cluster at {address}", "runtime.unreachable", log_path)
    return RaySession(False, True, joined, log_path, True)


def _bounded(work: Callable[[], str], timeout_s: float, what: str, code: str, log_path: str) -> str:
    future = _ray_thread().submit(work)
    try:
        return future.result(timeout_s)
    except KimiRayError:
        raise
    except TimeoutError as error:
        if future.done():
            raise _refused(error, what, code, log_path) from error
        raise RuntimeFault(
            f"{what} did not answer within {timeout_s:g} s",
            code=code,
            hint=f"Ray's own words are in {log_path}",
            details={"timeout_s": timeout_s, "log": log_path},
            retryable=True,
        ) from None
    except Exception as error:
        raise _refused(error, what, code, log_path) from error


def _refused(error: Exception, what: str, code: str, log_path: str) -> RuntimeFault:
    text = " ".join(str(error).split()) or type(error).__name__
    lowered = " ".join(f"{type(part).__name__} {part}" for part in _chain(error)).lower()
    hint = f"Ray's own words are in {log_path}"
    if "authenticationerror" in lowered or "unauthenticated" in lowered:
        code, hint = "runtime.auth", AUTH_HINT
    elif "version mismatch" in lowered:
        code, hint = "runtime.version_mismatch", "use the cluster's versions of Python and Ray"
    return RuntimeFault(
        f"{what} could not be used: {text[:1000]}",
        code=code,
        hint=hint,
        details={"exception": type(error).__name__, "log": log_path},
    )


def _chain(error: BaseException) -> list[BaseException]:
    """An error and its causes."""
    found = [error]
    while (cause := found[-1].__cause__ or found[-1].__context__) is not None and cause not in found:
        found.append(cause)
    return found


def _knock(address: str) -> None:
    """Refuse an address where nobody listens at once: Ray would try for a minute, and may end the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_BOUND_S).close()
    except OSError as error:
        raise RuntimeFault(
            f"nobody listens at {address}: {error}",
            code="runtime.unreachable",
            hint="check the address and that the Ray head is up (`ray status`)",
            details={"address": address},
            retryable=True,
        ) from error


def _check_same_cluster(address: str | None) -> None:
    if address in (None, "auto", "local"):
        return
    present = _gcs_address()
    wanted = str(address)
    if wanted != present and _resolved(wanted) != _resolved(present):
        raise RuntimeFault(
            f"this process is already connected to the Ray at {present}, not {wanted}",
            code="runtime.other_cluster",
            hint="call ray.shutdown() first, or use another process",
            details={"address": wanted, "present": present},
        )


def _resolved(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    try:
        return socket.gethostbyname(host.strip("[]")), port
    except OSError:
        return host, port


def _gcs_address() -> str:
    return str(_ray().get_runtime_context().gcs_address)


def _ray() -> Any:
    """Ray, without its own half-known types."""
    import ray

    return ray


def _ray_thread() -> _RayThread:
    global _thread  # noqa: PLW0603  it must outlive every connection: a local Ray dies with it
    if _thread is None:
        _thread = _RayThread()
    return _thread
