"""Every operation of a store, stopped before each of its changing file calls, on disks that keep and that lose.

An ``Operation`` has a history (processes that lived before), a beginning that is not cut, and the part that is. Each
cut leaves a disk. That disk is tried as it is (only the process died) and with a power cut for every seed; then the
next process runs to its end, or is itself stopped and the disk crashes again, and ``crash_oracles.check`` looks.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass

from kimi_ray.errors import KimiRayError
from kimi_ray.store.faults import Rule
from kimi_ray.store.seam import Stream
from tests.conformance.crash_life import DiedError, Ledger, Life, RefusedError
from tests.conformance.crash_oracles import check, look, next_process
from tests.conformance.simulated_fs import SECTOR, Disk, File
from tests.conformance.simulated_loop import SimulatedLoop
from tests.conformance.store_contract import MAIN, line

FORK = Stream("s1", "agent-1")
_MANY = 10**9

Part = Callable[[Life], Awaitable[None]]
History = Callable[[Disk, Ledger], Awaitable[None]]


# -- histories ---------------------------------------------------------------------------------------------------------


async def nothing(disk: Disk, ledger: Ledger) -> None:
    """No store yet."""


async def a_home(disk: Disk, ledger: Ledger) -> None:
    """A store without sessions."""
    (await Life.start(disk, ledger)).fs.kill()


async def a_session(disk: Disk, ledger: Ledger) -> None:
    """A document, and a log of twelve events in three batches, its grant not given back."""
    life = await Life.start(disk, ledger)
    await life.claim("n")
    await life.write_document("n", {"title": "first"})
    await life.grant("w", new=True)
    for first, end in ((0, 3), (3, 4), (4, 12)):
        await life.must_append("w", first, end, sync=True)
    life.fs.kill()


async def an_open_turn(disk: Disk, ledger: Ledger) -> None:
    """A log that ends inside a step."""
    life = await Life.start(disk, ledger)
    await life.claim("n")
    await life.grant("w", new=True)
    facts = ledger.log(MAIN)
    facts.open_turn = True
    facts.sent["w"] = {0: line(0, "turn/start", turn=0), 1: line(1, "step/start", turn=0, step=0)}
    await life.must_append("w", 0, 2, sync=True)
    await life.must_append("w", 2, 9, sync=True)
    life.fs.kill()


async def a_loose_window(disk: Disk, ledger: Ledger) -> None:
    """The last process died after a write that nobody synced."""
    await a_session(disk, ledger)
    life = await _went_on(disk, ledger)
    await life.must_append("w", 14, 30, sync=False)
    life.fs.kill()


async def a_cut_write(disk: Disk, ledger: Ledger) -> None:
    """The last process died in the middle of a write."""
    await a_session(disk, ledger)
    life = await _went_on(disk, ledger)
    life.fs.left = 0
    with contextlib.suppress(DiedError):
        await life.append("w", 14, 30, sync=True)


async def a_lost_sector(disk: Disk, ledger: Ledger) -> None:
    """A power cut took a sector from the middle of the last batch, which was not synced."""
    await a_session(disk, ledger)
    life = await _went_on(disk, ledger)
    log = next(node for path, node in disk.paths().items() if "/agents/main/wire." in path)
    assert isinstance(log, File)
    at = (len(log.cached) // SECTOR + 1) * SECTOR
    await life.must_append("w", 14, 50, sync=False)
    life.fs.kill()
    content = bytearray(log.cached)
    assert at + SECTOR < len(content)
    content[at : at + SECTOR] = bytes(SECTOR)
    log.durable, log.cached = bytes(content), content
    log.dirty.clear()
    disk.boots += 1


# -- parts -------------------------------------------------------------------------------------------------------------


async def _went_on(disk: Disk, ledger: Ledger) -> Life:
    life = await Life.start(disk, ledger)
    await went_on(life)
    return life


async def went_on(life: Life) -> None:
    """The store came back and its writer went on."""
    await life.claim("n")
    await life.must_append("w", 12, 14, sync=True)


async def claimed(life: Life) -> None:
    """The session is open."""
    await life.claim("n")


async def idle(life: Life) -> None:
    """Nothing."""


async def claim(life: Life) -> None:
    await life.claim("n2")
    await life.unclaim("n2")
    await life.claim("n3")


async def create(life: Life) -> None:
    await life.grant("w", new=True)
    await life.must_append("w", 0, 12, sync=True)


async def create_in_the_background(life: Life) -> None:
    await life.grant("w0", new=True)
    await life.grant("w", new=True)
    await life.must_append("w", 0, 12, sync=False)
    await life.must_append("w", 12, 20, sync=False)
    await life.must_append("w", 20, 20, sync=True)


async def append(life: Life) -> None:
    await life.must_append("w", 14, 26, sync=True)
    await life.must_append("w", 26, 30, sync=True)


async def window(life: Life) -> None:
    await life.must_append("w", 14, 30, sync=False)
    await life.must_append("w", 30, 30, sync=True)


async def resend(life: Life) -> None:
    await life.must_append("w", 12, 30, sync=True)
    await life.must_append("w", 29, 34, sync=True)


async def several_windows(life: Life) -> None:
    for first in (14, 24, 34):
        await life.must_append("w", first, first + 10, sync=False)
    await life.must_append("w", 44, 48, sync=True)


async def full_disk(life: Life) -> None:
    life.disk.capacity = life.disk.used + 300
    assert (await life.append("w", 14, 34, sync=True)).error is not None
    life.disk.capacity = None
    await life.must_append("w", 14, 40, sync=True)


async def full_disk_and_no_truncation(life: Life) -> None:
    life.fs.rules.append(Rule("truncate", errno.EIO))
    await full_disk(life)


async def failed_sync(life: Life) -> None:
    await life.must_append("w", 14, 20, sync=False)
    life.fs.rules.append(Rule("fdatasync", errno.EIO))
    await life.must_append("w", 20, 34, sync=True)
    await life.must_append("w", 34, 36, sync=True)


async def poisoned(life: Life) -> None:
    await life.must_append("w", 14, 20, sync=True)
    life.fs.rules += [Rule("fdatasync", errno.EIO), Rule("fsync", errno.EIO, skip=1)]
    answer = await life.append("w", 20, 34, sync=True)
    assert answer.error is not None
    assert answer.error["code"] == "store.poisoned"


async def grant(life: Life) -> None:
    await life.grant("w2")
    await life.must_append("w2", 14, 18, sync=True)


async def grant_over_a_window(life: Life) -> None:
    await life.must_append("w", 14, 30, sync=False)
    seq = await life.grant("w2")
    await life.must_append("w2", seq, seq + 4, sync=True)


async def close(life: Life) -> None:
    await life.must_append("w", 14, 30, sync=False)
    await life.close_writer("w")
    await life.grant("w2")
    await life.close_writer("w2")


async def fork(life: Life) -> None:
    await life.fork(9, "f", FORK)
    await life.must_append("f", 9, 12, FORK, sync=True)


async def remove(life: Life) -> None:
    await life.remove()


async def document(life: Life) -> None:
    await life.write_document("n", {"title": "second", "text": "x" * 1200})
    await life.write_document("n", {"title": "third"})


async def load(life: Life) -> None:
    await life.load()


async def blob(life: Life) -> None:
    await life.put_blob(b"a picture " * 300)


async def repair(life: Life) -> None:
    seq = await life.grant("w2")
    await life.must_append("w2", seq, seq + 4, sync=True)


async def life_of_a_session(life: Life) -> None:
    await life.claim("n")
    await life.write_document("n", {"v": 1})
    await life.grant("w", new=True)
    await life.must_append("w", 0, 12, sync=True)
    await life.fork(7, "f", FORK)
    await life.must_append("w", 12, 24, sync=False)
    await life.grant("w2")
    await life.write_document("n", {"v": 2})
    await life.must_append("w2", 24, 30, sync=True)
    await life.put_blob(b"text " * 200)
    await life.close_writer("w2")
    await life.claim("n2")
    await life.grant("w3")
    await life.must_append("w3", 30, 40, sync=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """``begin`` is not cut, ``part`` is. ``survives``: whether a process may die here without a power cut.

    A process that dies between a failed sync and its own second write leaves clean pages that the disk does not hold:
    no later process can know, and only a power cut at the same time is tried.
    """

    name: str
    history: History
    begin: Part
    part: Part
    survives: bool = True


OPERATIONS = (
    Operation("home", nothing, idle, idle),
    Operation("claim", a_session, idle, claim),
    Operation("create", a_home, claimed, create),
    Operation("create in the background", a_home, claimed, create_in_the_background),
    Operation("append", a_session, went_on, append),
    Operation("window", a_session, went_on, window),
    Operation("several windows", a_session, went_on, several_windows),
    Operation("full disk", a_session, went_on, full_disk),
    Operation("full disk, no truncation", a_session, went_on, full_disk_and_no_truncation),
    Operation("failed sync", a_session, went_on, failed_sync, survives=False),
    Operation("poisoned", a_session, went_on, poisoned, survives=False),
    Operation("grant", a_session, went_on, grant),
    Operation("grant over a window", a_session, went_on, grant_over_a_window),
    Operation("close", a_session, went_on, close),
    Operation("fork", a_session, went_on, fork),
    Operation("remove", a_session, went_on, remove),
    Operation("document", a_session, claimed, document),
    Operation("load", an_open_turn, claimed, load),
    Operation("blob", a_session, claimed, blob),
    Operation("repair of a cut write", a_cut_write, claimed, repair),
    Operation("repair of a lost sector", a_lost_sector, claimed, repair),
    Operation("first touch", a_session, idle, went_on),
    Operation("resend", a_loose_window, claimed, resend),
    Operation("life", a_home, idle, life_of_a_session),
)


# -- the matrix --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """How much was tried."""

    cuts: int = 0
    disks: int = 0
    recoveries_cut: int = 0


class Matrix:
    """One operation under crashes."""

    def __init__(self, loop: SimulatedLoop, operation: Operation, compression: str) -> None:
        self._loop = loop
        self._operation = operation
        self._disk, self._ledger = Disk(), Ledger(compression)
        loop.run(operation.history(self._disk, self._ledger))
        self.counts = Counts()

    def calls(self) -> int:
        """How many changing calls the part makes."""
        return self._cut(_MANY)[2]

    def _cut(self, calls: int) -> tuple[Disk, Ledger, int]:
        return self._loop.run(self._run(self._disk.clone(), self._ledger.clone(), calls))

    def fail(self, seeds: Iterable[int], cuts: Iterable[int]) -> Counts:
        """One call fails, the process sees it and ends when it is refused; then a power cut for each seed.

        Where the call was no sync, its death alone is tried too: what a failed sync left in the cache is nowhere else.
        """
        for calls in cuts:
            self.counts.cuts += 1
            disk, ledger = self._disk.clone(), self._ledger.clone()
            with self._named(calls, "the call fails"):
                failed = self._loop.run(self._run_failing(disk, ledger, calls))
            for seed in seeds if "sync" in failed else (None, *seeds):
                self.try_disk(disk, ledger, calls, seed)
        return self.counts

    async def _run_failing(self, disk: Disk, ledger: Ledger, calls: int) -> str:
        life = await Life.start(disk, ledger)
        await self._operation.begin(life)
        life.fs.fails_at = life.fs.made + calls
        with contextlib.suppress(KimiRayError, RefusedError):
            await self._operation.part(life)
        life.fs.kill()
        disk.capacity = None
        return life.fs.failed

    async def _run(self, disk: Disk, ledger: Ledger, calls: int) -> tuple[Disk, Ledger, int]:
        operation = self._operation
        opening = operation.history is nothing
        life = None
        made = 0
        try:
            life = await Life.start(disk, ledger, calls if opening else _MANY)
            await operation.begin(life)
            if not opening:
                made, life.fs.left = life.fs.made, calls
            await operation.part(life)
        except DiedError:
            pass
        if life is not None:
            made = life.fs.made - made
            life.fs.kill()
        disk.capacity = None
        return disk, ledger, made

    def run(
        self, seeds: Iterable[int], dice: random.Random, *, clean_recoveries: bool, cuts: Iterable[int] | None = None
    ) -> Counts:
        """Every cut with a clean disk and one per seed.

        Args:
            seeds: Of the power cuts.
            dice: Chooses where the next process is cut after a power cut.
            clean_recoveries: Cut the next process at each of its calls after the clean crash, not only at one.
            cuts: Only these; None takes all.
        """
        for calls in range(self.calls() + 1) if cuts is None else cuts:
            self.counts.cuts += 1
            disk, ledger, _ = self._cut(calls)
            for seed in (None, *seeds):
                if seed is None and not self._operation.survives:
                    continue
                self.try_disk(disk, ledger, calls, seed)
                if seed is None and clean_recoveries:
                    cut = 0
                    while self.try_recovery(disk, ledger, calls, None, cut, dice):
                        cut += 1
                else:
                    self.try_recovery(disk, ledger, calls, seed, dice.randrange(40), dice)
        return self.counts

    def try_disk(self, disk: Disk, ledger: Ledger, calls: int, seed: int | None) -> None:
        """Crash, and look."""
        self.counts.disks += 1
        disk, ledger = disk.clone(), ledger.clone()
        with self._named(calls, seed):
            disk.crash(_mixed(seed, calls))
            self._loop.run(check(disk, ledger))

    def try_recovery(
        self, disk: Disk, ledger: Ledger, calls: int, seed: int | None, cut: int, dice: random.Random
    ) -> bool:
        """Crash, let the next process die at ``cut``, crash again, and look; False when it came to its end."""
        self.counts.recoveries_cut += 1
        disk, ledger = disk.clone(), ledger.clone()
        again = dice.choice((None, dice.getrandbits(30)))
        with self._named(calls, seed, cut, again):
            disk.crash(_mixed(seed, calls))
            died = self._loop.run(self._die_in_recovery(disk, ledger, cut))
            disk.crash(again)
            self._loop.run(check(disk, ledger))
        return died

    async def _die_in_recovery(self, disk: Disk, ledger: Ledger, cut: int) -> bool:
        await look(disk, ledger)
        try:
            life = await next_process(disk, ledger, f"next-{disk.boots}", cut)
        except DiedError:
            return True
        life.fs.kill()
        return False

    @contextlib.contextmanager
    def _named(self, *where: object) -> Generator[None]:
        try:
            yield
        except Exception as error:
            names = ("call", "seed", "recovery cut", "second crash")
            place = ", ".join(f"{name} {value}" for name, value in zip(names, where, strict=False))
            error.add_note(f"operation {self._operation.name!r}: {place}")
            raise


def _mixed(seed: int | None, calls: int) -> int | None:
    return None if seed is None else seed * 100_003 + calls
