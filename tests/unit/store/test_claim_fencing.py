"""Grants asked for on behalf of a session's claim: only the newest claim gets them, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_ray.errors import StoreError
from kimi_ray.store.persistence import PersistenceService
from kimi_ray.store.seam import StoreOptions, Stream

STREAM = Stream("session_a", "main")


def header(agent_id: str = "main") -> dict[str, object]:
    return {"type": "log", "version": 1, "session_id": "session_a", "agent_id": agent_id, "created_at": 1}


async def test_only_the_newest_claim_opens_logs(tmp_path: Path) -> None:
    options = StoreOptions(claim_timeout_s=1)
    store = PersistenceService(str(tmp_path / "home"), options)
    await store.open_session("session_a", "one", "wd_x")
    assert (await store.open_writer(header(), "w1", claim="one")).epoch == 1
    await store.open_session("session_a", "two", "wd_x")
    for target in (STREAM, header("agent-1")):
        with pytest.raises(StoreError) as caught:
            await store.open_writer(target, "w2", claim="one")
        assert caught.value.code == "session.fenced"
    assert (await store.open_writer(header("agent-1"), "w3", claim="two")).epoch == 1
    await store.close()

    again = PersistenceService(str(tmp_path / "home"), options)
    with pytest.raises(StoreError) as caught:
        await again.open_writer(header("agent-2"), "w4", claim="one")
    assert caught.value.code == "session.fenced"
    assert (await again.open_writer(header("agent-2"), "w5", claim="two")).epoch == 1
    assert (await again.open_writer(header("agent-3"), "w6")).epoch == 1
    await again.close()
