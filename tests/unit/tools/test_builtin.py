"""The built-in tools: what they return, what they cut, and what they say when they cannot."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_ray.errors import ToolError
from kimi_ray.tools import Accesses, LocalEnvironment, ToolContext, ToolOutput, builtin_tools, select_tools, tool
from kimi_ray.tools.builtin import grep as grep_module
from kimi_ray.tools.builtin import walk as walk_module
from kimi_ray.tools.builtin.patterns import PathPattern
from kimi_ray.tools.matcher import Matcher
from kimi_ray.tools.matching import compiled, spans_of


class Bench:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = LocalEnvironment(root)
        self.context = ToolContext(self.environment, "session_1", "main", "call_1", asyncio.Event())
        self.tools = builtin_tools()

    def file(self, path: str, content: str | bytes) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)

    async def __call__(self, name: str, /, **arguments: Any) -> ToolOutput:
        arguments = {key.replace("opt_", "-"): value for key, value in arguments.items()}
        chosen = self.tools[name]
        output = await chosen.run(chosen.check(arguments), self.context)
        json.dumps(output.meta, allow_nan=False, ensure_ascii=False).encode()
        assert isinstance(output.content, str)
        output.content.encode()
        return output

    async def text(self, name: str, /, **arguments: Any) -> str:
        output = await self(name, **arguments)
        assert not output.is_error, output
        return str(output.content)

    async def code(self, name: str, /, **arguments: Any) -> tuple[str | None, str]:
        output = await self(name, **arguments)
        assert output.is_error, output
        return output.error_code, str(output.content)


@pytest.fixture
async def bench(tmp_path: Path):
    found = Bench(tmp_path)
    yield found
    await found.environment.close()


# -- the contract ----------------------------------------------------------------------------------------------------


def test_schemas_are_compact_and_named_as_models_know_them() -> None:
    tools = builtin_tools()
    assert list(tools) == ["Read", "Write", "Edit", "Glob", "Grep", "Bash"]
    properties = {name: list(chosen.parameters["properties"]) for name, chosen in tools.items()}
    assert properties == {
        "Read": ["path", "line_offset", "n_lines"],
        "Write": ["path", "content", "mode"],
        "Edit": ["path", "old_string", "new_string", "replace_all"],
        "Glob": ["pattern", "path", "include_ignored"],
        "Grep": [
            "pattern", "path", "glob", "type", "output_mode", "-i", "-n", "-A", "-B", "-C",
            "head_limit", "offset", "multiline", "include_ignored",
        ],
        "Bash": ["command", "cwd", "timeout", "description"],
    }  # fmt: skip
    for chosen in tools.values():
        assert chosen.parameters["type"] == "object" and chosen.description
        text = json.dumps(chosen.parameters)
        assert '"title"' not in text and "null" not in text and len(text) < 2200
        assert chosen.parameters is tools[chosen.name].parameters
    assert {name for name, chosen in tools.items() if chosen.writes} == {"Write", "Edit", "Bash"}


def test_accesses() -> None:
    tools = builtin_tools()
    assert tools["Read"].accesses({"path": "a"}) == Accesses.reads("a")
    assert tools["Grep"].accesses({"pattern": "x"}) == Accesses.reads(".")
    assert tools["Edit"].accesses({"path": "a", "old_string": "x", "new_string": "y"}) == Accesses.writes("a")
    assert tools["Bash"].accesses({"command": "ls"}) == Accesses.all()


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("Read", {}, "`path` is required"),
        ("Read", {"path": "a", "line_offset": 0}, "at least 1, or between -1000 and -1"),
        ("Read", {"path": "a", "line_offset": -1001}, "between -1000"),
        ("Grep", {"pattern": "x", "output_mode": "lines"}, "'content', 'files_with_matches' or 'count_matches'"),
        ("Grep", {"pattern": "x", "ignore_case": True}, "`ignore_case` is not an argument"),
        ("Bash", {"command": ""}, "`command`"),
        ("Bash", {"command": "x", "timeout": 301}, "`timeout`"),
        ("Edit", {"path": "a", "old_string": "", "new_string": "b"}, "`old_string`"),
        ("Write", "not json", "not valid JSON"),
    ],
)
def test_bad_arguments(name: str, arguments: Any, told: str) -> None:
    with pytest.raises(ToolError) as caught:
        builtin_tools()[name].check(arguments)
    assert caught.value.code == "tool.bad_arguments" and told in caught.value.message


def test_check_fills_in_defaults_and_takes_what_it_gave() -> None:
    for name, arguments in {"Grep": {"pattern": "x", "-i": True}, "Bash": {"command": "ls"}}.items():
        chosen = builtin_tools()[name]
        checked = chosen.check(arguments)
        assert chosen.check(checked) == checked
    assert builtin_tools()["Bash"].check({"command": "ls"})["timeout"] == 60


async def test_outside_and_without_a_directory(bench: Bench) -> None:
    for name, arguments in {
        "Read": {"path": "/etc/passwd"},
        "Write": {"path": "../x", "content": ""},
        "Edit": {"path": "../x", "old_string": "a", "new_string": "b"},
        "Glob": {"pattern": "*", "path": "/etc"},
        "Grep": {"pattern": "root", "path": "/etc/passwd"},
        "Bash": {"command": "pwd", "cwd": "/"},
    }.items():
        code, text = await bench.code(name, **arguments)
        assert code == "environment.outside_workdir" and "Hint:" in text
        bench.context.environment = LocalEnvironment(None)
        assert (await bench.code(name, **arguments))[0] == "environment.no_workdir"
        bench.context.environment = bench.environment


# -- Read ------------------------------------------------------------------------------------------------------------


async def test_read(bench: Bench) -> None:
    bench.file("a.txt", "one\r\ntwo\n\nfour")
    assert await bench.text("Read", path="a.txt") == "     1\tone\n     2\ttwo\n     3\t\n     4\tfour"
    assert await bench.text("Read", path="a.txt", line_offset=2, n_lines=1) == (
        "     2\ttwo\n[lines 2-2 of 4, read on with line_offset=3]"
    )
    assert await bench.text("Read", path="a.txt", line_offset=-2) == "     3\t\n     4\tfour\n[lines 3-4 of 4]"
    assert (await bench.text("Read", path="a.txt", line_offset=-9)).startswith("     1\tone")
    assert await bench.text("Read", path="a.txt", line_offset=5) == "[no line at 5; the file has 4 lines]"
    bench.file("empty", "")
    assert await bench.text("Read", path="empty") == "[the file is empty]"


async def test_read_refuses_what_is_no_text(bench: Bench) -> None:
    bench.file("bin", b"ELF\0\1")
    assert (await bench.code("Read", path="bin"))[0] == "tool.binary_file"
    assert (await bench.code("Read", path="missing"))[0] == "environment.not_found"
    assert (await bench.code("Read", path="."))[0] == "environment.is_directory"
    bench.file("latin1", b"caf\xe9\n")
    assert await bench.text("Read", path="latin1") == "     1\tcaf\ufffd"


async def test_read_cuts_and_says_so(bench: Bench) -> None:
    bench.file("many", "".join(f"{n}\n" for n in range(1, 2501)))
    text = await bench.text("Read", path="many")
    assert text.splitlines()[999] == "  1000\t1000" and text.endswith(
        "[lines 1-1000 of 2500, read on with line_offset=1001]"
    )
    assert await bench.text("Read", path="many", n_lines=5000) == text
    bench.file("long", "x" * 5000 + "\nshort\n")
    text = await bench.text("Read", path="long")
    assert "x" * 2000 + "[... 3000 characters cut]" in text and "short" in text and "1 lines longer than 2000" in text
    bench.file("wide", ("y" * 1500 + "\n") * 200)
    output = await bench("Read", path="wide")
    assert len(str(output.content).encode()) < (100 << 10) + 200 and "cut at 100 KiB before line" in str(output.content)
    assert output.meta is not None and output.meta["last_line"] < 100


@pytest.mark.parametrize("newline", ["\n", ""])
async def test_read_of_a_large_file(bench: Bench, newline: str) -> None:
    lines = [f"{n} {'z' * 80}" for n in range(1, 20_001)]
    bench.file("large", "\n".join(lines) + newline)
    text = await bench.text("Read", path="large", line_offset=15_000, n_lines=2)
    assert text.splitlines()[:2] == [f" 15000\t{lines[14_999]}", f" 15001\t{lines[15_000]}"]
    assert "there are more, read on with line_offset=15002" in text
    text = await bench.text("Read", path="large", line_offset=-3)
    assert text.splitlines()[:3] == [f" {n}\t{lines[n - 1]}" for n in (19_998, 19_999, 20_000)]
    text = await bench.text("Read", path="large", line_offset=19_999, n_lines=50)
    assert text.splitlines()[-1] == "[lines 19999-20000 of 20000]"
    assert await bench.text("Read", path="large", line_offset=30_000) == "[no line at 30000; the file has 20000 lines]"


async def test_read_of_a_line_without_end(bench: Bench) -> None:
    bench.file("one-line", "q" * (3 << 20))
    text = await bench.text("Read", path="one-line")
    assert text.startswith("     1\tqqq") and len(text) < 2200


# -- Write and Edit --------------------------------------------------------------------------------------------------


async def test_write(bench: Bench) -> None:
    assert await bench.text("Write", path="d/e/f.txt", content="é\n") == "Created d/e/f.txt (3 bytes)"
    assert (
        await bench.text("Write", path="d/e/f.txt", content="more", mode="append") == "Appended to d/e/f.txt (4 bytes)"
    )
    assert (bench.root / "d/e/f.txt").read_text() == "é\nmore"
    assert await bench.text("Write", path="d/e/f.txt", content="") == "Replaced d/e/f.txt (0 bytes)"
    assert (await bench.code("Write", path="d", content=""))[0] == "environment.is_directory"


async def test_edit(bench: Bench) -> None:
    bench.file("a.py", "x = 1\ny = 1\nz = 2\n")
    assert await bench.text("Edit", path="a.py", old_string="x = 1", new_string="x = 10") == "Changed a.py (line 1)"
    code, text = await bench.code("Edit", path="a.py", old_string=" = ", new_string="=")
    assert code == "tool.ambiguous_match" and "3 times" in text and "lines 1, 2, 3" in text
    text = await bench.text("Edit", path="a.py", old_string=" = ", new_string="=", replace_all=True)
    assert "3 places" in text and (bench.root / "a.py").read_text() == "x=10\ny=1\nz=2\n"
    assert await bench.text("Edit", path="a.py", old_string="y=1\n", new_string="") == "Changed a.py (line 2)"
    assert (bench.root / "a.py").read_text() == "x=10\nz=2\n"


@pytest.mark.parametrize(
    ("old", "told"),
    [
        ("nothing like it", "read the file again"),
        ("  alpha\n  beta", "white space"),
        ("alpha\ngamma", "line 1"),
        ("alpha  ", "white space at its ends"),
    ],
)
async def test_edit_says_why_nothing_matched(bench: Bench, old: str, told: str) -> None:
    bench.file("a", "alpha\nbeta\n")
    code, text = await bench.code("Edit", path="a", old_string=old, new_string="x")
    assert code == "tool.no_match" and told in text and (bench.root / "a").read_text() == "alpha\nbeta\n"


async def test_edit_refuses_what_it_would_destroy(bench: Bench) -> None:
    bench.file("bin", b"a\xff")
    bench.file("a", "a")
    assert (await bench.code("Edit", path="bin", old_string="a", new_string="b"))[0] == "tool.binary_file"
    assert (await bench.code("Edit", path="a", old_string="a", new_string="a"))[0] == "tool.no_change"
    assert (await bench.code("Edit", path="none", old_string="a", new_string="b"))[0] == "environment.not_found"


async def test_edit_does_not_blow_a_file_up(bench: Bench) -> None:
    bench.file("small", "a" * 20_000)
    arguments = {"path": "small", "old_string": "a", "replace_all": True}
    code, said = await bench.code("Edit", new_string="b" * 20_000, **arguments)
    assert code == "tool.file_too_large" and "400000000 bytes" in said
    assert (bench.root / "small").read_bytes() == b"a" * 20_000
    await bench.text("Edit", new_string="é" * 100, **arguments)
    assert (bench.root / "small").stat().st_size == 4_000_000


async def test_edit_keeps_carriage_returns(bench: Bench) -> None:
    bench.file("dos", "one\r\ntwo\r\nthree\r\n")
    await bench.text("Edit", path="dos", old_string="one\ntwo", new_string="1\n2\n2b")
    assert (bench.root / "dos").read_bytes() == b"1\r\n2\r\n2b\r\nthree\r\n"


async def test_lines_that_are_put_into_one_line_end_as_all_others_do(bench: Bench) -> None:
    bench.file("dos", "one\r\ntwo\r\n")
    await bench.text("Edit", path="dos", old_string="one", new_string="1\n1b")
    assert (bench.root / "dos").read_bytes() == b"1\r\n1b\r\ntwo\r\n"
    bench.file("mixed", "one\r\ntwo\n")
    await bench.text("Edit", path="mixed", old_string="one", new_string="1\n1b")
    assert (bench.root / "mixed").read_bytes() == b"1\n1b\r\ntwo\n"


# -- Glob and path patterns ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.py", ["a.py", ".py"], ["d/a.py", "a.pyc"]),
        ("**/*.py", ["a.py", "d/a.py", "d/e/a.py"], ["a.txt"]),
        ("src/**", ["src/a", "src/b/c"], ["src", "a"]),
        ("src/**/test_?.py", ["src/test_1.py", "src/a/b/test_2.py"], ["src/test_10.py", "test_1.py"]),
        ("**/b/**/c", ["b/c", "a/b/c", "a/b/x/y/c"], ["c", "b"]),
        ("*.{json,toml}", ["a.json", "b.toml"], ["a.{json,toml}", "a.yaml"]),
        ("{a,b}/{c,d}", ["a/c", "b/d"], ["a/b"]),
        ("[ab].txt", ["a.txt"], ["c.txt"]),
        ("a{b", ["a{b"], ["ab"]),
        ("./a.txt", ["a.txt"], []),
        ("**", ["a", "a/b"], []),
    ],
)
def test_patterns(pattern: str, yes: list[str], no: list[str]) -> None:
    made = PathPattern(pattern)
    for path in yes:
        assert made.matches(path), path
        parts = path.split("/")
        for depth in range(1, len(parts)):
            assert made.may_hold("/".join(parts[:depth])), path
    assert [path for path in no if made.matches(path)] == []


def test_a_pattern_enters_only_where_something_can_be() -> None:
    made = PathPattern("src/*.py")
    assert made.may_hold("src") and not made.may_hold("src/deep") and not made.may_hold("docs")


@pytest.mark.parametrize("pattern", ["/etc/*", "../*", "a/../b", "x" * 1001, "{a,b}" * 12])
def test_patterns_that_cannot_be(pattern: str) -> None:
    with pytest.raises(ToolError) as caught:
        PathPattern(pattern)
    assert caught.value.code == "tool.bad_pattern"


def test_no_pattern_hangs() -> None:
    started = time.monotonic()
    assert not PathPattern("*a" * 100 + "b").matches("a" * 250)
    assert not PathPattern("**/" + "*/**/" * 100 + "x").matches("/".join("a" * 200))
    assert time.monotonic() - started < 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4),
    st.lists(st.sampled_from(["**", "*", "a", "b*", "?b", "ab"]), min_size=1, max_size=4),
)
def test_patterns_agree_with_a_plain_definition(names: list[str], parts: list[str]) -> None:
    from fnmatch import fnmatchcase

    def plain(p: list[str], n: list[str]) -> bool:
        if not p:
            return not n
        if p[0] == "**":
            if len(p) == 1:
                return len(n) > 0
            return plain(p[1:], n) or (bool(n) and plain(p, n[1:]))
        return bool(n) and fnmatchcase(n[0], p[0]) and plain(p[1:], n[1:])

    collapsed = [p for i, p in enumerate(parts) if p != "**" or i == 0 or parts[i - 1] != "**"]
    assert PathPattern("/".join(parts)).matches("/".join(names)) is plain(collapsed, names)


async def test_glob(bench: Bench) -> None:
    for path in ("b.py", "a.py", "d/c.py", "node_modules/x.py", ".git/y.py", "d/t.txt"):
        bench.file(path, "")
    (bench.root / "loop").symlink_to(".")
    assert await bench.text("Glob", pattern="**/*.py") == "a.py\nb.py\nd/c.py"
    assert await bench.text("Glob", pattern="*.py", path="d") == "d/c.py"
    assert await bench.text("Glob", pattern="node_modules/*.py") == "node_modules/x.py"
    assert "no file matches" in await bench.text("Glob", pattern="*.rs") and (
        "**/*.rs" in await bench.text("Glob", pattern="*.rs")
    )
    assert (await bench.code("Glob", pattern="*", path="missing"))[0] == "environment.not_found"
    assert (await bench.code("Glob", pattern="/x"))[0] == "tool.bad_pattern"
    for n in range(120):
        bench.file(f"many/{n:03}.log", "")
    lines = (await bench.text("Glob", pattern="**/*.log")).splitlines()
    assert lines[:100] == [f"many/{n:03}.log" for n in range(100)] and "more than 100" in lines[100]


# -- Grep and matching -----------------------------------------------------------------------------------------------


async def test_grep_modes(bench: Bench) -> None:
    bench.file("a.py", "import os\nx = 1\nimport sys\n")
    bench.file("d/b.py", "IMPORT = 2\n")
    bench.file("d/c.txt", "import\n")
    bench.file("node_modules/n.py", "import\n")
    bench.file("bin", b"import\0")
    assert await bench.text("Grep", pattern="import") == "a.py\nd/c.txt"
    assert await bench.text("Grep", pattern="import", opt_i=True, glob="*.py") == "a.py\nd/b.py"
    assert await bench.text("Grep", pattern="import", output_mode="count_matches") == "a.py:2\nd/c.txt:1"
    assert await bench.text("Grep", pattern=r"^import \w+$", output_mode="content", path="a.py") == (
        "a.py:1:import os\na.py:3:import sys"
    )
    assert await bench.text("Grep", pattern="sys", output_mode="content", opt_n=False) == "a.py:import sys"
    assert await bench.text("Grep", pattern="import", include_ignored=True) == "a.py\nd/c.txt\nnode_modules/n.py"
    assert await bench.text("Grep", pattern="import", path="d", glob="*.txt") == "d/c.txt"
    assert await bench.text("Grep", pattern="nowhere") == "[no match in 3 files]"


async def test_grep_by_file_type(bench: Bench) -> None:
    for path in ("a.py", "b.pyi", "c.js", "d/e.mjs", "d/Makefile", "d/Makefile.txt", "node_modules/x.py"):
        bench.file(path, "needle\n")
    assert await bench.text("Grep", pattern="needle", type="py") == "a.py\nb.pyi"
    assert await bench.text("Grep", pattern="needle", type="python", include_ignored=True) == (
        "a.py\nb.pyi\nnode_modules/x.py"
    )
    assert await bench.text("Grep", pattern="needle", type="js") == "c.js\nd/e.mjs"
    assert await bench.text("Grep", pattern="needle", type="make") == "d/Makefile"
    assert await bench.text("Grep", pattern="needle", type="js", glob="d/**") == "d/e.mjs"
    assert (await bench.text("Grep", pattern="needle", type="rust")).startswith("[no match in 0 files")
    code, told = await bench.code("Grep", pattern="needle", type="pyton")
    assert code == "tool.bad_pattern" and "python" in told


async def test_a_search_of_a_bottomless_tree_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.file("a.py", "needle")
    bench.file("b/" * 200 + "c.py", "needle")
    monkeypatch.setattr(walk_module, "WALK_S", 0.05)
    for name, arguments in (("Glob", {"pattern": "**/*.py"}), ("Grep", {"pattern": "needle"})):
        code, said = await bench.code(name, **arguments)
        assert code == "tool.timeout" and said.startswith("a.py\n[stopped after")


async def test_glob_of_what_is_ignored(bench: Bench) -> None:
    for path in ("a.py", ".venv/b.py", "node_modules/c/d.py"):
        bench.file(path, "")
    assert await bench.text("Glob", pattern="**/*.py") == "a.py"
    assert await bench.text("Glob", pattern="**/*.py", include_ignored=True) == ".venv/b.py\na.py\nnode_modules/c/d.py"
    assert await bench.text("Glob", pattern="node_modules/**/*.py") == "node_modules/c/d.py"


async def test_grep_context_and_paging(bench: Bench) -> None:
    bench.file("t", "".join(f"line {n}{' hit' if n in (3, 9) else ''}\n" for n in range(1, 11)))
    assert await bench.text("Grep", pattern="hit", output_mode="content", opt_A=1, opt_B=1) == (
        "t-2-line 2\nt:3:line 3 hit\nt-4-line 4\n--\nt-8-line 8\nt:9:line 9 hit\nt-10-line 10"
    )
    assert (await bench.text("Grep", pattern="hit", output_mode="content", opt_C=100)).count("\n") == 9
    text = await bench.text("Grep", pattern="line", output_mode="content", head_limit=2, offset=3)
    assert text == "t:4:line 4\nt:5:line 5\n[there is more, read on with offset=5]"
    assert "only 10 entries" in await bench.text("Grep", pattern="line", output_mode="content", offset=10)


async def test_grep_multiline_and_lines(bench: Bench) -> None:
    bench.file("m", "begin\nmiddle\nend\r\nbegin end\n")
    assert await bench.text("Grep", pattern=r"begin\s+middle") == "[no match in 1 files]"
    assert await bench.text("Grep", pattern=r"begin.*?end", multiline=True, output_mode="content") == (
        "m:1:begin\nm:2:middle\nm:3:end\nm:4:begin end"
    )
    assert await bench.text("Grep", pattern="end$", output_mode="content") == "m:3:end\nm:4:begin end"
    bench.file("long", "x" * 2000 + "needle\n")
    assert "characters cut]" in await bench.text("Grep", pattern="needle", output_mode="content", path="long")


async def test_grep_errors(bench: Bench) -> None:
    code, text = await bench.code("Grep", pattern="foo(")
    assert code == "tool.bad_pattern" and "escape" in text
    assert (await bench.code("Grep", pattern="x", path="missing"))[0] == "environment.not_found"
    assert (await bench.code("Grep", pattern="x", glob="/abs"))[0] == "tool.bad_pattern"


async def test_a_catastrophic_pattern_neither_blocks_the_loop_nor_outlives_its_bound(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grep_module, "TIME_S", 0.7)
    bench.file("0-found-before", "aaab\n")
    bench.file("evil", "a" * 60 + "\n")
    longest = 0.0
    last = time.monotonic()
    running = True

    async def beat() -> None:
        nonlocal longest, last
        while running:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    task = asyncio.create_task(beat())
    started = time.monotonic()
    code, text = await bench.code("Grep", pattern="^(a+)+b$")
    took = time.monotonic() - started
    running = False
    await task
    assert code == "tool.timeout" and "evil" in text and text.startswith("0-found-before")
    assert took < 3 and longest < 0.5


async def test_the_matching_process_ends_itself_when_nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = Matcher("^(a+)+b$", ignore_case=False, multiline=False, within_s=0.2)
    monkeypatch.setattr(matcher, "_deadline", asyncio.get_running_loop().time() + 30)
    task = asyncio.create_task(matcher.spans(b"a" * 60))
    await asyncio.wait({task}, timeout=10)
    assert task.done()
    with pytest.raises(TimeoutError):
        await task


async def test_a_long_plain_pattern_over_a_large_text_is_not_matched_on_the_loop(bench: Bench) -> None:
    long = "|".join(f"aaaa{number}" for number in range(900))
    cases = ((long, b"a\n" * 100_000, True), (long, b"a\n" * 100, False), ("b", b"a" * (1 << 20), False))
    for pattern, data, elsewhere in cases:
        matcher = Matcher(pattern, ignore_case=False, multiline=False, within_s=20)
        assert await matcher.spans(data) == [] and (matcher._process is not None) is elsewhere
        await matcher.close()


async def test_cancelling_a_search_ends_its_process(bench: Bench) -> None:
    matcher = Matcher("^(a+)+b$", ignore_case=False, multiline=False, within_s=20)
    task = asyncio.create_task(matcher.spans(b"a" * 60))
    async with asyncio.timeout(10):
        while matcher._process is None:
            await asyncio.sleep(0.01)
    process = matcher._process
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert process.returncode is not None


@settings(max_examples=60, deadline=None)
@given(st.text("ab\n\r é.", max_size=40), st.sampled_from(["a", "^b", "b$", "a|b", "[ab] ", r"\s", "é", "^$"]))
def test_a_line_search_is_a_search_of_each_line(text: str, pattern: str) -> None:
    import re

    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    expected = [(n, n) for n, line in enumerate(lines, 1) if re.search(pattern, line.rstrip("\r"))]
    found = spans_of(compiled(pattern, ignore_case=False, multiline=False), text.encode(), multiline=False)
    assert found == expected


async def test_the_process_and_the_direct_way_agree() -> None:
    data = "".join(f"x{n} é\n" for n in range(5000)).encode()
    for pattern in ("x1", "x1+ "):
        matcher = Matcher(pattern, ignore_case=True, multiline=False, within_s=20)
        try:
            direct = spans_of(compiled(pattern, ignore_case=True, multiline=False), data, multiline=False)
            assert await matcher.spans(data) == direct and direct
            assert await matcher.spans(b"") == []
        finally:
            await matcher.close()


# -- Bash ------------------------------------------------------------------------------------------------------------


async def test_bash(bench: Bench) -> None:
    (bench.root / "sub").mkdir()
    assert await bench.text("Bash", command="echo hi; pwd", cwd="sub") == f"hi\n{bench.root}/sub"
    assert await bench.text("Bash", command="true") == "[no output]"
    output = await bench("Bash", command="echo no >&2; exit 4")
    assert (output.content, output.is_error, output.error_code, output.exit_code) == (
        "no\n[exit code 4]", True, "tool.exit_code", 4
    )  # fmt: skip
    output = await bench("Bash", command="echo partial; sleep 30", timeout=0.3)
    assert output.error_code == "tool.timeout" and str(output.content).startswith("partial\n[timed out after 0.3 s")
    output = await bench("Bash", command="head -c 3000000 /dev/zero | tr '\\0' x; exit 3")
    assert 1 << 20 <= len(str(output.content)) < (1 << 20) + 100 and "bytes cut here" in str(output.content)
    assert str(output.content).endswith("x\n[exit code 3]") and not output.bounded


# -- the registry ----------------------------------------------------------------------------------------------------


def test_selecting() -> None:
    @tool
    def lookup(key: str) -> str:
        return key

    @tool(name="Read")
    def mine(path: str) -> str:
        return path

    assert [chosen.name for chosen in select_tools(["Grep", "Read", "Grep"])] == ["Grep", "Read"]
    assert select_tools(["Read", "lookup"], [lookup, mine]) == [mine, lookup]
    assert select_tools(["lookup"], {"lookup": lookup}) == [lookup]
    assert select_tools([]) == []
    for name, near in {"read": "Read", "Grepp": "Grep", "look_up": "lookup"}.items():
        with pytest.raises(ToolError) as caught:
            select_tools([name], [lookup])
        assert caught.value.code == "tool.unknown" and near in (caught.value.hint or "")
    with pytest.raises(ToolError) as caught:
        select_tools(["zzz"])
    assert "Bash" in (caught.value.hint or "")
    with pytest.raises(ToolError) as caught:
        select_tools(["lookup"], [lookup, lookup])
    assert caught.value.code == "tool.duplicate"
