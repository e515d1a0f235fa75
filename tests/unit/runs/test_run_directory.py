"""The run directory: one writer, whole lines, nothing lost by a crash or a full disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import RunError
from kimi_ray.runs import (
    AttemptRow,
    ResultRow,
    RunDirectory,
    default_run_directory,
    read_attempts,
    read_manifest,
    read_rows,
)

MANIFEST: dict[str, Any] = {"v": 1, "run_id": "r", "ü": [1, None]}


def attempt(item: str = "i", number: int = 1, text: str = "t") -> AttemptRow:
    return AttemptRow(
        run_id="r",
        item_id=item,
        index=0,
        repeat=0,
        attempt=number,
        seed=1,
        status="completed",
        stop="completed",
        text=text,
    )


def row(item: str = "i", text: str = "t") -> ResultRow:
    return ResultRow.of_attempts((attempt(item, text=text),), item="x")


def refused(code: str, call: Any) -> RunError:
    with pytest.raises(RunError) as error:
        call()
    assert error.value.code == code
    assert error.value.hint or code in ("run.closed", "run.corrupt")
    return error.value


def test_a_run_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "a b" / "run"
    with RunDirectory.create(path, MANIFEST) as run:
        run.append([row("a")], [attempt("a")])
        run.append([row("b", "ü\n\u2028")], [attempt("b"), attempt("b", 2)])
        assert [one.item_id for one in run.rows()] == ["a", "b"]
    assert read_manifest(path) == MANIFEST
    assert [one.text for one in read_rows(path)] == ["t", "ü\n\u2028"]
    assert [one.attempt for one in read_attempts(path)] == [1, 1, 2]
    assert sorted(os.listdir(path)) == ["attempts.jsonl", "results.jsonl", "run.json", "run.lock"]


def test_a_directory_that_has_a_run(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, MANIFEST).close()
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path) if name != "run.lock"}
    refused("run.exists", lambda: RunDirectory.create(tmp_path, {"v": 1}))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_rows_without_a_manifest_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("precious\n")
    assert "results.jsonl" in refused("run.exists", lambda: RunDirectory.create(tmp_path, MANIFEST)).message


def test_what_a_crash_in_create_leaves_is_no_dead_end(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_bytes(b"")
    (tmp_path / "run.json.new").write_bytes(b'{"half')
    RunDirectory.create(tmp_path, MANIFEST).close()
    for name in ("results.jsonl", "attempts.jsonl"):
        (tmp_path / name).unlink()
    with RunDirectory.open(tmp_path) as run:
        run.append([row()], [attempt()])
    assert len(read_rows(tmp_path)) == 1


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    refused("run.not_found", lambda: RunDirectory.open(tmp_path))
    refused("run.not_found", lambda: RunDirectory.open(tmp_path / "no"))
    assert os.listdir(tmp_path) == []


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, MANIFEST)
    error = refused("run.in_use", lambda: RunDirectory.open(tmp_path))
    assert f"pid {os.getpid()}" in error.message
    refused("run.in_use", lambda: RunDirectory.create(tmp_path, MANIFEST))
    run.append([row()])
    assert len(read_rows(tmp_path)) == 1, "reading needs no lock"
    run.close()
    run.close()
    RunDirectory.open(tmp_path).close()
    refused("run.closed", lambda: run.append([row()]))


def test_a_killed_writer_holds_nothing(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, MANIFEST).close()
    code = (
        "import sys; from kimi_ray.runs import RunDirectory; run = RunDirectory.open(sys.argv[1]);"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert f"pid {process.pid}" in refused("run.in_use", lambda: RunDirectory.open(tmp_path)).message
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        RunDirectory.open(tmp_path).close()


def test_every_torn_end_costs_only_the_torn_row(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, MANIFEST, durability="none") as run:
        run.append([row("a"), row("b")])
    file = tmp_path / "results.jsonl"
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        file.write_bytes(whole[:cut])
        assert [one.item_id for one in read_rows(tmp_path)] == ["a"]
        if cut % 97 == 0 or cut == len(whole) - 1:
            with RunDirectory.open(tmp_path, durability="none") as run:
                run.append([row("c")])
            assert [one.item_id for one in read_rows(tmp_path)] == ["a", "c"]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, MANIFEST) as run:
        run.append([row("a"), row("b"), row("c")])
    file = tmp_path / "results.jsonl"
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([lines[0], b"\x00\x00", *lines[2:]]))
    assert refused("run.corrupt", lambda: read_rows(tmp_path)).details == {"file": str(file), "line": 2}
    (tmp_path / "run.json").write_text("[]")
    refused("run.corrupt", lambda: read_manifest(tmp_path))


@pytest.mark.parametrize("partial", [0, 1, 50])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partial: int) -> None:
    run = RunDirectory.create(tmp_path, MANIFEST)
    run.append([row("a")], [attempt("a")])
    real = os.write

    calls: list[int] = []

    def full(handle: int, data: Any) -> int:
        calls.append(handle)
        if partial and len(calls) == 1:
            return real(handle, bytes(data)[:partial])
        raise OSError(errno.ENOSPC, "No space left on device")

    before = (tmp_path / "results.jsonl").read_bytes()
    monkeypatch.setattr(os, "write", full)
    error = refused("run.write_failed", lambda: run.append([row("b")]))
    assert error.details["errno"] == "ENOSPC"
    assert "space" in (error.hint or "")
    assert (tmp_path / "results.jsonl").read_bytes() == before
    refused("run.write_failed", lambda: run.keep_only([row("z")]))
    assert (tmp_path / "results.jsonl").read_bytes() == before
    assert not (tmp_path / "results.jsonl.new").exists()
    monkeypatch.setattr(os, "write", real)
    run.append([row("b")])
    assert [one.item_id for one in run.rows()] == ["a", "b"]


def test_a_failed_sync_is_told_and_the_row_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path, MANIFEST)

    def broken(_handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, broken, raising=False)
        refused("run.write_failed", lambda: run.append([row("a")]))
    assert run.rows() == []
    run.append([row("a")])
    assert len(run.rows()) == 1


def test_disk_mode_syncs_every_append_and_other_modes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, synced.append, raising=False)
    for durability, expected in (("disk", 2), ("os", 0), ("none", 0)):
        with RunDirectory.create(tmp_path / durability, MANIFEST, durability=durability) as run:  # type: ignore[arg-type]
            synced.clear()
            run.append([row("a"), row("b")], [attempt("a"), attempt("b")])
            assert len(synced) == expected, durability


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        refused("run.not_writable", lambda bad=bad: RunDirectory.create(bad, MANIFEST))
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_rights(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    refused("run.not_writable", lambda: RunDirectory.create(tmp_path, MANIFEST))
    refused("run.not_writable", lambda: RunDirectory.create(tmp_path / "x", MANIFEST))
    tmp_path.chmod(0o700)


def test_rows_to_be_run_again_leave_results_and_stay_in_attempts(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, MANIFEST) as run:
        run.append([row("a"), row("b")], [attempt("a"), attempt("b")])
        inode = (tmp_path / "results.jsonl").stat().st_ino
        run.keep_only([row("b")])
        assert (tmp_path / "results.jsonl").stat().st_ino != inode, "replaced, never rewritten in place"
        run.append([row("a", "second")])
    assert [(one.item_id, one.text) for one in read_rows(tmp_path)] == [("b", "t"), ("a", "second")]
    assert [one.item_id for one in read_attempts(tmp_path)] == ["a", "b"]


def test_the_manifest_is_replaced_whole(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, MANIFEST) as run:
        run.write_manifest({**MANIFEST, "ended_at": "now"})
        assert run.manifest()["ended_at"] == "now"
    assert json.loads((tmp_path / "run.json").read_text())["ü"] == [1, None]


@pytest.mark.parametrize(
    ("prompt", "slug"),
    [
        ("Review {{item}}, please!", "review-please"),
        ("{{item}}", "run"),
        ("Ünïcode ☃", "n-code"),
        ("x " * 100, "-".join(["x"] * 20)),
    ],
)
def test_default_names(tmp_path: Path, prompt: str, slug: str) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    path = default_run_directory(prompt, base=tmp_path, now=now)
    assert path == tmp_path / f"20260102T030405Z-{slug}"
    path.mkdir()
    assert default_run_directory(prompt, base=tmp_path, now=now).name.endswith("-2")


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
@pytest.mark.parametrize("what", ["run", "run/results.jsonl"])
def test_rows_are_not_written_where_nobody_finds_them(tmp_path: Path, how: str, what: str) -> None:
    with RunDirectory.create(tmp_path / "run", MANIFEST) as run:
        run.append([row("a")], [attempt("a")])
        (tmp_path / what).rename(tmp_path / "away")
        if how == "replaced":
            (tmp_path / "run").mkdir(exist_ok=True)
            (tmp_path / "run" / "results.jsonl").touch()
            (tmp_path / "run" / "attempts.jsonl").touch()
        elif how == "removed":
            shutil.rmtree(tmp_path / "away") if (tmp_path / "away").is_dir() else (tmp_path / "away").unlink()
        error = refused("run.write_failed", lambda: run.append([row("b")], [attempt("b")]))
        assert "removed or replaced" in error.message
