"""Grants of logs that do not exist yet: ``<home>/reserved/<session_id>.<agent_id>``.

A new log becomes visible with its first batch. Until then its header, epoch and nonce are kept here, so that a store
that dies in between still knows the writer when its first batch arrives. Not synced, so of an earlier boot nothing here
counts: a power cut may have brought an older grant back in the place of a newer one.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any, cast

from pydantic_core import from_json, to_json

from kimi_ray.ids import new_ulid
from kimi_ray.store.fs import Fs, names_in, read_file, replace_file
from kimi_ray.store.seam import Stream

_FORGET_AFTER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A grant and the header of the log that its first batch will create."""

    epoch: int
    nonce: str
    workspace_id: str
    header: dict[str, Any]


class Reservations:
    """The reservations of one home. Blocking and thread-safe."""

    def __init__(self, fs: Fs, home: str, boot: str) -> None:
        """``boot`` is the present boot id of the machine."""
        self._fs = fs
        self._boot = boot
        self._directory = f"{home}/reserved"

    def _path(self, stream: Stream) -> str:
        return f"{self._directory}/{stream.session_id}.{stream.agent_id}"

    def keep(self, stream: Stream, reservation: Reservation) -> None:
        """Remember a grant, instead of an earlier one.

        Raises:
            OSError: As the file system gave it.
        """
        with contextlib.suppress(FileExistsError):
            self._fs.mkdir(self._directory)
        data = to_json(
            {
                "boot": self._boot,
                "epoch": reservation.epoch,
                "nonce": reservation.nonce,
                "workspace_id": reservation.workspace_id,
                "header": reservation.header,
            }
        )
        replace_file(self._fs, self._path(stream), data, sync=False, unique=new_ulid())

    def find(self, stream: Stream) -> Reservation | None:
        """The remembered grant, or None; an unreadable one counts as none, and so does one of an earlier boot."""
        try:
            value: Any = from_json(read_file(self._fs, self._path(stream)))
            facts = cast("dict[str, Any]", value)
            if facts["boot"] != self._boot:
                return None
            return Reservation(int(facts["epoch"]), str(facts["nonce"]), str(facts["workspace_id"]), facts["header"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def drop(self, stream: Stream) -> None:
        """Forget a grant: its log exists now, or will not. What cannot be removed is ignored once the log exists."""
        with contextlib.suppress(OSError):
            self._fs.unlink(self._path(stream))

    def drop_sessions(self, session_ids: set[str]) -> None:
        """Forget all grants of these sessions."""
        for name in names_in(self._fs, self._directory):
            if name.partition(".")[0] in session_ids:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(f"{self._directory}/{name}")

    def sweep(self) -> None:
        """Remove what no writer came back for within a day, and temporary files of dead processes."""
        limit = time.time() - _FORGET_AFTER_S
        for name in names_in(self._fs, self._directory):
            path = f"{self._directory}/{name}"
            with contextlib.suppress(FileNotFoundError):
                if self._fs.stat(path).st_mtime < limit:
                    self._fs.unlink(path)
