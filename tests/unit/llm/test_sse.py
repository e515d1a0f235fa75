from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_ray.llm import sse
from kimi_ray.llm.sse import EventParser, EventTooLargeError

STREAM = (
    b"\xef\xbb\xbf: comment\n\ndata: one\n\nevent: x\nid: 7\ndata:two\r\n\r\n\n\n"
    b"data: a\ndata:  b\n\ndatax: no\ndata\n\ndata: gr\xc3\xbc\n\ndata: last"
)
EVENTS = [b"one", b"two", b"a\n b", b"gr\xc3\xbc", b"last"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    events: list[bytes] = []
    for start, end in pairwise(edges):
        events += parser.feed(STREAM[start:end])
    assert events + parser.end() == EVENTS


def test_an_event_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    with pytest.raises(EventTooLargeError):
        parser.feed(b"data: " + b"x" * 200)
    parser = EventParser()
    with pytest.raises(EventTooLargeError):
        for _ in range(60):
            parser.feed(b"data: xxxx\n")
