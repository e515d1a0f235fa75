"""Tools on their way: nothing is imported where they only pass, and their digest is of the code they need."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_ray.errors import ToolError
from kimi_ray.settings import Workdir
from kimi_ray.tools import FunctionTool, as_tool, builtin_tools, select_tools
from kimi_ray.tools.carried import CarriedTool, carried, carried_workdir, check_importable, code_digest, fingerprint_of

TOOL = """
from kimi_ray import tool
import {helper}
from {helper}_value import VALUE

@tool
def weigh(what: str) -> str:
    '''Weigh something.'''
    import {helper}_lazy
    return {helper}.WORD + what
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a tool's module and its helper, import them afresh, give the tool."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(word: str, comment: str = "", name: str = "f_tools") -> FunctionTool:
        (tmp_path / f"{name}_helper.py").write_text(f"WORD = {word!r}\n")
        for more in ("value", "lazy"):
            (tmp_path / f"{name}_helper_{more}.py").write_text("VALUE = 1\n")
        (tmp_path / f"{name}.py").write_text(TOOL.format(helper=f"{name}_helper") + f"# {comment}\n")
        for module in (name, f"{name}_helper"):
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        return importlib.import_module(name).weigh

    yield write
    for module in [module for module in sys.modules if module.startswith("f_tools")]:
        del sys.modules[module]


def test_passing_on_imports_nothing_and_sends_the_same_bytes(written):
    (tool,) = carried([written("heavy ")])
    data = pickle.dumps(tool)
    code = (
        "import pickle, sys\n"
        "tool = pickle.loads(sys.stdin.buffer.read())\n"
        "assert 'f_tools' not in sys.modules, 'imported'\n"
        "assert (tool.name, tool.writes) == ('weigh', False)\n"
        "sys.stdout.buffer.write(pickle.dumps(tool))\n"
    )
    passed = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True).stdout
    arrived = pickle.loads(passed)
    assert isinstance(arrived, CarriedTool)
    assert (arrived.digest, arrived.sealed(None)) == (tool.digest, tool.sealed(None))
    assert arrived.opened()("gold") == "heavy gold"
    assert arrived.parameters["properties"].keys() == {"what"}
    assert arrived.description == "Weigh something."


def test_the_digest_is_of_the_code_and_of_what_it_imports(written):
    first = code_digest(written("heavy "))
    assert code_digest(written("heavy ")) == first
    assert code_digest(written("heavy ", comment="changed")) != first
    assert code_digest(written("light ")) != first


@pytest.mark.parametrize("edited", ["f_tools", "f_tools_helper", "f_tools_helper_value", "f_tools_helper_lazy"])
def test_an_edit_shows_though_the_module_is_loaded_or_never_was(written, tmp_path: Path, edited: str):
    tool = written("heavy ")
    before = code_digest(tool)
    with (tmp_path / f"{edited}.py").open("a") as file:
        file.write("WORD = 'feathery '\n")
    assert code_digest(tool) != before
    (tmp_path / f"{edited}.py").write_text("def broken(:\n")
    assert code_digest(tool) != before


def test_packages_and_relative_imports_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "f_tools_package" / "inner"
    package.mkdir(parents=True)
    files = [package.parent / "__init__.py", package / "__init__.py", package / "words.py", package.parent / "top.py"]
    for file in files:
        file.write_text("VALUE = 1\n")
    text = (
        "from kimi_ray import tool\nfrom .words import VALUE\nfrom ..top import VALUE as other\nfrom . import words\n"
    )
    (package / "mine.py").write_text(text + "@tool\ndef up(n: int) -> int:\n    'Up.'\n    return n\n")
    importlib.invalidate_caches()
    tool = importlib.import_module("f_tools_package.inner.mine").up
    seen = {code_digest(tool)}
    for file in files:
        file.write_text("VALUE = 2\n")
        seen.add(code_digest(tool))
    assert len(seen) == 1 + len(files)
    for module in [module for module in sys.modules if module.startswith("f_tools")]:
        del sys.modules[module]


def test_what_is_only_loaded_beside_a_tool_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A large package of one's own: what else of it is loaded is in the package's globals, and is no use of it."""
    package = tmp_path / "large_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "used.py").write_text("TEXT = 'used'\n")
    for number in range(20):
        (package / f"other{number}.py").write_text(f"NUMBER = {number}\n")
    (package / "tools.py").write_text(
        "from kimi_ray.tools import tool\nfrom large_package import used\n\n"
        "@tool\ndef look(what: str) -> str:\n    'Look.'\n    return used.TEXT\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    look = importlib.import_module("large_package.tools").look
    before = code_digest(look)
    for number in range(20):
        importlib.import_module(f"large_package.other{number}")
    assert code_digest(look) == before
    (package / "other3.py").write_text("NUMBER = 33\n")
    assert code_digest(look) == before
    (package / "used.py").write_text("TEXT = 'used otherwise'\n")
    assert code_digest(look) != before
    for module in [module for module in sys.modules if module.startswith("large_package")]:
        del sys.modules[module]


FACTORY = """
import f_tools_seed

def make(item, ctx):
    return ctx.base_dir
"""


def test_a_factorys_code_counts_like_a_tools(written, tmp_path: Path):
    (tmp_path / "f_tools_seed.py").write_text("VALUE = 1\n")
    (tmp_path / "f_tools_places.py").write_text(FACTORY)
    asked = Workdir.factory("f_tools_places:make")
    first = carried_workdir(asked)
    assert fingerprint_of((), asked) == "" and fingerprint_of((), first) != ""
    assert fingerprint_of((), carried_workdir(asked)) == fingerprint_of((), pickle.loads(pickle.dumps(first)))
    assert first.said() == asked.said() and first.within("/x").code == first.code
    tools = carried([written("a")])
    assert fingerprint_of(tools, first) not in (fingerprint_of(tools), fingerprint_of((), first))
    (tmp_path / "f_tools_seed.py").write_text("VALUE = 2\n")
    second = carried_workdir(asked)
    assert second.code != first.code
    (tmp_path / "f_tools_places.py").write_text(FACTORY + "# edited\n")
    assert carried_workdir(asked).code not in (first.code, second.code)


def test_other_directories_and_installed_factories_need_no_code():
    for workdir in (Workdir.none(), Workdir.copy("/x"), Workdir.git("/x"), Workdir.factory("pytest:fixture")):
        assert fingerprint_of((), carried_workdir(workdir)) == ""
    with pytest.raises(ToolError) as caught:
        carried_workdir(Workdir.factory("f_tools_nowhere:make"))
    assert caught.value.code == "workdir.invalid"


def test_fingerprints_need_no_order_and_are_neutral_without_code(written):
    one, two = written("a"), written("b", name="f_tools_two")
    assert fingerprint_of(carried([one, two])) == fingerprint_of(carried([two, one]))
    assert fingerprint_of(carried([one])) != fingerprint_of(carried([one, two]))
    assert fingerprint_of(()) == "" == fingerprint_of(builtin_tools().values())


def test_carried_once_is_carried(written):
    tools = carried([written("a")])
    assert carried(tools) == tools
    assert select_tools(["weigh", "Read"], tools)[0] is tools[0]


def test_code_that_is_in_no_file_has_a_digest_of_its_own():
    space: dict = {"__name__": "typed_in"}
    exec("def up(n: int) -> int:\n    'Up.'\n    return n + 1", space)
    one = as_tool(space["up"])
    exec("def up(n: int) -> int:\n    'Up.'\n    return n + 2", space)
    two = as_tool(space["up"])
    assert code_digest(one) != code_digest(two)


def test_what_cannot_be_imported_is_named_with_its_node(written):
    (tool,) = carried([written("a")])
    data = pickle.dumps(tool)
    for module in ("f_tools", "f_tools_helper"):
        sys.modules.pop(module, None)
    sys.path.remove(sys.path[0])
    importlib.invalidate_caches()
    arrived = pickle.loads(data)
    with pytest.raises(ToolError) as caught:
        check_importable([arrived], "node-7")
    error = caught.value
    assert error.code == "tool.not_importable"
    assert (error.details["tool"], error.details["node_id"]) == ("weigh", "node-7")
    assert "f_tools" in error.message and "runtime_env" in str(error.hint)
