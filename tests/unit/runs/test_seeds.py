"""Seeds: a hash of the key, the same in every run, and never the same for two rollouts."""

from __future__ import annotations

import hashlib

import pytest

from kimi_ray.errors import RunError
from kimi_ray.runs import RunSeed, fork_seed, keys_of, prepare_items


def test_a_seed_is_the_hash_that_the_docs_promise() -> None:
    digest = hashlib.sha256('[7,"ü-1",3,2]'.encode()).digest()
    assert RunSeed(7, sent=True).of("ü-1", 3, 2) == int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
    digest = hashlib.sha256(b"[5,19]").digest()
    assert fork_seed(5, 19) == int.from_bytes(digest[:4], "big") & 0x7FFFFFFF


def test_a_hundred_equal_prompts_eight_times_with_seed_seven() -> None:
    def seeds() -> list[int]:
        run = RunSeed.choose(7)
        assert run.sent
        return [run.of(key.item_id, key.repeat, 1) for key in keys_of(prepare_items(["the same"] * 100), 8)]

    first = seeds()
    assert len(first) == len(set(first)) == 800
    assert first == seeds()
    assert all(0 <= seed < 2**31 for seed in first)


def test_a_retry_has_another_seed() -> None:
    run = RunSeed.choose(0)
    assert len({run.of("x", 0, attempt) for attempt in range(1, 50)}) == 49


def test_without_a_run_seed_one_is_chosen_recorded_and_not_sent() -> None:
    first, second = RunSeed.choose(None), RunSeed.choose(None)
    assert not first.sent
    assert first.value != second.value
    assert 0 <= first.value < 2**31


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range(seed: int) -> None:
    with pytest.raises(RunError) as error:
        RunSeed.choose(seed)
    assert error.value.code == "swarm.bad_seed"
