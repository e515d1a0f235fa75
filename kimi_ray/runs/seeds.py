"""Where the seed of a rollout comes from: a hash, so that it needs no order, no state and no coordination.

A seed is the first four bytes (big endian) of the SHA-256 of the canonical JSON of ``[run seed, item id, repeat,
attempt]``, masked to 31 bits. It depends on nothing else: the same key has the same seed in any run with that run
seed, whatever the order or the number of the other items.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Any

from kimi_ray.errors import RunError
from kimi_ray.runs.canonical import canonical_json

_MASK = 0x7FFF_FFFF


@dataclass(frozen=True, slots=True)
class RunSeed:
    """The seed of a run. Rollout seeds are recorded always, and sent to the model only if the user gave a run seed."""

    value: int
    sent: bool

    @classmethod
    def choose(cls, seed: int | None) -> RunSeed:
        """The user's seed, or a random one that is recorded but not sent.

        Raises:
            RunError: ``swarm.bad_seed`` outside 0..2^63-1.
        """
        if seed is None:
            return cls(secrets.randbits(31), sent=False)
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise RunError(
                f"the seed {seed!r} is out of range", code="swarm.bad_seed", hint="give an integer from 0 to 2^63-1"
            )
        return cls(seed, sent=True)

    def of(self, item_id: str, repeat: int, attempt: int) -> int:
        """The seed of one attempt.

        Args:
            item_id: The item's id.
            repeat: Counted from 0.
            attempt: Counted from 1; a retry has another seed.
        """
        return _masked([self.value, item_id, repeat, attempt])


def fork_seed(base: int, index: int) -> int:
    """The seed of fork number ``index`` (from 0) of a group with the seed ``base``."""
    return _masked([base, index])


def _masked(parts: list[Any]) -> int:
    return int.from_bytes(hashlib.sha256(canonical_json(parts)).digest()[:4], "big") & _MASK
