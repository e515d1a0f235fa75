"""What a driver still says when its program ends without ``disconnect``: at exit, and on SIGTERM.

Neither Ray's shutdown nor a kill flushes anything, so the exit hook asks the registry to end the runtime of a local
Ray (its hosts flush), or gives the lease back; bounded, then the program ends anyway. SIGTERM becomes an ordinary
exit with status 143, unless the program has a handler of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from kimi_ray.actors.calls import call_at_exit
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.ports import registry_name

if TYPE_CHECKING:
    from kimi_ray.actors.ray_cluster import RaySpec

FAREWELL_BOUND_S = 10.0
SIGTERM_STATUS = 128 + signal.SIGTERM


class Farewell:
    """Armed when made, by ``connect``; disarmed by ``cancel``."""

    def __init__(self, spec: RaySpec, lease_id: str, *, ends_runtime: bool) -> None:
        self._spec = spec
        self._lease_id = lease_id
        self._ends_runtime = ends_runtime
        atexit.register(self._at_exit)
        self._has_signal = _take_sigterm()

    def cancel(self) -> None:
        """The connection was ended as it should be. Idempotent."""
        atexit.unregister(self._at_exit)
        if self._has_signal:
            self._has_signal = False
            _give_sigterm_back()

    def _at_exit(self) -> None:
        import ray

        if not ray.is_initialized():
            return
        name = registry_name(self._spec.home_id)
        if self._ends_runtime:
            group, method, args = "default", "shutdown", ()
        else:
            group, method, args = "control", "goodbye", (self._lease_id,)

        def submit() -> Any:
            handle = cast("Any", ray).get_actor(name, namespace=self._spec.namespace)
            return getattr(handle, f"call_{group}").remote(method, args)

        # A registry that is gone already (no such name) needs no farewell.
        with contextlib.suppress(KimiRayError, ValueError):
            call_at_exit(submit, FAREWELL_BOUND_S, target=name, method=method)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    sys.exit(SIGTERM_STATUS)


def _take_sigterm() -> bool:
    """Make SIGTERM an exit; False where the program has its own handler or this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    signal.signal(signal.SIGTERM, _on_sigterm)
    return True


def _give_sigterm_back() -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
