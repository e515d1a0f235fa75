"""What a ``swarm`` command line says, as plain data: it goes into ``run.json`` and comes back with ``--resume``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from kimi_ray.errors import ConfigError, RunError
from kimi_ray.settings import Isolation, Limits, Sampling, Settings

_LIMITS = {
    "max_steps": "max_steps",
    "max_tool_calls": "max_tool_calls",
    "max_total_tokens": "max_total_tokens",
    "max_cost_usd": "max_cost_usd",
    "time_s": "time_s",
}
_TOTAL_LIMITS = {"total_cost_usd": "max_cost_usd", "total_time_s": "time_s", "total_tokens": "max_total_tokens"}
_SAMPLING = ("temperature", "max_output_tokens")


class SwarmArguments(Settings):
    """The flags of ``kimi-ray swarm``; None was not said. A flag's field has its name, with underscores."""

    prompt: str | None = None
    """The text itself, also when it was given as @FILE."""
    items: str | None = None
    """Absolute path of the items file, or ``-``."""
    id_column: str | None = None
    limit: int | None = None
    shuffle: int | None = None
    filter: tuple[str, ...] | None = None
    repeats: int | None = None
    model: str | None = None
    base_url: str | None = None
    profile: str | None = None
    system_prompt: str | None = None
    tools: tuple[str, ...] | None = None
    rollout: str | None = None
    output_schema: dict[str, Any] | None = None
    """The JSON schema itself, also when it was given as a file or a model."""
    temperature: float | None = None
    max_output_tokens: int | None = None
    seed: int | None = None
    max_steps: int | None = None
    max_tool_calls: int | None = None
    max_total_tokens: int | None = None
    max_cost_usd: float | None = None
    time_s: float | None = None
    total_cost_usd: float | None = None
    total_time_s: float | None = None
    total_tokens: int | None = None
    max_concurrency: int | None = None
    retries: int | None = None
    retry_on: tuple[str, ...] | None = None
    fail_on: str | None = None
    on_interrupted: Literal["continue", "restart"] | None = None
    workdir: str | None = None
    keep_workdirs: bool | None = None
    allow_shared_writes: bool | None = None
    isolation: Isolation | None = None
    tag: tuple[str, ...] | None = None
    home: str | None = None
    address: str | None = None
    namespace: str | None = None

    @classmethod
    def of(cls, **said: Any) -> SwarmArguments:
        """The flags as they were given.

        Raises:
            ConfigError: ``request.out_of_range`` naming the flag (a NaN, say).
        """
        try:
            return cls(**said)
        except ValidationError as error:
            raise _out_of_range(error, {}) from None

    def over(self, base: SwarmArguments) -> SwarmArguments:
        """These arguments on top of an earlier command's: what is said now wins."""
        return base.model_copy(update={name: value for name, value in self.__dict__.items() if value is not None})

    @property
    def limits(self) -> Limits | None:
        """The bounds of each rollout."""
        return _some_limits(self, _LIMITS)

    @property
    def total_limits(self) -> Limits | None:
        """The bounds of the whole run."""
        return _some_limits(self, _TOTAL_LIMITS)

    @property
    def sampling(self) -> Sampling | None:
        """How the model samples; the seed is the run's."""
        return sampling_of({name: getattr(self, name) for name in _SAMPLING})

    @property
    def tags(self) -> dict[str, str]:
        """The tags of all rows.

        Raises:
            RunError: ``swarm.bad_tag``.
        """
        return parse_tags(self.tag or ())


def parse_tags(texts: tuple[str, ...] | list[str]) -> dict[str, str]:
    """``KEY=VALUE`` texts as a table.

    Raises:
        RunError: ``swarm.bad_tag``.
    """
    tags: dict[str, str] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise RunError(f"the tag {text!r} has no value", code="swarm.bad_tag", hint="write --tag KEY=VALUE")
        tags[key.strip()] = value
    return tags


def split_names(texts: list[str] | None) -> tuple[str, ...] | None:
    """``--tools Read,Glob --tools mine:count``: the names; ``none`` or an empty text is no tools at all."""
    if texts is None:
        return None
    names = [name.strip() for text in texts for name in text.split(",")]
    return tuple(name for name in names if name and name.lower() != "none")


def limits_of(said: Mapping[str, Any]) -> Limits | None:
    """Limits from what was said, or None when nothing was.

    Raises:
        ConfigError: ``request.out_of_range`` naming the flag.
    """
    return _checked(Limits, said, {name: name for name in said})


def sampling_of(said: Mapping[str, Any]) -> Sampling | None:
    """Sampling from what was said, or None when nothing was.

    Raises:
        ConfigError: ``request.out_of_range`` naming the flag.
    """
    return _checked(Sampling, said, {name: name for name in said})


_Checked = TypeVar("_Checked", bound=Settings)


def _some_limits(arguments: SwarmArguments, names: Mapping[str, str]) -> Limits | None:
    said = {field: getattr(arguments, flag) for flag, field in names.items()}
    return _checked(Limits, said, {field: flag for flag, field in names.items()})


def _checked(kind: type[_Checked], said: Mapping[str, Any], flags: Mapping[str, str]) -> _Checked | None:
    values = {name: value for name, value in said.items() if value is not None}
    if not values:
        return None
    try:
        return kind(**values)
    except ValidationError as error:
        raise _out_of_range(error, flags) from None


def _out_of_range(error: ValidationError, flags: Mapping[str, str]) -> ConfigError:
    first = error.errors(include_url=False, include_input=False)[0]
    field = str(first["loc"][0]) if first["loc"] else ""
    flag = "--" + (flags.get(field) or field).replace("_", "-")
    return ConfigError(
        f"{flag}: {first['msg'][0].lower()}{first['msg'][1:]}",
        code="request.out_of_range",
        hint=f"leave {flag} out for what is the default",
        details={"flag": flag},
    )
