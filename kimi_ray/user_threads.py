"""Calls of a user's code in threads of their own.

Daemons, unlike the threads of an executor: a function that never ends must not keep the program from ending.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Outcome = tuple[BaseException | None, Any]
"""What a call raised, or what it returned."""


def call_in_thread(function: Callable[[], Any], name: str) -> asyncio.Future[Outcome]:
    """Begin a call, in a copy of the caller's context. Wait for it shielded: nothing interrupts a thread.

    What it raises is no exception of the future: a ``StopIteration`` cannot pass one, and a ``KeyboardInterrupt`` or
    ``SystemExit`` would end the loop.

    Args:
        function: What is called.
        name: Of the thread.

    Raises:
        RuntimeError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Outcome] = loop.create_future()

    def tell(outcome: Outcome) -> None:
        if not ended.done():
            ended.set_result(outcome)

    def work(variables: contextvars.Context) -> None:
        try:
            outcome: Outcome = None, variables.run(function)
        except BaseException as error:  # noqa: BLE001  told to whoever waits
            outcome = error, None
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            loop.call_soon_threadsafe(tell, outcome)

    threading.Thread(target=work, args=(contextvars.copy_context(),), name=name, daemon=True).start()
    return ended


def raisable(error: BaseException) -> Exception | SystemExit:
    """What a call raised, fit to be raised where it is waited for: neither an end of the loop nor of a coroutine."""
    if isinstance(error, Exception | SystemExit) and not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    told.__cause__ = error
    return told
