"""MCP servers, real ones written with the SDK: shared, crashing, hanging, talking nonsense, changing, ended."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_ray.agent.slots import AgentAwake, AgentSlots
from kimi_ray.errors import ConfigError, ToolError
from kimi_ray.features.mcp import servers as servers_module
from kimi_ray.features.mcp.connection import Connection
from kimi_ray.features.mcp.content import MAX_TEXT_CHARS, output_of
from kimi_ray.features.mcp.servers import McpServers
from kimi_ray.features.mcp.source import McpTools, named
from kimi_ray.llm.script import Step
from kimi_ray.settings import McpServer
from kimi_ray.tools.contract import Accesses, ToolOutput
from tests.unit.runtime_fixtures import running

SERVER = Path(__file__).parents[2] / "fixtures" / "mcp_server.py"
RAW = Path(__file__).parents[2] / "fixtures" / "raw_mcp_server.py"


def settings(kind: str = "healthy", **more: Any) -> McpServer:
    return McpServer(command=(sys.executable, str(SERVER), kind), **{"connect_timeout_s": 20.0, **more})


class Log:
    """As much of a journal as the tools of an agent need."""

    def __init__(self, cwd: str | None = None) -> None:
        self.log = SimpleNamespace(header=SimpleNamespace(cwd=cwd))
        self.notes: list[str] = []

    def append(self, type: str, data: dict[str, Any]) -> None:
        assert type == "note/added" and data["by"] == "mcp"
        self.notes.append(data["text"])


class Looker:
    """One agent's view of the servers."""

    def __init__(self, servers: McpServers, cwd: str | None = None) -> None:
        self.log, self.slots = Log(cwd), AgentSlots()
        self.source = McpTools(servers, self.log, self.slots)  # type: ignore[arg-type]
        self.tools: dict[str, Any] = {}

    async def look(self, *names: str) -> dict[str, Any]:
        self.tools = {tool.name: tool for tool in await self.source.tools(names or ("mcp__*",))}
        await self.slots.awake.run(AgentAwake("startup"))
        return self.tools

    async def call(self, name: str, **arguments: Any) -> ToolOutput:
        tool = self.tools[name]
        return await tool.run(tool.check(arguments), None)


@asynccontextmanager
async def serving(**named_settings: McpServer) -> AsyncGenerator[McpServers]:
    servers = McpServers(named_settings)
    try:
        yield servers
    finally:
        await servers.close()


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(10):
        while any(is_there(pid) for pid in pids):
            await asyncio.sleep(0.01)


async def test_two_agents_share_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    async with serving(t=settings(env={"GIVEN": "yes"})) as servers:
        one, two = Looker(servers, str(tmp_path)), Looker(servers, str(tmp_path))
        await asyncio.gather(one.look(), two.look())
        assert one.log.notes == two.log.notes == []
        assert one.tools.keys() == two.tools.keys() >= {"mcp__t__add", "mcp__t__odd_name_1"}
        add = one.tools["mcp__t__add"]
        assert add.description == "Add two numbers." and set(add.parameters["properties"]) == {"a", "b"}
        assert not add.writes and add.accesses({}) == Accesses.none()
        assert one.tools["mcp__t__crash"].writes and one.tools["mcp__t__crash"].accesses({}) == Accesses.all()
        told = [await looker.call("mcp__t__whoami") for looker in (one, two)]
        assert told[0].content == told[1].content
        pid, cwd, given, secret = str(told[0].content).split()
        assert (cwd, given, secret) == (str(tmp_path), "yes", "-")
        sums = await asyncio.gather(*(one.call("mcp__t__add", a=n, b=1) for n in range(20)))
        assert [output.content for output in sums] == [str(n + 1) for n in range(20)]
        assert (await two.call("mcp__t__odd_name_1")).content == "odd"
        assert one.log.notes == two.log.notes == []
    await until_gone(int(pid))


async def test_what_a_tool_answers_is_text_images_or_an_error() -> None:
    async with serving(t=settings()) as servers:
        agent = Looker(servers)
        await agent.look()
        picture = await agent.call("mcp__t__picture")
        assert [block["type"] for block in picture.content] == ["text", "image"]
        assert picture.content[1]["media_type"] == "image/png"  # type: ignore[index]
        failed = await agent.call("mcp__t__fail")
        assert failed.is_error and "fail" in str(failed.content) and failed.error_code == "tool.failed"
        wrong = await agent.call("mcp__t__add", a="x")
        assert wrong.is_error and str(wrong.content)
        long = await agent.call("mcp__t__big", size=3_000_000)
        assert len(long.content) < MAX_TEXT_CHARS + 200 and "characters cut here" in str(long.content)
        assert (await agent.call("mcp__t__chatter")).content == "said"
        with pytest.raises(ToolError) as caught:
            agent.tools["mcp__t__add"].check([1])
        assert caught.value.code == "tool.bad_arguments"


async def test_a_crash_in_a_call_is_told_and_the_next_call_finds_it_again(tmp_path: Path) -> None:
    async with serving(t=settings()) as servers:
        agent, other = Looker(servers), Looker(servers)
        await agent.look()
        await other.look()
        before = str((await agent.call("mcp__t__whoami")).content).split()[0]
        with pytest.raises(ToolError) as caught:
            await agent.call("mcp__t__crash", marker=str(tmp_path / "crashed"))
        assert caught.value.code == "mcp.server_dead" and "about to crash" in caught.value.message
        assert agent.log.notes == [caught.value.message] and other.log.notes == []
        assert (await agent.call("mcp__t__crash", marker=str(tmp_path / "crashed"))).content == "survived"
        after = str((await other.call("mcp__t__whoami")).content).split()[0]
        assert before != after
        await until_gone(int(before))


async def test_calls_beside_a_crash_all_end(tmp_path: Path) -> None:
    async with serving(t=settings()) as servers:
        agent = Looker(servers)
        await agent.look()
        async with asyncio.timeout(20):
            ended = await asyncio.gather(
                *(agent.call("mcp__t__hang") for _ in range(5)),
                agent.call("mcp__t__crash"),
                return_exceptions=True,
            )
        assert all(isinstance(error, ToolError) and error.code == "mcp.server_dead" for error in ended), ended
        assert len(agent.log.notes) <= 6


async def test_a_hanging_call_ends_and_a_frozen_server_is_replaced() -> None:
    async with serving(t=settings(call_timeout_s=0.3)) as servers:
        agent = Looker(servers)
        await agent.look()
        pid = str((await agent.call("mcp__t__whoami")).content).split()[0]
        with pytest.raises(ToolError) as caught:
            await agent.call("mcp__t__hang")
        assert caught.value.code == "mcp.timeout"
        assert str((await agent.call("mcp__t__whoami")).content).split()[0] == pid
    from kimi_ray.features.mcp import connection

    before = connection.PING_S
    connection.PING_S = 0.3
    try:
        async with serving(t=settings(call_timeout_s=1.0)) as servers:
            agent = Looker(servers)
            await agent.look()
            pid = str((await agent.call("mcp__t__whoami")).content).split()[0]
            with pytest.raises(ToolError):
                await agent.call("mcp__t__freeze")
            assert str((await agent.call("mcp__t__whoami")).content).split()[0] != pid
            await until_gone(int(pid))
    finally:
        connection.PING_S = before


async def test_a_cancelled_call_leaves_the_server_as_it_is() -> None:
    async with serving(t=settings()) as servers:
        agent = Looker(servers)
        await agent.look()
        call = asyncio.create_task(agent.call("mcp__t__hang"))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await agent.call("mcp__t__add", a=1, b=1)).content == "2"


@pytest.mark.parametrize(
    ("kind", "told"),
    [("dies", "no such database"), ("garbage", "hello, I am no server"), ("silent", "did not answer within")],
)
async def test_a_server_that_cannot_be_reached_costs_its_tools_only(kind: str, told: str) -> None:
    patience_s = 20.0 if kind == "dies" else 2.0
    good = McpServer(command=(sys.executable, "-S", str(RAW)), connect_timeout_s=20.0)
    async with serving(bad=settings(kind, connect_timeout_s=patience_s), good=good) as servers:
        agent = Looker(servers)
        tools = await agent.look("Read", "mcp__*", "mcp__bad__named")
        assert "mcp__good__good" in tools
        assert [name for name in tools if name.startswith("mcp__bad")] == ["mcp__bad__named"]
        (note,) = agent.log.notes
        assert note.startswith("the MCP server bad") and told in note and "left out" in note
        with pytest.raises(ToolError) as caught:
            await agent.call("mcp__bad__named", x=1)
        assert caught.value.code == "mcp.server_dead"
        assert len(agent.log.notes) == 2
        began = time.monotonic()
        later = Looker(servers)
        assert "mcp__good__good" in await later.look()
        assert time.monotonic() - began < 1.9, "it does not try again at once"
        assert len(later.log.notes) == 1


async def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    missing = McpServer(command=(str(tmp_path / "nothing"),), connect_timeout_s=5.0)
    async with serving(bad=missing) as servers:
        agent = Looker(servers, str(tmp_path / "no such directory"))
        assert await agent.look() == {}
        assert "nothing" in agent.log.notes[0]


async def test_tools_that_a_server_adds_are_there_for_the_next_agent() -> None:
    async with serving(t=settings()) as servers:
        one = Looker(servers)
        await one.look()
        assert "mcp__t__grown" not in one.tools
        await one.call("mcp__t__grow")
        async with asyncio.timeout(10):
            while "mcp__t__grown" not in (await Looker(servers).look()):
                await asyncio.sleep(0.01)
        two = Looker(servers)
        await two.look()
        assert (await two.call("mcp__t__grown")).content == "grown"


async def test_a_list_is_asked_for_anew_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    list_tools = Connection.list_tools

    async def counted(self: Connection) -> Any:
        nonlocal asked
        asked += 1
        return await list_tools(self)

    monkeypatch.setattr(Connection, "list_tools", counted)
    async with serving(t=settings()) as servers:
        for _ in range(3):
            await Looker(servers).look()
        assert asked == 1
        monkeypatch.setattr(servers_module, "LISTING_S", -1.0)
        await Looker(servers).look()
        assert asked == 2


async def test_the_end_of_a_session_ends_all_that_a_server_started() -> None:
    async with serving(t=settings()) as servers:
        agent = Looker(servers)
        await agent.look()
        pids = [
            int(str((await agent.call("mcp__t__whoami")).content).split()[0]),
            int(str((await agent.call("mcp__t__spawn")).content)),
        ]
        assert all(is_there(pid) for pid in pids)
    await until_gone(*pids)
    with pytest.raises(ToolError) as caught:
        await agent.call("mcp__t__whoami")
    assert caught.value.code == "mcp.server_dead"


async def test_a_server_does_not_outlive_a_host_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys, os
from kimi_ray.features.mcp.connection import Connection
from kimi_ray.settings import McpServer

async def main():
    made = Connection("t", McpServer(command=(sys.executable, {str(SERVER)!r})), None)
    await made.open()
    said = [(await made.call(name, {{}})).content[0].text.split()[0] for name in ("whoami", "spawn")]
    print(*said, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        line = await asyncio.to_thread(host.stdout.readline)
        pids = [int(part) for part in line.split()]
        assert len(pids) == 2 and all(is_there(pid) for pid in pids)
    finally:
        host.kill()
        host.wait()
    await until_gone(*pids)


async def test_streamable_http(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    process = subprocess.Popen([sys.executable, str(SERVER), "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(20):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except OSError:
                    await asyncio.sleep(0.02)
        web = McpServer(url=url, headers={"X-Team": "tests"}, connect_timeout_s=10, call_timeout_s=10)
        async with serving(web=web) as servers:
            agent = Looker(servers)
            await agent.look("mcp__web__*")
            assert (await agent.call("mcp__web__add", a=2, b=3)).content == "5"
            process.kill()
            process.wait()
            with pytest.raises(ToolError) as caught:
                await agent.call("mcp__web__add", a=2, b=3)
            assert caught.value.code == "mcp.server_dead"
            later = Looker(servers)
            assert await later.look("mcp__web__*") == {} and len(later.log.notes) == 1
    finally:
        process.kill()
        process.wait()


async def test_only_the_tools_that_are_allowed_and_meant_are_offered() -> None:
    async with serving(a=settings(tools=("add", "whoami")), a__b=settings()) as servers:
        agent = Looker(servers)
        assert set(await agent.look("mcp__a__*", "Read", "Bash")) >= {"mcp__a__add", "mcp__a__whoami"}
        assert "mcp__a__big" not in agent.tools
        assert set(await agent.look("mcp__a__add")) == {"mcp__a__add"}
        assert set(await agent.look("mcp__*__add")) == {"mcp__a__add", "mcp__a__b__add"}
        assert await agent.look("Read") == {}
        with pytest.raises(ToolError) as caught:
            await agent.look("mcp__nobody__add")
        assert caught.value.code == "tool.unknown" and "a__b" in str(caught.value.hint)


async def test_without_servers_nothing_is_imported_and_nothing_offered() -> None:
    code = (
        "import asyncio, sys\n"
        "import kimi_ray.hosts.agent_host\n"
        "from kimi_ray.features.mcp.servers import McpServers\n"
        "from kimi_ray.features.mcp.source import McpTools\n"
        "assert asyncio.run(McpTools(McpServers({}), None, None).tools(['mcp__*', 'Read'])) == []\n"
        "assert 'mcp' not in sys.modules and 'httpx2' not in sys.modules\n"
    )
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], check=True, timeout=60)


async def test_the_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mcp", "mcp_types")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "kimi_ray.features.mcp.connection", raising=False)
    monkeypatch.setitem(sys.modules, "mcp", None)
    async with serving(t=settings()) as servers:
        with pytest.raises(ConfigError) as caught:
            await Looker(servers).look()
        assert caught.value.code == "mcp.not_installed" and "kimi-ray[mcp]" in str(caught.value.hint)


def test_names_are_what_model_servers_take() -> None:
    listing = [SimpleNamespace(name=name) for name in ("ok", "a b", "a.b", "x" * 100, "é")]
    found = named("s", listing)  # type: ignore[arg-type]
    assert len(found) == 5 and all(len(name) <= 64 for name in found)
    assert {"mcp__s__ok", "mcp__s__a_b"} <= set(found)


def test_parts_that_cannot_be_shown_are_told() -> None:
    import mcp_types as t

    result = t.CallToolResult(
        content=[
            t.AudioContent(data="AAAA", mime_type="audio/wav"),
            t.ResourceLink(name="doc", uri="file:///doc"),
            t.EmbeddedResource(resource=t.TextResourceContents(uri="file:///a", text="inside")),
            t.EmbeddedResource(resource=t.BlobResourceContents(uri="file:///b", blob="AAAA")),
            t.TextContent(text="half \ud800"),
        ]
    )
    text = str(output_of(result).content)
    assert "audio" in text and "file:///doc" in text and "inside" in text and "file:///b" in text
    assert "\ud800" not in text
    huge = t.CallToolResult(content=[t.ImageContent(data="A" * (11 << 20), mime_type="image/png")])
    assert "not shown" in str(output_of(huge).content)
    only_data = t.CallToolResult(content=[], structured_content={"rows": [1, 2]})
    assert json.loads(str(output_of(only_data).content)) == {"rows": [1, 2]}
    both = t.CallToolResult(content=[t.TextContent(text="x")], structured_content={"n": 1})
    assert output_of(both).meta == {"structured": {"n": 1}}


async def test_through_a_runtime(tmp_path: Path) -> None:
    table = {
        "t": {"command": [sys.executable, str(SERVER)]},
        "dead": {"command": [sys.executable, str(SERVER), "dies"], "connect_timeout_s": 5.0},
    }
    async with running(tmp_path, mcp_servers=table, hosts_per_node=1) as (runtime, stage, model):
        session = await runtime.workspace(tmp_path / "work").create_session(
            model=model, profile="bare", tools=["mcp__*"]
        )
        steps = [("add", {"a": 1, "b": 2}), ("whoami", {}), ("big", {"size": 70_000}), ("picture", {})]
        stage.faults = {"hi": [Step.call(f"mcp__t__{name}", arguments) for name, arguments in steps]}
        result = await (await session.main.submit("hi")).result(30)
        assert result.text == "did hi" and result.tool_calls == 4, result
        events = [event async for event in session.main.events()]
        outputs = [
            event.data["message"]["content"][0]["content"][0]["text"] for event in events if event.type == "tool/result"
        ]
        assert outputs[0] == "3"
        pid, cwd = outputs[1].split()[:2]
        assert cwd == str(tmp_path / "work")
        assert len(outputs[2]) < 10_000 and "70000" in outputs[2].replace(",", "").replace("_", ""), "a preview"
        assert any(block["type"] == "image" for block in stage.requests[4].messages[-1]["content"][0]["content"])
        notes = [event.data["text"] for event in events if event.type == "note/added"]
        assert len(notes) == 1 and "the MCP server dead" in notes[0] and "no such database" in notes[0]
        assert {tool.name for tool in stage.requests[0].tools} >= {"mcp__t__add"}
        stage.faults = {"a": [Step.call("mcp__t__whoami", {})], "b": [Step.call("mcp__t__whoami", {})]}
        report = await session.swarm("{{item}}", ["a", "b"], profile="bare", tools=["mcp__t__whoami"])
        assert [row.status for row in report.rows] == ["completed"] * 2, report.rows
        last = [request.messages[-1]["content"][0] for request in stage.requests if request.step == 1][-2:]
        assert {part["content"][0]["text"].split()[0] for part in last} == {pid}
        await session.close()
        await until_gone(int(pid))


def test_secrets_of_servers_are_not_in_run_json() -> None:
    from kimi_ray.runs.manifest import without_secrets

    config = {"mcp_servers": {"x": {"command": ["a"], "env": {"DSN": "secret"}, "headers": {"X-Any": "secret"}}}}
    assert "secret" not in json.dumps(without_secrets(config)) and "DSN" in json.dumps(without_secrets(config))
    assert os.environ is not None


@pytest.mark.parametrize(
    ("tool", "code"),
    [
        ("bad_result", "mcp.bad_result"),
        ("error", "mcp.call_failed"),
        ("huge_line", "mcp.server_dead"),
        ("half_line", "mcp.server_dead"),
        ("no_result", "mcp.bad_result"),
        ("wrong_id", None),
    ],
)
async def test_answers_that_are_none(tool: str, code: str | None) -> None:
    raw = McpServer(command=(sys.executable, "-S", str(RAW)), connect_timeout_s=20, call_timeout_s=20)
    async with serving(r=raw) as servers:
        agent = Looker(servers)
        assert len(await agent.look()) == 9
        async with asyncio.timeout(18):
            if code is None:
                assert (await agent.call(f"mcp__r__{tool}")).content == tool
            else:
                with pytest.raises(ToolError) as caught:
                    await agent.call(f"mcp__r__{tool}")
                assert caught.value.code == code, caught.value
                caught.value.message.encode()
            assert (await agent.call("mcp__r__good")).content == "good"


@pytest.mark.parametrize("at", ["in the pause between two tries", "while its dead connection is ended"])
async def test_a_session_that_ends_while_a_call_waits_for_a_server_leaves_none_behind(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    waits, go_on = asyncio.Event(), asyncio.Event()

    class Dead:
        alive = False
        doubtful = False

        def __init__(self, *_: object) -> None:
            made.append(self)

        async def open(self) -> None:
            raise ToolError("dead", code="mcp.server_dead")

        async def close(self) -> None:
            waits.set()
            if at == "while its dead connection is ended":
                await go_on.wait()

    monkeypatch.setattr(servers_module, "connection_type", lambda: Dead)
    monkeypatch.setattr(servers_module, "BACKOFF_S", 0.2)
    servers = McpServers({"one": settings()})
    with pytest.raises(ToolError):
        await servers.server("one").call("look", {}, None)
    waiting = asyncio.create_task(servers.server("one").call("look", {}, None))
    await waits.wait()
    await asyncio.gather(servers.close(), asyncio.sleep(0, go_on.set()))
    with pytest.raises(ToolError) as caught:
        await asyncio.wait_for(waiting, 5)
    assert caught.value.code == "mcp.server_dead" and len(made) == 1


async def test_a_server_that_says_nothing_any_more_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_ray.features.mcp import connection

    monkeypatch.setattr(connection, "PING_S", 0.3)
    raw = McpServer(command=(sys.executable, "-S", str(RAW)), connect_timeout_s=20, call_timeout_s=1.0)
    async with serving(r=raw) as servers:
        agent = Looker(servers)
        await agent.look()
        with pytest.raises(ToolError) as caught:
            await agent.call("mcp__r__close_stdout")
        assert caught.value.code in ("mcp.timeout", "mcp.server_dead")
        assert (await agent.call("mcp__r__good")).content == "good"
