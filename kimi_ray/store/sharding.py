"""Which shard of a store keeps a session: one rule for the actors that serve shards and for the databases."""

from __future__ import annotations

import hashlib


def shard_of(session_id: str, shards: int) -> int:
    """The shard that keeps a session.

    Ids that differ only in case share a shard: that is where the second of them is refused.

    Args:
        session_id: The session.
        shards: How many shards the store was created with.
    """
    if shards <= 1:
        return 0
    return int.from_bytes(hashlib.sha256(session_id.lower().encode()).digest()[:8], "big") % shards
