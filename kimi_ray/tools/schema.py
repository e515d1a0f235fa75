"""Argument schemas: what a model is shown, and what it is told when its arguments do not fit."""

from __future__ import annotations

import re
from typing import Any, NoReturn, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from kimi_ray.errors import ToolError
from kimi_ray.tools.results import storable

_M = TypeVar("_M", bound=BaseModel)
_MAX_PROBLEMS = 8
_SHOWN = 80
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Arguments(BaseModel):
    """Base of the arguments of a tool: an unknown key is an error, a dashed key is written as an alias."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=False, validate_by_alias=True)


def check_name(name: str) -> str:
    """The name, if a model server takes it.

    Raises:
        ToolError: ``tool.bad_signature``.
    """
    if _NAME.fullmatch(name) is None:
        raise ToolError(
            f"{name[:80]!r} cannot be the name of a tool",
            code="tool.bad_signature",
            hint='use 1 to 64 letters, digits, _ and -, e.g. name="lookup"',
            details={"name": name[:200]},
        )
    return name


def compact_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a model without what costs tokens and says nothing: titles, null beside optional."""
    schema = cast("dict[str, Any]", _compact(model.model_json_schema(by_alias=True)))
    schema.pop("description", None)
    schema.setdefault("properties", {})
    return schema


def _compact(node: Any) -> Any:
    if isinstance(node, list):
        return [_compact(item) for item in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    found: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", node).items():
        if key == "title" and isinstance(value, str):
            continue
        if key in ("properties", "$defs") and isinstance(value, dict):
            # names chosen by the author: a property may well be called "title"
            found[key] = {name: _compact(item) for name, item in cast("dict[str, Any]", value).items()}
        elif key in ("default", "enum", "const", "examples"):
            found[key] = value
        else:
            found[key] = _compact(value)
    if found.get("default", ...) is None:
        del found["default"]
        choices = found.get("anyOf")
        if isinstance(choices, list):
            kept: list[Any] = [choice for choice in cast("list[Any]", choices) if choice != {"type": "null"}]
            if len(kept) == 1 and isinstance(kept[0], dict):
                del found["anyOf"]
                found = {**cast("dict[str, Any]", kept[0]), **found}
            else:
                found["anyOf"] = kept
    return found


def validate(model: type[_M], arguments: Any, *, tool: str) -> _M:
    """The arguments as a model; None and an empty text count as no arguments, None for a key as not said.

    Raises:
        ToolError: ``tool.bad_arguments``, naming every problem and what the tool takes.
    """
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        kind = "not valid JSON" if isinstance(arguments, str) else f"of type {type(arguments).__name__}"
        _refuse(model, tool, [f"the arguments are {kind}; they must be one JSON object"])
    given = cast("dict[str, Any]", arguments)
    try:
        to_json(given)  # JSON text may spell half a character, which nothing here can store or send on
    except (ValueError, RecursionError) as error:
        _refuse(model, tool, [f"they cannot be stored as JSON ({str(error)[:200]})"])
    try:
        return model.model_validate(given)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    return _refuse(model, tool, [_problem(dict(problem)) for problem in problems])


def _problem(problem: dict[str, Any]) -> str:
    place = ""
    for part in problem["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}"
    place = storable(place.lstrip("."))
    kind = problem["type"]
    if kind == "missing":
        return f"`{place}` is required"
    if kind == "extra_forbidden":
        return f"`{place}` is not an argument of this tool"
    shown = repr(problem.get("input"))
    if len(shown) > _SHOWN:
        shown = shown[:_SHOWN] + "..."
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"`{place}`: {message} (got {shown})" if place else message


def _refuse(model: type[BaseModel], tool: str, problems: list[str]) -> NoReturn:
    more = len(problems) - _MAX_PROBLEMS
    text = "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
    taken = [f"{field.alias or name}{'' if field.is_required() else '?'}" for name, field in model.model_fields.items()]
    raise ToolError(
        f"{tool} cannot take these arguments: {text}",
        code="tool.bad_arguments",
        hint=f"{tool} takes {', '.join(taken) or 'no arguments'}",
        details={"tool": tool, "problems": problems},
    )
