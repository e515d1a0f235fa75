"""A Feature: one class that brings a capability, everything of it, to a runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from dishka import Provider

from kimi_ray.events.catalog import EventType
from kimi_ray.settings import Profile


class Feature:
    """What a capability contributes. Subclass it and override what is needed; it is built once for each host.

    It is found by the entry point group ``kimi_ray.features``, or named in the setting ``features`` as
    ``package.module:Class``. It is built with no arguments in each host process, and in each program that connects
    (which asks it for names, profiles and event types only); what it needs comes by its services' constructors
    (``RuntimeConfig`` for one).
    """

    name: ClassVar[str] = ""
    """Unique among features."""

    def services(self) -> Sequence[Provider]:
        """dishka providers of services, each of the scope ``LifecycleScope.APP``, ``SESSION`` or ``AGENT``.

        No two Features may bring one service. One that kimi-ray brings itself is replaced with ``override=True``.
        Classes that ``on_agent``, ``on_session``, ``tools`` and ``tool_sources`` name need no provider of their own.
        """
        return ()

    def on_agent(self) -> Sequence[type]:
        """Services of the Agent scope that are built with each agent, in this order, and not only at first use.

        This is how handlers come into an agent's slots: their constructor registers them.
        """
        return ()

    def on_session(self) -> Sequence[type]:
        """Services of the Session scope that are built with each session on an agent host."""
        return ()

    def tools(self) -> dict[str, type]:
        """Tools by name: the class of each is a service of the Agent scope, built when a profile lists the name.

        A built-in tool of the same name gives way.
        """
        return {}

    def tool_sources(self) -> Sequence[type]:
        """Services (``kimi_ray.tools.ToolSource``) that offer tools whose names are not known before they are asked."""
        return ()

    def tool_prefixes(self) -> Sequence[str]:
        """How the names of tools begin that its sources offer: such names are not refused before a source is asked."""
        return ()

    def profiles(self) -> Sequence[Profile]:
        """Profiles by which agents may be asked for."""
        return ()

    def event_types(self) -> Sequence[EventType]:
        """Types of events that it writes, as ``family/what``. They cannot be on the surface.

        An ``ignorable`` one is passed over by programs without this Feature; a log with another one needs it.
        """
        return ()

    def commands(self) -> dict[str, Any]:
        """Commands of ``kimi-ray``: by name, a function as typer takes it, or a ``typer.Typer`` of several."""
        return {}
