"""The model of an agent's next turn, which may be another one than it was brought to life with."""

from __future__ import annotations

from kimi_ray.llm.models import ResolvedModel


class ModelInUse:
    """The model that an agent speaks to, and those that it spoke to in this life.

    Args:
        model: The one to begin with.
    """

    def __init__(self, model: ResolvedModel) -> None:
        self._known = {model.name: model}
        self.model = model
        """The model of the next turn."""

    def switch(self, model: ResolvedModel) -> None:
        """Another one from the next turn on."""
        self._known[model.name] = model
        self.model = model

    def known(self, name: str) -> ResolvedModel | None:
        """One that the agent speaks to, or spoke to in this life."""
        return self._known.get(name)
