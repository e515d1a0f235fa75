"""Small pickles for the few classes that travel with every turn: their values by place, not their fields by name.

Python writes a frozen dataclass with slots, or a pydantic model, through functions of its own that look every field up
each time. A turn pays that four times: on its way to the host and back, at both ends.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def pickled_by_place(cls: T) -> T:
    """Class decorator: a frozen dataclass of at least two fields is pickled as a call of its class."""
    values = attrgetter(*(each.name for each in fields(cls)))

    def reduce(self: Any) -> tuple[T, tuple[Any, ...]]:
        return cls, values(self)

    setattr(cls, "__reduce__", reduce)  # noqa: B010  a checker takes it for a method of the class's own class
    return cls
