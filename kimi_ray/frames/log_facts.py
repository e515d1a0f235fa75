"""What the folds of one log share: which rollout it is of, what is copied, blobs, and the facts of errors and usage."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from pydantic_core import to_json

from kimi_ray.errors import KimiRayError
from kimi_ray.frames.reading import Event, Handler
from kimi_ray.frames.sources import FoundLog
from kimi_ray.ids import MAIN
from kimi_ray.runs.outcomes import RowError
from kimi_ray.session.document_value import parent_of_log

_BLOBS_HELD: Final = 8
_NO_USAGE: Final = (None,) * 6
_COUNTS: Final = ("input", "cached", "cache_write", "output", "reasoning")
_NO_ERROR: Final = (None, None, None)


class LogFacts:
    """A log as its folds see it.

    Args:
        log: Which.
        copied: Whether events of the log that this one was forked from make rows.
        lost: Told of blobs that cannot be read.
    """

    def __init__(self, log: FoundLog, *, copied: bool, lost: Callable[[KimiRayError], None]) -> None:
        header = log.header
        stream = log.stream
        self.header = header
        self.stream = stream
        self.seed_length = int(header.get("seed_length") or 0)
        self.shows_copied = copied
        rollout = tuple(header.get(name) for name in ("run_id", "item_id", "repeat", "attempt"))
        above = None if stream.agent_id == MAIN else parent_of_log(header)
        whose = (stream.session_id, stream.agent_id, above, *rollout)
        self._own, self._copied = (*whose, False), (*whose, True)
        self.prices = log.prices
        self._place = log.place
        self._lost = lost
        self._blobs: OrderedDict[str, str] = OrderedDict()

    def place(self, seq: int) -> tuple[Any, ...] | None:
        """The first columns of a row whose first event has this seq; None when it makes no row."""
        if seq >= self.seed_length:
            return self._own
        return self._copied if self.shows_copied else None

    def text(self, block: Any) -> str | None:
        """The text of a block or of content that may be kept as a blob; None when it has none, or it is lost."""
        if isinstance(block, str):
            return block
        text = block.get("text")
        if text is not None:
            return str(text)
        digest = block.get("$blob")
        return None if digest is None else self._blob(str(digest))

    def texts(self, content: Any) -> str | None:
        """The text blocks of content, joined by line feeds; None when there is none."""
        if not isinstance(content, list):
            return self.text(content)
        blocks: list[Any] = content  # pyright: ignore[reportUnknownVariableType]
        found = [text for block in blocks if block["type"] == "text" and (text := self.text(block)) is not None]
        return "\n".join(found) if found else None

    def _blob(self, digest: str) -> str | None:
        held = self._blobs.get(digest)
        if held is None:
            try:
                held = self._place.blob(digest).decode("utf-8", "replace")
            except KimiRayError as error:
                self._lost(error)
                return None
            self._blobs[digest] = held
            if len(self._blobs) > _BLOBS_HELD:
                self._blobs.popitem(last=False)
        return held


class ModelNames:
    """Which model the log is at, by its configured name and by that of the requests."""

    def __init__(self, facts: LogFacts) -> None:
        self.bound: str | None = None
        self.latest: str | None = None
        """As ``bound``, but already the one that the next turn is to have: summaries are written by it."""
        self._in_turn = False
        self.requested: str | None = None
        self.provider: str | None = None
        self._seed_bind: dict[str, Any] | None = facts.header.get("bind")

    @property
    def name(self) -> str | None:
        """The configured name where it is known, else that of the requests."""
        return self.bound or self.requested

    def handlers(self) -> dict[str, Handler]:
        """What follows the names, for a fold that needs them."""
        return {
            "profile/bind": self._bind,
            "profile/model": self._switch,
            "turn/start": self.turn_start,
            "turn/end": self.turn_end,
            "request/header": self._header,
            "log/end-seed": self._end_seed,
        }

    def _bind(self, event: Event) -> None:
        self.bound = self.latest = event["data"].get("model")

    def _switch(self, event: Event) -> None:
        self.latest = event["data"]["model"]
        if not self._in_turn:
            self.bound = self.latest

    def turn_start(self, _event: Event) -> None:
        """A turn begins, by the model that was said last."""
        self._in_turn, self.bound = True, self.latest

    def turn_end(self, _event: Event) -> None:
        """A turn is over: what was said in it counts."""
        self._in_turn, self.bound = False, self.latest

    def _header(self, event: Event) -> None:
        header = event["data"]["header"]
        self.requested, self.provider = header.get("model"), header.get("provider")

    def _end_seed(self, _event: Event) -> None:
        # A copy may be bound otherwise than its source.
        if self._seed_bind is not None:
            self.bound = self.latest = self._seed_bind.get("model")


def usage_of(usage: dict[str, Any] | None) -> tuple[Any, ...]:
    """The six columns of a usage."""
    if not usage:
        return _NO_USAGE
    get = usage.get
    return (
        get("input", 0),
        get("cached", 0),
        get("cache_write", 0),
        get("output", 0),
        get("reasoning", 0),
        bool(get("estimated")),
    )


def check_counts(usage: dict[str, Any] | None) -> None:
    """Refuse counts below zero: in a sum nobody would see them.

    Raises:
        ValueError: naming the count.
    """
    for name in _COUNTS if usage else ():
        count: Any = (usage or {}).get(name, 0)
        if count < 0:
            raise ValueError(f"usage.{name} is {str(count)[:40]}")


def error_of(error: dict[str, Any] | None) -> tuple[str | None, str | None, str | None]:
    """Code, class and message of an error."""
    if not error:
        return _NO_ERROR
    found = RowError.of(error)
    return found.code, found.error_class, found.message


def as_json(value: Any) -> str | None:
    """A value as JSON text; None stays None."""
    return None if value is None else to_json(value).decode()
