"""The local environment: what it lets through, what it refuses, what it calls things."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from kimi_ray.errors import ToolError
from kimi_ray.tools import LocalEnvironment


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "root"
    place.mkdir()
    return place


@pytest.fixture
async def env(root: Path):
    environment = LocalEnvironment(root)
    yield environment
    await environment.close()


async def refused(awaitable) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await awaitable
    return caught.value


async def test_relative_and_absolute_paths_inside(env: LocalEnvironment, root: Path) -> None:
    await env.write_bytes("a/b/c.txt", b"hello")
    assert await env.read_bytes("a/b/c.txt") == b"hello"
    assert await env.read_bytes(str(root / "a/b/c.txt"), offset=1, limit=3) == b"ell"
    assert await env.read_bytes("a/../a/b/c.txt") == b"hello"
    found = await env.stat("a/b/c.txt")
    assert found is not None and (found.kind, found.size) == ("file", 5)
    assert await env.stat("a/missing") is None
    assert await env.stat("a/b/c.txt/below-a-file") is None


@pytest.mark.parametrize("path", ["../outside.txt", "/etc/passwd", "a/../../outside.txt", "link-out/x", "/", ".."])
async def test_escape_is_refused_by_name(env: LocalEnvironment, root: Path, path: str) -> None:
    (root.parent / "outside.txt").write_text("secret")
    (root / "link-out").symlink_to(root.parent)
    for call in (env.read_bytes(path), env.write_bytes(path, b"x"), env.stat(path), env.list(path)):
        error = await refused(call)
        assert error.code == "environment.outside_workdir"
        assert error.details["given"] == path and error.details["path"] in error.message
    assert (root.parent / "outside.txt").read_text() == "secret"


async def test_sibling_with_the_same_prefix_is_outside(env: LocalEnvironment, root: Path) -> None:
    (root.parent / "rooted").mkdir()
    assert (await refused(env.stat("../rooted"))).code == "environment.outside_workdir"


async def test_a_dangling_link_cannot_be_written_through(env: LocalEnvironment, root: Path) -> None:
    (root / "dangling").symlink_to(root.parent / "new.txt")
    assert (await refused(env.write_bytes("dangling", b"x"))).code == "environment.outside_workdir"
    assert not (root.parent / "new.txt").exists()


async def test_a_link_inside_is_written_through_and_stays_a_link(env: LocalEnvironment, root: Path) -> None:
    (root / "real").write_text("old")
    (root / "link").symlink_to("real")
    await env.write_bytes("link", b"new")
    assert (root / "real").read_text() == "new" and (root / "link").is_symlink()


async def test_denied_roots(root: Path) -> None:
    (root / "home").mkdir()
    (root / "home" / "log").write_text("secret")
    (root / "items.jsonl").write_text("answers")
    (root / "link").symlink_to("home/log")
    env = LocalEnvironment(root, denied_roots=[root / "home", root / "items.jsonl"])
    for path in ("home", "home/log", "items.jsonl", "link", "home/new"):
        assert (await refused(env.stat(path))).code == "environment.denied"
    assert (await refused(env.write_bytes("home/new", b"x"))).code == "environment.denied"
    assert [(entry.path, entry.kind) for entry in await env.list(".", recursive=True)] == [("link", "other")]


async def test_a_root_below_a_denied_directory_is_usable_and_its_surroundings_are_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    work = run / "workdirs" / "one"
    work.mkdir(parents=True)
    (run / "results.jsonl").write_text("{}")
    env = LocalEnvironment(work, denied_roots=[run], scratch=tmp_path)
    await env.write_bytes("x", b"1")
    assert await env.read_bytes("x") == b"1"
    assert (await refused(env.read_bytes(str(run / "results.jsonl")))).code == "environment.denied"
    same = LocalEnvironment(run, denied_roots=[run])
    assert (await refused(same.list("."))).code == "environment.denied"


async def test_scratch_is_reachable_by_absolute_path(env: LocalEnvironment, root: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    both = LocalEnvironment(root, scratch=scratch)
    await both.write_bytes(str(scratch / "out.txt"), b"1")
    assert await both.read_bytes(str(scratch / "out.txt")) == b"1"
    assert (await both.exec("echo $TMPDIR")).output.strip() == str(scratch)
    assert (await refused(env.read_bytes(str(scratch / "out.txt")))).code == "environment.outside_workdir"
    await both.close()


async def test_errors_are_named(env: LocalEnvironment, root: Path) -> None:
    (root / "dir").mkdir()
    (root / "file").write_text("x")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "fifo")
    expected = {
        "environment.not_found": env.read_bytes("missing"),
        "environment.is_directory": env.read_bytes("dir"),
        "environment.not_a_file": env.read_bytes("fifo"),
        "environment.not_a_directory": env.list("file"),
        "environment.bad_path": env.read_bytes("a\0b"),
        "environment.failed": env.read_bytes("loop"),
    }
    for code, call in expected.items():
        async with asyncio.timeout(5):
            error = await refused(call)
        assert error.code == code, error
    assert (await refused(env.write_bytes("dir", b""))).code == "environment.is_directory"
    assert (await refused(env.write_bytes("fifo", b""))).code == "environment.not_a_file"
    assert (await refused(env.write_bytes("file/below", b""))).code == "environment.not_a_directory"
    assert (await refused(env.read_bytes(""))).code == "environment.bad_path"
    assert (await refused(env.read_bytes("x" * 300))).code == "environment.failed"


async def test_no_workdir() -> None:
    env = LocalEnvironment(None)
    assert env.root is None
    for call in (env.read_bytes("x"), env.write_bytes("x", b""), env.stat("x"), env.list("."), env.exec("true")):
        error = await refused(call)
        assert error.code == "environment.no_workdir" and error.hint


async def test_root_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ToolError) as caught:
        LocalEnvironment(tmp_path / "missing")
    assert caught.value.code == "environment.not_found"


async def test_write_keeps_mode_and_leaves_no_temporary_file(env: LocalEnvironment, root: Path) -> None:
    script = root / "run.sh"
    script.write_text("old")
    script.chmod(0o755)
    await env.write_bytes("run.sh", b"new")
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    await env.write_bytes("run.sh", b"er", append=True)
    assert script.read_text() == "newer"
    await env.write_bytes("fresh", b"x", append=True)
    assert sorted(entry.name for entry in root.iterdir()) == ["fresh", "run.sh"]


async def test_listing_is_in_name_order_bounded_and_does_not_follow_links(env: LocalEnvironment, root: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c/d/e.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    (root / "b" / "up").symlink_to("..")
    (root / "out").symlink_to("/etc")
    (root / "alias.txt").symlink_to("a.txt")
    os.mkfifo(root / "pipe")
    flat = await env.list(".")
    assert [(e.path, e.kind) for e in flat] == [
        ("a.txt", "file"), ("alias.txt", "file"), ("b", "directory"),
        ("c", "directory"), ("out", "other"), ("pipe", "other"),
    ]  # fmt: skip
    deep = [entry.path for entry in await env.list(".", recursive=True)]
    assert deep[:6] == ["a.txt", "alias.txt", "b", "b/1.txt", "b/2.txt", "b/up"]
    assert "c/d/e.txt" in deep
    assert [entry.path for entry in await env.list(".", recursive=True, limit=4)] == deep[:4]


async def test_file_names_that_are_not_utf8_can_be_stored(env: LocalEnvironment, root: Path) -> None:
    os.close(os.open(os.fsencode(root) + b"/\xff.txt", os.O_CREAT))
    (entry,) = await env.list(".")
    entry.path.encode()
    assert entry.path == "\ufffd.txt"


@pytest.mark.parametrize("on_the_loop", [True, False])
async def test_small_and_large_reads_are_the_same(root: Path, on_the_loop: bool) -> None:
    env = LocalEnvironment(root)
    if not on_the_loop:
        env._disk = None
    data = bytes(range(256)) * 1024
    (root / "large").write_bytes(data)
    (root / "small").write_bytes(data[:1000])
    (root / "empty").write_bytes(b"")
    for name, content in (("large", data), ("small", data[:1000]), ("empty", b"")):
        for offset in (0, 1, 999, 1000, 1001, 300_000):
            for limit in (None, 0, 1, 1000, 70_000, 300_000):
                end = None if limit is None else offset + limit
                assert await env.read_bytes(name, offset=offset, limit=limit) == content[offset:end], (
                    name,
                    offset,
                    limit,
                )
    await env.close()


async def test_closed_refuses_and_closing_twice_is_fine(root: Path) -> None:
    env = LocalEnvironment(root)
    await env.write_bytes("x", b"")
    await env.close()
    await env.close()
    assert (await refused(env.read_bytes("x"))).code == "environment.closed"
    assert (await refused(env.exec("true"))).code == "environment.closed"


async def test_many_concurrent_operations_stay_within_the_bound(root: Path) -> None:
    env = LocalEnvironment(root, max_concurrent_files=2)
    await asyncio.gather(*(env.write_bytes(f"f{n}", str(n).encode()) for n in range(50)))
    assert await asyncio.gather(*(env.read_bytes(f"f{n}") for n in range(50))) == [str(n).encode() for n in range(50)]
    await env.close()
