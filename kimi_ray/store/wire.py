"""What an append looks like between a host and the store process: one blob with offsets, never a list of lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kimi_ray.store.seam import Batch, Stream

MAX_CALL_BYTES = 32 << 20

PackedBatch = tuple[str, str, int, str, int, tuple[int, ...], tuple[int, ...], bool]
"""``(session_id, agent_id, epoch, nonce, first_seq, row_bytes, row_events, closing)``; no ``row_events``: one each."""


@dataclass(frozen=True, slots=True)
class AppendCall:
    """Many batches as one picklable value: payloads one after the other in ``blob``, the rest in ``batches``.

    ``sync``: whether the answer may come only when everything is durable.
    """

    blob: bytes
    batches: tuple[PackedBatch, ...]
    sync: bool = True


def pack_call(batches: Iterable[Batch], *, sync: bool = True) -> AppendCall:
    """One call for these batches, in their order."""
    packed: list[PackedBatch] = []
    payloads: list[bytes | memoryview] = []
    for batch in batches:
        events = batch.row_events
        plain = sum(events) == len(events)
        session_id, agent_id = batch.stream
        row_events = () if plain else events
        packed.append(
            (
                session_id,
                agent_id,
                batch.epoch,
                batch.nonce,
                batch.first_seq,
                batch.row_bytes,
                row_events,
                batch.closing,
            )
        )
        payloads.append(batch.payload)
    return AppendCall(b"".join(payloads), tuple(packed), sync)


def unpack_call(call: AppendCall) -> list[Batch]:
    """The batches again; their payloads are views into the blob."""
    view = memoryview(call.blob)
    batches: list[Batch] = []
    start = 0
    for session_id, agent_id, epoch, nonce, first_seq, row_bytes, row_events, closing in call.batches:
        end = start + sum(row_bytes)
        events = row_events or (1,) * len(row_bytes)
        stream = Stream(session_id, agent_id)
        batches.append(Batch(stream, epoch, nonce, first_seq, view[start:end], row_bytes, events, closing))
        start = end
    return batches
