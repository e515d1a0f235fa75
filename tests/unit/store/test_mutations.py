"""The oracles can fail: each protection of the store, switched off by itself, is missed by some test.

Every mutation has the slice of tests that should notice. The slice passes on the product as it is (other modules run
it whole), so what fails here fails because of the mutation.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kimi_ray.errors import KimiRayError
from kimi_ray.store import documents, jsonl, log_files, owners, recovery, removal, stream_log, unpublished
from kimi_ray.store.directories import Directories
from kimi_ray.store.fs import io_errors
from kimi_ray.store.publications import Publications
from kimi_ray.store.seam import Batch
from kimi_ray.store.stream_log import StreamLog
from kimi_ray.store.unpublished import Unpublished
from tests.conformance.crash_matrix import OPERATIONS, Matrix
from tests.conformance.publication_crashes import MAKINGS, Makings
from tests.conformance.simulated_home import SimulatedHome
from tests.conformance.simulated_loop import SimulatedLoop, simulated_loop
from tests.conformance.store_machine import MachineHome, StoreMachine
from tests.conformance.store_races import StoreRaces
from tests.unit.store import test_store_races as power_cut_races

Patch = pytest.MonkeyPatch
Slice = Callable[[SimulatedLoop, str], Iterator[None]]
SEEDS = (12, 1, 2, 3, 5, 8)


# -- slices ------------------------------------------------------------------------------------------------------------


def crashes(*names: str) -> Slice:
    """Operations of the crash matrix, one power cut at a time."""

    def run(loop: SimulatedLoop, compression: str) -> Iterator[None]:
        operations = [operation for operation in OPERATIONS if operation.name in names]
        assert len(operations) == len(names)
        dice = random.Random(1)
        matrices = [Matrix(loop, operation, compression) for operation in operations]
        for seed in SEEDS:
            for matrix in matrices:
                matrix.run([seed], dice, clean_recoveries=False)
                yield

    return run


def makings(name: str) -> Slice:
    """A way to make sessions, cut everywhere: the process dies, or the power fails too."""

    def run(loop: SimulatedLoop, compression: str) -> Iterator[None]:
        (making,) = [making for making in MAKINGS if making.name == name]
        cuts = Makings(loop, making, compression)
        for seed in (None, *SEEDS):
            for left in range(cuts.calls() + 1):
                cuts.try_cut(left, None if seed is None else seed * 1009 + left)
                yield

    return run


def race(test: Callable[..., Any], **arguments: Any) -> Slice:
    """A named race on a simulated home."""

    def run(loop: SimulatedLoop, compression: str) -> Iterator[None]:
        home = SimulatedHome(compression)
        try:
            if inspect.iscoroutinefunction(test):
                home.run(test(StoreRaces(), home, **arguments))
            else:
                test(home, **arguments)
        finally:
            home.close()
        yield

    return run


def failing_calls(name: str) -> Slice:
    """An operation of the crash matrix, one call of which fails."""

    def run(loop: SimulatedLoop, compression: str) -> Iterator[None]:
        matrix = Matrix(loop, next(operation for operation in OPERATIONS if operation.name == name), compression)
        matrix.fail(SEEDS, range(matrix.calls()))
        yield

    return run


class Simulated(StoreMachine):
    """Both encodings on simulated machines."""

    @staticmethod
    def make_homes() -> list[MachineHome]:  # type: ignore[override]
        return [SimulatedHome("none"), SimulatedHome("zstd")]


def random_lives(loop: SimulatedLoop, compression: str) -> Iterator[None]:
    """The state machine, without making its finding small."""
    given = settings(
        max_examples=100, stateful_step_count=30, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(Simulated, settings=given)
    yield


# -- mutations ---------------------------------------------------------------------------------------------------------


def no_fencing_by_nonce(patch: Patch) -> None:
    check = StreamLog._check_batch

    def by_epoch_alone(log: StreamLog, batch: Batch) -> None:
        check(log, Batch(batch.stream, batch.epoch, log.nonce, batch.first_seq, b"", (), ()))

    patch.setattr(StreamLog, "_check_batch", by_epoch_alone)


def no_fencing_by_epoch(patch: Patch) -> None:
    patch.setattr(StreamLog, "_check_batch", lambda log, batch: None)


def grants_are_not_durable(patch: Patch) -> None:
    write = StreamLog._write_storage_row

    def unsynced(log: StreamLog, row: bytes) -> None:
        with patch.context() as inner:
            inner.setattr(StreamLog, "sync", lambda _: None)
            write(log, row)

    patch.setattr(StreamLog, "_write_storage_row", unsynced)


def grants_before_what_stands_in_front(patch: Patch) -> None:
    write, sync = StreamLog._write_storage_row, StreamLog.sync

    def not_first(log: StreamLog, row: bytes) -> None:
        calls = iter((lambda _: None, sync))
        with patch.context() as inner:
            inner.setattr(StreamLog, "sync", lambda log: next(calls)(log))
            write(log, row)

    patch.setattr(StreamLog, "_write_storage_row", not_first)


def no_first_touch_sync(patch: Patch) -> None:
    patch.setattr(recovery, "sync_found", lambda *_: None)


def overlaps_are_not_compared(patch: Patch) -> None:
    def blindly(batch: Batch, payload: bytes, next_seq: int, stored: Any) -> list[tuple[bytes, int]]:
        rows = zip(payload.splitlines(keepends=True), batch.row_events, strict=True)
        return list(rows)[next_seq - batch.first_seq :]

    patch.setattr(stream_log, "rows_after_overlap", blindly)


def loads_do_not_ask_who_lives(patch: Patch) -> None:
    load = jsonl.JsonlStore.load
    patch.setattr(jsonl.JsonlStore, "load", lambda store, stream, *, is_live=None: load(store, stream, is_live=False))


def closers_are_made_before_the_grant(patch: Patch) -> None:
    """The turn is looked at before the grant: an event that comes in between is not seen."""
    close = jsonl.JsonlStore._close_turn

    def stale(store: Any, log: StreamLog) -> Any:
        reader = store._reader
        found = reader.survey(log.stream, None)
        found_then = type("Then", (), {"survey": lambda *_: found})()
        log.write([Batch(log.stream, log.epoch, log.nonce, log.next_seq, *_late(log.next_seq))])
        store._reader = found_then
        try:
            return close(store, log)
        finally:
            store._reader = reader

    patch.setattr(jsonl.JsonlStore, "_close_turn", stale)


def _late(seq: int) -> tuple[bytes, tuple[int, ...], tuple[int, ...]]:
    row = b'{"seq":%d,"time":1,"type":"note/added","data":{}}\n' % seq
    return row, (len(row),), (1,)


def repair_in_place(patch: Patch) -> None:
    def in_place(fs: Any, directories: Any, source: Any, scan: Any, tail: Any, *, sync: bool) -> int:
        kept = scan.encode_kept(tail.kept)
        redo = log_files.Redo(tail.offset, "wire.tail-x", source.read(tail.offset, tail.size), kept)
        with patch.context() as inner:
            inner.setattr(fs, "unlink", lambda _: None)
            log_files.apply_redo(fs, directories, source.path, redo, sync=sync)
        return tail.offset + len(kept)

    patch.setattr(recovery, "repair_tail", in_place)


def sync_twice_without_writing_again(patch: Patch) -> None:
    def again(log: StreamLog, cause: Exception) -> None:
        descriptor = log.tools.descriptors.take(log.path)
        with io_errors(log.path):
            log.tools.fs.fdatasync(descriptor.fd)
        log.tools.descriptors.give_back(descriptor)
        log.synced, log.durable_seq = log.size, log.next_seq
        log.unsynced.clear()
        log.unsynced_bytes = 0

    patch.setattr(StreamLog, "_write_again", again)


def _no_directory_sync(part: str) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        sync = Directories.sync
        patch.setattr(Directories, "sync", lambda shared, path: None if part in path else sync(shared, path))

    mutate.__name__ = f"no_directory_sync_{part.strip('/')}"
    return mutate


def new_directories_are_not_synced(patch: Patch) -> None:
    def unsynced(shared: Directories, path: str) -> None:
        with patch.context() as inner:
            inner.setattr(Directories, "sync", lambda *_: None)
            ensure(shared, path)

    ensure = Directories.ensure
    patch.setattr(Directories, "ensure", unsynced)


def delete_before_the_tombstone(patch: Patch) -> None:
    remove = removal.remove_session

    def late(layout: Any, directories: Any, reservations: Any, session_id: str, prune: Any) -> None:
        directory = layout.session_dir(session_id)
        if directory is not None:
            removal.remove_tree(layout.fs, directory)
        remove(layout, directories, reservations, session_id, prune)

    patch.setattr(jsonl, "remove_session", late)


def logs_are_linked_before_they_are_synced(patch: Patch) -> None:
    write = log_files.write_file
    patch.setattr(log_files, "write_file", lambda fs, path, data, *, sync: write(fs, path, data, sync=False))


def nothing_is_rolled_back(patch: Patch) -> None:
    async def recover(_: Any) -> None:
        return

    patch.setattr(Publications, "recover", recover)


def markers_go_before_what_they_name(patch: Patch) -> None:
    async def delete(self: Any, marker: Any) -> None:
        await self._run(self._unpublished.drop, marker)
        await self._maker.unmake(marker.sessions)
        await self._run(self._owners.forget, marker.sessions)

    patch.setattr(Publications, "_delete", delete)


def claims_before_their_markers(patch: Patch) -> None:
    take = owners.Owners._take

    def late(self: Any, wanted: Any, refused: Any, groups: Any) -> Any:
        take(self, [want for want, no in zip(wanted, refused, strict=True) if no is None])
        return mark(self, wanted, refused, groups)

    mark = owners.Owners._mark_new
    patch.setattr(owners.Owners, "_mark_new", late)


def unpublished_sessions_are_listed(patch: Patch) -> None:
    patch.setattr(Unpublished, "_hidden_since", lambda *_: frozenset())


def unpublished_sessions_are_read(patch: Patch) -> None:
    patch.setattr(Unpublished, "hides", lambda *_: False)


def a_publication_is_shown_one_by_one(patch: Patch) -> None:
    patch.setattr(Unpublished, "groups", lambda _: [])
    patch.setattr(Unpublished, "_pending", lambda *_: [])


def _replaced_unsynced(module: Any) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        replace = module.replace_file
        patch.setattr(
            module, "replace_file", lambda fs, path, data, **how: replace(fs, path, data, **{**how, "sync": False})
        )

    mutate.__name__ = f"unsynced_{module.__name__.rsplit('.', 1)[1]}"
    return mutate


@dataclass(frozen=True, slots=True)
class Mutation:
    """What is switched off, and who should notice."""

    mutate: Callable[[Patch], None]
    slices: tuple[Slice, ...]


MUTATIONS = (
    Mutation(no_fencing_by_nonce, (race(StoreRaces.test_a_zombie_after_a_restart),)),
    Mutation(no_fencing_by_epoch, (race(StoreRaces.test_a_zombie_after_a_restart),)),
    Mutation(no_fencing_by_epoch, (crashes("grant"),)),
    Mutation(no_fencing_by_epoch, (random_lives,)),
    Mutation(loads_do_not_ask_who_lives, (random_lives,)),
    Mutation(grants_are_not_durable, (crashes("grant"),)),
    Mutation(grants_before_what_stands_in_front, (crashes("grant over a window"),)),
    Mutation(no_first_touch_sync, (crashes("resend"),)),
    Mutation(
        no_first_touch_sync,
        tuple(
            race(power_cut_races.test_killed_before_its_sync_then_sent_again_then_a_power_cut, seed=seed)
            for seed in SEEDS
        ),
    ),
    Mutation(overlaps_are_not_compared, (race(StoreRaces.test_overlapping_resends_that_differ_have_one_winner),)),
    Mutation(
        loads_do_not_ask_who_lives,
        (race(StoreRaces.test_a_load_at_a_restart_with_a_live_turn, writer_lives=True),),
    ),
    Mutation(closers_are_made_before_the_grant, (race(StoreRaces.test_eight_loads_of_one_interrupted_log_at_once),)),
    Mutation(repair_in_place, (crashes("repair of a cut write", "repair of a lost sector"),)),
    Mutation(sync_twice_without_writing_again, (crashes("failed sync"),)),
    Mutation(sync_twice_without_writing_again, (failing_calls("window"),)),
    Mutation(_no_directory_sync("/agents/main"), (crashes("create"),)),
    Mutation(_no_directory_sync("/tombstones"), (crashes("remove"),)),
    Mutation(_no_directory_sync("/owners"), (crashes("claim"),)),
    Mutation(_no_directory_sync("/blobs"), (crashes("blob"),)),
    Mutation(new_directories_are_not_synced, (crashes("create"),)),
    Mutation(delete_before_the_tombstone, (crashes("remove"),)),
    Mutation(logs_are_linked_before_they_are_synced, (crashes("create"),)),
    Mutation(_replaced_unsynced(documents), (crashes("document"),)),
    Mutation(_replaced_unsynced(owners), (crashes("claim"),)),
    Mutation(_replaced_unsynced(unpublished), (makings("publish 4"),)),
    Mutation(_no_directory_sync("/unpublished/new"), (makings("create"),)),
    Mutation(_no_directory_sync("/unpublished/groups"), (makings("publish"),)),
    Mutation(nothing_is_rolled_back, (makings("create"),)),
    Mutation(nothing_is_rolled_back, (makings("publish"),)),
    Mutation(markers_go_before_what_they_name, (makings("discard"),)),
    Mutation(claims_before_their_markers, (makings("create"),)),
    Mutation(unpublished_sessions_are_listed, (makings("create"),)),
    Mutation(unpublished_sessions_are_read, (makings("create"),)),
    Mutation(a_publication_is_shown_one_by_one, (makings("publish 4"),)),
)


@pytest.mark.parametrize(
    ("number", "mutation"), list(enumerate(MUTATIONS)), ids=[mutation.mutate.__name__ for mutation in MUTATIONS]
)
def test_no_mutation_survives(monkeypatch: pytest.MonkeyPatch, number: int, mutation: Mutation) -> None:
    compression = "zstd" if number % 2 else "none"
    with simulated_loop() as loop:
        mutation.mutate(monkeypatch)
        runs = 0
        try:
            for one in mutation.slices:
                for _ in one(loop, compression):
                    runs += 1
        except (AssertionError, KimiRayError):
            return
    pytest.fail(f"{mutation.mutate.__name__} was not noticed in {runs} runs")
