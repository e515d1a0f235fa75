"""A user's code by its name, ``package.module:attribute``: tools, scripts, factories, schemas, Features."""

from __future__ import annotations

import importlib
import os
from typing import Any

GUARD = 'importing a module runs it: what only a program should do belongs under `if __name__ == "__main__":`'


class CannotLoadError(Exception):
    """A name that means nothing here. Whoever asked says so with an error of its own.

    Attributes:
        why: The reason, in words: the import's own error, or what is missing.
        hint: The way out, where it is known.
    """

    def __init__(self, why: str, hint: str | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint


def load_named(reference: str) -> Any:
    """What a name means; its module is imported.

    Args:
        reference: ``package.module:attribute``, with further dots for what is inside.

    Raises:
        CannotLoadError: It means nothing, or its module raised something.
    """
    module, _, path = reference.partition(":")
    if not module or not path:
        raise CannotLoadError("it is not of the form package.module:attribute")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            if not hasattr(found, part):
                raise CannotLoadError(f"{module} has no {path}")
            found = getattr(found, part)
    except (CannotLoadError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # A module's body may raise anything; a SystemExit would end a host with all of its agents.
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            why = f"no module {module!r} in {os.getcwd()} or on the path"
            raise CannotLoadError(
                why, "write package.module:name, and run where that module is, or install it"
            ) from error
        hint = None if isinstance(error, ImportError) else GUARD
        raise CannotLoadError(f"the module {module} raised {type(error).__name__}: {error}", hint) from error
    return found
