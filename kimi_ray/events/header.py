"""The header of a log: its identity and lineage, kept beside the events and never shown to the model."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kimi_ray.errors import LogError
from kimi_ray.events.json_rule import thaw

LOG_VERSION = 1
ENCODING_VERSION = 1

Origin = Literal["main", "subagent", "fork", "replay"]


class ParentRef(BaseModel):
    """The log that this one descends from."""

    model_config = ConfigDict(frozen=True, extra="allow")
    session_id: str
    agent_id: str


class WriterRef(BaseModel):
    """The program that created the log."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str
    version: str


class LogHeader(BaseModel):
    """The first line of a log. Keys that this version does not know are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: Literal["log"] = "log"
    version: int = LOG_VERSION
    enc: int = ENCODING_VERSION
    session_id: str
    agent_id: str
    created_at: int = Field(ge=0)
    """Epoch milliseconds."""
    cwd: str | None = None
    parent: ParentRef | None = None
    seed_length: int | None = Field(default=None, ge=0)
    origin: Origin = "main"
    delegation_depth: int = Field(default=0, ge=0)
    profile: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    run_id: str | None = None
    item_id: str | None = None
    repeat: int | None = None
    attempt: int | None = None
    fork_group: str | None = None
    fork_index: int | None = None
    writer: WriterRef

    def to_data(self) -> dict[str, Any]:
        """The header as JSON, keys in their order, absent where nothing is said; unknown keys last, as they came."""
        return _data_of(self)


def parse_header(value: Any) -> LogHeader:
    """Read a header. The version is looked at before anything else.

    Raises:
        LogError: ``log.version_unsupported`` (say upgrade, or no path), ``log.bad_header``.
    """
    if not isinstance(value, dict):
        raise LogError("the first line is not a log header", code="log.bad_header")
    body = cast("dict[str, Any]", value)
    version, encoding = body.get("version"), body.get("enc", ENCODING_VERSION)
    for what, found, known in (("version", version, LOG_VERSION), ("encoding", encoding, ENCODING_VERSION)):
        if type(found) is int and found != known:
            newer = found > known
            raise LogError(
                f"the log has {what} {found}, this program reads {known}",
                code="log.version_unsupported",
                hint="upgrade kimi-ray" if newer else "no upgrade path exists from this version",
                details={"found": found, "known": known},
            )
    if body.get("type") != "log":
        raise LogError("the first line is not a log header", code="log.bad_header")
    if version is None:
        raise LogError("the log header says no version", code="log.bad_header")
    try:
        return LogHeader.model_validate(body, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise LogError(f"log header: {place}: {first['msg']}", code="log.bad_header") from None


def _data_of(model: BaseModel) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in type(model).model_fields:
        value: Any = getattr(model, name)
        if isinstance(value, BaseModel):
            out[name] = _data_of(value)
        elif value is not None:
            out[name] = thaw(value)
    for name, value in (model.model_extra or {}).items():
        out[name] = thaw(value)
    return out
