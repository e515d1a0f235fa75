"""Paths that lead out: by links, by /proc, by another name of what is denied, by a link that comes in between."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import ToolError
from kimi_ray.tools import Accesses, LocalEnvironment
from kimi_ray.tools.builtin import Glob, Grep
from kimi_ray.tools.confinement import Confinement
from kimi_ray.tools.contract import ToolContext
from kimi_ray.tools.scheduling import by_file, conflict

SECRET = b"the secret"


class Ground:
    """A root with a denied directory and a denied file in it, and a secret outside."""

    def __init__(self, base: Path) -> None:
        self.root = base / "root"
        self.outside = base / "outside"
        self.home = self.root / "home"
        self.items = self.root / "items.jsonl"
        for directory in (self.root, self.outside, self.home, self.root / "sub"):
            directory.mkdir()
        for place in (self.outside / "secret", self.home / "secret", self.items):
            place.write_bytes(SECRET)
        (self.root / "sub" / "secret").write_bytes(b"mine")
        self.environment = LocalEnvironment(self.root, denied_roots=[str(self.home), str(self.items)])

    async def code(self, path: str) -> set[str]:
        """The codes with which reading, writing, appending, looking and listing are refused."""
        environment = self.environment
        codes: set[str] = set()
        for attempt in (
            lambda: environment.read_bytes(path),
            lambda: environment.write_bytes(path, b"spoilt"),
            lambda: environment.write_bytes(path, b"spoilt", append=True),
            lambda: environment.stat(path),
            lambda: environment.list(os.path.dirname(path) or "."),
        ):
            try:
                found: Any = await attempt()
                assert found != SECRET
            except ToolError as error:
                codes.add(error.code)
        return codes

    def unspoilt(self) -> bool:
        places = (self.outside / "secret", self.home / "secret", self.items)
        names = {entry.name for entry in self.outside.iterdir()}
        return all(place.read_bytes() == SECRET for place in places) and names == {"secret"}


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncGenerator[Ground]:
    found = Ground(tmp_path)
    yield found
    await found.environment.close()


@pytest.mark.parametrize(
    "path",
    [
        "../outside/secret",
        "sub/../../outside/secret",
        "/etc/passwd",
        "/proc/self/root/etc/passwd",
        "/proc/self/cwd/../../../../../../etc/passwd",
        "/proc/thread-self/root/etc/passwd",
        pytest.param(f"/proc/{os.getpid()}/environ", id="/proc/PID/environ"),
        "/proc/1/root/etc/passwd",
        "/dev/fd/0",
        "to_outside/secret",
        "to_parent/outside/secret",
        "chain/secret",
        "sub/up/outside/secret",
    ],
)
async def test_ways_out_are_refused(ground: Ground, path: str) -> None:
    (ground.root / "to_outside").symlink_to(ground.outside)
    (ground.root / "to_parent").symlink_to("..")
    (ground.root / "chain").symlink_to("to_outside")
    (ground.root / "sub" / "up").symlink_to("../..")
    # what another process sees as its root may not even be looked at
    refusals = {"environment.outside_workdir", *(["environment.permission"] if path.startswith("/proc/1/") else [])}
    codes = await ground.code(path)
    assert codes and codes <= refusals
    with pytest.raises(ToolError) as caught:
        await ground.environment.exec("pwd", cwd=os.path.dirname(path))
    assert caught.value.code in refusals
    assert ground.unspoilt()


@pytest.mark.parametrize(
    "path",
    ["home/secret", "./sub/../home/secret", "to_home/secret", "sub/../to_home/secret", "home", "home/new/file"],
)
async def test_the_denied_directory_by_every_name(ground: Ground, path: str) -> None:
    (ground.root / "to_home").symlink_to("home")
    refused = await ground.code(path)
    assert refused == {"environment.denied"}
    assert ground.unspoilt() and [entry.name for entry in ground.home.iterdir()] == ["secret"]


@pytest.mark.parametrize("path", ["items.jsonl", "to_items", "sub/hard", "/proc/self/root{root}/items.jsonl"])
async def test_the_denied_file_by_every_name(ground: Ground, path: str) -> None:
    (ground.root / "to_items").symlink_to("items.jsonl")
    os.link(ground.items, ground.root / "sub" / "hard")
    assert await ground.code(path.format(root=ground.root)) == {"environment.denied"}
    assert ground.unspoilt()


async def test_a_denied_directory_that_was_moved_aside_is_still_the_same(ground: Ground) -> None:
    ground.home.rename(ground.root / "moved")
    ground.home.symlink_to("moved")  # its name still leads to it, another does too
    assert await ground.code("moved/secret") == {"environment.denied"}
    assert (ground.root / "moved" / "secret").read_bytes() == SECRET
    assert "moved" not in {entry.path for entry in await ground.environment.list(".")}


async def test_searches_do_not_show_what_is_denied(ground: Ground) -> None:
    os.link(ground.items, ground.root / "sub" / "hard")
    (ground.root / "link").symlink_to("home/secret")
    context = ToolContext(ground.environment, "s", "main", "c", None)  # type: ignore[arg-type]
    found = await Glob().run({"pattern": "**/*"}, context)
    assert str(found.content).splitlines() == ["sub/secret"]
    found = await Grep().run({"pattern": "secret|mine", "output_mode": "content"}, context)
    assert str(found.content).splitlines() == ["sub/secret:1:mine"]


def swap(place: Path, target: Path) -> None:
    """Put a link where something was."""
    place.rename(place.with_name("aside"))
    place.symlink_to(target)


@pytest.mark.parametrize("what", ["directory", "file"])
@pytest.mark.parametrize("way", ["read", "write", "append", "make", "stat", "list"])
async def test_a_link_that_comes_between_judging_and_opening(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, what: str, way: str
) -> None:
    judged = Confinement.resolve

    def resolve(self: Confinement, path: str) -> str:
        found = judged(self, path)
        if not (ground.root / "sub" / "aside").exists() and not (ground.root / "aside").exists():
            if what == "directory":
                swap(ground.root / "sub", ground.outside)
            else:
                swap(ground.root / "sub" / "secret", ground.outside / "secret")
        return found

    monkeypatch.setattr(Confinement, "resolve", resolve)
    environment = ground.environment
    attempts: dict[str, Callable[[], Any]] = {
        "read": lambda: environment.read_bytes("sub/secret"),
        "write": lambda: environment.write_bytes("sub/secret", b"spoilt"),
        "append": lambda: environment.write_bytes("sub/secret", b"spoilt", append=True),
        "make": lambda: environment.write_bytes("sub/deep/er/new", b"spoilt"),
        "stat": lambda: environment.stat("sub/secret"),
        "list": lambda: environment.list("sub"),
    }
    try:
        found = await attempts[way]()
        if way == "stat":
            assert found is None or found.kind == "other"  # a link, not what it leads to
        elif way == "list":
            assert what == "file"
        else:
            assert way == "make" and what == "file"
    except ToolError as error:
        assert error.code in ("environment.not_a_directory", "environment.failed", "environment.not_a_file")
    assert ground.unspoilt()


async def test_a_pipe_is_not_waited_for(ground: Ground) -> None:
    os.mkfifo(ground.root / "pipe")
    began = time.monotonic()
    for attempt in (ground.environment.read_bytes("pipe"), ground.environment.write_bytes("pipe", b"x")):
        with pytest.raises(ToolError) as caught:
            await attempt
        assert caught.value.code == "environment.not_a_file"
    assert time.monotonic() - began < 2


async def test_the_scratch_directory_has_the_same_walls(tmp_path: Path) -> None:
    for name in ("root", "scratch", "outside"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "secret").write_bytes(SECRET)
    (tmp_path / "scratch" / "out").symlink_to("../outside")
    environment = LocalEnvironment(tmp_path / "root", scratch=tmp_path / "scratch")
    await environment.write_bytes(str(tmp_path / "scratch" / "a" / "b"), b"fine")
    assert await environment.read_bytes(f"{tmp_path}/scratch/a/b") == b"fine"
    with pytest.raises(ToolError) as caught:
        await environment.read_bytes(f"{tmp_path}/scratch/out/secret")
    assert caught.value.code == "environment.outside_workdir"
    await environment.close()


async def test_nothing_is_left_open(ground: Ground) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    await ground.code("sub/secret")
    before = count()
    for path in ("sub/secret", "home/secret", "sub/none/at/all", "sub/secret/x", "../outside/secret", "."):
        await ground.code(path)
    assert count() == before


# -- two names of one file -------------------------------------------------------------------------------------------

R, W = Accesses.reads, Accesses.writes


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (W("sub/secret"), R("link"), True),
        (W("link"), W("sub/secret"), True),
        (W("link"), R("other"), False),
        (R("link"), R("sub/secret"), False),
        (W("to_sub/secret"), R("sub"), True),
        (W("to_sub/new"), W("sub/new"), True),
        (W("to_sub/new"), R("sub/old"), False),
        (W("hard"), R("sub/secret"), True),
        (W("sub/../sub/./secret"), R("SUB/SECRET"), True),
        (W("../outside/secret"), W("to_outside/secret"), True),
        (W("to_outside/../root/link"), R("sub/secret"), True),
        (W("bad\0path"), R("link"), False),
        (Accesses.all(), R("link"), True),
    ],
)
async def test_calls_conflict_by_the_files_that_they_mean(
    ground: Ground, one: Accesses, other: Accesses, expected: bool
) -> None:
    root = ground.root
    (root / "link").symlink_to("sub/secret")
    (root / "to_sub").symlink_to("sub")
    (root / "to_outside").symlink_to("../outside")
    os.link(root / "sub" / "secret", root / "hard")
    found = await by_file([one, other], ground.environment)
    assert conflict(*found, root=str(root)) is expected and conflict(*found[::-1], root=str(root)) is expected


async def test_names_are_looked_up_only_where_it_matters(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Any, *paths: str) -> Any:
        raise AssertionError(paths)

    monkeypatch.setattr(LocalEnvironment, "_names", never)
    for accesses in ([W("a")], [R("a"), R("b")], [W("a"), W("a")], [Accesses.all(), Accesses.none()], []):
        assert await by_file(accesses, ground.environment) == accesses
    assert await by_file([W("a"), R("b")], object()) == [W("a"), R("b")]  # type: ignore[arg-type]
    nowhere = LocalEnvironment(None)
    assert await by_file([W("a"), R("b")], nowhere) == [W("a"), R("b")]
