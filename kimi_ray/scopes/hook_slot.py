"""A point in the flow of work where others may have a say: named handlers, run one after the other, in order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kimi_ray.errors import ConfigError

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[E]):
    name: str
    handler: Callable[[E], Awaitable[None]]


class HookSlot(Generic[E]):
    """Handlers of one kind of event.

    Each handler is awaited with the event and may change it; ``run`` ends early once the event says that it is
    ``decided`` (an attribute of that name, where it has one). What a handler raises is raised to whoever runs the slot.

    Args:
        name: For messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._entries: tuple[_Entry[E], ...] = ()

    def __bool__(self) -> bool:
        """Whether anybody listens: a slot that nobody uses costs nothing."""
        return bool(self._entries)

    @property
    def handlers(self) -> tuple[str, ...]:
        """The names of the handlers, in order."""
        return tuple(entry.name for entry in self._entries)

    def register(
        self,
        name: str,
        handler: Callable[[E], Awaitable[None]],
        *,
        before: str | None = None,
        after: str | None = None,
    ) -> None:
        """Add a handler, at the end or beside another; one of the same name is replaced where it is.

        Args:
            name: Unique in the slot.
            handler: Awaited with each event.
            before: The handler to come before.
            after: The handler to come after.

        Raises:
            ConfigError: ``config.hook_order`` for both at once, or for an anchor that is not there or is itself.
        """
        entry = _Entry(name, handler)
        entries = list(self._entries)
        names = self.handlers
        anchor = before if before is not None else after
        if (before is not None and after is not None) or (anchor is not None and anchor not in {*names} - {name}):
            raise ConfigError(
                f"the handler {name!r} cannot be placed in the slot {self.name}: before={before!r}, after={after!r}",
                code="config.hook_order",
                hint=f"name one handler that is there: {', '.join(names) or 'none is'}",
                details={"slot": self.name, "handler": name},
            )
        if anchor is not None:
            entries = [known for known in entries if known.name != name]
            at = next(index for index, known in enumerate(entries) if known.name == anchor)
            entries.insert(at if before is not None else at + 1, entry)
        elif name in names:
            entries[names.index(name)] = entry
        else:
            entries.append(entry)
        self._entries = tuple(entries)

    def remove(self, name: str) -> None:
        """Take a handler away. Idempotent."""
        self._entries = tuple(entry for entry in self._entries if entry.name != name)

    async def run(self, event: E) -> E:
        """Await the handlers that are registered now, in order; gives the event back."""
        for entry in self._entries:
            await entry.handler(event)
            if getattr(event, "decided", False):
                break
        return event
