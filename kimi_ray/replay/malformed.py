"""Payloads of another shape than their type's: what reading them raises becomes one error with a name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from kimi_ray.errors import LogError

MALFORMED = (KeyError, IndexError, TypeError, AttributeError, ValueError)
"""What following a payload of another shape raises."""


@contextmanager
def shape_of(what: str, **details: object) -> Generator[None]:
    """Reads something that a log says.

    Args:
        what: It, for the message.
        details: Where it stands.

    Raises:
        LogError: ``log.bad_payload``: it is of another shape.
    """
    try:
        yield
    except MALFORMED as error:
        raise wrong_shape(what, error, **details) from error


def wrong_shape(what: str, error: Exception, **details: object) -> LogError:
    """``log.bad_payload``: something that a log says is not of the shape that its type has."""
    return LogError(
        f"{what} does not have the payload of its type: {type(error).__name__}: {str(error)[:200]}",
        code="log.bad_payload",
        hint="kimi_ray.events.payloads says what each type carries",
        details=dict(details),
    )
