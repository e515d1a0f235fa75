"""A user's code by its name, ``package.module:attribute``."""

from __future__ import annotations

import importlib
from typing import Any

from kimi_ray.errors import ToolError


def load_named(reference: str, kind: str) -> Any:
    """What a name means; its module is imported.

    Args:
        reference: ``package.module:attribute``, with further dots for what is inside.
        kind: What it should be, for messages: ``tool``, ``rollout function``.

    Raises:
        ToolError: ``tool.not_importable`` {reference, reason}, with the import's own error.
    """
    module_name, _, path = reference.partition(":")
    if not module_name or not path:
        raise not_importable(reference, kind, "it is not of the form package.module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a module's body may raise anything
        raise not_importable(reference, kind, f"{type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise not_importable(reference, kind, f"{module_name} has no {path}")
        found = getattr(found, part)
    return found


def not_importable(reference: str, kind: str, why: str) -> ToolError:
    """``tool.not_importable``."""
    return ToolError(
        f"the {kind} {reference!r} cannot be imported: {why}",
        code="tool.not_importable",
        hint="write package.module:function; the module must be importable on every node: install it there, or pass it"
        " by runtime_env",
        details={"reference": reference, "reason": why},
    )
