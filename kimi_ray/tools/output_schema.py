"""The shape that an answer must have: a JSON schema, from a pydantic model or as it is, and what does not fit it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from pydantic import BaseModel, TypeAdapter
from pydantic_core import from_json, to_json

from kimi_ray.errors import ConfigError, LogError
from kimi_ray.events import freeze, thaw
from kimi_ray.named_code import CannotLoadError, load_named
from kimi_ray.tools.results import storable

MAX_SCHEMA_BYTES = 64 << 10
"""It is sent with every request."""

_MAX_PROBLEMS = 8
_SHOWN = 120


def schema_of(thing: Any) -> dict[str, Any]:
    """The JSON schema that an ``output_schema`` means, checked.

    Args:
        thing: A pydantic model, a type that pydantic knows (``list[int]``, a dataclass), or a JSON schema. Of a model
            its JSON schema counts: validators in Python are not run.

    Raises:
        ConfigError: ``output.bad_schema``.
    """
    if isinstance(thing, BaseModel):
        raise _bad(f"it is an object of {type(thing).__name__}, not the class")
    if isinstance(thing, dict):
        schema = cast("dict[str, Any]", thing)
    else:
        try:
            schema = TypeAdapter(cast("type[Any]", thing)).json_schema()
        except Exception as error:  # pydantic raises several kinds of its own, and type hints may raise anything
            raise _bad(f"{type(error).__name__}: {error}") from error
    try:
        plain: dict[str, Any] = thaw(freeze(schema))
    except LogError as error:
        raise _bad(error.message) from None
    if len(to_json(plain)) > MAX_SCHEMA_BYTES:
        raise _bad(f"it has more than {MAX_SCHEMA_BYTES} bytes")
    reference = next((one for one in _references(plain) if not one.startswith("#")), None)
    if reference is not None:
        raise _bad(f"it refers to {reference}, and nothing is fetched for it")
    from jsonschema import validators
    from jsonschema.exceptions import SchemaError

    try:
        validators.validator_for(plain, default=validators.Draft202012Validator).check_schema(plain)  # pyright: ignore[reportUnknownMemberType]
    except SchemaError as error:
        raise _bad(f"{error.json_path}: {error.message}") from None
    try:
        _errors(plain, None)
    except RecursionError:
        raise _bad("it refers to itself without an end") from None
    return plain


def load_schema(reference: str) -> dict[str, Any]:
    """The schema of ``package.module:Model``: a pydantic model, another type, or a dict that is a JSON schema.

    Raises:
        ConfigError: ``output.bad_schema``.
    """
    try:
        found = load_named(reference)
    except CannotLoadError as error:
        raise _bad(f"{reference} cannot be imported: {error.why}", error.hint) from error
    return schema_of(found)


def problems_of(schema: dict[str, Any], value: Any) -> list[str]:
    """What is wrong with a value, each with its place; empty for one that fits.

    Raises:
        ConfigError: ``output.bad_schema`` for a schema that refers to a part of itself that is not there.
    """
    try:
        errors = _errors(schema, value)
    except RecursionError:
        return ["it is nested too deeply to be looked at"]
    told = [_problem(error) for error in errors[:_MAX_PROBLEMS]]
    return told if len(errors) <= _MAX_PROBLEMS else [*told, f"and {len(errors) - _MAX_PROBLEMS} more"]


def _errors(schema: dict[str, Any], value: Any) -> list[Any]:
    from referencing.exceptions import Unresolvable

    validator = _validator(to_json(schema))
    try:
        return sorted(validator.iter_errors(value), key=lambda error: [str(part) for part in error.absolute_path])
    except Unresolvable as error:
        raise _bad(f"it refers to {error.ref}, which is not in it") from None


@lru_cache(maxsize=64)
def _validator(schema: bytes) -> Any:
    from jsonschema import validators
    from referencing import Registry

    plain: dict[str, Any] = from_json(schema)
    kind: Any = validators.validator_for(plain, default=validators.Draft202012Validator)  # pyright: ignore[reportUnknownMemberType]
    nothing: Any = cast("Any", Registry)()
    return kind(plain, registry=nothing)


def _problem(error: Any) -> str:
    place = str(error.json_path).removeprefix("$").lstrip(".")
    message = str(error.message)
    if len(message) > _SHOWN * 2:
        message = f"{message[:_SHOWN]} ... {message[-_SHOWN:]}"
    return storable(f"`{place}`: {message}" if place else message)


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [found for item in cast("list[Any]", node) for found in _references(item)]
    if not isinstance(node, dict):
        return []
    inner = cast("dict[str, Any]", node)
    own = [inner["$ref"]] if isinstance(inner.get("$ref"), str) else []
    return own + [found for key, item in inner.items() if key not in ("const", "enum") for found in _references(item)]


def _bad(why: str, hint: str | None = None) -> ConfigError:
    return ConfigError(
        f"the output schema cannot be used: {why}",
        code="output.bad_schema",
        hint=hint or "give a pydantic model, or a JSON schema as a dict",
        details={"reason": why},
    )
