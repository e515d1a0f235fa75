"""The models of a program: the ``[models.X]`` tables with their settings, and what a model's name means."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kimi_ray.config import RuntimeConfig, load_models
from kimi_ray.errors import ConfigError
from kimi_ray.llm.models import ModelSettings, ResolvedModel, resolve_model
from kimi_ray.llm.reachable import ReachableModels
from kimi_ray.settings import Profile


class ModelCatalogue:
    """Which models are configured, and how each is reached from here.

    An App service of hosts, and ``runtime.models`` of a program. The tables stay with programs, since they may hold
    keys: on hosts the catalogue has none, and agents bring their models with them.

    Args:
        config: The settings that hold the tables.
        environ: Where keys and ``OPENAI_BASE_URL`` are looked up; None is this process's environment.

    Raises:
        ConfigError: ``config.invalid`` naming the table and the key.
    """

    def __init__(self, config: RuntimeConfig, environ: Mapping[str, str] | None = None) -> None:
        self._tables = load_models(config)
        self._environ = os.environ if environ is None else environ
        self.default = config.default_model
        """The model of agents and profiles that name none; None leaves it to the tables."""

    def __iter__(self) -> Iterator[str]:
        """The names of the tables, in order of the alphabet."""
        return iter(sorted(self._tables))

    def __len__(self) -> int:
        return len(self._tables)

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def settings(self, name: str) -> ModelSettings | None:
        """The settings of a table, or None when there is none of that name."""
        return self._tables.get(name)

    def resolve(self, name: str | None = None, base_url: str | None = None) -> ResolvedModel:
        """What a name means here, key included.

        Args:
            name: A table's, ``scripted`` and the like, or a name on the wire; None is the default.
            base_url: An address in place of the table's.

        Raises:
            ConfigError: ``model.not_configured``, ``model.no_api_key``, ``model.bad_base_url``.
        """
        return resolve_model(name or self.default, self._tables, base_url, self._environ)

    def reachable(self, profiles: Iterable[Profile] = ()) -> ReachableModels:
        """All tables, resolved, for agents that start others; with the models that profiles name.

        One that cannot be reached from here is in there with the reason, which whoever asks for it is told.
        """
        models: dict[str, ResolvedModel] = {}
        refused: dict[str, dict[str, Any]] = {}
        named = [profile.model for profile in profiles if profile.model is not None]
        for name in dict.fromkeys([*self, *named]):
            try:
                models[name] = self.resolve(name)
            except ConfigError as error:
                refused[name] = error.to_data()
        return ReachableModels(tuple(self), models, refused)
