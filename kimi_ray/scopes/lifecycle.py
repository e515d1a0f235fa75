"""Scopes: how long a service lives, how the containers of one lifetime come, and how they go.

``APP < SESSION < AGENT``: a service may depend on services of its own or an outer scope. Containers are dishka's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, cast

from dishka import AsyncContainer, BaseScope, new_scope
from dishka.exceptions import ExitError

from kimi_ray.errors import AgentError

_logger = logging.getLogger(__name__)


class LifecycleScope(BaseScope):
    """The lifetime of a service."""

    APP = new_scope("APP")
    """As long as the process."""
    SESSION = new_scope("SESSION")
    """As long as a session lives here."""
    AGENT = new_scope("AGENT")
    """As long as one agent holds its log."""


class TaskLock:
    """The lock of a container. The task that holds it may take it again: a service may ask while it is built.

    Once it is ended nobody gets it any more, so that nothing is built in a container that nobody will dispose again.
    """

    __slots__ = ("_depth", "_ended", "_lock", "_owner")

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._owner: asyncio.Task[Any] | None = None
        self._depth = 0
        self._ended: str | None = None

    def end(self, name: str) -> None:
        """Whoever wants it from now on gets ``agent.closed``."""
        self._ended = name

    async def __aenter__(self) -> None:
        self._check()
        task = asyncio.current_task()
        if self._owner is not task:
            await self._lock.acquire()
            try:
                self._check()  # it may have been ended while this task waited
            except AgentError:
                self._lock.release()
                raise
            self._owner = task
        self._depth += 1

    async def __aexit__(self, *_exc: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def _check(self) -> None:
        if self._ended is not None:
            raise AgentError(
                f"the scope of {self._ended} was closed: it builds nothing any more",
                code="agent.closed",
                hint="keep services, not the container that built them",
            )


async def open_scope(parent: AsyncContainer, values: Mapping[type, Any]) -> AsyncContainer:
    """The container of the next inner scope; ``dispose`` ends it.

    However many ask it at once, it builds one of each service.

    Args:
        parent: The container of the outer scope, which must outlive it.
        values: Services of the inner scope that exist already, by type.
    """
    return await parent(context=dict(values), lock_factory=TaskLock).__aenter__()


async def dispose(container: AsyncContainer, name: str) -> list[str]:
    """End a container: what was built in it is disposed, newest first. Idempotent.

    A disposer that raises keeps none from its turn: it is logged with the label of the service that it belongs to. Nor
    does a cancel: it is raised when all had theirs.

    Args:
        container: Which.
        name: Whose container it is, for the log.

    Returns:
        The labels of the disposers that raised.
    """
    failed: list[str] = []
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            await container.close()
        except ExitError as group:
            errors = cast("ExceptionGroup[Exception]", group).exceptions
            for error in errors:
                failed.append(_label(error))
                _logger.warning("%s: disposing of %s failed: %r", name, failed[-1], error, exc_info=error)
        except asyncio.CancelledError as error:
            cancelled = error
            continue  # the container has let go of that one disposer: the others are still to come
        break
    if isinstance(container.lock, TaskLock):
        container.lock.end(name)
    if cancelled is not None:
        raise cancelled
    return failed


def _label(error: BaseException) -> str:
    """The factory whose disposer raised: the frame that dishka resumed."""
    resumed = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "a service" if resumed is None else resumed.tb_frame.f_code.co_qualname.rpartition("<locals>.")[2]
