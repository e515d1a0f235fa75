"""Code that is named: whatever its module does when it is imported, who asked hears why it cannot be had."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import KimiRayError
from kimi_ray.hosts.features import load_features
from kimi_ray.llm.script import load_script
from kimi_ray.named_code import GUARD, CannotLoadError, load_named
from kimi_ray.tools import load_tool
from kimi_ray.tools.carried import CarriedTool, arrived
from kimi_ray.tools.output_schema import load_schema
from kimi_ray.tools.rollout_function import carried_rollout
from kimi_ray.tools.workdirs import load_factory

MODULE = "kimi_ray_test_named"

LOADERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "tool": (load_tool, "tool.not_importable"),
    "rollout": (carried_rollout, "tool.not_importable"),
    "schema": (load_schema, "output.bad_schema"),
    "factory": (load_factory, "workdir.invalid"),
    "script": (load_script, "config.invalid_script"),
    "feature": (lambda name: load_features(RuntimeConfig(features=(name,))), "config.feature"),
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes the body of a module that can be imported; gives its name."""

    def write(body: str) -> str:
        (tmp_path / f"{MODULE}.py").write_text(body)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        return MODULE

    return write


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    "body", ["import sys\nsys.exit(3)", "raise GeneratorExit", "x = = 1", "1 / 0", "import no_such_q"]
)
def test_a_module_that_raises_whatever_is_an_error_of_who_asked(
    kind: str, body: str, module: Callable[[str], str]
) -> None:
    load, code = LOADERS[kind]
    with pytest.raises(KimiRayError) as caught:
        load(f"{module(body)}:thing")
    assert caught.value.code == code and f"the module {MODULE} raised " in caught.value.message
    assert (caught.value.hint == GUARD) == (body != "import no_such_q")


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("name", ["", MODULE, f"{MODULE}:", ":thing", f"{MODULE}:thing.more", f"{MODULE}:", "..:x"])
def test_a_name_that_means_nothing_is_refused_as_what_was_asked_for(
    kind: str, name: str, module: Callable[[str], str]
) -> None:
    module("thing = 1")
    load, code = LOADERS[kind]
    with pytest.raises(KimiRayError) as caught:
        load(name)
    assert caught.value.code == code


def test_an_attribute_that_raises_when_it_is_looked_at_is_told_too(module: Callable[[str], str]) -> None:
    name = module("def __getattr__(name):\n    raise SystemExit(name)")
    with pytest.raises(CannotLoadError, match="SystemExit: thing"):
        load_named(f"{name}:thing")


def test_what_is_inside_is_found_by_further_dots() -> None:
    assert load_named("pathlib:Path.home") == Path.home


def test_a_tool_whose_module_exits_where_it_arrives_is_told(module: Callable[[str], str]) -> None:
    name = module("class Tool: ...\ntool = Tool()")
    sealed = pickle.dumps(load_named(f"{name}:tool"))
    module("import sys\nsys.exit(3)")
    there: CarriedTool = arrived("look", False, "digest", sealed)
    with pytest.raises(KimiRayError, match="SystemExit: 3") as caught:
        there.opened()
    assert caught.value.code == "tool.not_importable"


def test_a_module_that_is_not_there_is_told_with_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotLoadError) as caught:
        load_named("no_such_q.inner:count")
    assert caught.value.why == f"no module 'no_such_q.inner' in {tmp_path} or on the path"
    assert "cluster" not in str(caught.value.hint)
