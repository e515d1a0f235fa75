"""The models that an agent may give to agents of its own. Their tables and keys stay with programs; this travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_ray.errors import ConfigError, error_from_data
from kimi_ray.llm.models import ResolvedModel, resolve_model


@dataclass(frozen=True, slots=True)
class ReachableModels:
    """What a program's tables and its profiles' models meant when it opened a session.

    Travels to hosts in the call that brings a session or an agent to life, and nowhere else.
    """

    tables: tuple[str, ...] = ()
    """The names of the ``[models.X]`` tables, in order of the alphabet."""
    models: Mapping[str, ResolvedModel] = field(default_factory=dict[str, ResolvedModel], repr=False)
    """Those of the tables, and those that profiles name."""
    refused: Mapping[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]], repr=False)
    """Why others cannot be reached: ``KimiRayError.to_data``."""

    def configured(self, name: str) -> ResolvedModel:
        """The model of a table.

        Raises:
            ConfigError: ``model.not_configured`` {model, configured}; what the program met: ``model.no_api_key``.
        """
        if name not in self.tables:
            raise ConfigError(
                f"no model {name!r} is configured",
                code="model.not_configured",
                hint=f"leave it out for your own; configured are {', '.join(self.tables) or 'none'}",
                details={"model": name, "configured": list(self.tables)},
            )
        return self.resolve(name, {})

    def resolve(self, name: str, environ: Mapping[str, str]) -> ResolvedModel:
        """What a name means; one that the program did not know needs no table, or is on the wire of a known server.

        Args:
            name: The name.
            environ: Where ``OPENAI_BASE_URL`` and the key are looked up then.

        Raises:
            ConfigError: ``model.not_configured``, ``model.no_api_key``, ``model.bad_base_url``.
        """
        found = self.models.get(name)
        if found is not None:
            return found
        if name in self.refused:
            raise error_from_data(dict(self.refused[name]))
        return resolve_model(name, {}, None, environ)


NO_MODELS = ReachableModels()
