"""What every store backend promises, as tests. A backend subclasses ``StoreContract`` and gives it a ``Home``.

The promises by topic: ``log_contract``, ``session_contract``, ``publication_contract``.
"""

from __future__ import annotations

from tests.conformance.contract_home import (
    MAIN,
    Home,
    all_lines,
    batch,
    chunk_events,
    code,
    fingerprint,
    header,
    interrupted_turn,
    line,
    notes,
    ok,
)
from tests.conformance.log_contract import LogContract
from tests.conformance.publication_contract import PublicationContract
from tests.conformance.session_contract import SessionContract

__all__ = [
    "MAIN",
    "Home",
    "StoreContract",
    "all_lines",
    "batch",
    "chunk_events",
    "code",
    "fingerprint",
    "header",
    "interrupted_turn",
    "line",
    "notes",
    "ok",
]


class StoreContract(LogContract, SessionContract, PublicationContract):
    """Subclass it and give the fixture ``home``."""
