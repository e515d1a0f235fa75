"""The watch of main agents goes on, whatever one session does to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kimi_ray.hosts.main_watch import MainWatch
from kimi_ray.store.seam import Stream
from tests.unit.hosts.fakes import until


class Live:
    """A session whose main has done something that its document does not know of."""

    def __init__(self, session_id: str, host: str, error: Exception | None = None) -> None:
        self.id, self.host, self.error = session_id, host, error
        self.looks = 0
        self.document = SimpleNamespace(snapshot=lambda: {"updated_at": 0})

    def host_of(self, _agent_id: str) -> str:
        return self.host

    async def reconcile(self) -> None:
        self.looks += 1
        if self.error is not None:
            raise self.error


class Cluster:
    def __init__(self) -> None:
        self.since_ms = 1_000_000_000

    def peer(self, _name: str) -> Cluster:
        return self

    async def call(self, _method: str, streams: list[Stream], **_how: Any) -> list[Any]:
        self.since_ms -= 1000  # it has moved since
        return [SimpleNamespace(stream=stream, turn=None, since_ms=self.since_ms) for stream in streams]


async def test_one_session_that_cannot_be_looked_at_does_not_end_the_watch() -> None:
    odd, fine = Live("odd", "h1", ValueError("odd")), Live("fine", "h2")
    watch = MainWatch(Cluster(), {"odd": odd, "fine": fine}, every_s=0.01)  # type: ignore[arg-type,dict-item]
    watch.start()
    try:
        await until(lambda: odd.looks > 1 and fine.looks > 2)
    finally:
        await watch.close()
    assert watch.last_error is not None and watch.last_error.details["exception"] == "ValueError"
