"""Filters of items: ``column=value``, ``column!=value``, ``column~regex``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kimi_ray.errors import RunError

_FORM = re.compile(r"\A(?P<column>[^=!~]+)(?P<operator>!=|=|~)(?P<value>.*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Filter:
    """One condition on a column. Values that are not strings are compared as JSON: ``true``, ``3``, ``null``."""

    column: str
    operator: Literal["=", "!=", "~"]
    value: str

    @classmethod
    def parse(cls, text: str) -> Filter:
        """Read the command line's form.

        Raises:
            RunError: ``items.bad_filter``.
        """
        found = _FORM.match(text)
        if found is None:
            raise _bad_filter(text, "has no column and operator")
        column, operator, value = found["column"].strip(), found["operator"], found["value"]
        if operator == "~":
            try:
                re.compile(value)
            except re.error as error:
                raise _bad_filter(text, f"is not a regular expression: {error}") from None
            return cls(column, "~", value)
        return cls(column, "!=" if operator == "!=" else "=", value)

    def holds(self, columns: Mapping[str, Any], source: str) -> bool:
        """Whether an item passes.

        Raises:
            RunError: ``items.unknown_column``.
        """
        if self.column not in columns:
            have = list(columns)
            raise RunError(
                f"{source} has no column {self.column!r}, which the filter {str(self)!r} names",
                code="items.unknown_column",
                hint=f"its columns are {', '.join(have)}",
                details={"column": self.column, "columns": have, "source": source},
            )
        found = as_text(columns[self.column])
        if self.operator == "~":
            return re.search(self.value, found) is not None
        return (found == self.value) is (self.operator == "=")

    def __str__(self) -> str:
        return f"{self.column}{self.operator}{self.value}"


def as_text(value: Any) -> str:
    """A column's value as text: a string as it is, everything else as compact JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _bad_filter(text: str, what: str) -> RunError:
    return RunError(
        f"the filter {text!r} {what}",
        code="items.bad_filter",
        hint="write column=value, column!=value or column~regex",
        details={"filter": text},
    )
