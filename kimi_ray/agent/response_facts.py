"""What a model's server said of its answer, as ``llm/response`` and ``compaction/response`` keep it."""

from __future__ import annotations

from typing import Any

from kimi_ray.errors import KimiRayError
from kimi_ray.llm.assemble import Assembled, Assembler


def response_facts(assembler: Assembler, answer: Assembled | None, error: KimiRayError | None) -> dict[str, Any]:
    """The ids, the served model, why it ended, and the tokens; what was not said is left out.

    Args:
        assembler: What came.
        answer: The whole answer, if there is one.
        error: Why there is none.
    """
    meta, usage = assembler.meta, assembler.usage
    said = error.details if error is not None else {}
    facts = {
        "response_id": meta.response_id,
        "served_model": meta.served_model,
        "fingerprint": meta.fingerprint,
        "finish_reason": answer.finish if answer is not None else None,
        "raw_finish_reason": answer.raw_finish if answer is not None else None,
        "http_status": meta.http_status or said.get("status"),
        "request_id": meta.request_id or said.get("request_id"),
        "usage": None if usage is None else {key: value for key, value in usage.__dict__.items() if value is not None},
    }
    return {key: value for key, value in facts.items() if value is not None}
