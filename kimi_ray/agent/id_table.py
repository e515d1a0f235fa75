"""Ids of a whole log in little memory: which were there, with a few numbers of each.

A log never runs out of turns, and whoever asks again for a prompt of long ago must be told from one who brings a new
one. An object for each would be most of what a long session needs; here an id is 8 bytes, and 8 for each number.
"""

from __future__ import annotations

from array import array

_SMALLEST = 64
_FULL = 3, 5
"""Above this share of its places a table is made twice as large."""
_BITS = (1 << 64) - 1


class IdTable:
    """Ids, each with as many numbers as there are ``columns``; none is ever taken out.

    Ids are told apart by 64 bits of their hash, which differs from process to process: among a million ids, one that is
    new is taken for a known one in one of 10^13 cases.

    Args:
        columns: Numbers of each id, of 64 bits with their sign.
    """

    __slots__ = ("_columns", "_keys", "_size")

    def __init__(self, columns: int = 0) -> None:
        self._keys = array("Q", bytes(8 * _SMALLEST))
        self._columns = tuple(array("q", bytes(8 * _SMALLEST)) for _ in range(columns))
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdTable) and self._rows() == other._rows()

    __hash__ = None  # pyright: ignore[reportAssignmentType]  what changes has none

    def __contains__(self, name: str) -> bool:
        return self._keys[_place(self._keys, _key(name))] != 0

    def get(self, name: str) -> tuple[int, ...] | None:
        """The numbers of an id, or None for one that was never here."""
        place = _place(self._keys, _key(name))
        return tuple(column[place] for column in self._columns) if self._keys[place] else None

    def put(self, name: str, *numbers: int) -> None:
        """Remember an id with its numbers, in the place of those that it had."""
        key = _key(name)
        place = _place(self._keys, key)
        if not self._keys[place]:
            self._keys[place] = key
            self._size += 1
        for column, number in zip(self._columns, numbers, strict=True):
            column[place] = number
        if self._size * _FULL[1] > len(self._keys) * _FULL[0]:
            self._grow()

    def _rows(self) -> set[tuple[int, ...]]:
        return {row for row in zip(self._keys, *self._columns, strict=True) if row[0]}

    def _grow(self) -> None:
        wide = 16 * len(self._keys)
        keys, columns = array("Q", bytes(wide)), tuple(array("q", bytes(wide)) for _ in self._columns)
        for old, key in enumerate(self._keys):
            if key:
                place = _place(keys, key)
                keys[place] = key
                for before, after in zip(self._columns, columns, strict=True):
                    after[place] = before[old]
        self._keys, self._columns = keys, columns


def _key(name: str) -> int:
    return (hash(name) & _BITS) or 1  # 0 is a free place


def _place(keys: array[int], key: int) -> int:
    """Where a key is, or the free place where it would be."""
    last = len(keys) - 1
    place = key & last
    while (found := keys[place]) and found != key:
        place = (place + 1) & last
    return place
