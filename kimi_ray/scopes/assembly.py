"""Assembling: the App container from what contributes services, checked as a whole before anything is built.

What is missing, in a circle, of the wrong scope or brought twice is found here, not in the middle of a run, and told
as a path of services in plain words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

from dishka import STRICT_VALIDATION, AsyncContainer, Provider, make_async_container
from dishka.exception_base import DishkaError
from dishka.exceptions import (
    CycleDependenciesError,
    GraphMissingFactoryError,
    ImplicitOverrideDetectedError,
    NothingOverriddenError,
    UnknownScopeError,
)

from kimi_ray.errors import ConfigError
from kimi_ray.scopes.lifecycle import LifecycleScope, TaskLock

_SERVICES_HINT = "look at the constructors of the path: each parameter needs a provider of the same or an outer scope"


def assemble(
    providers: Iterable[Provider],
    values: Mapping[type, Any],
    asked: Iterable[tuple[type, LifecycleScope]] = (),
) -> AsyncContainer:
    """The App container of this process, checked as a whole.

    Args:
        providers: What contributes services, of any scope. A later one may replace a service of an earlier one, in its
            scope, when it says ``override=True``.
        values: Services that exist already (the config, the cluster), by type.
        asked: Services that will be asked for, and in which scope.

    Raises:
        ConfigError: ``config.assembly`` naming the missing, circular, wrong-scope or doubled dependency and its path.
    """
    listed = list(providers)
    services = Services(listed)
    services.check_overrides()
    try:
        container = make_async_container(
            *listed,
            scopes=LifecycleScope,
            context=dict(values),
            lock_factory=TaskLock,
            validation_settings=STRICT_VALIDATION,
        )
    except DishkaError as error:
        raise services.explained(error) from error
    for service, scope in asked:
        services.check_asked(service, scope, values)
    return container


def service_name(service: Any) -> str:
    """How a service is called in messages: its class's name, with what it is of."""
    arguments = get_args(service)
    if get_origin(service) is not None and arguments:
        return f"{service_name(get_origin(service))}[{', '.join(service_name(part) for part in arguments)}]"
    return str(getattr(service, "__qualname__", service)).rpartition("<locals>.")[2]


def provided_by(provider: Provider) -> dict[Any, LifecycleScope | None]:
    """The services that a provider brings, with their scopes; None is the scope of what an alias stands for."""
    found: dict[Any, Any] = {}
    for source in (*provider.context_vars, *provider.factories):
        found[source.provides.type_hint] = source.scope
    for alias in provider.aliases:
        found[alias.provides.type_hint] = None
    return found


class Services:
    """All services that providers bring: what depends on what, to explain what does not fit.

    Args:
        providers: In order.
    """

    def __init__(self, providers: Sequence[Provider]) -> None:
        self._providers = providers
        self._scopes: dict[Any, LifecycleScope | None] = {}
        self._needs: dict[Any, list[Any]] = {}
        for provider in providers:
            self._scopes.update(provided_by(provider))
            for factory in provider.factories:
                keys = (*factory.dependencies, *factory.kw_dependencies.values())
                self._needs[factory.provides.type_hint] = [key.type_hint for key in keys]
            for alias in provider.aliases:
                self._needs[alias.provides.type_hint] = [alias.source.type_hint]

    def check_overrides(self) -> None:
        """Refuse a replacement that lives longer or shorter than what it replaces.

        Raises:
            ConfigError: ``config.assembly``.
        """
        first: dict[Any, LifecycleScope] = {}
        for provider in self._providers:
            for service, scope in provided_by(provider).items():
                if scope is not None and first.setdefault(service, scope) is not scope:
                    raise _refused(
                        f"{service_name(service)} is of the {first[service].name} scope and cannot be replaced by one "
                        f"of the {scope.name} scope",
                        "give the replacement the scope of what it replaces",
                        [service],
                    )

    def check_asked(self, service: type, scope: LifecycleScope, values: Mapping[type, Any]) -> None:
        """Refuse what will be asked for where it cannot be had.

        Raises:
            ConfigError: ``config.assembly``.
        """
        name = service_name(service)
        if service not in self._scopes and service not in values:
            raise _refused(f"{name} is asked for in the {scope.name} scope, and nobody provides it", None, [service])
        own = self._scopes.get(service)
        if own is not None and own > scope:
            raise _refused(
                f"{name} is of the {own.name} scope and is asked for in the {scope.name} scope, which outlives it",
                None,
                [service],
            )

    def explained(self, error: DishkaError) -> ConfigError:
        """What dishka found, in plain words."""
        match error:
            case CycleDependenciesError():
                circle = [factory.provides.type_hint for factory in error.path]
                return self._circle(circle)
            case GraphMissingFactoryError():
                return self._missing([factory.provides.type_hint for factory in error.path], error.requested.type_hint)
            case ImplicitOverrideDetectedError():
                service = error.new.provides.type_hint
                sources = " and ".join(sorted({service_name(one.source) for one in (error.existing, error.new)}))
                return _refused(
                    f"{service_name(service)} is provided twice, by {sources}",
                    "remove one; to replace a built-in service, say so: provide(..., override=True)",
                    [service],
                )
            case NothingOverriddenError():
                service = error.factory.provides.type_hint
                return _refused(
                    f"{service_name(error.factory.source)} is to replace {service_name(service)}, which there is not",
                    "leave override=True out",
                    [service],
                )
            case UnknownScopeError():
                service = error.factory.provides.type_hint
                return _refused(
                    f"{service_name(service)} has the scope {error.scope}, which there is not",
                    "take LifecycleScope.APP, SESSION or AGENT",
                    [service],
                )
            case _:
                return _refused(str(error), None, [])

    def _missing(self, path: list[Any], missing: Any) -> ConfigError:
        """A dependency that is not there, or not in a scope where it could be had."""
        way_back = self._way(missing, set(path))
        if way_back:  # a circle that goes through an inner scope
            return self._circle([*path[path.index(way_back[-1]) :], *way_back[:-1]])
        if self._scopes.get(missing) is None or not path:
            return _refused(
                f"{service_name(path[-1])} needs {service_name(missing)}, which nobody provides"
                if path
                else f"nobody provides {service_name(missing)}",
                None,
                [*path, missing],
            )
        outer, inner = self._scopes.get(path[-1]), self._scopes[missing]
        assert inner is not None
        return _refused(
            f"{service_name(path[-1])}{f' of the {outer.name} scope' if outer else ''} cannot have "
            f"{service_name(missing)} of the {inner.name} scope, which ends before it",
            f"give {service_name(path[-1])} the scope {inner.name}, or {service_name(missing)} an outer one",
            [*path, missing],
        )

    def _circle(self, circle: list[Any]) -> ConfigError:
        return _refused(
            "services depend on each other in a circle", "let one of them do without", [*circle, *circle[:1]]
        )

    def _way(self, start: Any, goals: set[Any]) -> list[Any]:
        """The shortest way along dependencies from ``start`` to one of ``goals``, both ends included; or nothing."""
        ways: dict[Any, list[Any]] = {start: [start]}
        queue = [start]
        for service in queue:
            if service in goals:
                return ways[service]
            for needed in self._needs.get(service, ()):
                if needed not in ways:
                    ways[needed] = [*ways[service], needed]
                    queue.append(needed)
        return []


def _refused(problem: str, hint: str | None, path: Sequence[Any]) -> ConfigError:
    shown = " -> ".join(service_name(service) for service in path)
    return ConfigError(
        f"the services do not fit together: {problem}" + (f": {shown}" if len(path) > 1 else ""),
        code="config.assembly",
        hint=hint or _SERVICES_HINT,
        details={"path": [f"{getattr(one, '__module__', '')}.{service_name(one)}".lstrip(".") for one in path]},
    )
