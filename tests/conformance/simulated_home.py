"""A home on a simulated machine, for tests that go through the ``Store`` seam alone."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from kimi_ray.store import JsonlStore, StoreOptions
from kimi_ray.store.seam import Store
from tests.conformance.simulated_fs import Disk, SimulatedFs
from tests.conformance.simulated_loop import InlineSync, simulated_loop

R = TypeVar("R")


class SimulatedHome:
    """``open`` is a store process, ``kill`` its SIGKILL, ``power_cut`` the end of all of them. Close it at the end."""

    def __init__(self, compression: str = "none") -> None:
        self.name = f"jsonl {compression}"
        self.disk = Disk()
        self._compression = compression
        self._files: dict[int, SimulatedFs] = {}
        self._stack = ExitStack()
        self._loop = self._stack.enter_context(simulated_loop())

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run to the end, in simulated time."""
        return self._loop.run(work)

    async def open(self, **options: Any) -> Store:
        """A store process; ``options`` are fields of ``StoreOptions``."""
        files = SimulatedFs(self.disk)
        extra = {"boot_id": self.disk.boot_id, **options.pop("extra", {})}
        given = StoreOptions(**{"compression": self._compression, "claim_timeout_s": 0.0, "extra": extra, **options})
        store = await JsonlStore.open("/home", given, fs=files, strategy=InlineSync())
        self._files[id(store)] = files
        return store

    def files(self, store: Store) -> SimulatedFs:
        """The files of a process."""
        return self._files[id(store)]

    async def kill(self, store: Store) -> None:
        """SIGKILL."""
        self._files.pop(id(store)).kill()

    def power_cut(self, seed: int) -> bool:
        """The end of all processes by a power cut."""
        for files in self._files.values():
            files.kill()
        self._files.clear()
        self.disk.crash(seed)
        return True

    def close(self) -> None:
        """Give the loop back."""
        self._stack.close()
