"""The Features of a host process: found once, checked, and asked for what they bring."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from dishka import AsyncContainer, Provider

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import ConfigError
from kimi_ray.features import BUILTIN
from kimi_ray.scopes import Feature
from kimi_ray.settings import Profile
from kimi_ray.tools.contract import Tool, ToolSource

GROUP = "kimi_ray.features"
"""The entry point group in which packages offer Features."""


class Features:
    """All Features of this process, built-in ones first.

    Raises:
        ConfigError: ``config.feature`` for two of one name, or two that bring one tool or profile.
    """

    def __init__(self, features: Iterable[Feature]) -> None:
        self._features = tuple(features)
        self._tools: dict[str, type] = {}
        self.profiles: dict[str, Profile] = {}
        """Profiles that Features bring, by name."""
        owners: dict[tuple[str, str], str] = {}
        for feature in self._features:
            self._claim(owners, "feature", feature.name, feature)
            for name, tool in feature.tools().items():
                self._claim(owners, "tool", name, feature)
                self._tools[name] = tool
            for profile in feature.profiles():
                self._claim(owners, "profile", profile.name, feature)
                self.profiles[profile.name] = profile

    def __iter__(self) -> Any:
        return iter(self._features)

    @staticmethod
    def _claim(owners: dict[tuple[str, str], str], kind: str, name: str, feature: Feature) -> None:
        first = owners.setdefault((kind, name), type(feature).__qualname__)
        if not name or owners[kind, name] != type(feature).__qualname__:
            raise ConfigError(
                f"the {kind} {name!r} of the feature {type(feature).__qualname__} is also that of {first}"
                if name
                else f"the feature {type(feature).__qualname__} has no name",
                code="config.feature",
                hint="give it a name of its own, or load only one of the two",
                details={"kind": kind, "name": name},
            )

    def services(self) -> list[Provider]:
        """The providers of all."""
        return [provider for feature in self._features for provider in feature.services()]

    def on_agent(self) -> list[type]:
        """What is built with each agent."""
        return [service for feature in self._features for service in feature.on_agent()]

    def on_session(self) -> list[type]:
        """What is built with each session of a host."""
        return [service for feature in self._features for service in feature.on_session()]

    async def tools_for(self, container: AsyncContainer, names: Sequence[str]) -> list[Tool]:
        """The tools of Features among these names, built in the agent's scope."""
        found: list[Tool] = [await container.get(self._tools[name]) for name in names if name in self._tools]
        for feature in self._features:
            for service in feature.tool_sources():
                source = cast("ToolSource", await container.get(service))
                found.extend(await source.tools(names))
        return found

    @staticmethod
    def without_patterns(names: Sequence[str], offered: Sequence[Tool]) -> list[str]:
        """The names, each pattern in place replaced by the offered tools that it means."""
        resolved: list[str] = []
        for name in names:
            if "*" in name:
                resolved.extend(tool.name for tool in offered if fnmatchcase(tool.name, name))
            else:
                resolved.append(name)
        return resolved


def load_features(config: RuntimeConfig) -> Features:
    """The Features of this process: built-in ones, those of installed packages, those that the settings name.

    Raises:
        ConfigError: ``config.feature`` naming the one that cannot be loaded, and why.
    """
    built: list[Feature] = [kind() for kind in BUILTIN]
    installed = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    kinds = [_kind(entry.value, entry) for entry in installed]
    for name in config.features:
        kind = _kind(name, None)
        if kind not in kinds:
            kinds.append(kind)
    for kind in kinds:
        try:
            built.append(kind())
        except Exception as error:
            raise _refused(kind.__qualname__, f"cannot be built: {error}") from error
    return Features(built)


def _kind(name: str, entry: EntryPoint | None) -> type[Feature]:
    try:
        if entry is not None:
            found = entry.load()
        else:
            module, _, attribute = name.partition(":")
            found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise _refused(name, f"cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Feature)):
        raise _refused(name, "is no subclass of kimi_ray.Feature")
    return found


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the feature {name} {why}",
        code="config.feature",
        hint="name it as package.module:Class; it must be importable on every node",
        details={"feature": name},
    )
