"""The Features of a process: found once, checked against each other, and asked for what they bring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from dishka import AsyncContainer, Provider

from kimi_ray.agent.profiles import BUILTIN as BUILTIN_PROFILES
from kimi_ray.agent.profiles import resolve_profile
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import ConfigError, KimiRayError
from kimi_ray.events import CORE, Catalog, EventType
from kimi_ray.features import BUILTIN
from kimi_ray.named_code import CannotLoadError, load_named
from kimi_ray.scopes import Feature, LifecycleScope, provided_by, service_name
from kimi_ray.settings import Profile
from kimi_ray.tools.contract import Tool, ToolSource
from kimi_ray.tools.registry import select_tools

GROUP = "kimi_ray.features"
"""The entry point group in which packages offer Features."""


class Features:
    """All Features of this process, built-in ones first.

    Raises:
        ConfigError: ``config.feature`` for one that has no name or cannot say what it brings, and for two that have
            one name or bring one service, tool, profile, event type or command.
    """

    def __init__(self, features: Iterable[Feature]) -> None:
        self._features = tuple(features)
        self._owners: dict[tuple[str, Any], Feature] = {}
        self._tools: dict[str, type] = {}
        self._prefixes: tuple[str, ...] = ()
        self._providers: list[Provider] = []
        self.profiles: dict[str, Profile] = {}
        """Profiles that Features bring, by name."""
        self.commands: dict[str, Any] = {}
        """Commands that Features bring, by name."""
        types: list[EventType] = []
        for feature in self._features:
            self._claim("feature", feature.name, feature)
            try:
                types.extend(self._take(feature))
            except KimiRayError:
                raise
            except Exception as error:
                raise _refused(_class_name(feature), f"cannot say what it brings: {error}") from error
        self.catalog: Catalog = CORE.with_types(types) if types else CORE
        """Every event type that agents of this process may write."""

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features)

    def _take(self, feature: Feature) -> Sequence[EventType]:
        for name, tool in feature.tools().items():
            self._claim("tool", name, feature)
            self._tools[name] = tool
        self._prefixes += tuple(feature.tool_prefixes())
        for profile in feature.profiles():
            self._claim("profile", profile.name, feature, builtin=BUILTIN_PROFILES)
            self.profiles[profile.name] = profile
        for name, command in feature.commands().items():
            self._claim("command", name, feature)
            self.commands[name] = command
        for entry in feature.event_types():
            self._claim("event type", entry.name, feature, builtin=CORE)
            if entry.surface or "/" not in entry.name:
                raise _refused(
                    _class_name(feature),
                    f"has an event type {entry.name!r} that is on the surface, or not named family/what",
                )
        own = list(feature.services())
        scopes = {service: scope for provider in own for service, scope in provided_by(provider).items()}
        for service in scopes:
            self._claim("service", service, feature)
        for name, tool in feature.tools().items():
            if scopes.get(tool) not in (None, LifecycleScope.AGENT):
                raise _refused(
                    _class_name(feature), f"would have agents share its tool {name}: give it the AGENT scope"
                )
        self._providers.extend(own)
        return feature.event_types()

    def _claim(self, kind: str, key: Any, feature: Feature, builtin: Any = ()) -> None:
        name = key if isinstance(key, str) else service_name(key)
        if not name:
            what = "no name" if kind == "feature" else f"a {kind} without a name"
            raise _refused(_class_name(feature), f"has {what}")
        first = self._owners.setdefault((kind, key), feature)
        if first is feature and key not in builtin:
            return
        whose = "kimi-ray itself" if first is feature else f"the feature {_class_name(first)}"
        raise ConfigError(
            f"the {kind} {name!r} of the feature {_class_name(feature)} is also that of {whose}",
            code="config.feature",
            hint="give it a name of its own, or load only one of the two",
            details={"kind": kind, "name": name},
        )

    @property
    def only_builtin(self) -> bool:
        """Whether there is none but those of kimi-ray itself."""
        return all(type(feature) in BUILTIN for feature in self._features)

    def services(self, builtin: Sequence[Provider]) -> list[Provider]:
        """The providers of all, and one for the classes that Features name and nobody provides.

        Args:
            builtin: The providers that there are besides.

        Raises:
            ConfigError: ``config.feature`` for a class whose constructor cannot be understood.
        """
        provided = {service for provider in (*builtin, *self._providers) for service in provided_by(provider)}
        extra = Provider()
        for service, scope in self.asked():
            if service in provided:
                continue
            provided.add(service)
            try:
                extra.provide(service, scope=scope)
            except Exception as error:
                raise _refused(service_name(service), f"has a constructor that says too little: {error}") from error
        return [*self._providers, extra]

    def asked(self) -> list[tuple[type, LifecycleScope]]:
        """The services that will be asked for, and in which scope."""
        in_agents = [*self.on_agent(), *self._tools.values()]
        for feature in self._features:
            in_agents.extend(feature.tool_sources())
        return [(service, LifecycleScope.SESSION) for service in self.on_session()] + [
            (service, LifecycleScope.AGENT) for service in in_agents
        ]

    def on_agent(self) -> list[type]:
        """What is built with each agent."""
        return [service for feature in self._features for service in feature.on_agent()]

    def on_session(self) -> list[type]:
        """What is built with each session of a host."""
        return [service for feature in self._features for service in feature.on_session()]

    @property
    def tools(self) -> Mapping[str, type]:
        """The classes of the Features' tools, by name."""
        return self._tools

    async def tools_for(self, container: AsyncContainer, names: Sequence[str]) -> list[Tool]:
        """The tools of Features among these names, built in the agent's scope."""
        found: list[Tool] = []
        for name in names:
            if name in self._tools:
                tool = cast("Tool", await container.get(self._tools[name]))
                if tool.name != name:
                    kind = service_name(self._tools[name])
                    raise _refused(kind, f"is brought as the tool {name!r}, and is called {tool.name!r}")
                found.append(tool)
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

    def check_tools(self, names: Sequence[str], own: Sequence[Tool]) -> None:
        """Refuse tools that no agent of this runtime could have, before one is asked for.

        Args:
            names: What a profile lists.
            own: The user's tools.

        Raises:
            ToolError: ``tool.unknown``, ``tool.duplicate``, ``tool.bad_signature``.
        """
        asked_later = [name for name in names if "*" in name or name.startswith(self._prefixes)]
        select_tools(names, own, elsewhere=[*self._tools, *asked_later])

    def profile(self, profile: str | Profile) -> Profile:
        """A profile by name, those of Features among them, or the object as it is.

        Raises:
            ConfigError: ``profile.unknown``.
        """
        return resolve_profile(profile, self.profiles)


def load_features(config: RuntimeConfig) -> Features:
    """The Features of this process: built-in ones, those of installed packages, those that the settings name.

    Raises:
        ConfigError: ``config.feature`` naming the one that cannot be loaded, and why.
    """
    kinds: list[type[Feature]] = list(BUILTIN)
    installed = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    found = [_kind(entry.value, entry) for entry in installed] + [_kind(name, None) for name in config.features]
    kinds.extend(kind for kind in found if kind not in BUILTIN)
    built: list[Feature] = []
    for kind in dict.fromkeys(kinds):
        try:
            built.append(kind())
        except Exception as error:
            raise _refused(kind.__qualname__, f"cannot be built: {error}") from error
    return Features(built)


def _kind(name: str, entry: EntryPoint | None) -> type[Feature]:
    try:
        found = load_named(name if entry is None else f"{entry.module}:{entry.attr}")
    except CannotLoadError as error:
        raise _refused(name, f"cannot be imported: {error.why}", error.hint) from error
    if not (isinstance(found, type) and issubclass(found, Feature)):
        raise _refused(name, "is no subclass of kimi_ray.Feature")
    return found


def _class_name(feature: Feature) -> str:
    kind = type(feature)
    return f"{kind.__module__}:{kind.__qualname__}"


def _refused(name: str, why: str, hint: str | None = None) -> ConfigError:
    return ConfigError(
        f"the feature {name} {why}",
        code="config.feature",
        hint=hint or "name it as package.module:Class; it must be importable on every node",
        details={"feature": name},
    )
