"""Ids: monotonic, safe in paths, and workspaces named as Kimi Code names them."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from kimi_ray import ids

VECTORS = json.loads((Path(__file__).parents[1] / "fixtures" / "workdir_vectors.json").read_text())


def test_every_vector_of_the_original() -> None:
    checked = 0
    for vector in VECTORS["encodeWorkDirKey"]:
        assert ids.workspace_id(vector["input"]) == vector["id"], vector
        assert ids.workspace_root_key(vector["input"]) == vector["rootKey"], vector
        checked += 1
    assert checked > 20


def test_ulids_rise_strictly_within_one_millisecond_and_when_the_clock_steps_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([5_000_000_000, 5_000_000_000, 4_000_000_000, 6_000_000_000, 5_500_000_000] * 1)
    far = 9_000_000_000_000
    monkeypatch.setattr(ids, "epoch_ms", lambda: far + next(times) // 1_000_000)
    made = [ids.new_ulid() for _ in range(5)]
    assert made == sorted(set(made))


def test_a_ulid_is_spelled_as_the_library_does() -> None:
    from ulid import ULID

    for made in (ids.new_ulid() for _ in range(200)):
        assert str(ULID.from_str(made)) == made
    for value in (0, 1, 31, 32, 1 << 79, (1 << 128) - 1):
        assert ids._base32(value) == str(ULID(value.to_bytes(16, "big")))  # pyright: ignore[reportPrivateUsage]


def test_ulids_of_many_threads_are_distinct() -> None:
    made: list[str] = []

    def work() -> None:
        made.extend([ids.new_ulid() for _ in range(2000)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8000


def test_ids_have_their_prefix_and_may_become_paths() -> None:
    assert ids.new_session_id().startswith("session_")
    assert ids.new_message_id().startswith("msg_")
    assert ids.is_path_safe_id(ids.new_session_id())


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "a\n", "a\\b", "é", "a" * 129, " a", "a\0"])
def test_what_may_not_become_a_path(bad: str) -> None:
    assert not ids.is_path_safe_id(bad)


@pytest.mark.parametrize(
    ("agent_id", "number"),
    [
        ("agent-0", 0),
        ("agent-17", 17),
        ("main", None),
        ("agent-", None),
        ("agent-x", None),
        ("agent-١", None),
        ("b-1", None),
    ],
)
def test_agent_numbers(agent_id: str, number: int | None) -> None:
    assert ids.agent_number(agent_id) == number


def test_the_id_of_the_first_agent_is_defined_once() -> None:
    root = Path(ids.__file__).parent
    defines = re.compile(r'^_?MAIN\b.*= *"main"', re.MULTILINE)
    assert [path.name for path in root.rglob("*.py") if defines.search(path.read_text())] == ["ids.py"]
