"""Working directories: made whole or not at all, and removed without a trace."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import ToolError
from kimi_ray.settings import Workdir
from kimi_ray.tools import check_workdir, parse_workdir, prepare_workdir
from kimi_ray.tools.workdirs import copying as module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    top = tmp_path / "source"
    (top / "src" / "deep").mkdir(parents=True)
    (top / "src" / "deep" / "a.txt").write_text("a")
    (top / ".hidden").write_text("h")
    (top / "run.sh").write_text("#!/bin/sh\n")
    (top / "run.sh").chmod(0o755)
    (top / "link").symlink_to("src/deep/a.txt")
    (top / "dir-link").symlink_to("src")
    (top / "dangling").symlink_to("nowhere")
    os.mkfifo(top / "pipe")
    (top / "sealed").mkdir()
    (top / "sealed" / "x").write_text("x")
    (top / "sealed").chmod(0o555)
    return top


async def refused(awaitable) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await awaitable
    return caught.value


async def test_none_and_shared(source: Path, tmp_path: Path) -> None:
    none = await prepare_workdir(Workdir.none(), base_dir=str(tmp_path / "w"), name="n")
    assert (none.path, none.kind, none.created) == (None, "none", False)
    shared = await prepare_workdir(Workdir.shared(str(source)), base_dir=str(tmp_path / "w"), name="n")
    assert (shared.path, shared.created) == (str(source), False)
    await none.release()
    await shared.release(keep=False)
    assert (source / "run.sh").exists() and not (tmp_path / "w").exists()


async def test_a_copy_is_the_same_tree_and_its_own(source: Path, tmp_path: Path) -> None:
    made = await prepare_workdir(Workdir.copy(str(source)), base_dir=str(tmp_path / "w"), name="item-1")
    assert made.path is not None and made.created and made.skipped == ("pipe",)
    copy = Path(made.path)
    assert copy == tmp_path / "w" / "item-1"
    assert sorted(p.name for p in copy.iterdir()) == sorted(p.name for p in source.iterdir() if p.name != "pipe")
    assert os.readlink(copy / "link") == "src/deep/a.txt" and os.readlink(copy / "dangling") == "nowhere"
    assert (copy / "dir-link").is_symlink()
    assert stat.S_IMODE((copy / "run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE((copy / "sealed").stat().st_mode) == 0o555
    assert (copy / "run.sh").stat().st_mtime_ns == (source / "run.sh").stat().st_mtime_ns
    (copy / "src" / "deep" / "a.txt").write_text("changed")
    assert (source / "src" / "deep" / "a.txt").read_text() == "a"
    assert [p.name for p in (tmp_path / "w").iterdir()] == ["item-1"]
    await made.release()
    assert not copy.exists() and source.exists()
    await made.release()


@pytest.mark.parametrize("moment", ["scandir", "copyfile", "copystat", "readlink"])
async def test_what_is_removed_meanwhile_was_never_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As a repository in which git works: the files of ``source/goes`` go right before they are looked at."""
    (source / "goes" / "deep").mkdir(parents=True)
    (source / "goes" / "file").write_text("x")
    (source / "goes" / "link").symlink_to("file")
    (source / "stays").write_text("y")
    owner = shutil if moment.startswith("copy") else os
    real = getattr(owner, moment)

    def removing(path: str, *rest: Any, **options: Any) -> Any:
        if str(path).startswith(f"{source}/goes/") or (moment == "scandir" and str(path) == f"{source}/goes"):
            shutil.rmtree(source / "goes", ignore_errors=True)
        return real(path, *rest, **options)

    monkeypatch.setattr(module, "_FICLONE", 0)  # as on a file system that shares no blocks
    with monkeypatch.context() as patched:
        patched.setattr(owner, moment, removing)
        made = await prepare_workdir(Workdir.copy(str(source)), base_dir=str(tmp_path / "w"), name="s.a.1")
    assert made.path is not None and Path(made.path, "stays").read_text() == "y"
    gone = "link" if moment == "readlink" else "file"
    assert not os.path.lexists(Path(made.path, "goes", gone))


async def test_keep(source: Path, tmp_path: Path) -> None:
    made = await prepare_workdir(Workdir.copy(str(source)), base_dir=str(tmp_path), name="kept", keep=True)
    await made.release()
    assert made.path is not None and Path(made.path).exists()
    await made.release(keep=False)
    assert not Path(made.path).exists()


async def test_copies_made_inside_what_is_copied(source: Path) -> None:
    base = source / "runs" / "workdirs"
    for name in ("one", "two"):
        made = await prepare_workdir(Workdir.copy(str(source)), base_dir=str(base), name=name)
        assert made.path is not None
        assert not (Path(made.path) / "runs" / "workdirs").exists() and "runs/workdirs" in made.skipped


async def test_what_an_agent_may_not_read_is_not_copied_for_it(source: Path, tmp_path: Path) -> None:
    (source / "items.jsonl").write_text("answers")
    (source / "runs").mkdir()
    (source / "runs" / "results.jsonl").write_text("{}")
    (tmp_path / "alias").symlink_to(source)
    made = await prepare_workdir(
        Workdir.copy(str(source)),
        base_dir=str(tmp_path / "w"),
        name="n",
        leave_out=[str(tmp_path / "alias" / "items.jsonl"), str(source / "runs"), str(tmp_path / "elsewhere")],
    )
    assert made.path is not None and set(made.skipped) == {"pipe", "items.jsonl", "runs"}
    names = {p.name for p in Path(made.path).iterdir()}
    assert not names & {"items.jsonl", "runs"} and "run.sh" in names


async def test_refusals(source: Path, tmp_path: Path) -> None:
    base = str(tmp_path / "w")
    cases = {
        "workdir.not_found": Workdir.copy(str(tmp_path / "missing")),
        "workdir.not_a_directory": Workdir.shared(str(source / "run.sh")),
    }
    for code, spec in cases.items():
        assert (await refused(prepare_workdir(spec, base_dir=base, name="n"))).code == code
    for name in ("", "..", "a/b"):
        error = await refused(prepare_workdir(Workdir.copy(str(source)), base_dir=base, name=name))
        assert error.code == "workdir.failed"


async def test_an_existing_directory_is_never_taken_over(source: Path, tmp_path: Path) -> None:
    (tmp_path / "w" / "n").mkdir(parents=True)
    error = await refused(prepare_workdir(Workdir.copy(str(source)), base_dir=str(tmp_path / "w"), name="n"))
    assert error.code == "workdir.exists" and list((tmp_path / "w" / "n").iterdir()) == []


async def test_two_at_once_for_one_name(source: Path, tmp_path: Path) -> None:
    results = await asyncio.gather(
        *(prepare_workdir(Workdir.copy(str(source)), base_dir=str(tmp_path / "w"), name="n") for _ in range(2)),
        return_exceptions=True,
    )
    failures = [r for r in results if isinstance(r, ToolError)]
    assert [f.code for f in failures] == ["workdir.exists"]
    assert [p.name for p in (tmp_path / "w").iterdir()] == ["n"]


async def test_a_failing_copy_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device", "some/file")

    monkeypatch.setattr(shutil, "copyfile", full)
    error = await refused(prepare_workdir(Workdir.copy(str(source)), base_dir=str(tmp_path / "w"), name="n"))
    assert error.code == "workdir.failed" and "No space left" in error.message and error.hint
    assert list((tmp_path / "w").iterdir()) == []


async def test_a_cancelled_copy_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    real = shutil.copystat

    def slow(*args, **kwargs):
        entered.set()
        assert go_on.wait(10)
        return real(*args, **kwargs)

    monkeypatch.setattr(module.shutil, "copystat", slow)
    task = asyncio.create_task(prepare_workdir(Workdir.copy(str(source)), base_dir=str(tmp_path / "w"), name="n"))
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert list((tmp_path / "w").iterdir()) == []


async def test_lost(tmp_path: Path) -> None:
    await check_workdir(str(tmp_path))
    error = await refused(check_workdir(str(tmp_path / "gone")))
    assert error.code == "workdir.lost" and error.error_class == "infra" and error.retryable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Workdir.none()),
        ("copy", Workdir.copy("/here")),
        ("copy:a:b", Workdir.copy("a:b")),
        ("shared", Workdir.shared("/here")),
        ("shared:{{path}}", Workdir.shared("{{path}}")),
        ("git:{{repo}}@{{commit}}", Workdir(kind="git", path="{{repo}}", ref="{{commit}}")),
        ("git:a dir@here@v1", Workdir.git("a dir@here", "v1")),
        ("factory:pkg.mod:make", Workdir(kind="factory", path="pkg.mod:make")),
    ],
)
def test_parsing(text: str, expected: Workdir) -> None:
    assert parse_workdir(text, "/here") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "copi",
        "none:x",
        "git:repo",
        "git:git@host:me/repo@v1",
        "git:https://h/r.git@main",
        "git:@x",
        "git",
        "factory:mod",
        "/a/path",
    ],
)
def test_parsing_refuses_by_name(text: str) -> None:
    with pytest.raises(ToolError) as caught:
        parse_workdir(text, "/here")
    assert caught.value.code == "workdir.invalid" and (caught.value.hint or "")
    with pytest.raises(ToolError):
        parse_workdir("copy")


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"])
async def test_a_path_that_no_directory_can_have_is_refused_by_name(tmp_path: Path, path: str) -> None:
    with pytest.raises(ToolError) as refused:
        await prepare_workdir(Workdir.shared(path), base_dir=str(tmp_path), name="x")
    assert refused.value.code == "workdir.invalid"
    refused.value.message.encode()


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (Workdir.copy("a/../b"), "/here/b"),
        (Workdir.git("/r", "main"), "/r"),
        (Workdir.shared("~"), os.path.expanduser("~")),
        (Workdir.factory("m:f"), "m:f"),
        (Workdir.none(), None),
        (Workdir(kind="git", path="https://host/r", ref="x"), "https://host/r"),
    ],
)
def test_relative_to_a_directory(given: Workdir, path: str | None) -> None:
    assert given.within("/here") == given.model_copy(update={"path": path})
