"""What went wrong at a model server, as one ``ProviderError`` code each.

=========================  ==========================================================  =========
code                       when                                                        retryable
=========================  ==========================================================  =========
provider.auth              401, 403                                                    no
provider.rate_limit        429                                                         yes
provider.quota             402, or wording about quota, billing or credit              no
provider.overloaded        529, or 500 and 503 that say so                             yes
provider.server            other 5xx (501 and 505 are not retryable)                   yes
provider.timeout           no connection, silence, too long in all; 408                yes
provider.connection        refused, reset, a stream that was cut                       yes
provider.not_found         404, or a body that says the model is unknown               no
provider.bad_request       other 4xx (409 is retryable)                                no
context.overflow           400, 413, 422 whose wording says the input is too long      no
provider.filtered          an answer or a request stopped by a content filter          no
provider.empty_response    an answer without text and without a tool call              yes
provider.bad_stream        bytes that are not the protocol                             yes
=========================  ==========================================================  =========

Nothing in an error holds a key: bodies are cut to 500 characters and redacted.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal, cast

from pydantic_core import from_json

from kimi_ray.errors import ProviderError

TimeoutKind = Literal["connect", "idle", "total", "server"]

STALE = "stale"
"""The ``kind`` of a failure that only says that a connection had been closed."""

BODY_CHARS = 500
"""How much of an error's body is kept."""

_RETRYABLE_CODES = frozenset(
    {
        "provider.rate_limit",
        "provider.overloaded",
        "provider.server",
        "provider.timeout",
        "provider.connection",
        "provider.empty_response",
        "provider.bad_stream",
    }
)
_OVERFLOW_STATUSES = (400, 413, 422)
_BAD_REQUEST, _UNAUTHORIZED, _PAYMENT, _FORBIDDEN, _NOT_FOUND = 400, 401, 402, 403, 404
_REQUEST_TIMEOUT, _CONFLICT, _TOO_MANY, _SERVER, _UNAVAILABLE, _OVERLOADED = 408, 409, 429, 500, 503, 529
_NEVER_SERVED = (501, 505)

_OVERFLOW = re.compile(
    r"context[ _-]?(length|window|size)|maximum context|prompt (is )?too (long|large)|input (is )?too (long|large)"
    r"|too many (input |prompt )?tokens|exceeds? the (model'?s )?(maximum|max|context)|maximum (model|prompt) length"
    r"|max_model_len|reduce the length of|input token count|exceed_context_size|request_too_large|exceeded model token",
    re.IGNORECASE,
)
_WINDOW_FIELD = re.compile(r'"(?:n_ctx|max_model_len|max_context_length)":\s*(\d+)')
_WINDOW = re.compile(
    r"(?:context[ _-]?(?:length|window|size)|max(?:imum)?)[^0-9\"]{0,60}([\d,]*\d)(?![\d.-])"
    r"|(\d+) (?:tokens? )?maximum",
    re.IGNORECASE,
)
"""Where an overflow's text names the window: the first number behind the words."""
_LEAST_WINDOW = 64
_OUTPUT_TOO_LARGE = re.compile(r"max_(completion_|output_)?tokens\W.{0,60}(is )?too (large|high)", re.IGNORECASE)
_QUOTA = re.compile(
    r"insufficient_quota|exceeded.{0,16}current.{0,3}quota|quota (is )?(exceeded|exhausted)|credit balance"
    r"|out of credits?|insufficient (balance|credits?|funds)|billing|payment required|account.{0,20}suspended",
    re.IGNORECASE,
)
_QUOTA_STATUSES = (400, 402, 403, 429)
_OVERLOAD = re.compile(r"over(ly )?load|at capacity|over capacity|server is busy|engine is.{0,20}busy", re.IGNORECASE)
_UNKNOWN_MODEL = re.compile(
    r"model_not_found|model[^.\n]{0,80}(does not exist|not found|is not available)|unknown model|no such model",
    re.IGNORECASE,
)
_FILTERED = re.compile(r"content_filter|content management policy|content_policy|responsible.?ai", re.IGNORECASE)
_KEY_LIKE = re.compile(r"(?<![A-Za-z0-9])(sk|pk|key|gsk|xai)-[A-Za-z0-9_*-]{6,}|(?<=Bearer )[^\s\"',}]+")
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
_MIN_SECRET = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where the failure happened: what messages name, and what must never appear in them."""

    model: str
    base_url: str = ""
    secrets: tuple[str, ...] = ()
    key_name: str = ""
    """The variable that holds the key, for the hint."""

    @property
    def server(self) -> str:
        """The server's address without user and password, for a message."""
        return _USER_INFO.sub("", self.base_url) or "the model server"


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """``text`` with the given secrets, and whatever looks like a key, replaced by ``[redacted]``."""
    for secret in secrets:
        if len(secret) >= _MIN_SECRET:
            text = text.replace(secret, "[redacted]")
    return _USER_INFO.sub("", _KEY_LIKE.sub("[redacted]", text))


def retry_after_ms(headers: Mapping[str, str], *, now_s: float | None = None) -> int | None:
    """What the server asks to wait: ``retry-after-ms``, or ``Retry-After`` in seconds or as an HTTP date.

    Args:
        headers: Response headers; names in any case.
        now_s: The present time (Unix seconds) that a date is compared with.
    """
    lower = {key.lower(): value.strip() for key, value in headers.items()}
    for name, scale in (("retry-after-ms", 1.0), ("retry-after", 1000.0)):
        value = lower.get(name)
        if not value:
            continue
        try:
            wait = float(value) * scale
        except ValueError:
            if name == "retry-after-ms":
                continue
            try:
                then = parsedate_to_datetime(value).timestamp()
            except ValueError:
                continue
            wait = (then - (time.time() if now_s is None else now_s)) * 1000
        if math.isfinite(wait):
            return max(0, round(wait))
    return None


def status_fault(
    place: Place, status: int, body: str, headers: Mapping[str, str] | None = None, *, now_s: float | None = None
) -> ProviderError:
    """The error for an HTTP status with its body and headers."""
    headers = {key.lower(): value for key, value in (headers or {}).items()}
    code = _status_code(status, body)
    wait = retry_after_ms(headers, now_s=now_s)
    details: dict[str, Any] = {"status": status}
    request_id = headers.get("x-request-id") or headers.get("request-id") or headers.get("x-trace-id")
    if request_id:
        details["request_id"] = redact(request_id, place.secrets)
    if wait is not None:
        details["retry_after_ms"] = wait
    if code == "provider.timeout":
        details["kind"] = "server"
    return _answered(place, code, f"{place.server} answered {status}", body, details, status)


def stream_error_fault(place: Place, error: Any) -> ProviderError:
    """The error for an ``{"error": ...}`` object that came in the middle of a stream or in a body with status 200."""
    body = error if isinstance(error, str) else _json_text(error)
    fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    status = next((value for key in ("status", "status_code", "code") if (value := _status(fields.get(key)))), None)
    code = _status_code(status or _SERVER, body)
    if status is None and str(fields.get("type", "")).startswith("rate_limit"):
        code = "provider.rate_limit"
    details: dict[str, Any] = {} if status is None else {"status": status}
    return _answered(place, code, f"{place.server} sent an error in its answer", body, details, status)


def timeout_fault(place: Place, kind: TimeoutKind, seconds: float) -> ProviderError:
    """No connection within ``seconds`` (``connect``), so long a silence (``idle``), or too long in all (``total``)."""
    said = {
        "connect": f"no connection to {place.server} within {seconds:g} s",
        "idle": f"{place.server} was silent for {seconds:g} s",
        "total": f"{place.server} took longer than {seconds:g} s in all",
        "server": f"{place.server} gave up waiting",
    }[kind]
    setting = {"idle": "idle_timeout_s", "total": "timeout_s"}.get(kind)
    return _fault(
        "provider.timeout",
        said,
        hint=f"raise {setting} of the model, or lower its max_connections" if setting else "check the model's base_url",
        details={"kind": kind, "timeout_s": seconds},
    )


def connection_fault(place: Place, reason: str, *, cut: bool = False, stale: bool = False) -> ProviderError:
    """Refused, reset, or a stream that ended in the middle (``cut``).

    ``stale``: a connection that stood open was closed before a word came back. Some servers close it behind each
    stream without saying so; asking again on a new one is all it takes.
    """
    said = "the stream was cut" if cut else "no connection, or a broken one"
    return _fault(
        "provider.connection",
        f"{place.server}: {said}: {redact(reason, place.secrets)}",
        hint="see that the server runs, and that the model's base_url (and the proxy in the environment) is right",
        details={"kind": "cut" if cut else STALE if stale else "connection"},
    )


def address_fault(place: Place, error: BaseException) -> ProviderError:
    """An address that nobody can be asked at: the model's own, or that of a proxy in the environment."""
    said = redact(f"{type(error).__name__}: {error}", place.secrets)
    return ProviderError(
        f"{place.server}: no request can be sent there: {said}",
        code="provider.connection",
        hint="set the model's base_url right, or HTTP_PROXY, HTTPS_PROXY and ALL_PROXY in the environment"
        " (NO_PROXY names hosts that are reached without)",
        details={"kind": "address"},
        retryable=False,
    )


def bad_stream_fault(place: Place, what: str, excerpt: str, *, retryable: bool = True) -> ProviderError:
    """Bytes that are not the protocol. Not ``retryable`` when the server is plainly another one."""
    fault = _fault(
        "provider.bad_stream",
        f"{place.server} sent {what}",
        hint="see that base_url leads to a Chat Completions API (it usually ends in /v1)",
        details={"body": redact(excerpt, place.secrets)[:BODY_CHARS]},
    )
    fault.retryable = retryable
    return fault


def answer_fault(*, empty: bool, finish: str, raw_finish: str | None = None) -> ProviderError | None:
    """The error that a complete answer amounts to: filtered, or empty; None when it is one to go on with."""
    if finish == "filtered":
        return _fault(
            "provider.filtered",
            "the answer was stopped by the server's content filter",
            hint="change the prompt, or the server's filter",
            details={"raw_finish_reason": raw_finish},
        )
    if empty:
        return _fault(
            "provider.empty_response",
            "the model answered without text and without a tool call",
            hint="a thinking model may need more max_output_tokens",
            details={"finish_reason": finish, "raw_finish_reason": raw_finish},
        )
    return None


def named_window(body: str) -> int | None:
    """The window in tokens that a refusal as too long names, or None."""
    found = _WINDOW_FIELD.search(body) or _WINDOW.search(body)
    number = next((group for group in found.groups() if group), None) if found is not None else None
    window = 0 if number is None else int(number.replace(",", ""))
    return window if window >= _LEAST_WINDOW else None


def scripted_fault(
    code: str, *, status: int | None = None, retry_after_ms: int | None = None, message: str | None = None
) -> ProviderError:
    """A failure as a script or a chaos rule asks for it, retryable as its code is everywhere."""
    details: dict[str, Any] = {}
    if status is not None:
        details["status"] = status
    if retry_after_ms is not None:
        details["retry_after_ms"] = retry_after_ms
    return _fault(code, message or f"the scripted model fails with {code}", details=details, status=status)


def _status_code(status: int, body: str) -> str:
    if status in _QUOTA_STATUSES and (status == _PAYMENT or _QUOTA.search(body)):
        return "provider.quota"
    if status == _TOO_MANY:
        return "provider.rate_limit"
    if status in (_UNAUTHORIZED, _FORBIDDEN):
        return "provider.auth"
    if status in _OVERFLOW_STATUSES and _OVERFLOW.search(body) and not _OUTPUT_TOO_LARGE.search(body):
        return "context.overflow"
    if status == _OVERLOADED or (status in (_SERVER, _UNAVAILABLE) and _OVERLOAD.search(body)):
        return "provider.overloaded"
    if status >= _SERVER:
        return "provider.server"
    if status == _REQUEST_TIMEOUT:
        return "provider.timeout"
    if status == _NOT_FOUND or _UNKNOWN_MODEL.search(body):
        return "provider.not_found"
    if status == _BAD_REQUEST and _FILTERED.search(body):
        return "provider.filtered"
    return "provider.bad_request"


def _answered(
    place: Place, code: str, said: str, body: str, details: dict[str, Any], status: int | None
) -> ProviderError:
    excerpt = redact(body, place.secrets)[:BODY_CHARS]
    if excerpt:
        details["body"] = excerpt
    if code == "context.overflow" and (window := named_window(body)) is not None:
        details["window"] = window
    wording = redact(_wording(body), place.secrets)[:BODY_CHARS]
    key = place.key_name or "the key"
    hints = {
        "provider.auth": f"check {key}: this server does not accept it",
        "provider.quota": "the account behind the key has no quota left",
        "provider.not_found": f"this server has no model {place.model!r}, or base_url is wrong (it usually"
        " ends in /v1); `kimi-ray models check` lists what it serves",
        "provider.bad_request": "the server refuses the request as it is: see its words, and the model's settings",
        "context.overflow": "the conversation is longer than the model's context window: compact it, or set"
        " max_context_tokens",
        "provider.rate_limit": "lower max_concurrency, or the model's max_connections",
    }
    return _fault(code, f"{said}: {wording}" if wording else said, hints.get(code), details, status)


def _fault(
    code: str, message: str, hint: str | None = None, details: dict[str, Any] | None = None, status: int | None = None
) -> ProviderError:
    retryable = code in _RETRYABLE_CODES
    if status in _NEVER_SERVED:
        retryable = False
    elif status == _CONFLICT and code == "provider.bad_request":
        retryable = True
    return ProviderError(message, code=code, hint=hint, details=details, retryable=retryable)


def _wording(body: str) -> str:
    """The message inside an error body, in whichever of the usual places it is; else the body."""
    try:
        data: Any = from_json(body)
    except ValueError:
        return " ".join(body.split())
    for key in ("error", "message", "detail", "msg"):
        while isinstance(data, dict) and key in data:
            data = cast("dict[str, Any]", data)[key]
    return data if isinstance(data, str) else _json_text(data)


def _json_text(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, default=str)


def _status(value: Any) -> int | None:
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    return value if isinstance(value, int) and 400 <= value < 600 else None
