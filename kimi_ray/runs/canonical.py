"""One spelling for a JSON value, so that hashes of equal data are equal."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Compact JSON with sorted keys in UTF-8. The value must already obey the JSON rule."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha256_hex(value: Any) -> str:
    """The SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()
