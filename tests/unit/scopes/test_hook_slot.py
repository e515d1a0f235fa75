"""Slots: who is asked, in which order, and when the asking ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import ConfigError
from kimi_ray.scopes import HookSlot


@dataclass
class Asked:
    told: list[str] = field(default_factory=list[str])
    decided: bool = False


def saying(word: str, *, decides: bool = False) -> Callable[[Asked], Awaitable[None]]:
    async def handler(event: Asked) -> None:
        event.told.append(word)
        event.decided = decides

    return handler


def slot(*names: str) -> HookSlot[Asked]:
    made = HookSlot[Asked]("test")
    for name in names:
        made.register(name, saying(name))
    return made


async def test_handlers_are_awaited_in_the_order_in_which_they_came() -> None:
    event = Asked()
    assert await slot("a", "b", "c").run(event) is event
    assert event.told == ["a", "b", "c"]


def test_a_slot_that_nobody_uses_is_false() -> None:
    used = slot("a")
    assert used and not slot()
    used.remove("a")
    used.remove("a")
    assert not used and used.handlers == ()


@pytest.mark.parametrize(
    ("where", "order"),
    [
        ({"before": "b"}, ("a", "x", "b", "c")),
        ({"after": "b"}, ("a", "b", "x", "c")),
        ({"before": "a"}, ("x", "a", "b", "c")),
        ({"after": "c"}, ("a", "b", "c", "x")),
        ({}, ("a", "b", "c", "x")),
    ],
)
def test_a_handler_may_stand_beside_another(where: dict[str, str], order: tuple[str, ...]) -> None:
    used = slot("a", "b", "c")
    used.register("x", saying("x"), **where)
    assert used.handlers == order


async def test_one_of_the_same_name_takes_its_place() -> None:
    used = slot("a", "b", "c")
    used.register("b", saying("other"))
    assert used.handlers == ("a", "b", "c")
    assert (await used.run(Asked())).told == ["a", "other", "c"]
    used.register("b", saying("moved"), before="a")
    assert used.handlers == ("b", "a", "c")


@pytest.mark.parametrize(
    "where",
    [{"before": "a", "after": "b"}, {"before": "nobody"}, {"after": "nobody"}, {"before": "x"}, {"after": "a2"}],
)
def test_a_place_that_there_is_not_is_refused_and_changes_nothing(where: dict[str, str]) -> None:
    used = slot("a", "b", "x")
    with pytest.raises(ConfigError) as caught:
        used.register("x", saying("y"), **where)
    assert caught.value.code == "config.hook_order" and "a, b, x" in (caught.value.hint or "")
    assert used.handlers == ("a", "b", "x")


async def test_the_first_decision_ends_it() -> None:
    used = slot("a")
    used.register("b", saying("b", decides=True))
    used.register("c", saying("c"))
    assert (await used.run(Asked())).told == ["a", "b"]


async def test_events_that_cannot_be_decided_reach_all() -> None:
    class Notice:
        told = 0

    notices = HookSlot[Notice]("notices")

    async def count(event: Notice) -> None:
        event.told += 1

    notices.register("one", count)
    notices.register("two", count)
    assert (await notices.run(Notice())).told == 2


async def test_who_comes_or_goes_while_it_runs_counts_the_next_time() -> None:
    used = slot()

    async def changing(event: Asked) -> None:
        event.told.append("changing")
        used.remove("last")
        used.register("new", saying("new"))

    used.register("changing", changing)
    used.register("last", saying("last"))
    assert (await used.run(Asked())).told == ["changing", "last"]
    assert (await used.run(Asked())).told == ["changing", "new"]


async def test_what_a_handler_raises_is_raised_and_the_rest_not_asked() -> None:
    used = slot("a")

    async def failing(_event: Asked) -> None:
        raise OSError("no")

    used.register("b", failing)
    used.register("c", saying("c"))
    event = Asked()
    with pytest.raises(OSError, match="no"):
        await used.run(event)
    assert event.told == ["a"]


Step = tuple[str, str, str]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "before", "after", "remove"]), st.sampled_from("abcd"))
    )
)
def test_names_stay_unique_and_anchors_are_kept(steps: list[Step]) -> None:
    used = slot()
    for name, how, anchor in steps:
        before = used.handlers
        try:
            if how == "remove":
                used.remove(name)
            else:
                used.register(name, saying(name), **({how: anchor} if how else {}))
        except ConfigError:
            assert used.handlers == before and (anchor not in before or anchor == name)
            continue
        after = used.handlers
        assert len(set(after)) == len(after)
        assert [one for one in after if one != name] == [one for one in before if one != name], (
            "others keep their order"
        )
        if how in ("before", "after"):
            assert after.index(name) == after.index(anchor) + (-1 if how == "before" else 1)
