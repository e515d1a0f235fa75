"""The model of an agent's next turn, which may be another one than it was brought to life with."""

from __future__ import annotations

from collections.abc import Callable

from kimi_ray.llm.chat import ChatProvider
from kimi_ray.llm.models import ResolvedModel


class ModelInUse:
    """The model that an agent speaks to, and those that it spoke to in this life.

    Args:
        model: The one to begin with.
        provider: Its server.
    """

    def __init__(self, model: ResolvedModel, provider: ChatProvider) -> None:
        self._known = {model.name: model}
        self._listeners: list[Callable[[], None]] = []
        self.model = model
        """The model of the next turn."""
        self.provider = provider
        """Its server."""

    def switch(self, model: ResolvedModel, provider: ChatProvider) -> None:
        """Another one from the next turn on."""
        self._known[model.name] = model
        self.model, self.provider = model, provider
        for listener in self._listeners:
            listener()

    def on_switch(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when there is another model."""
        self._listeners.append(listener)

    def known(self, name: str) -> ResolvedModel | None:
        """One that the agent speaks to, or spoke to in this life."""
        return self._known.get(name)
