"""The pages for users say what the program does: every setting, every code, every flag."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kimi_ray.cli.exits import _USAGE, _WORK_FAILED
from kimi_ray.cli.manifest_facts import error_facts
from kimi_ray.config import settings_table
from kimi_ray.runs.resume import DEFAULT_RETRY_ON
from kimi_ray.runs.rows import AttemptRow, ResultRow

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def codes_in_the_program() -> set[str]:
    return {row["name"] for row in error_facts()}


def codes_in_the_page() -> set[str]:
    return set(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|", (DOCS / "errors.md").read_text(), re.MULTILINE))


def test_every_code_is_explained() -> None:
    assert sorted(codes_in_the_program() - codes_in_the_page()) == []


def test_no_code_is_explained_that_there_is_not() -> None:
    assert sorted(codes_in_the_page() - codes_in_the_program()) == []


def test_exit_codes_name_codes_that_exist() -> None:
    assert sorted((_USAGE | _WORK_FAILED) - codes_in_the_page()) == []


def test_the_first_page_names_every_example() -> None:
    page = (ROOT / "README.md").read_text()
    missing = [path.name for path in (ROOT / "examples").glob("*.py") if f"(examples/{path.name})" not in page]
    assert missing == []


def test_settings_are_those_of_the_program() -> None:
    assert settings_table() in (DOCS / "configuration.md").read_text()


@pytest.mark.parametrize("model", [ResultRow, AttemptRow])
def test_row_keys_are_explained(model: type[ResultRow | AttemptRow]) -> None:
    page = (DOCS / "swarm.md").read_text()
    assert [name for name in model.model_fields if f"`{name}`" not in page] == []


def test_classes_are_explained() -> None:
    page = (DOCS / "swarm.md").read_text()
    assert [name for name in DEFAULT_RETRY_ON if f"| `{name}` |" not in page] == []


def test_model_keys_are_explained() -> None:
    from kimi_ray.llm.models import ModelSettings

    page = (DOCS / "configuration.md").read_text()
    assert [name for name in ModelSettings.model_fields if f"| `{name}` |" not in page] == []


def test_pages_link_to_files_that_exist() -> None:
    for page in (*DOCS.glob("*.md"), ROOT / "README.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
