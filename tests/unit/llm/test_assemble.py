from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.errors import ProviderError
from kimi_ray.llm import (
    Assembled,
    Assembler,
    BlockEnd,
    BlockStart,
    Chunk,
    Finish,
    MetaChunk,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    UsageChunk,
)
from kimi_ray.llm.surrogates import Joiner, whole
from kimi_ray.settings import Usage


def assembled(*chunks: Chunk) -> Assembled:
    assembler = Assembler()
    for chunk in chunks:
        assembler.add(chunk)
    return assembler.result()


def test_blocks_stand_in_the_order_in_which_they_were_first_seen() -> None:
    result = assembled(
        ReasoningDelta(7, "think "),
        TextDelta(2, "he"),
        ReasoningDelta(7, "hard"),
        ToolCallDelta(0, "a", "Read", '{"pa'),
        TextDelta(2, "llo"),
        ToolCallDelta(0, None, None, 'th":1}'),
        UsageChunk(Usage(input=3, output=4)),
        Finish("tool-calls", "tool_calls"),
    )
    assert result.content == [
        {"type": "reasoning", "text": "think hard"},
        {"type": "text", "text": "hello"},
        {"type": "tool-call", "id": "a", "name": "Read", "arguments": '{"path":1}'},
    ]
    assert (result.finish, result.raw_finish, result.empty) == ("tool-calls", "tool_calls", False)
    assert result.usage == Usage(input=3, output=4)
    assert result.text == "hello"
    assert [call["id"] for call in result.tool_calls] == ["a"]


def test_deltas_behind_a_blocks_end_are_ignored() -> None:
    result = assembled(
        BlockStart(0, "text"), TextDelta(0, "a"), BlockEnd(0), TextDelta(0, "late"), BlockEnd(5), Finish("stop")
    )
    assert result.content == [{"type": "text", "text": "a"}]
    calls = assembled(ToolCallDelta(3, "x", "T", "{}"), BlockEnd(3), ToolCallDelta(3, None, None, "late"))
    assert calls.tool_calls[0]["arguments"] == "{}"


def test_a_tool_call_without_id_is_named_by_its_index_and_an_id_that_comes_late_is_taken() -> None:
    result = assembled(
        ToolCallDelta(4, None, "A", "{}"),
        ToolCallDelta(6, None, None, ""),
        ToolCallDelta(6, "late", "B", ""),
        ToolCallDelta(6, "again", "C", "{}"),
        Finish("stop"),
    )
    assert [(call["id"], call["name"]) for call in result.tool_calls] == [("call-4", "A"), ("late", "B")]


def test_the_finish_follows_from_what_was_called() -> None:
    assert assembled(ToolCallDelta(0, "a", "T", ""), Finish("stop", "stop")).finish == "tool-calls"
    assert assembled(TextDelta(0, "a"), Finish("tool-calls", "tool_calls")).finish == "stop"
    assert assembled(TextDelta(0, "a")).finish == "stop"


def test_max_tokens_drops_the_calls_that_are_not_complete() -> None:
    def names(*calls: tuple[str, str]) -> list[str]:
        chunks = [ToolCallDelta(at, name, name, raw) for at, (name, raw) in enumerate(calls)]
        return [call["name"] for call in assembled(*chunks, Finish("max-tokens", "length")).tool_calls]

    assert names(("whole", '{"a": {"b": 1}}'), ("cut", '{"a": {"b": 1}'), ("bare", ""), ("number", "12")) == ["whole"]
    nothing_left = assembled(TextDelta(1, "so"), ToolCallDelta(0, "a", "T", '{"x'), Finish("max-tokens"))
    assert nothing_left.content == [{"type": "text", "text": "so"}]
    assert nothing_left.finish == "max-tokens"


@pytest.mark.parametrize(
    ("chunks", "empty"),
    [
        ([Finish("stop")], True),
        ([TextDelta(0, " \n"), Finish("stop")], True),
        ([ReasoningDelta(0, "hm"), Finish("stop")], True),
        ([ReasoningDelta(0, "hm"), Finish("max-tokens")], False),
        ([ToolCallDelta(0, "a", "T", "{"), Finish("max-tokens")], True),
        ([TextDelta(0, "x"), Finish("stop")], False),
        ([ToolCallDelta(0, "a", "T", ""), Finish("stop")], False),
    ],
)
def test_what_counts_as_empty(chunks: list[Chunk], empty: bool) -> None:
    assert assembled(*chunks).empty is empty


@pytest.mark.parametrize(
    "chunks",
    [
        [Finish("stop"), TextDelta(0, "x")],
        [Finish("stop"), Finish("stop")],
        [UsageChunk(Usage()), UsageChunk(Usage())],
        [BlockStart(0, "text"), BlockStart(0, "text")],
        [BlockStart(0, "text"), ReasoningDelta(0, "x")],
        [TextDelta(0, "x"), ToolCallDelta(0, "a", "T", "")],
    ],
)
def test_a_broken_grammar_is_an_error_with_a_code(chunks: list[Chunk]) -> None:
    with pytest.raises(ProviderError) as caught:
        assembled(*chunks)
    assert caught.value.code == "provider.bad_stream"


def test_partial_keeps_what_is_readable() -> None:
    assembler = Assembler()
    for chunk in (
        ReasoningDelta(0, "hm"),
        TextDelta(1, "  "),
        TextDelta(2, "half a \ud83d"),
        ToolCallDelta(3, "a", "T", '{"x": 1}'),
    ):
        assembler.add(chunk)
    assert assembler.partial() == [{"type": "reasoning", "text": "hm"}, {"type": "text", "text": "half a \ufffd"}]


def test_facts_add_up_and_token_slices_are_joined() -> None:
    result = assembled(
        MetaChunk(response_id="r", http_status=200, connect_ms=7),
        MetaChunk(served_model="m", tokens={"logprobs": [1], "prompt_token_ids": [9]}),
        MetaChunk(response_id="r2", tokens={"logprobs": [2, 3]}),
        Finish("stop"),
    )
    assert result.meta == MetaChunk(
        response_id="r2",
        served_model="m",
        http_status=200,
        connect_ms=7,
        tokens={"logprobs": [1, 2, 3], "prompt_token_ids": [9]},
    )


text_units = st.text(st.characters(codec=None, exclude_categories=()), max_size=12)


@given(st.lists(text_units, max_size=6))
def test_text_is_always_encodable_and_complete_pairs_survive_any_cut(pieces: list[str]) -> None:
    joined = assembled(*[TextDelta(0, piece) for piece in pieces], Finish("stop")).text
    assert joined == "".join(pieces).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@given(st.text(max_size=20), st.data())
def test_the_joiner_gives_back_a_text_cut_between_any_two_units(text: str, data: st.DataObject) -> None:
    units = text.encode("utf-16-le")
    halves = [units[at : at + 2].decode("utf-16-le", "surrogatepass") for at in range(0, len(units), 2)]
    pieces: list[str] = []
    for half in halves:
        if pieces and data.draw(st.booleans()):
            pieces[-1] += half
        else:
            pieces.append(half)
    joiner = Joiner()
    fed = [joiner.feed(piece) for piece in pieces]
    for piece in fed:
        piece.encode()
    assert "".join(fed) + joiner.end() == text


@given(text_units)
def test_a_whole_text_is_left_alone_and_made_whole_once(text: str) -> None:
    once = whole(text)
    assert whole(once) == once
    assert json.loads(json.dumps(once)) == once


def test_a_half_that_never_meets_the_other_ends_as_a_replacement() -> None:
    joiner = Joiner()
    assert joiner.feed("a\ud83d") == "a"
    assert joiner.feed("b\udc00") == "\ufffdb\ufffd"
    assert joiner.feed("\ud83d") == ""
    assert joiner.feed("\ude00") == "\N{GRINNING FACE}"
    assert joiner.feed("\ud83d") == ""
    assert joiner.end() == "\ufffd"
    assert joiner.end() == ""
