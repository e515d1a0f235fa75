"""Identities: ULID ids, agent ids, and the two functions that name a workspace.

``workspace_id`` and ``workspace_root_key`` follow Kimi Code's own rules, so a directory has the same id in both
systems; the shipped vectors in ``tests/fixtures/workdir_vectors.json`` pin them.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from typing import Final

from kimi_ray.wall_clock import epoch_ms

MAIN: Final = "main"
"""The id of a session's first agent."""

_PATH_SAFE_ID = re.compile(r"\A[A-Za-z0-9_-]{1,128}\Z")
_SLUG_GAP = re.compile(r"[^a-z0-9._-]+")
_DRIVE_PATH = re.compile(r"\A[A-Za-z]:[\\/]")
_SLUG_UNITS = 40
_RANDOM_BITS = 80

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32, as the ULID specification has it."""
_PAIRS = tuple(one + other for one in _ALPHABET for other in _ALPHABET)

_POOL_BYTES = 4096

_lock = threading.Lock()
_pool = b""
_last_ms = 0
_last_random = 0


def new_ulid() -> str:
    """A new ULID, strictly increasing within this process (also within one millisecond and under clock steps)."""
    global _last_ms, _last_random, _pool  # noqa: PLW0603  monotonic within a process is a property of the process
    with _lock:
        now_ms = epoch_ms()
        if now_ms > _last_ms:
            _last_ms = now_ms
            # A system call a millisecond is dear on some kernels: randomness is drawn in larger pieces.
            if len(_pool) < 10:
                _pool = os.urandom(_POOL_BYTES)
            _last_random, _pool = int.from_bytes(_pool[:10], "big") >> 1, _pool[10:]
        else:
            _last_random += 1
            if _last_random >> _RANDOM_BITS:
                _last_ms += 1
                _last_random = 0
        value = _last_ms << _RANDOM_BITS | _last_random
    return _base32(value)


def _base32(value: int) -> str:
    """The 26 characters of a ULID, two at a time: every event of a log costs some, and the library's go one by one."""
    pairs = _PAIRS
    return "".join([pairs[value >> shift & 0x3FF] for shift in range(120, -1, -10)])


def new_session_id() -> str:
    """``session_<ulid>``."""
    return f"session_{new_ulid()}"


def new_message_id() -> str:
    """``msg_<ulid>``: prompts and messages share one id space."""
    return f"msg_{new_ulid()}"


def is_path_safe_id(value: str) -> bool:
    """Whether an id may become part of a path: ``[A-Za-z0-9_-]{1,128}``."""
    return _PATH_SAFE_ID.match(value) is not None


def agent_number(agent_id: str) -> int | None:
    """The n of ``agent-<n>``, or None for ``main`` and anything else."""
    prefix, _, digits = agent_id.partition("-")
    return int(digits) if prefix == "agent" and digits.isascii() and digits.isdigit() else None


def workspace_id(path: str) -> str:
    """The id of a directory, ``wd_<slug>_<hash12>``, from its path as text (nothing is resolved or folded).

    Args:
        path: An absolute path; Windows separators are accepted.
    """
    normalized = path.replace("\\", "/").rstrip("/")
    base = normalized.rsplit("/", 1)[-1]
    slug = _SLUG_GAP.sub("-", base.lower()).strip("-")
    slug = slug.encode("utf-16-le", "surrogatepass")[: _SLUG_UNITS * 2].decode("utf-16-le", "replace").strip("-")
    if slug in ("", ".", ".."):
        slug = "workspace"
    text = re.sub("[\ud800-\udfff]", "\ufffd", normalized)
    return f"wd_{slug}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def workspace_root_key(root: str) -> str:
    """The key under which spellings of one directory are the same workspace.

    A drive path (``C:\\``), a UNC path and a path that begins with ``//`` are lower-cased; trailing slashes are
    stripped from all.
    """
    key = root.replace("\\", "/").rstrip("/")
    folds = _DRIVE_PATH.match(root) is not None or root.startswith(("\\\\", "//"))
    return key.lower() if folds else key
