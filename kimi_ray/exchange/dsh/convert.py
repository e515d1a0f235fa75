"""From the events of a session of the harness to ours: one for one, same seq and time, turns and steps as recorded.

A type with a counterpart in our catalogue is mapped by ``payloads``; one that the harness knows and we do not, and an
unknown one that it may ignore, becomes an ignorable ``dsh/<type>`` with its payload as it was. What would not fit the
counterpart's payload is kept in the same way. Every change that is not a renaming is counted by its rule.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any, Final, cast

from pydantic import ValidationError

from kimi_ray.errors import LogError
from kimi_ray.events import CORE, SessionEvent, encode, parse_event
from kimi_ray.exchange.dsh.lossless import text_of, within_rule
from kimi_ray.exchange.dsh.model import Event, JsonObject
from kimi_ray.exchange.dsh.payloads import PAYLOADS, Context
from kimi_ray.exchange.dsh.vocabulary import KNOWN_TYPES, SURFACE_TYPES

PREFIX: Final = "dsh/"
_OUR_TYPES: Final = {"session/end-seed": "log/end-seed"}


class Conversion:
    """Converts one session, in order.

    Attributes:
        counts: Changes by rule, for the report.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._context = Context(self.counts)
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """Of the originals of the events converted so far: equal for an unchanged source, however we convert it."""
        return self._digest.hexdigest()

    def convert(self, event: Event) -> SessionEvent:
        """Our event for one of theirs, which has passed all rules of the harness."""
        kind, data, ignorable = self._payload(event)
        body: JsonObject = {"seq": event["seq"], "time": int(event["time"]), "type": kind, "data": data}
        if not ignorable and event["type"] in SURFACE_TYPES:
            op = event["surfaceOp"]
            body["surface"] = op if op == "append" else {"replace": [int(op["start"]), int(op["end"])]}
            if "sourceEventSeqs" in event:
                body["sources"] = [int(seq) for seq in event["sourceEventSeqs"]]
        if ignorable:
            body["ignorable"] = True
        made = self._event(body)
        self._context.follow(event)
        self._digest.update(text_of(event).encode(errors="surrogatepass") + b"\n")
        return made

    def _payload(self, event: Event) -> tuple[str, JsonObject, bool]:
        kind: str = event["type"]
        data: Any = event["data"]
        if kind in KNOWN_TYPES:
            ours = _OUR_TYPES.get(kind, kind)
            entry, mapping = CORE.get(ours), PAYLOADS.get(kind)
            if entry is not None and mapping is not None:
                mapped = mapping(cast("JsonObject", data), self._context) if isinstance(data, dict) else None
                if mapped is not None and _fits(entry.payload, mapped):
                    return ours, mapped, entry.ignorable
                self.counts["kept_as_foreign"] += 1
        else:
            self.counts["unknown_ignorable"] += 1
        self._context.foreign(kind)
        if isinstance(data, dict):
            return PREFIX + (kind or "unnamed"), cast("JsonObject", data), True
        self.counts["wrapped_payload"] += 1
        return PREFIX + (kind or "unnamed"), {"value": data}, True

    def _event(self, body: JsonObject) -> SessionEvent:
        """Encoded and read back: what a store is given must be what a reader takes."""
        try:
            return parse_event(encode(body))
        except (LogError, ValueError):
            return parse_event(encode({**body, "data": within_rule(body["data"], self.counts)}))


def _fits(payload: Any, mapped: JsonObject) -> bool:
    try:
        payload.model_validate(mapped)
    except ValidationError:
        return False
    return True
