"""Swarms and sessions whose agents work in worktrees, copies and what factories make: through the public API."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.agent_services import SleepingWorkdirs, workdirs_base
from kimi_ray.hosts.agent_workdirs import AgentWorkdirs
from kimi_ray.hosts.specs import PlaceAgent
from kimi_ray.hosts.steady_calls import RegistryCalls, StoreCalls
from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step
from kimi_ray.runs.run_directory import read_rows
from kimi_ray.settings import Item, Workdir
from kimi_ray.tools.workdirs import leftovers, workdir_name
from tests.unit.cli.conftest import Cli
from tests.unit.cli.conftest import cli as cli
from tests.unit.cli.conftest import place as place
from tests.unit.runtime_fixtures import cluster_of, hosts_of, running

FACTORIES = "kimi_ray_test_places"


def reads(request: ChatRequest) -> Step:
    """A model that reads f.txt, and says what it found."""
    last = request.messages[-1]
    if last["source"]["kind"] == "tool":
        return Step(text=str(last["content"]))
    return Step.call("Read", {"path": "f.txt"})


@pytest.fixture
def factories() -> Iterator[Any]:
    module: Any = types.ModuleType(FACTORIES)
    module.released = []
    module.contexts = []
    sys.modules[FACTORIES] = module
    yield module
    del sys.modules[FACTORIES]


def git(where: Path, *arguments: str) -> str:
    who = {f"GIT_{role}_{what}": "x@y" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {"PATH": os.environ["PATH"], "HOME": str(where.parent), **who}
    return subprocess.run(
        ["git", "-C", str(where), *arguments], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def repository(top: Path, *texts: str) -> list[str]:
    """A repository with one commit a text; returns the commits."""
    top.mkdir(parents=True)
    git(top, "init", "-q", "-b", "main")
    commits: list[str] = []
    for text in texts:
        (top / "f.txt").write_text(text)
        git(top, "add", ".")
        git(top, "commit", "-q", "-m", text)
        commits.append(git(top, "rev-parse", "HEAD"))
    return commits


def left(runtime: Any) -> list[str]:
    base = Path(workdirs_base(cluster_of(runtime).home_id))
    return sorted(name for name in os.listdir(base) if not name.startswith(".")) if base.exists() else []


async def all_left(runtime: Any, *repositories: Path) -> None:
    """Wait until no private directory is left, and no entry of one: a row does not wait for the last of it."""
    async with asyncio.timeout(10):
        while left(runtime) or any(len(git(one, "worktree", "list").splitlines()) > 1 for one in repositories):
            await asyncio.sleep(0.02)


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
MODEL = "scripted:tests.unit.test_runtime_workdirs:reads"
READING = {"profile": "explore", "tools": ["Read"]}


@needs_git
async def test_a_swarm_in_worktrees_of_its_items(tmp_path: Path) -> None:
    repos = tmp_path / "work" / "some repos"
    items: list[Item] = []
    for name in ("one", "two"):
        items += [
            Item(id=f"{name}-{n}", data={"repo": name, "commit": commit})
            for n, commit in enumerate(repository(repos / name, f"{name} old", f"{name} new"))
        ]
    async with running(tmp_path) as (runtime, _stage, _model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=MODEL, profile="bare")
        report = await session.swarm(
            "go", items, workdir=Workdir.git("some repos/{{repo}}", "{{commit}}"), repeats=3, **READING
        )
        report.raise_for_status()
        for row in report.rows:
            assert f"{row.item['repo']} {'old' if row.item_id.endswith('0') else 'new'}" in (row.text or "")
        await all_left(runtime, repos / "one", repos / "two")
        wrong = await session.swarm(
            "go", [*items[:1], Item(id="bad", data={"repo": "one", "commit": "nope"})],
            workdir=Workdir.git("some repos/{{repo}}", "{{commit}}"), **READING,
        )  # fmt: skip
        by_id = {row.item_id: row for row in wrong.rows}
        assert by_id["one-0"].status == "completed"
        assert by_id["bad"].error is not None and by_id["bad"].error.code == "workdir.bad_ref"
        with pytest.raises(KimiRayError) as caught:
            await session.start_swarm(
                "{{url}}",
                [{"url": "https://host/x.git"}],
                workdir=Workdir(kind="git", path="{{url}}", ref="main"),
                **READING,
            )
        assert caught.value.code == "workdir.invalid"
        kept = await session.swarm(
            "go", items[:1], workdir=Workdir.git("some repos/{{repo}}", "{{commit}}"), keep_workdirs=True, **READING
        )
        kept.raise_for_status()
        (name,) = left(runtime)
        assert name.startswith(f"{session.id}.agent-")
        host = (await hosts_of(runtime, "agents"))[0]
        peer = cluster_of(runtime).peer(host)
        assert await peer.call("drop_workdirs", [session.id], timeout_s=10) == 1
        await all_left(runtime, repos / "one")


async def test_a_swarm_in_what_a_factory_makes(tmp_path: Path, factories: Any) -> None:
    def make(item: Any, ctx: Any) -> Any:
        factories.contexts.append(ctx)
        if item["word"] == "bad":
            raise ValueError("no room")
        tree = Path(ctx.base_dir, "tree")
        tree.mkdir()
        (tree / "f.txt").write_text(f"{item['word']} {ctx.seed}")
        yield tree
        factories.released.append(ctx.agent_id)

    factories.make = make
    items = [Item(id=word, data={"word": word}) for word in ("a", "b", "bad")]
    async with running(tmp_path) as (runtime, _stage, _model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=MODEL, profile="bare")
        report = await session.swarm(
            "{{word}}", items, workdir=Workdir.factory(f"{FACTORIES}:make"), retries=1, retry_on=["environment"],
            seed=5, **READING,
        )  # fmt: skip
        rows = {row.item_id: row for row in report.rows}
        for word in ("a", "b"):
            assert rows[word].status == "completed" and f"{word} {rows[word].seed}" in (rows[word].text or "")
        assert rows["bad"].error is not None and rows["bad"].error.code == "workdir.failed"
        assert "no room" in rows["bad"].error.message and f"{FACTORIES}:make" in rows["bad"].error.message
        assert sorted(factories.released) == sorted(str(rows[word].agent_id) for word in ("a", "b"))
        assert sorted(ctx.attempt for ctx in factories.contexts if ctx.item["word"] == "bad") == [1, 2]
        assert {ctx.session_id for ctx in factories.contexts} == {session.id}
        await all_left(runtime)
        for name in ("nowhere_to_be_found:make", f"{FACTORIES}:missing"):
            with pytest.raises(KimiRayError) as caught:
                await session.start_swarm("{{word}}", items, workdir=Workdir.factory(name), **READING)
            assert caught.value.code == "workdir.invalid"


async def test_an_agent_finds_its_directory_again_and_a_lost_one_is_told(tmp_path: Path, factories: Any) -> None:
    def make(_item: Any, ctx: Any) -> Any:
        Path(ctx.base_dir, "f.txt").write_text("here")
        yield ctx.base_dir
        factories.released.append(ctx.agent_id)

    factories.make = make
    async with running(tmp_path) as (runtime, _stage, _model):
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=MODEL, profile="explore", tools=["Read"], workdir=Workdir.factory(f"{FACTORIES}:make")
        )
        assert "here" in (await (await session.main.submit("go")).result(20)).text
        await session.close()
        assert factories.released == [] and len(left(runtime)) == 1
        again = await runtime.workspace(tmp_path / "work").resume(session.id)
        assert "here" in (await (await again.main.submit("go on")).result(20)).text
        assert len(left(runtime)) == 1
        await again.close()
        shutil.rmtree(Path(workdirs_base(cluster_of(runtime).home_id), left(runtime)[0]))
        with pytest.raises(KimiRayError) as caught:
            lost = await runtime.workspace(tmp_path / "work").resume(session.id)
            (await (await lost.main.submit("and now")).result(20)).raise_for_state()
        assert caught.value.code == "workdir.lost" and caught.value.error_class == "infra"
    assert left_nothing_but_what_was_told(factories)


EDITED = """
def make(item, ctx):
    return ctx.base_dir
"""


async def test_a_factorys_code_chooses_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kimi_ray_test_edited.py").write_text(EDITED)
    own = Workdir.factory("kimi_ray_test_edited:make")

    async def homes(runtime: Any, session: Any, model: str) -> dict[str, str]:
        """The code of the hosts on which a swarm, a fork and a new session have been, by session and agent."""
        await session.swarm("{{item}}", ["a"], profile="bare", workdir=own)
        fork = await runtime.workspace(tmp_path / "work").fork(session.id, workdir=own)
        await fork.close()
        new = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare", workdir=own)
        hosts = {
            name: (await cluster_of(runtime).peer(name).call("ping", timeout_s=5))["fingerprint"]
            for name in await hosts_of(runtime, "agents")
        }
        main = hosts[
            (
                await runtime.connection.cluster.peer((await hosts_of(runtime, "sessions"))[0]).call(
                    "session_info", new.id, timeout_s=5, group="control"
                )
            ).main_host
        ]
        await new.close()
        return {"all": " ".join(sorted({code for code in hosts.values() if code})), "main": main}

    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await (await session.main.submit("one")).result(20)
        first = await homes(runtime, session, model)
        assert first["main"] and first["all"] == first["main"], "all three need the same code"
        assert await homes(runtime, session, model) == first
        (tmp_path / "kimi_ray_test_edited.py").write_text(EDITED + "# edited\n")
        second = await homes(runtime, session, model)
        assert second["main"] not in ("", first["main"])
    sys.modules.pop("kimi_ray_test_edited", None)


async def test_relative_directories_are_relative_to_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for top, text in ((tmp_path / "work", "the right one"), (tmp_path / "elsewhere", "the wrong one")):
        (top / "tree").mkdir(parents=True)
        (top / "tree" / "f.txt").write_text(text)
    monkeypatch.chdir(tmp_path / "elsewhere")
    async with running(tmp_path) as (runtime, _stage, _model):
        work = runtime.workspace(tmp_path / "work")
        for workdir in (Workdir.copy("tree"), Workdir.shared("tree")):
            session = await work.create_session(model=MODEL, workdir=workdir, **READING)
            assert "the right one" in (await (await session.main.submit("go")).result(20)).text
            for fork in [
                await work.fork(session.id, workdir=workdir),
                *await work.fork_many(session.id, 1, workdir=Workdir.copy("./tree")),
            ]:
                assert "the right one" in (await (await fork.main.submit("go")).result(20)).text
                await fork.close()
            await session.close()


@pytest.mark.parametrize("kinds", [("agents",), ("agents", "sessions")], ids="+".join)
async def test_whoever_comes_back_wants_the_node_of_its_own_directory(
    tmp_path: Path, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes: list[PlaceAgent] = []
    place = RegistryCalls.place_agents

    async def noted(self: RegistryCalls, asked: list[PlaceAgent]) -> list[str]:
        wishes.extend(asked)
        return await place(self, asked)

    def wanted() -> dict[str, str | None]:
        found = {wish.stream.agent_id: wish.near for wish in wishes}
        wishes.clear()
        return found

    monkeypatch.setattr(RegistryCalls, "place_agents", noted)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f.txt").write_text("a copy")
    async with running(tmp_path) as (runtime, stage, model):
        work, here = runtime.workspace(tmp_path / "work"), cluster_of(runtime).node_id
        own = Workdir.copy(str(tmp_path / "tree"))
        session = await work.create_session(model=model, profile="bare", workdir=own)
        await (await session.main.submit("one")).result(20)
        plain = await work.create_session(model=model, profile="bare")
        await (await plain.main.submit("one")).result(20)
        assert wanted() == {"main": None}, "a new one has no directory yet"
        stage.gate.clear()
        swarm = await session.start_swarm("{{item}}", ["a"], profile="bare", workdir=own, keep_workdirs=True)
        await stage.until_running(1)
        wanted()
        for kind in kinds:
            for host in await hosts_of(runtime, kind):
                cluster_of(runtime).kill_host(host)
        stage.gate.set()
        assert (await swarm.result()).ok
        await (await session.main.submit("two")).result(20)
        assert wanted() == {"main": here, "agent-1": here}
        await (await session.agent("agent-1").submit("you too")).result(20)
        assert wanted() == {"agent-1": here}
        await session.close()
        again = await work.resume(session.id)
        assert wanted() == {"main": here}
        await again.close()
        (fork,) = await work.fork_many(session.id, 1, workdir="copy")
        assert wanted()["main"] == here, "where its directory was made before it was there"
        await fork.close()
        await (await plain.main.submit("two")).result(20)
        assert set(wanted().values()) == {None}


def left_nothing_but_what_was_told(factories: Any) -> bool:
    """At the end of the process at the latest everything is released, once."""
    return factories.released == ["main"]


async def test_made_for_somebody_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "secret").write_text("x")
    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await (await session.main.submit("there is a host now")).result(20)
        host = (await hosts_of(runtime, "agents"))[0]
        peer = cluster_of(runtime).peer(host)
        copy, none = Workdir.copy(str(tmp_path / "tree")), Workdir.none()
        names = [workdir_name(f"session_{n}", "main", "x" * 8) for n in range(3)]
        hidden = [str(tmp_path / "tree" / "secret")]
        made = await peer.call("make_workdirs", [(copy, names[0], hidden), (none, "n", [])], timeout_s=10)
        assert [one["created"] for one in made] == [True, False] and made[1]["path"] is None
        assert os.listdir(made[0]["path"]) == []
        bad = Workdir.copy(str(tmp_path / "missing"))
        with pytest.raises(KimiRayError) as caught:
            many = [(copy, workdir_name(f"many_{n}", "main", "y" * 8), []) for n in range(9)]
            await peer.call("make_workdirs", [*many, (bad, names[2], []), (copy, names[1], [])], timeout_s=10)
        assert caught.value.code == "workdir.not_found" and left(runtime) == [names[0]]
        assert await peer.call("drop_workdirs", ["session_0", "session_1"], timeout_s=10) == 1
        await all_left(runtime)


@needs_git
def test_on_the_command_line(cli: Cli, place: Path, tmp_path: Path) -> None:
    commits = repository(place / "a repo", "old", "new")
    (place / "items.csv").write_text(f"id,commit\nold,{commits[0]}\nnew,{commits[1]}\n")
    (place / "places_here.py").write_text(
        "import pathlib\n"
        "def make(item, ctx):\n"
        "    pathlib.Path(ctx.base_dir, 'f.txt').write_text(item['id'])\n"
        "    return ctx.base_dir\n"
    )
    swarm = (
        "swarm", "go {{id}}", "--in-process", "--items", "items.csv", "--id-column", "id", "--model", MODEL,
        "--tools", "Read",
    )  # fmt: skip
    done = cli(*swarm, "--workdir", "git:a repo@{{commit}}", "--out", "one")
    assert done.code == 0, done
    assert {row.item_id: row.item_id in (row.text or "") for row in read_rows(place / "one")} == {
        "old": True,
        "new": True,
    }
    try:
        done = cli(*swarm, "--workdir", "factory:places_here:make", "--out", "two")
        assert done.code == 0, done
        rows = read_rows(place / "two")
        assert {row.item_id: row.item_id in (row.text or "") for row in rows} == {"old": True, "new": True}
    finally:
        sys.modules.pop("places_here", None)
        if str(place) in sys.path:
            sys.path.remove(str(place))
    done = cli("run", "go", "--workdir", "git:a repo@main", "--model", MODEL, "--tools", "Read")
    assert done.code == 0 and "new" in done.out
    for wrong, code in (
        ("git:missing@main", "workdir.not_found"),
        ("git:https://host/x@main", "workdir.invalid"),
        ("factory:places_nowhere:make", "workdir.invalid"),
        ("git:a repo", "workdir.invalid"),
    ):
        refused = cli(*swarm, "--workdir", wrong, "--out", "three")
        assert (refused.code, f"code: {code}" in refused.err) == (2, True), refused
        assert not (place / "three").exists()


async def test_a_release_that_fails_costs_no_row(
    tmp_path: Path, factories: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def make(_item: Any, ctx: Any) -> Any:
        Path(ctx.base_dir, "f.txt").write_text("x")
        yield ctx.base_dir
        raise OSError("cannot let go")

    factories.make = make
    async with running(tmp_path) as (runtime, _stage, _model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=MODEL, profile="bare")
        report = await session.swarm("{{item}}", ["a", "b"], workdir=Workdir.factory(f"{FACTORIES}:make"), **READING)
        report.raise_for_status()
        again = await session.swarm("{{item}}", ["c"], workdir=Workdir.factory(f"{FACTORIES}:make"), **READING)
        again.raise_for_status()
        await all_left(runtime)
    told = [record.getMessage() for record in caplog.records if "cannot let go" in record.getMessage()]
    assert len(told) == 3 and all(f"{FACTORIES}:make" in text for text in told)


@needs_git
def test_what_agents_may_not_read_is_in_no_worktree(cli: Cli, place: Path) -> None:
    repo = place / "repo"
    repository(repo, "text")
    (repo / "items.csv").write_text("id,answer\none,secret\ntwo,secret\n")
    git(repo, "add", ".")
    git(repo, "commit", "-q", "-m", "items")
    done = cli(
        "swarm", "go {{id}}", "--in-process", "--items", "repo/items.csv", "--id-column", "id", "--model", MODEL,
        "--tools", "Read", "--workdir", "git:repo@main", "--keep-workdirs", "--out", "run",
    )  # fmt: skip
    assert done.code == 0, done
    trees = [Path(line.split()[0]) for line in git(repo, "worktree", "list").splitlines()[1:]]
    assert len(trees) == 2
    for tree in trees:
        assert sorted(os.listdir(tree)) == [".git", "f.txt"] and git(tree, "status", "--porcelain") == ""
        git(repo, "worktree", "remove", "--force", str(tree))


async def test_a_host_sweeps_what_deleted_sessions_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tree").mkdir()
    copy = Workdir.copy(str(tmp_path / "tree"))
    async with running(tmp_path) as (runtime, _stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(model=model, profile="bare")
        await (await session.main.submit("hello")).result(20)
        cluster = cluster_of(runtime)
        store = StoreCalls(cluster, runtime.config.shards, 5.0)
        workdirs = AgentWorkdirs(workdirs_base(cluster.home_id), store, SleepingWorkdirs())
        mine, gone = workdir_name(session.id, "main", "x" * 8), workdir_name("session_gone", "main", "x" * 8)
        await workdirs.make([(copy, mine, []), (copy, gone, [])])
        assert await workdirs.sweep() == 0 and left(runtime) == sorted([mine, gone])
        monkeypatch.setattr(leftovers, "_age_s", lambda _path: 7200.0)
        host = (await hosts_of(runtime, "agents"))[0]
        name = f"{host.rpartition('/')[0]}/agents-another"
        await cluster.start_host("agents", name)
        async with asyncio.timeout(10):
            while left(runtime) != [mine]:
                await asyncio.sleep(0.01)
        await cluster.stop_host(name)
        await runtime.delete(session.id)
        await all_left(runtime)
        await workdirs.make([(copy, mine, [])])
        assert await workdirs.sweep() == 1 and left(runtime) == []
