"""What leaves a home and what comes in: archives of sessions, conversations for others, logs of other programs.

One package for each foreign format. It reads the foreign artifacts without ever changing them, says what it found in
its own terms, and turns whole sessions into logs and documents of a home through the ``Store`` seam. ``archive`` writes
our own exchange format, ``text_export`` those that trainers and viewers read (OpenAI messages, ShareGPT, ATIF). What
may enter: readers, conversions, writers of formats for others. What may not: anything that the runtime needs to run.
"""

from kimi_ray.exchange.archive import export_session
from kimi_ray.exchange.archive_check import ArchiveCheck, verify_archive
from kimi_ray.exchange.text_export import ExportReport, Wanted, export_conversations

__all__ = ["ArchiveCheck", "ExportReport", "Wanted", "export_conversations", "export_session", "verify_archive"]
