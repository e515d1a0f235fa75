"""Every error of kimi_ray: one root, one class per boundary, stable codes.

A ``KimiRayError`` says *what* went wrong (``message``), *which kind* it is (``code``, stable across releases), *the
facts* (``details``, plain JSON), *whether trying again can help* (``retryable``) and *the way out* (``hint``). It is
the same on both sides of a process boundary: it pickles by plain data, and ``to_data``/``from_data`` carry it through
JSON (a result row, a ``turn/end`` event, ``--json`` output).

The tree, by boundary::

    KimiRayError
    ├── ConfigError        settings, flags, files the user wrote        config.* request.* model.not_configured
    ├── LogError           the log in memory and its rules              log.*
    ├── StoreError         durable storage                              store.*
    ├── SessionError       sessions and their lifecycle                 session.* workspace.*
    ├── AgentError         agents, prompts, turns                       agent.* prompt.* turn.* limit.* output.*
    ├── ProviderError      a model server                               provider.* context.*
    ├── ToolError          a tool, its arguments, its environment       tool.* environment.* workdir.*
    ├── RunError           swarms, items, run directories               swarm.* run.* items.*
    └── RuntimeFault       actors, nodes, Ray                           runtime.* infra.*
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self, cast

ErrorClass = Literal[
    "provider",
    "rate_limit",
    "auth",
    "model_output",
    "tool",
    "environment",
    "user_code",
    "infra",
    "store",
    "cancelled",
]
"""The class of an error in a result row: what a retry rule or an analysis groups by."""


class KimiRayError(Exception):
    """The root of every error that kimi_ray raises on purpose.

    Args:
        message: One sentence that names the thing.
        code: The stable code, ``family.what``.
        hint: What to do about it, or None.
        details: Plain JSON facts (paths, offsets, expected and found values).
        retryable: Whether the same call may succeed later without a change.
    """

    family: ClassVar[str] = "internal"
    default_class: ClassVar[ErrorClass] = "infra"

    def __init__(
        self,
        message: str,
        *,
        code: str,
        hint: str | None = None,
        details: dict[str, Any] | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint
        self.details: dict[str, Any] = details if details is not None else {}
        self.retryable = retryable

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        return f"{text} ({self.hint})" if self.hint else text

    def __reduce__(self) -> tuple[Any, tuple[dict[str, Any]]]:
        return (error_from_data, (self.to_data(),))

    @property
    def error_class(self) -> ErrorClass:
        """The class used in result rows and by retry rules (``runs.md`` section 4)."""
        return _CLASS_BY_CODE.get(self.code, self.default_class)

    def to_data(self) -> dict[str, Any]:
        """The error as plain JSON: ``{code, message, hint?, details?, retryable}``."""
        data: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "retryable": self.retryable,
            "kind": type(self).__name__,
        }
        if self.hint is not None:
            data["hint"] = self.hint
        if self.details:
            data["details"] = self.details
        return data

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> KimiRayError:
        """The inverse of ``to_data``; an unknown ``kind`` comes back as ``KimiRayError`` itself."""
        return error_from_data(data)

    def with_details(self, **details: Any) -> Self:
        """The same error with more facts added to ``details``."""
        self.details.update(details)
        return self


class ConfigError(KimiRayError):
    """A setting, a flag or a file that the user wrote cannot be used."""

    family = "config"
    default_class = "user_code"


class LogError(KimiRayError):
    """An event or a log breaks a rule: JSON rule, envelope, order, surface, version."""

    family = "log"
    default_class = "store"


class StoreError(KimiRayError):
    """Durable storage failed, refused, or is somebody else's."""

    family = "store"
    default_class = "store"


class SessionError(KimiRayError):
    """A session operation was refused or failed."""

    family = "session"
    default_class = "infra"


class AgentError(KimiRayError):
    """A prompt, a turn or an agent was refused or failed."""

    family = "agent"
    default_class = "infra"


class ProviderError(KimiRayError):
    """A model server answered with an error, or not at all.

    ``details`` may hold ``status`` (HTTP), ``request_id``, ``retry_after_ms`` and ``attempts``.
    """

    family = "provider"
    default_class = "provider"

    @property
    def retry_after_ms(self) -> int | None:
        """What the server asked us to wait, in milliseconds, or None."""
        value = self.details.get("retry_after_ms")
        return value if isinstance(value, int) else None


class ToolError(KimiRayError):
    """A tool, its arguments or the place it works in failed."""

    family = "tool"
    default_class = "tool"


class RunError(KimiRayError):
    """A swarm, its items or its run directory cannot be used as asked."""

    family = "run"
    default_class = "user_code"


class RuntimeFault(KimiRayError):
    """An actor, a node or Ray itself failed or did not answer in time."""

    family = "runtime"
    default_class = "infra"


_KINDS: dict[str, type[KimiRayError]] = {
    kind.__name__: kind
    for kind in (
        KimiRayError,
        ConfigError,
        LogError,
        StoreError,
        SessionError,
        AgentError,
        ProviderError,
        ToolError,
        RunError,
        RuntimeFault,
    )
}

_CLASS_BY_CODE: dict[str, ErrorClass] = {
    "provider.rate_limit": "rate_limit",
    "provider.auth": "auth",
    "provider.empty_response": "model_output",
    "provider.filtered": "model_output",
    "context.overflow": "model_output",
    "output.invalid": "model_output",
    "tool.user_code": "user_code",
    "environment.failed": "environment",
    "workdir.failed": "environment",
    "workdir.no_git": "environment",
    "workdir.bad_ref": "environment",
    "workdir.not_a_repository": "environment",
    "workdir.lost": "infra",
    "agent.cancelled": "cancelled",
    "turn.cancelled": "cancelled",
    "swarm.cancelled": "cancelled",
    "prompt.cancelled": "cancelled",
    "prompt.blocked": "user_code",
    "turn.interrupted": "infra",
    "internal": "infra",
}


def error_from_data(data: dict[str, Any]) -> KimiRayError:
    """Build the error that ``KimiRayError.to_data`` described.

    Returns:
        An instance of the class named by ``kind``, or of ``KimiRayError`` when this version does not know it.
    """
    kind = _KINDS.get(str(data.get("kind", "")), KimiRayError)
    details = data.get("details")
    hint = data.get("hint")
    return kind(
        str(data.get("message", "")),
        code=str(data.get("code", "internal")),
        hint=hint if isinstance(hint, str) else None,
        details=cast("dict[str, Any]", details) if isinstance(details, dict) else None,
        retryable=bool(data.get("retryable", False)),
    )


def as_error(error: BaseException, *, code: str = "internal") -> KimiRayError:
    """Any exception as a ``KimiRayError``: itself if it is one, else wrapped with its type and text.

    Used where an exception becomes data (a failed turn, a row): nothing is swallowed, its type stays in ``details``.
    """
    if isinstance(error, KimiRayError):
        return error
    text = str(error) or type(error).__name__
    return KimiRayError(f"{type(error).__name__}: {text}", code=code, details={"exception": type(error).__name__})
