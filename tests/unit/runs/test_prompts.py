"""Prompts: one pass, items are data and never template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import RunError
from kimi_ray.runs import check_prompt, prepare_items, prompt_hash, render_prompt, render_workdir
from kimi_ray.settings import Item, Workdir


def render(prompt: Any, data: Any) -> str:
    return render_prompt(prompt, prepare_items([data])[0])


def test_columns_and_items() -> None:
    assert render("Review {{item}}!", "this") == "Review this!"
    assert render("{{a}}-{{ b }}-{{a}}", {"a": "x", "b": 3}) == "x-3-x"
    assert render("{{item}}", {"a": "ü", "b": [1, None]}) == '{"a":"ü","b":[1,null]}'
    assert render("{{item}}", {"item": "mine", "b": 1}) == "mine"
    assert render("{{the column}}", {"the column": True}) == "true"


def test_what_an_item_contains_is_not_expanded() -> None:
    assert render("{{a}} {{b}}", {"a": "{{b}}", "b": "{{a}} \\1 \\g<0>"}) == "{{b}} {{a}} \\1 \\g<0>"
    assert render("{{item}}", "{{item}}{{nothing}}") == "{{item}}{{nothing}}"


@given(st.text(), st.text())
def test_any_text_comes_through_as_it_is(before: str, value: str) -> None:
    if "{{" in before or before.endswith("{"):
        return
    text = value.encode("utf-8", "replace").decode()
    assert render(before + "{{item}}", text) == before + text


@pytest.mark.parametrize("text", ["{{}}", "{{ }}", "{ {item} }", "{item}", "{{", "}}", "{{a{b}}"])
def test_braces_that_are_no_placeholder_stay(text: str) -> None:
    assert render(text + "{{item}}", "x") == text + "x"


def test_an_unknown_column_names_the_line_and_its_columns() -> None:
    items = prepare_items([{"text": "a"}, {"txet": "b"}], sources=["f line 2", "f line 9"])
    for check in (lambda: check_prompt("{{text}}", items), lambda: render_prompt("{{text}}", items[1])):
        with pytest.raises(RunError) as error:
            check()
        assert error.value.code == "items.unknown_column"
        assert error.value.details == {"column": "text", "columns": ["txet"], "source": "f line 9"}
        assert "txet" in str(error.value)


def test_an_own_prompt_wins_and_is_literal() -> None:
    items = prepare_items([Item(data="x", prompt="do {{item}} as written"), Item(data={"b": 1}, prompt="{{c}}")])
    assert [render_prompt("{{a}}", item) for item in items] == ["do {{item}} as written", "{{c}}"]
    check_prompt("{{a}}", items)
    check_prompt("no placeholder", items)


@pytest.mark.parametrize("prompt", ["Say hello", "", "{{}}"])
def test_a_prompt_that_does_not_use_the_item(prompt: str) -> None:
    items = prepare_items(["a", "b"])
    with pytest.raises(RunError) as error:
        check_prompt(prompt, items)
    assert error.value.code == "swarm.no_placeholder"
    assert "{{item}}" in (error.value.hint or "")


def test_the_item_may_be_used_in_the_workdir_only() -> None:
    items = prepare_items([{"repo": "/r", "rev": "abc"}])
    workdir = Workdir(kind="git", path="{{repo}}", ref="{{rev}}")
    check_prompt("Fix the bug", items, workdir)
    made = render_workdir(workdir, items[0])
    assert made == Workdir(kind="git", path="/r", ref="abc")
    with pytest.raises(RunError) as error:
        check_prompt("Fix the bug", items, Workdir.copy("/x/{{nope}}"))
    assert "the workdir" in error.value.message


def test_an_item_with_its_own_workdir_keeps_it() -> None:
    items = prepare_items([Item(data="x", workdir=Workdir.copy("/{{own}}"))])
    assert render_workdir(Workdir.copy("/a"), items[0]) == Workdir.copy("/{{own}}")
    check_prompt("the same for all", items, Workdir.copy("/{{b}}"))
    assert render_workdir(None, prepare_items(["x"])[0]) is None


def test_a_prompt_function_gets_the_item() -> None:
    assert render(lambda item: f"<{item.data['a']}>", {"a": 1}) == "<1>"
    check_prompt(lambda item: "constant on purpose", prepare_items(["a"]))


def test_a_prompt_function_that_fails_or_returns_no_text() -> None:
    for prompt in (lambda item: item.data["missing"], lambda item: None):
        with pytest.raises(RunError) as error:
            render(prompt, {"a": 1})
        assert error.value.code == "swarm.prompt_failed"
        assert error.value.error_class == "user_code"


def test_a_prompt_of_five_megabytes() -> None:
    big = "x" * 5_000_000
    assert len(render("{{item}}{{item}}", big)) == 10_000_000


def test_the_hash_of_a_prompt() -> None:
    assert prompt_hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    one = prompt_hash(lambda item: "a")
    other = prompt_hash(lambda item: "b")
    assert one != other
    assert prompt_hash(str.upper) == prompt_hash(str.upper)  # type: ignore[arg-type]  no source to read
