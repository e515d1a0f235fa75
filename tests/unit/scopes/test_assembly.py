"""What does not fit is refused when the container is assembled, with a path in plain words."""

from __future__ import annotations

from typing import Any

import pytest
from dishka import AnyOf, Provider, Scope, provide

from kimi_ray.errors import ConfigError
from kimi_ray.scopes import LifecycleScope, assemble, open_scope, service_name

APP, SESSION, AGENT = LifecycleScope.APP, LifecycleScope.SESSION, LifecycleScope.AGENT


class A:
    def __init__(self, b: B) -> None: ...


class B:
    def __init__(self, c: C) -> None: ...


class C:
    def __init__(self, a: A) -> None: ...


class Alone:
    pass


class Needs:
    def __init__(self, alone: Alone) -> None:
        self.alone = alone


class NeedsNeeds:
    def __init__(self, needs: Needs) -> None:
        self.needs = needs


def provider(scope: Any, *kinds: Any, override: bool = False) -> Provider:
    made = Provider()
    for kind in kinds:
        made.provide(kind, scope=scope, override=override)
    return made


def refused(*providers: Provider, asked: Any = (), values: Any = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        assemble(providers, values or {}, asked)
    assert caught.value.code == "config.assembly"
    assert caught.value.hint
    return caught.value


def test_a_circle_is_told_as_a_path() -> None:
    error = refused(provider(APP, A, B, C))
    assert "circle: A -> B -> C -> A" in error.message
    assert error.details["path"] == [f"{__name__}.{name}" for name in ("A", "B", "C", "A")]


def test_a_circle_is_told_without_the_way_to_it() -> None:
    class Door:
        def __init__(self, a: A) -> None: ...

    assert "circle: A -> B -> C -> A" in refused(provider(APP, Door), provider(APP, A, B, C)).message


def test_a_service_that_needs_itself() -> None:
    class Own:
        def __init__(self, own: Any) -> None: ...

    Own.__init__.__annotations__["own"] = Own
    assert "circle: Own -> Own" in refused(provider(APP, Own)).message


@pytest.mark.parametrize(
    ("a", "b", "c", "path"),
    [(APP, SESSION, AGENT, "A -> B -> C -> A"), (AGENT, APP, APP, "A"), (SESSION, AGENT, SESSION, "A")],
)
def test_a_circle_across_scopes_is_a_circle(a: Any, b: Any, c: Any, path: str) -> None:
    error = refused(provider(a, A), provider(b, B), provider(c, C))
    assert "in a circle: " in error.message
    names = [name.rpartition(".")[2] for name in error.details["path"]]
    assert names[0] == names[-1] and sorted(names[:-1]) == ["A", "B", "C"], names
    assert path in error.message


def test_what_is_missing_is_named_with_the_path_to_it() -> None:
    error = refused(provider(APP, NeedsNeeds), provider(APP, Needs))
    assert "Needs needs Alone, which nobody provides: " in error.message
    assert error.message.endswith("Needs -> Alone")


@pytest.mark.parametrize(
    ("outer", "inner", "words"), [(APP, SESSION, "APP"), (APP, AGENT, "APP"), (SESSION, AGENT, "SESSION")]
)
def test_an_outer_service_cannot_have_an_inner_one(outer: Any, inner: Any, words: str) -> None:
    error = refused(provider(outer, Needs), provider(inner, Alone))
    assert f"Needs of the {words} scope cannot have Alone of the {inner.name} scope" in error.message
    assert error.message.endswith("Needs -> Alone")


async def test_an_inner_service_has_outer_ones() -> None:
    app = assemble([provider(AGENT, NeedsNeeds), provider(SESSION, Needs), provider(APP, Alone)], {})
    session = await open_scope(app, {})
    found = await (await open_scope(session, {})).get(NeedsNeeds)
    assert found.needs is await session.get(Needs) and found.needs.alone is await app.get(Alone)


def test_one_service_twice_is_refused_unless_it_says_that_it_replaces() -> None:
    class Other(Provider):
        scope = APP

        @provide
        def mine(self) -> Alone:
            return Alone()

    error = refused(provider(APP, Alone), Other())
    assert "Alone is provided twice, by Alone and Other.mine" in error.message.replace("test_one_service_twice", "")
    assert "override=True" in (error.hint or "")


async def test_a_replacement_is_what_all_get() -> None:
    class Better(Alone):
        pass

    class Instead(Provider):
        scope = APP

        @provide(override=True)
        def mine(self) -> Alone:
            return Better()

    app = assemble([provider(APP, Alone, Needs), Instead()], {})
    assert isinstance((await app.get(Needs)).alone, Better)


def test_a_replacement_of_nothing_is_refused() -> None:
    assert "Alone, which there is not" in refused(provider(APP, Alone, override=True)).message


@pytest.mark.parametrize(("first", "second"), [(AGENT, APP), (APP, AGENT), (AGENT, SESSION)])
def test_a_replacement_lives_as_long_as_what_it_replaces(first: Any, second: Any) -> None:
    error = refused(provider(first, Alone), provider(second, Alone, override=True))
    assert f"Alone is of the {first.name} scope and cannot be replaced by one of the {second.name} scope" in str(error)


def test_a_scope_of_another_library() -> None:
    assert "take LifecycleScope" in str(refused(provider(Scope.REQUEST, Alone)))


def test_what_will_be_asked_for_must_be_there_and_in_reach() -> None:
    assert "Alone is asked for in the AGENT scope, and nobody" in str(refused(asked=[(Alone, AGENT)]))
    wrong = refused(provider(AGENT, Alone), asked=[(Alone, SESSION)])
    assert "Alone is of the AGENT scope and is asked for in the SESSION scope" in wrong.message
    assemble([provider(APP, Alone)], {}, [(Alone, AGENT), (Alone, SESSION), (Alone, APP)])
    assemble([], {Alone: Alone()}, [(Alone, SESSION)])


def test_aliases_are_seen() -> None:
    class Both(Provider):
        scope = SESSION

        @provide
        def made(self) -> AnyOf[Needs, NeedsNeeds]:
            return Needs(Alone())

    assemble([Both()], {}, [(NeedsNeeds, SESSION)])
    assert "provided twice" in str(refused(Both(), provider(SESSION, NeedsNeeds), provider(APP, Alone)))


def test_names_are_those_of_the_code() -> None:
    assert service_name(list[A]) == "list[A]"
    assert service_name(dict[str, list[A]]) == "dict[str, list[A]]"
