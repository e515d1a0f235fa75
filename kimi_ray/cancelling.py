"""Whether an exception ends the task that sees it, or was only raised by somebody else's code inside it.

Code of users (tools, scripted models) may raise anything, a ``CancelledError``, ``SystemExit`` or ``KeyboardInterrupt``
of its own included. Taken for the task's own end, such a thing leaves whoever waits for that task waiting for ever, or
ends the whole process with all of its agents. (A real Ctrl-C does not come this way: the event loop's own handler
turns it into a cancellation.)
"""

from __future__ import annotations

import asyncio


def ends_this_task(error: BaseException) -> bool:
    """True for a cancellation that was asked of the running task; False for whatever the code it runs has raised."""
    if not isinstance(error, asyncio.CancelledError | GeneratorExit):
        return False
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
