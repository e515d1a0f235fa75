"""A shard as far as reading goes: what a store process and a mere reader have in common."""

from __future__ import annotations

from collections.abc import Callable
from sqlite3 import Connection
from typing import Protocol, TypeVar

from kimi_ray.store.sqlite.database_file import DatabaseFile

R = TypeVar("R")


class ShardReads(Protocol):
    """Blocking read transactions on one database. Thread-safe."""

    file: DatabaseFile
    """Its database."""

    def read(self, work: Callable[[Connection | None], R]) -> R:
        """What ``work`` finds, in one read transaction; None stands for a database that is not there.

        Raises:
            StoreError: As ``connections.connect`` and ``failures.store_error``, and what ``work`` raises.
        """
        ...
