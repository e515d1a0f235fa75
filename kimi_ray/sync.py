"""``run_sync``: async calls from scripts and notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any, TypeVar

from kimi_ray.errors import RuntimeFault

T = TypeVar("T")

_STOP_S = 5.0


class _Background:
    """One event loop in one thread, for as long as the process lives: what a call made lives on for the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="kimi_ray.run_sync", daemon=True)
                self._thread.start()
            return self._loop

    def is_here(self) -> bool:
        return threading.current_thread() is self._thread


_background = _Background()


def run_sync(coro: Awaitable[T], timeout_s: float | None = None) -> T:
    """Run an awaitable to its end and give back what it returned; also where a loop is running already (a notebook).

    All calls of a process share one background loop, so a runtime that one call connected serves the next. Ctrl-C
    cancels the awaitable.

    Args:
        coro: What to run.
        timeout_s: Seconds; then it is cancelled. None waits as long as it takes.

    Raises:
        RuntimeFault: ``runtime.timeout``; ``runtime.wrong_loop`` when called from inside of the background loop.
    """
    if _background.is_here():
        if isinstance(coro, asyncio.Future):
            coro.cancel()
        elif hasattr(coro, "close"):
            coro.close()  # pyright: ignore[reportAttributeAccessIssue,reportUnknownMemberType]
        raise RuntimeFault(
            "run_sync was called inside of an awaitable that run_sync runs",
            code="runtime.wrong_loop",
            hint="await it instead",
        )

    async def whole() -> T:
        bound = asyncio.timeout(timeout_s)
        try:
            async with bound:
                return await coro
        except TimeoutError as error:
            if not bound.expired():
                raise  # the awaitable's own
            raise RuntimeFault(
                f"the call did not end within {timeout_s} s and was cancelled", code="runtime.timeout"
            ) from error

    future: Future[Any] = asyncio.run_coroutine_threadsafe(whole(), _background.loop())
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        _settle(future)
        raise


def _settle(future: Future[Any]) -> None:
    """Give a cancelled awaitable a moment to clean up."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait(_STOP_S)
