"""The catalogue: the vocabulary of version 1 and what holds for each of its words."""

from __future__ import annotations

import re

import pytest
from pydantic import BaseModel, ValidationError

from kimi_ray.errors import LogError
from kimi_ray.events import CORE, SURFACE_TYPES, Catalog, EventType
from kimi_ray.events import payloads as p

WORDS = """
turn/start turn/end step/start step/end
user/message assistant/message tool/result surface/cut
assistant/chunk tool/call
prompt/submitted prompt/queued prompt/started prompt/steered prompt/completed
request/header llm/retry llm/response llm/tokens
profile/bind profile/model permission/mode permission/decided
compaction/start compaction/summary compaction/prune compaction/end
log/end-seed log/forked runtime/activated
subagent/spawned subagent/started subagent/suspended subagent/completed subagent/failed swarm/start swarm/end
run/manifest score/recorded note/added
task/started task/ended task/lost
todo/write hook/invoked hook/result
""".split()
IGNORABLE = {
    "log/salvaged",
    "llm/response",
    "llm/tokens",
    "runtime/activated",
    "run/manifest",
    "score/recorded",
    "note/added",
    "output/recorded",
    "permission/asked",
    "compaction/request",
    "compaction/response",
}


def test_version_1_has_these_words() -> None:
    names = [entry.name for entry in CORE]
    assert set(WORDS) <= set(names)
    assert len(names) == len(set(names))


def test_only_what_a_reader_may_skip_is_ignorable() -> None:
    assert {entry.name for entry in CORE if entry.ignorable} == IGNORABLE


def test_the_surface_types_are_four() -> None:
    assert {entry.name for entry in CORE if entry.surface} == SURFACE_TYPES
    assert not any(entry.surface and entry.ignorable for entry in CORE)


@pytest.mark.parametrize("entry", list(CORE), ids=lambda entry: entry.name)
def test_every_payload_is_frozen_closed_documented_and_in_snake_case(entry: EventType) -> None:
    assert re.fullmatch(r"[a-z]+/[a-z-]+", entry.name)
    assert issubclass(entry.payload, BaseModel) and entry.payload.__doc__
    assert entry.payload.model_config.get("frozen") is True
    assert entry.payload.model_config.get("extra") == "forbid"
    assert all(re.fullmatch(r"[a-z_0-9]+", name) for name in entry.payload.model_fields)
    with pytest.raises(ValidationError):
        entry.payload.model_validate({"no_such_key": 1})


def test_a_feature_adds_words_and_cannot_redeclare_one() -> None:
    class Mine(BaseModel):
        x: int = 0

    more = CORE.with_types([EventType("mine/word", Mine)])
    assert "mine/word" in more and "mine/word" not in CORE
    assert more.get("mine/word") is not None and CORE.get("mine/word") is None
    for types in ([EventType("turn/start", Mine)], [EventType("a/b", Mine), EventType("a/b", Mine)]):
        with pytest.raises(LogError, match=r"log\.duplicate_type"):
            CORE.with_types(types)
    assert len(list(Catalog([]))) == 0


def test_turns_and_steps_count_from_0() -> None:
    for payload in (p.TurnStart, p.StepStart, p.StepEnd):
        with pytest.raises(ValidationError):
            payload.model_validate({"turn": -1, "step": 0})


def test_a_blob_reference_names_its_digest_and_length() -> None:
    data = {"$blob": "sha256:" + "0a" * 32, "bytes": 5}
    assert p.BlobRef.model_validate(data).model_dump(by_alias=True) == data
    for wrong in ({"$blob": "sha256:xyz", "bytes": 5}, {**data, "bytes": -1}, {**data, "more": 1}, {"bytes": 5}):
        with pytest.raises(ValidationError):
            p.BlobRef.model_validate(wrong)
