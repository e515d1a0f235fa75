"""Items: what a run works on, and how each gets its identity.

An item's id does not depend on its place: it is the user's (an ``Item.id`` or an id column) or the hash of its data.
So a filter, a limit or a shuffle changes which rollouts run, and never what a rollout is called or which seed it has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from kimi_ray.errors import LogError, RunError
from kimi_ray.events.json_rule import freeze, thaw
from kimi_ray.runs.canonical import canonical_json, sha256_hex
from kimi_ray.runs.filters import Filter
from kimi_ray.settings import Item

MAX_ID_CHARS = 256
MAX_ROLLOUTS = 2_000_000
"""Of one run: all of its keys are held in memory, by the driver and by the session's host."""

BARE_COLUMN = "item"
"""The one column of an item that is a bare string."""


class RolloutKey(NamedTuple):
    """The identity of a rollout within its run; ``repeat`` counts from 0."""

    item_id: str
    repeat: int

    def __str__(self) -> str:
        return f"{self.item_id}#{self.repeat}"


@dataclass(frozen=True, slots=True)
class RunItem:
    """An item with its final id and its place (``index``, from 0) in the run's order."""

    id: str
    index: int
    item: Item
    source: str = ""
    """Where it was read, for messages: ``items.csv line 7``, ``item 3``."""

    @property
    def columns(self) -> dict[str, Any]:
        """The data as named columns; a bare string is the column ``item``."""
        return _columns(self.item)


def _columns(item: Item) -> dict[str, Any]:
    data = item.data
    return cast("dict[str, Any]", data) if isinstance(data, dict) else {BARE_COLUMN: data}


def prepare_items(
    items: Iterable[str | dict[str, Any] | Item],
    *,
    id_column: str | None = None,
    filters: Sequence[Filter] = (),
    shuffle: int | None = None,
    limit: int | None = None,
    sources: Iterable[str] | None = None,
) -> tuple[RunItem, ...]:
    """Check the items, name them, and choose: filters first, then the shuffle, then the limit.

    Args:
        items: Strings, dicts of columns, or ``Item`` objects. Taken only as far as needed when there is a limit and no
            shuffle.
        id_column: The column that holds the id of items without an ``Item.id``.
        filters: All of them must hold.
        shuffle: The seed of the order, which is that of a hash of seed and id; None keeps the order of the input.
        limit: The number of items, at least 1.
        sources: For messages, where each item was read.

    Raises:
        RunError: ``items.empty``, ``items.bad_item``, ``items.duplicate_id``, ``items.unknown_column``,
            ``items.bad_limit``.
    """
    given: object = items
    if isinstance(given, str | bytes | dict) or not hasattr(given, "__iter__"):
        raise RunError(
            f"items is a {type(cast(object, given)).__name__}, not a collection of items",
            code="items.bad_item",
            hint="pass a list, also for a single item",
        )
    if limit is not None and limit < 1:
        raise RunError(f"the limit {limit} is below 1", code="items.bad_limit", hint="leave it out to take all items")
    names = iter(sources) if sources is not None else None
    naming = _Naming(id_column)
    chosen: list[RunItem] = []
    seen = 0
    for seen, raw in enumerate(items, start=1):
        source = next(names, f"item {seen}") if names is not None else f"item {seen}"
        item = _checked(raw, source)
        made = RunItem(naming.name(item, source), len(chosen), item, source)
        if all(one.holds(made.columns, source) for one in filters):
            chosen.append(made)
        if limit is not None and shuffle is None and len(chosen) == limit:
            break
    if not chosen:
        shown = " and ".join(str(one) for one in filters)
        raise RunError(
            f"none of {seen} items passes {shown}" if seen else "there are no items",
            code="items.empty",
            hint="loosen the filter" if seen else "give at least one",
            details={"items": seen},
        )
    if shuffle is not None:
        chosen.sort(key=lambda made: hashlib.sha256(canonical_json([shuffle, made.id])).digest())
        chosen = [replace(made, index=index) for index, made in enumerate(chosen[:limit])]
    return tuple(chosen)


def keys_of(items: Iterable[RunItem], repeats: int = 1) -> tuple[RolloutKey, ...]:
    """The keys of a run in the order of its rows: item by item, repeats within.

    Raises:
        RunError: ``swarm.bad_repeats`` below 1; ``swarm.too_many``.
    """
    if type(repeats) is not int or repeats < 1:
        raise RunError(f"{repeats!r} repeats is not 1 or more", code="swarm.bad_repeats", hint="give 1 or more")
    chosen = tuple(items)
    if len(chosen) * repeats > MAX_ROLLOUTS:
        raise RunError(
            f"{len(chosen)} items with {repeats} repeats are {len(chosen) * repeats} rollouts",
            code="swarm.too_many",
            hint=f"a run has at most {MAX_ROLLOUTS}: make several of it, with --limit and --filter",
            details={"rollouts": len(chosen) * repeats, "most": MAX_ROLLOUTS},
        )
    return tuple(RolloutKey(item.id, repeat) for item in chosen for repeat in range(repeats))


def items_hash(items: Iterable[RunItem]) -> str:
    """The SHA-256 of what a run works on: ids, data, and each item's own settings, in order."""
    digest = hashlib.sha256()
    for made in items:
        digest.update(canonical_json([made.id, made.item.model_dump(mode="json", exclude={"id"})]))
        digest.update(b"\n")
    return digest.hexdigest()


class _Naming:
    """Gives ids, and remembers which are taken."""

    def __init__(self, id_column: str | None) -> None:
        self._column = id_column
        self._taken: dict[str, str] = {}
        self._repeats: dict[str, int] = {}

    def name(self, item: Item, source: str) -> str:
        explicit = item.id if item.id is not None else self._from_column(item, source)
        if explicit is None:
            base = sha256_hex(item.data)[:12]
            number = self._repeats.get(base, 0) + 1
            self._repeats[base] = number
            chosen = base if number == 1 else f"{base}~{number}"
        else:
            chosen = _checked_id(explicit, source)
        if chosen in self._taken:
            raise RunError(
                f"{source} and {self._taken[chosen]} have the same id {chosen!r}",
                code="items.duplicate_id",
                hint="make ids unique, or leave them out: equal data is then told apart by ~2, ~3",
                details={"id": chosen, "first": self._taken[chosen], "second": source},
            )
        self._taken[chosen] = source
        return chosen

    def _from_column(self, item: Item, source: str) -> str | None:
        if self._column is None:
            return None
        columns = _columns(item)
        if self._column not in columns:
            raise unknown_column(self._column, columns, source)
        value = columns[self._column]
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return str(value)
        raise _bad(source, f"the id column {self._column!r} holds {value!r}", "ids are strings or integers")


def unknown_column(column: str, columns: Iterable[str], source: str, *, where: str = "") -> RunError:
    """``items.unknown_column``: names the column, the place and the columns that there are."""
    have = list(columns)
    return RunError(
        f"{source} has no column {column!r}{where}",
        code="items.unknown_column",
        hint=f"its columns are {', '.join(have)}" if have else "it has no columns",
        details={"column": column, "columns": have, "source": source},
    )


def _checked(raw: Any, source: str) -> Item:
    item = raw if isinstance(raw, Item) else None
    data: Any = item.data if item is not None else raw
    if not isinstance(data, str | dict):
        raise _bad(source, f"is of type {type(data).__name__}", "an item is a string, a dict of columns, or an Item")
    try:
        data = thaw(freeze(data))
    except LogError as error:
        raise _bad(source, error.message, error.hint or "") from None
    return Item(data=data) if item is None else item.model_copy(update={"data": data})


def _checked_id(value: str, source: str) -> str:
    if not 1 <= len(value) <= MAX_ID_CHARS:
        raise _bad(source, f"has an id of {len(value)} characters", f"ids have 1 to {MAX_ID_CHARS}")
    if not value.isprintable():
        raise _bad(source, f"has the id {value!r} with unprintable characters", "ids may hold any printable character")
    return value


def _bad(source: str, what: str, hint: str) -> RunError:
    return RunError(f"{source}: {what}", code="items.bad_item", hint=hint, details={"source": source})
