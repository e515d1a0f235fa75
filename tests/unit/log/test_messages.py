"""Tool calls and their results in what goes over the wire: one answer each, right behind the question."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.log import complete_tools, tool_message
from kimi_ray.log.messages import MISSING_RESULT


def asks(*ids: str) -> dict[str, Any]:
    content = [{"type": "tool-call", "id": call, "name": "t", "arguments": "{}"} for call in ids]
    return {"id": "a" + "".join(ids), "role": "assistant", "content": content, "source": {}}


def says(text: str) -> dict[str, Any]:
    return {"id": f"u{text}", "role": "user", "content": [{"type": "text", "text": text}], "source": {}}


def result(call: str, text: str = "r") -> dict[str, Any]:
    return tool_message(f"r{call}", call, [{"type": "text", "text": text}], is_error=False)


def test_results_follow_their_call_in_call_order_and_others_move_behind() -> None:
    out = complete_tools([says("x"), asks("1", "2"), says("steer"), result("2"), result("1")])
    assert [message["id"] for message in out] == ["ux", "a12", "r1", "r2", "usteer"]


def test_missing_results_are_stated_orphans_and_doubles_are_dropped() -> None:
    out = complete_tools([result("0"), asks("1"), result("1", "first"), result("1", "second"), asks("2")])
    assert [message["id"] for message in out] == ["a1", "r1", "a2", "missing-2"]
    assert out[1]["content"][0]["content"][0]["text"] == "first"
    assert out[3]["content"][0]["content"][0]["text"] == MISSING_RESULT
    assert out[3]["content"][0]["is_error"] is True


def test_an_id_that_is_used_again_is_another_call_with_a_result_of_its_own() -> None:
    second = {**result("1", "second"), "id": "later"}
    out = complete_tools([asks("1"), result("1", "first"), says("x"), asks("1", "2"), second])
    assert [message["id"] for message in out] == ["a1", "r1", "ux", "a12", "later", "missing-2"]


def test_a_call_that_was_given_up_is_answered_apart_from_a_later_one_of_its_id() -> None:
    out = complete_tools([asks("1"), says("x"), asks("1"), result("1")])
    assert [message["id"] for message in out] == ["a1", "missing-1", "ux", "a1", "r1"]


def test_one_id_twice_in_one_message_is_one_call() -> None:
    out = complete_tools([asks("1", "1"), result("1"), result("1", "again")])
    assert [message["id"] for message in out] == ["a11", "r1"]


@given(
    st.lists(
        st.one_of(
            st.lists(st.sampled_from("abcd"), min_size=1, max_size=3).map(lambda ids: asks(*ids)),
            st.sampled_from("abcd").map(result),
            st.just(says("x")),
        ),
        max_size=12,
    )
)
def test_whatever_comes_in_every_call_has_one_result_behind_it(messages: list[dict[str, Any]]) -> None:
    out = complete_tools(messages)
    expected: list[str] = []
    for message in out:
        blocks = message["content"]
        if message["role"] == "assistant":
            assert expected == []
            expected = list(dict.fromkeys(block["id"] for block in blocks))
        elif blocks[0]["type"] == "tool-result":
            assert blocks[0]["tool_call_id"] == expected.pop(0)
        else:
            assert expected == []
    assert expected == []
    assert [m for m in out if m["role"] == "assistant"] == [m for m in messages if m["role"] == "assistant"]
