"""What a typed function tells about itself: name, description, schema, defaults."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union, cast

from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError, create_model
from pydantic_core import PydanticSerializationError, to_jsonable_python

from kimi_ray.errors import ToolError
from kimi_ray.tools.contract import ToolContext
from kimi_ray.tools.schema import Arguments, check_name, compact_schema

Function = Callable[..., Any]

_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^(\s+)(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Signature:
    """A function as a tool sees it."""

    name: str
    description: str
    model: type[Arguments]
    schema: dict[str, Any]
    fields: dict[str, str]
    """Parameter to field: fields have names of their own, for a parameter may be called ``copy`` or ``_x``."""
    context: tuple[str, ...]
    defaults: dict[str, Any]
    is_async: bool


def read_signature(function: Function, given_name: str | None) -> Signature:
    """Name, description, schema and parameters of a function.

    Raises:
        ToolError: ``tool.bad_signature``, saying which part cannot be used.
    """
    if not callable(function):
        raise _unusable(repr(function), "it is not callable")
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = cast("functools.partial[Any]", inner).func
    if not inspect.isroutine(inner) and not isinstance(inner, type):
        inner = type(inner).__call__
    name = given_name or str(getattr(function, "__name__", None) or getattr(inner, "__name__", "")) or "function"
    if name == "<lambda>":
        raise _unusable(name, "a lambda has neither a name nor types", "use def, with an annotation for each parameter")
    check_name(name)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise _unusable(name, "it is a generator", "return the whole result")
    try:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(inner, include_extras=True)
    except (TypeError, ValueError, NameError, AttributeError) as error:
        raise _unusable(name, f"its types cannot be read ({type(error).__name__}: {error})") from error
    description, told = _docstring(inspect.getdoc(inner) or "")
    context: list[str] = []
    fields: dict[str, str] = {}
    made: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for index, parameter in enumerate(parameters.values()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise _unusable(name, f"the parameter {parameter} cannot be named by a model", "use plain parameters")
        if parameter.name not in hints:
            raise _unusable(
                name, f"the parameter {parameter.name} has no type", f"annotate it, e.g. {parameter.name}: str"
            )
        kind = hints[parameter.name]
        if _is_context(kind):
            context.append(parameter.name)
            continue
        fields[parameter.name] = field = f"p{index}"
        made[field] = _field(name, parameter, kind, told.get(parameter.name), defaults)
    try:
        model = create_model(f"{name}_arguments", __base__=Arguments, **made)
        schema = compact_schema(model)
    except (PydanticUserError, TypeError, NameError, ValueError) as error:
        raise _unusable(name, f"no schema can be made of its types ({error})") from error
    is_async = inspect.iscoroutinefunction(inner)
    return Signature(name, description, model, schema, fields, tuple(context), defaults, is_async)


def _field(
    name: str, parameter: inspect.Parameter, kind: Any, description: str | None, defaults: dict[str, Any]
) -> tuple[Any, Any]:
    if parameter.default is parameter.empty:
        return kind, Field(alias=parameter.name, description=description)
    default = parameter.default
    if default is None:
        kind = kind | None if isinstance(kind, type | types.UnionType) else Union[kind, None]  # noqa: UP007
        return kind, Field(default=None, alias=parameter.name, description=description)
    try:
        plain = to_jsonable_python(default)
        TypeAdapter(kind).validate_python(plain)
    except (PydanticUserError, PydanticSerializationError, ValidationError, TypeError, ValueError):
        # a default that JSON cannot hold, or of another type than it says, is the function's own business
        return kind, Field(default_factory=lambda: default, alias=parameter.name, description=description)
    defaults[parameter.name] = plain
    return kind, Field(default=default, alias=parameter.name, description=description)


def _is_context(kind: Any) -> bool:
    return kind is ToolContext or ToolContext in typing.get_args(kind)


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """The part before the first section, and what the ``Args:`` section says of each parameter."""
    lines = text.splitlines()
    end = next((n for n, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    told: dict[str, str] = {}
    inside = False
    indent = 0
    current = ""
    for line in lines[end:]:
        section = _SECTION.match(line)
        if section is not None:
            inside = section.group(1) in ("Args", "Arguments", "Parameters")
            indent = 0
        elif inside and line.strip():
            argument = _ARGUMENT.match(line)
            depth = len(line) - len(line.lstrip())
            if argument is not None and (indent == 0 or depth <= indent):
                indent = depth
                current = argument.group(2)
                told[current] = argument.group(3)
            elif current:
                told[current] = f"{told[current]} {line.strip()}".strip()
    return "\n".join(lines[:end]).strip(), told


def _unusable(name: str, why: str, hint: str | None = None) -> ToolError:
    return ToolError(
        f"{name} cannot be a tool: {why}",
        code="tool.bad_signature",
        hint=hint or "give it typed, named parameters that JSON can carry",
        details={"tool": name, "reason": why},
    )
