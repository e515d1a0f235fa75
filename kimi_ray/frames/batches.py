"""Rows that become Arrow record batches: columns are built a batch at a time, so memory is that of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

from kimi_ray.frames.schemas import arrow_schema, bounds_of, columns

BATCH_ROWS: Final = 32_768
BATCH_CHARS: Final = 16 << 20
"""Characters of text that end a batch early."""

Row = Sequence[Any]
Sink = Callable[[str, Any], Callable[[Any], None]]
"""By a frame's name and Arrow schema, what takes its record batches."""
Problem = dict[str, Any]


def pyarrow() -> Any:
    """The library, loaded where it is used: it is large, and has no types."""
    return import_module("pyarrow")


class Batches:
    """Collects the rows of one frame and hands them on as record batches.

    Args:
        frame: Which.
        sink: Gives the taker of its batches.
        problem: Told of values that are not of their column's type; they become null.
    """

    def __init__(self, frame: str, sink: Sink, problem: Callable[[Problem], None]) -> None:
        self.frame = frame
        self.count = 0
        self._pa = pyarrow()
        self.schema = arrow_schema(self._pa, frame)
        self._bounds = {column.name: bounds for column in columns(frame) if (bounds := bounds_of(column)) is not None}
        self._emit = sink(frame, self.schema)
        self._problem = problem
        self._rows: list[Row] = []
        self._chars = 0

    def add(self, row: Row, chars: int = 0) -> None:
        """Take a row; ``chars`` is how much text it holds, roughly."""
        self._rows.append(row)
        self._chars += chars
        if len(self._rows) >= BATCH_ROWS or self._chars >= BATCH_CHARS:
            self.flush()

    def flush(self) -> None:
        """Hand on what there is."""
        if not self._rows:
            return
        rows, self._rows, self._chars = self._rows, [], 0
        self.count += len(rows)
        arrays = [
            self._array(field, values) for field, values in zip(self.schema, zip(*rows, strict=True), strict=True)
        ]
        self._emit(self._pa.RecordBatch.from_arrays(arrays, schema=self.schema))

    def _array(self, field: Any, values: tuple[Any, ...]) -> Any:
        try:
            made = self._pa.array(values, field.type)
            self._check_range(field, values)
        except (self._pa.ArrowException, TypeError, OverflowError, ValueError):
            return self._pa.array([self._or_null(field, value) for value in values], field.type)
        return made

    def _check_range(self, field: Any, values: Sequence[Any]) -> None:
        """Refuse what the column's type can hold, and its meaning cannot.

        Raises:
            ValueError: a count below zero, a time that no calendar has.
        """
        bounds = self._bounds.get(field.name)
        if bounds is None:
            return
        least, most = bounds
        for value in values:
            if value is not None and not least <= value <= most:
                raise ValueError(f"{str(value)[:40]} is out of range")

    def _or_null(self, field: Any, value: Any) -> Any:
        try:
            self._pa.scalar(value, field.type)
            self._check_range(field, (value,))
        except (self._pa.ArrowException, TypeError, OverflowError, ValueError) as error:
            self._problem(
                {
                    "code": "frames.bad_value",
                    "message": f"a value of {self.frame}.{field.name} is not of its type: {str(error)[:200]}",
                    "details": {"frame": self.frame, "column": field.name},
                }
            )
            return None
        return value


def column_names(frame: str) -> list[str]:
    """The names of a frame's columns."""
    return [column.name for column in columns(frame)]
