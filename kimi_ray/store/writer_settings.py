"""The writer's settings: windows, bounds and time-outs of write controllers and their sender."""

from __future__ import annotations

from pydantic import Field

from kimi_ray.settings import Settings

MIB = 1 << 20


class WriterSettings(Settings):
    """How events travel from a log to the store."""

    write_window_ms: int = Field(default=200, ge=0, le=2**31 - 1)
    """From the first pending event to its background write, in milliseconds."""
    sync_interval_ms: int = Field(default=1000, ge=0, le=2**31 - 1)
    """From a background write to the sync that makes it durable, in milliseconds."""
    store_timeout_s: float = Field(default=30.0, gt=0)
    """Longest wait of a flush, and of a loop that waits for room."""
    close_timeout_s: float = Field(default=30.0, ge=0)
    """Longest wait of a close."""
    call_timeout_s: float = Field(default=20.0, gt=0)
    """After this an unanswered call counts as lost, and its events are sent again."""
    log_max_bytes: int = Field(default=64 * MIB, ge=1)
    """What one log may retain before its loop waits."""
    host_max_bytes: int = Field(default=256 * MIB, ge=1)
    """What all logs of a host together may retain before their loops wait."""
    closing_reserve_bytes: int = Field(default=MIB, ge=0)
    """What closing brackets may retain above ``log_max_bytes``."""
    batch_max_bytes: int = Field(default=4 * MIB, ge=1)
    """Events of one batch; a larger event is a batch of its own."""
    call_max_bytes: int = Field(default=32 * MIB, ge=1)
    """Batches (or blobs) of one call; a larger one is a call of its own."""
    call_soon_bytes: int = Field(default=48 << 10, ge=1)
    """Urged events that are worth a call at once, while other logs of the same pass are still appending. Half of what
    Ray carries inside a call (100 kB); beyond, it goes by the object store, which takes some ms longer."""
    call_max_streams: int = Field(default=2000, ge=1)
    """Batches of one call."""
    calls_in_flight: int = Field(default=1, ge=1, le=2)
    """Unanswered append calls of one sender; two are always on different streams."""
    backoff_initial_ms: int = Field(default=50, ge=1)
    """The pause after the first lost call; each further one doubles it."""
    backoff_max_ms: int = Field(default=2000, ge=1)
    known_blobs: int = Field(default=65_536, ge=0)
    """How many digests of durable blobs are remembered, so that their content is not sent again."""
    known_blob_ttl_s: float = Field(default=6 * 3600.0, gt=0)
    """How long one is remembered: well below the grace of blob collection (24 h)."""
