"""How a turn's end becomes a row's status, stop and error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from pydantic import ConfigDict, Field

from kimi_ray.errors import ErrorClass, KimiRayError, error_from_data
from kimi_ray.settings import Settings

RowStatus = Literal["completed", "limit", "failed", "cancelled", "not_started"]

_STATUS_BY_KIND: dict[str, RowStatus] = {
    "completed": "completed",
    "truncated": "completed",
    "repeated": "completed",
    "limit": "limit",
    "failed": "failed",
    "timeout": "failed",
    "interrupted": "failed",
    "blocked": "failed",
    "cancelled": "cancelled",
    "not_started": "not_started",
}

_MESSAGES: dict[str, tuple[str, str]] = {
    "failed": ("turn.failed", "the turn failed without saying why"),
    "timeout": ("provider.timeout", "the model did not answer in time"),
    "interrupted": ("turn.interrupted", "the process that ran the turn was lost"),
    "blocked": ("prompt.blocked", "a gate refused the prompt"),
    "cancelled": ("turn.cancelled", "the turn was cancelled"),
}


class RowError(Settings):
    """Why a rollout did not complete.

    ``origin`` is the part that failed: ``details.origin`` of the error if it says so, else the family of its code
    (``provider``, ``tool``, ``store`` ...). ``cause`` is the exception or the deeper error, as text.
    """

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    code: str
    error_class: ErrorClass = Field(alias="class")
    origin: str
    retryable: bool
    message: str
    cause: str | None = None

    @classmethod
    def of(cls, error: KimiRayError | Mapping[str, Any]) -> RowError:
        """From an error, or from its ``to_data()`` form as logs hold it."""
        known = error if isinstance(error, KimiRayError) else error_from_data(dict(error))
        details = known.details
        told = details.get("class")
        cause = details.get("cause") or details.get("exception")
        return cls.model_validate(
            {
                "code": known.code,
                "class": told if told in get_args(ErrorClass) else known.error_class,
                "origin": str(details.get("origin") or known.code.partition(".")[0]),
                "retryable": known.retryable,
                "message": known.message,
                "cause": None if cause is None else str(cause),
            }
        )


def stop_of(reason: Mapping[str, Any]) -> str:
    """A row's ``stop``: the kind of a turn's end, or ``limit:<name>``."""
    kind = str(reason["kind"])
    return f"limit:{reason.get('name') or 'unnamed'}" if kind == "limit" else kind


def reason_of_function(data: Mapping[str, Any]) -> dict[str, Any]:
    """How a rollout function ended by its ``prompt/completed``, as a turn would tell it: its last turn may have gone
    well all the same."""
    error: dict[str, Any] = data.get("error") or {}
    code = str(error.get("code", ""))
    if code.startswith("limit."):
        return {"kind": "limit", "name": code.removeprefix("limit.")}
    return {"kind": data["state"]} | ({"error": error} if error else {})


def status_of(stop: str) -> RowStatus:
    """The status that a ``stop`` means; a kind that this version does not know is a failure, never a success."""
    return _STATUS_BY_KIND.get(stop.partition(":")[0], "failed")


def error_of(stop: str, error: KimiRayError | Mapping[str, Any] | None) -> RowError | None:
    """The error of a row with this ``stop``: the recorded one, else the one that the kind implies, else None."""
    if status_of(stop) in ("completed", "limit"):
        return None
    if error is not None:
        return RowError.of(error)
    code, message = _MESSAGES.get(stop, ("turn.failed", f"the turn ended with {stop}"))
    return RowError.of(KimiRayError(message, code=code, details=_implied(stop)))


def _implied(stop: str) -> dict[str, Any]:
    return cast("dict[str, Any]", {"class": "provider"} if stop == "timeout" else {})
