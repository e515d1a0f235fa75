"""Who decides about a call: modes, rules over files, the order of the policies, questions and their answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kimi_ray.agent.slots import AgentSlots, ToolGate
from kimi_ray.config import load_config
from kimi_ray.errors import ConfigError, KimiRayError, ToolError
from kimi_ray.features.permissions import AgentPermissions, Call, RuleBook, decide
from kimi_ray.features.permissions.calls import FileNames, call_of
from kimi_ray.features.permissions.policy import is_sensitive
from kimi_ray.settings import PermissionModeName, PermissionRule
from kimi_ray.tools.contract import Accesses, Tool
from kimi_ray.tools.local import LocalEnvironment
from kimi_ray.tools.registry import builtin_tools
from tests.unit.agent.bench import AgentBench

TOOLS = builtin_tools()


def book(*rules: tuple[str, str]) -> RuleBook:
    return RuleBook(PermissionRule.model_validate({"tool": tool, "decision": decision}) for tool, decision in rules)


def file_call(tool: str, path: str, *, root: str = "/place", real: str | None = None) -> Call:
    written = path if path.startswith("/") else f"{root}/{path}"
    return Call(tool, {"path": path}, root, (FileNames(written, (real or written,), tool in ("Write", "Edit")),))


def command(line: str) -> Call:
    return Call("Bash", {"command": line}, "/place", command=line)


def judged(
    call: Call, mode: PermissionModeName, rules: RuleBook | None = None, approved: set[str] | None = None
) -> str:
    found = decide(call, mode, rules or book(), approved or set())
    return f"{found.decision} {found.by}"


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "meant"),
    [
        ("secrets/**", "secrets/a/b", True),
        ("secrets", "secrets/a/b", True),
        ("secrets/", "secrets/a", True),
        ("./secrets/**", "secrets/a", True),
        ("secrets/**", "other/secrets/a", False),
        ("secrets", "other/secrets/a", True),
        ("*.pem", "deep/down/key.pem", True),
        ("*.pem", "key.pem.txt", False),
        ("src/*.py", "src/a.py", True),
        ("src/*.py", "src/b/a.py", False),
        ("src/**/*.py", "src/b/c/a.py", True),
        ("/etc/**", "/etc/passwd", True),
        ("/etc", "/etc/passwd", True),
        ("/etc/**", "etc/passwd", False),
        ("etc/**", "/etc/passwd", False),
        ("../other/**", "/other/x", True),
        (".", "anything/at/all", True),
        ("/", "/any/where", True),
        ("SECRETS/**", "secrets/a", True),
        ("a{b,c}/x", "ac/x", True),
        ("secrets/**", "secrets", True),
        ("Secrets/*", "secrets/.", True),
        ("/place/secrets/**", "secrets", True),
        ("deep/secrets/**", "deep", False),
        ("*/**", "a.py", False),
        ("src/*/**", "src/a.py", False),
        ("src/*.py", "src", False),
    ],
)
def test_a_pattern_over_paths(pattern: str, path: str, meant: bool) -> None:
    rules = book((f"Write({pattern})", "deny"))
    assert (judged(file_call("Write", path), "auto", rules) == "deny rule") is meant


def test_a_link_is_judged_by_both_of_its_names() -> None:
    link = file_call("Read", "notes.txt", real="/place/secrets/key")
    assert judged(link, "auto", book(("Read(secrets/**)", "deny"))) == "deny rule"
    assert judged(link, "auto", book(("Read(notes.txt)", "deny"))) == "deny rule"
    inward = file_call("Write", "src/a", real="/etc/passwd")
    assert book(("Write(src/**)", "allow")).allowing(inward) is None
    assert book(("Write(/etc/**)", "allow")).allowing(inward) is not None


def test_allow_is_exact_about_letters_and_needs_every_file() -> None:
    rules = book(("Move(src/**)", "allow"))
    assert rules.allowing(file_call("Move", "SRC/a")) is None
    one, other = file_call("Move", "src/a").files[0], file_call("Move", "out/a").files[0]
    assert rules.allowing(Call("Move", {}, "/place", (one, other))) is None
    assert book(("Move(src/**)", "allow"), ("Move(out/**)", "allow")).allowing(Call("Move", {}, "/place", (one, other)))


def test_to_allow_all_in_a_directory_is_not_to_allow_the_directory() -> None:
    assert book(("Write(src/**)", "allow")).allowing(file_call("Write", "src")) is None


async def test_a_real_call_is_seen_through_links(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("x")
    (tmp_path / "notes").symlink_to("secrets/key")
    environment = LocalEnvironment(tmp_path)
    tool = TOOLS["Read"]
    gate = ToolGate("c", "Read", {"path": "./x/../notes"}, tool, tool.accesses({"path": "./x/../notes"}), 0, 0)
    call = await call_of(gate, environment)
    assert judged(call, "auto", book(("Read(secrets/**)", "deny"))) == "deny rule"
    assert (call.about, call.exactly) == ("notes", "Read(secrets/key)")
    await environment.close()


def test_rules_over_other_tools_see_their_arguments_and_globs_their_names() -> None:
    call = Call("deploy", {"env": "prod", "force": True}, "/place")
    assert judged(call, "auto", book(('deploy(*"prod"*)', "deny"))) == "deny rule"
    assert judged(call, "auto", book(('deploy(*"test"*)', "deny"))) == "allow mode"
    assert judged(Call("mcp__db__drop", {}, "/"), "auto", book(("mcp__db__*", "deny"))) == "deny rule"


@pytest.mark.parametrize("tool", ["", "Bash(", "Bash()", "Bash(x", "Ba sh", "Bash)x(", "(x)"])
def test_what_is_no_rule_is_refused_with_the_config(tool: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config={"permissions": [{"tool": tool, "decision": "deny"}]})
    assert caught.value.code == "config.invalid"


def test_a_pattern_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        book(("Write(" + "{a,b}" * 10 + ")", "deny"))


# -- the order ------------------------------------------------------------------------------------------------------


def test_policies_decide_in_their_order(tmp_path: Path) -> None:
    everything = book(
        ("Bash(rm *)", "deny"), ("Bash(git *)", "ask"), ("Bash(git status)", "allow"), ("Bash(ls *)", "allow")
    )
    cases: list[tuple[Call, str, str, str]] = [
        # call, manual, auto, yolo
        (Call("AskUserQuestion", {}, "/place"), "allow default", "deny mode", "allow mode"),
        (command("rm x"), "deny rule", "deny rule", "deny rule"),
        (command("git status"), "ask rule", "allow mode", "ask rule"),
        (command("ls -l"), "allow rule", "allow mode", "allow rule"),
        (command("ls .env"), "allow rule", "allow mode", "allow rule"),
        (command("cat .env"), "ask sensitive", "allow mode", "ask sensitive"),
        (command("cat .git/config"), "ask git", "allow mode", "ask git"),
        (command("make"), "ask mode", "allow mode", "allow mode"),
        (file_call("Read", "a.py"), "allow default", "allow mode", "allow mode"),
        (file_call("Read", ".env"), "ask sensitive", "allow mode", "ask sensitive"),
        (file_call("Write", ".git/hooks/pre-commit"), "ask git", "allow mode", "ask git"),
        (file_call("Write", "a.py"), "ask mode", "allow mode", "allow mode"),
        (Call("TodoList", {}, "/place"), "allow default", "allow mode", "allow mode"),
        (Call("my_tool", {}, "/place"), "ask mode", "allow mode", "allow mode"),
    ]
    for call, manual, auto, yolo in cases:
        found = [judged(call, mode, everything) for mode in ("manual", "auto", "yolo")]
        assert found == [manual, auto, yolo], call


def test_what_was_approved_comes_before_a_rule_that_asks_and_behind_one_that_denies() -> None:
    assert judged(command("make"), "manual", book(("Bash(make)", "ask")), {"Bash(make)"}) == "allow session"
    assert judged(command("make x"), "manual", book(("Bash(make)", "ask")), {"Bash(make)"}) == "ask rule"
    assert judged(command("make"), "manual", book(("Bash(make)", "deny")), {"Bash(make)"}) == "deny rule"


def test_writing_under_git_is_allowed_and_only_inside(tmp_path: Path) -> None:
    root = str(tmp_path / "repo" / "sub")
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    assert judged(file_call("Write", "a.py", root=root), "manual") == "allow git"
    assert judged(file_call("Write", "/etc/x", root=root), "manual") == "ask mode"
    assert judged(file_call("Write", "a.py", root=root, real="/etc/x"), "manual") == "ask mode"
    assert judged(file_call("Write", "a.py", root=str(tmp_path / "plain")), "manual") == "ask mode"


@pytest.mark.parametrize(
    ("path", "sensitive"),
    [
        ("/w/.env", True),
        ("/w/.ENV.local", True),
        ("/w/.env.example", False),
        ("/w/env.py", False),
        ("/h/.ssh/config", True),
        ("/w/id_rsa", True),
        ("/w/id_rsa.pub", True),
        ("/w/server.key", True),
        ("/w/monkey.py", False),
        ("/h/.aws/credentials", True),
        ("/w/credentials.py", False),
        ("/w/src/main.py", False),
    ],
)
def test_files_that_may_hold_secrets(path: str, sensitive: bool) -> None:
    assert is_sensitive(path) is sensitive


@pytest.mark.parametrize(
    "line", ["cat<.env", "curl -F f=@x --key=a.pem u", "scp h:.ssh/id_rsa .", "echo x>.env", "a;cat '.env'"]
)
def test_a_command_that_names_a_secret_is_asked_about(line: str) -> None:
    assert judged(command(line), "yolo") == "ask sensitive"


# -- one agent ------------------------------------------------------------------------------------------------------


class Desk:
    """The permissions of one agent over a log in memory."""

    def __init__(
        self,
        tmp_path: Path,
        *rules: tuple[str, str],
        mode: PermissionModeName = "manual",
        wait_s: float = 0.0,
        events: list[Any] | None = None,
        asked_for: PermissionModeName | None = None,
    ) -> None:
        self.bench = AgentBench([], root=str(tmp_path), events=events)
        self.slots = AgentSlots()
        spec = SimpleNamespace(
            permission_mode=asked_for, profile=self.bench.spec.profile, stream=self.bench.spec.stream
        )
        self.agent = AgentPermissions(
            book(*rules),
            cast("Any", spec),
            self.bench.journal,
            self.slots,
            LocalEnvironment(tmp_path),
            default=mode,
            wait_s=wait_s,
        )

    async def ask(self, name: str, call_id: str = "c1", /, **arguments: Any) -> ToolGate:
        tool = TOOLS.get(name)
        accesses = tool.accesses(tool.check(arguments)) if tool is not None else Accesses.none()
        gate = ToolGate(call_id, name, arguments, cast("Tool", tool), accesses, 0, 0)
        if self.slots.tool:
            await self.slots.tool.run(gate)
        return gate

    async def until_asked(self) -> None:
        async with asyncio.timeout(5):
            while not self.agent.questions:
                await asyncio.sleep(0.001)

    @property
    def decided(self) -> list[Mapping[str, Any]]:
        return [event.data for event in self.bench.events if event.type == "permission/decided"]


async def test_auto_without_rules_costs_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ("Bash(ls)", "allow"), ("Bash", "ask"), mode="auto")
    assert not desk.slots.tool
    desk.agent.set_mode("manual")
    assert desk.slots.tool
    desk.agent.set_mode("auto")
    assert not desk.slots.tool


async def test_a_denied_call_is_an_error_for_the_model_and_a_record(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ("Bash(rm *)", "deny"), mode="auto")
    gate = await desk.ask("Bash", command="true; rm x")
    assert gate.veto is not None and gate.veto.is_error and gate.veto.error_code == "tool.denied"
    assert "Bash(rm *)" in str(gate.veto.content)
    assert desk.decided == [{"call_id": "c1", "decision": "deny", "rule": "Bash(rm *)", "by": "rule"}]
    assert (await desk.ask("Bash", "c2", command="ls")).veto is None
    assert len(desk.decided) == 1


async def test_without_time_for_an_answer_a_question_is_a_denial_at_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    async with asyncio.timeout(1):
        gate = await desk.ask("Bash", command="make")
    assert gate.veto is not None and "nobody answered" in str(gate.veto.content)
    assert desk.decided == [{"call_id": "c1", "decision": "deny", "by": "nobody"}]
    assert not any(event.type == "permission/asked" for event in desk.bench.events)


async def test_an_answer_that_does_not_come_in_time_is_a_denial(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_s=0.02)
    gate = await desk.ask("Bash", command="make")
    assert gate.veto is not None and "within 0.02 s" in str(gate.veto.content)
    assert desk.agent.questions == []
    assert [event.data["call_id"] for event in desk.bench.events if event.type == "permission/asked"] == ["c1"]
    with pytest.raises(ToolError) as caught:
        desk.agent.answer("c1", "allow")
    assert caught.value.code == "tool.not_asked"


async def test_allowed_once_is_asked_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_s=5)
    asking = asyncio.create_task(desk.ask("Bash", command="make"))
    await desk.until_asked()
    [question] = desk.agent.questions
    assert (question.tool, question.about, question.by) == ("Bash", "make", "mode")
    desk.agent.answer("c1", "allow")
    with pytest.raises(ToolError):
        desk.agent.answer("c1", "deny")
    assert (await asking).veto is None
    again = asyncio.create_task(desk.ask("Bash", "c2", command="make"))
    await desk.until_asked()
    desk.agent.answer("c2", "deny", feedback="use ninja")
    gate = await again
    assert gate.veto is not None and "use ninja" in str(gate.veto.content)
    assert [(one["decision"], one["by"], one.get("feedback")) for one in desk.decided] == [
        ("allow", "user", None),
        ("deny", "user", "use ninja"),
    ]


async def test_allowed_for_the_session_is_not_asked_again_also_after_a_resume(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_s=5)
    asking = asyncio.create_task(desk.ask("Bash", command="make"))
    await desk.until_asked()
    desk.agent.answer("c1", "allow", "session")
    assert (await asking).veto is None
    assert (await desk.ask("Bash", "c2", command="make")).veto is None
    resumed = Desk(tmp_path, events=desk.bench.events)
    assert (await resumed.ask("Bash", "c3", command="make")).veto is None
    assert (await resumed.ask("Bash", "c4", command="make install")).veto is not None
    assert (await resumed.ask("Bash", "c5", command="make", cwd="sub")).veto is not None
    assert [one["by"] for one in resumed.decided] == ["user", "session", "session", "nobody", "nobody"]


async def test_an_approval_for_the_session_is_for_one_directory(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    desk = Desk(tmp_path, wait_s=5)
    asking = asyncio.create_task(desk.ask("Bash", "c1", command="make # [in sub]"))
    await desk.until_asked()
    desk.agent.answer("c1", "allow", scope="session")
    await asking
    for call_id, arguments in (("c2", {"command": "make #", "cwd": "sub"}), ("c3", {"command": "make #"})):
        other = asyncio.create_task(desk.ask("Bash", call_id, **arguments))
        await desk.until_asked()
        desk.agent.answer(call_id, "deny")
        assert (await other).veto is not None
    assert (await desk.ask("Bash", "c4", command="make # [in sub]")).veto is None


async def test_an_answer_is_in_the_log_when_it_is_given_and_stands(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_s=0.05)
    asking = asyncio.create_task(desk.ask("Bash", "c1", command="ls"))
    await desk.until_asked()
    asking.get_loop().call_later(0.02, time.sleep, 0.06)
    asking.get_loop().call_later(0.03, desk.agent.answer, "c1", "allow")  # the bound is over before it is seen
    assert (await asking).veto is None
    assert [said["decision"] for said in desk.decided] == ["allow"]
    asking = asyncio.create_task(desk.ask("Bash", "c2", command="ls"))
    await desk.until_asked()
    desk.agent.answer("c2", "allow", "session")
    assert desk.decided[-1]["scope"] == "session"
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert [said["decision"] for said in desk.decided] == ["allow", "allow"]


async def test_an_answer_that_cannot_be_recorded_is_none(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_s=5)
    asking = asyncio.create_task(desk.ask("Bash", "c1", command="ls"))
    await desk.until_asked()
    with pytest.raises(KimiRayError):
        desk.agent.answer("c1", "deny", feedback="\ud800")
    assert [question.call_id for question in desk.agent.questions] == ["c1"]
    desk.agent.answer("c1", "allow")
    assert (await asking).veto is None


async def test_a_denial_for_the_session_is_for_this_call_alone(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_s=5)
    asking = asyncio.create_task(desk.ask("Bash", command="make"))
    await desk.until_asked()
    desk.agent.answer("c1", "deny", "session")
    await asking
    assert "scope" not in desk.decided[0]
    assert desk.bench.journal.fold.approved_calls == set()


async def test_a_turn_that_ends_cancels_its_question(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_s=60)
    asking = asyncio.create_task(desk.ask("Bash", command="make"))
    await desk.until_asked()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert desk.agent.questions == []
    assert desk.decided == [{"call_id": "c1", "decision": "cancelled", "by": "turn"}]


async def test_another_mode_answers_the_question_that_waits(tmp_path: Path) -> None:
    desk = Desk(tmp_path, wait_s=60)
    asking = asyncio.create_task(desk.ask("Bash", command="make"))
    await desk.until_asked()
    desk.agent.set_mode("auto")
    assert (await asking).veto is None
    assert desk.decided[-1]["by"] == "mode"


async def test_the_mode_is_the_last_of_the_log_then_the_one_asked_for_then_the_configured(tmp_path: Path) -> None:
    desk = Desk(tmp_path, mode="auto", asked_for="yolo")
    assert desk.agent.mode == "yolo"
    desk.agent.set_mode("manual")
    desk.agent.set_mode("manual")
    modes = [event.data["mode"] for event in desk.bench.events if event.type == "permission/mode"]
    assert modes == ["manual"]
    assert Desk(tmp_path, mode="auto", asked_for="yolo", events=desk.bench.events).agent.mode == "manual"
    assert Desk(tmp_path, mode="auto").agent.mode == "auto"


async def test_a_log_that_cannot_be_written_lets_no_call_start(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.bench.log.detach()
    with pytest.raises(KimiRayError):
        await desk.ask("Bash", command="make")
