"""Places at a model's server: what an attempt takes before it asks, and gives back with how it went."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self

from kimi_ray.llm.chat import ChatProvider, ChatRequest, Chunk


class Place(Protocol):
    """One request's place. A context manager: its body is the attempt, and how the body ends is its result.

    A body that ends was served; one that raises ``ProviderError`` failed so; any other exception says nothing of the
    server.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Slots(Protocol):
    """The places that this process has at one server."""

    def take_now(self) -> Place | None:
        """A place that is free at this moment, or None; nobody who waits is overtaken."""
        ...

    async def take(self) -> Place:
        """A place, in the order of asking. Cancelling leaves the queue."""
        ...


class SharedProvider:
    """A provider whose server has counted places.

    Args:
        inner: What asks the server.
        slots: The places. An attempt takes one, streams, and gives it back; the provider does not look at them.
    """

    def __init__(self, inner: ChatProvider, slots: Slots) -> None:
        self._inner = inner
        self.slots = slots

    @property
    def name(self) -> str:
        """The inner provider's."""
        return self._inner.name

    def stream(self, request: ChatRequest) -> AsyncIterator[Chunk]:
        """The inner provider's stream itself."""
        return self._inner.stream(request)

    async def close(self) -> None:
        """Close the inner provider. Idempotent."""
        await self._inner.close()


def slots_of(provider: ChatProvider) -> Slots | None:
    """The places at a provider's server; None: as many requests at once as anybody wants."""
    return provider.slots if isinstance(provider, SharedProvider) else None
