"""DeepSeek Harness's own session stores (format 0): plain JSONL, Zstandard JSONL, SQLite schema 17.

``read_source`` gives every session as the original's ``list``, ``readFrom``, ``inspect`` and ``load`` see it, or why
they refuse it; ``import_sessions`` turns them into logs of a home. The way of a session: ``sources`` finds it,
``log_file`` (``frames``, ``line_scan``) or ``database`` decode it (``js_json``, ``chunk_rows``, ``header``),
``interpret`` applies ``legacy``, ``rules`` and ``closers``; ``convert`` and ``lossless`` make our events of it, and
``importer`` writes them. What may enter: the harness's formats and nothing of other programs.
"""

from kimi_ray.exchange.dsh.errors import Refusal
from kimi_ray.exchange.dsh.model import Reading
from kimi_ray.exchange.dsh.sources import read_source

__all__ = ["Reading", "Refusal", "read_source"]
