"""What becomes of a call's outcome: an exception as an error result, a Python value as text."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import uuid
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from kimi_ray.errors import KimiRayError, ToolError
from kimi_ray.events import encode, freeze
from kimi_ray.tools.contract import ToolOutput

MAX_RESULT_CHARS = 8 << 20
"""Of one result, far above what any model reads: a result is held by host and store, and sent with every request."""

MAX_META_BYTES = 1 << 20

_MAX_MESSAGE = 4000
_MAX_DEPTH = 64
_AS_TEXT = (
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
    pathlib.PurePath,
)


def error_output(error: BaseException) -> ToolOutput:
    """An error as the model sees it: what happened and the way out; its code and facts go into the log.

    An exception that is not ours is ``tool.user_code``, told by type and message.
    """
    if isinstance(error, KimiRayError):
        text = error.message if error.hint is None else f"{error.message}\nHint: {error.hint}"
        try:
            meta = _plain(error.to_data(), "error", 0, "error")
        except ToolError:  # facts that no log can hold: what and which kind are still told
            meta = {"code": error.code, "message": storable(error.message)}
        return ToolOutput(storable(text), is_error=True, error_code=error.code, meta={"error": meta})
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception as second:  # noqa: BLE001  a user's __str__ may fail too; its failure is what can be told
        message = f"(its message could not be made: {type(second).__name__})"
    text = storable(f"{kind}: {message}" if message else kind)
    if len(text) > _MAX_MESSAGE:
        text = f"{text[:_MAX_MESSAGE]} [... {len(text) - _MAX_MESSAGE} characters cut]"
    return ToolOutput(text, is_error=True, error_code="tool.user_code", meta={"exception": kind})


def storable(text: str) -> str:
    """The text with lone surrogates replaced: what UTF-8 cannot hold, a log cannot hold."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def check_output(output: Any) -> None:
    """Refuse what a tool returned when no later request could be made with it, or it is beyond all measure.

    Raises:
        ToolError: ``tool.bad_result``.
        LogError: ``log.not_json`` for facts that a log cannot hold.
    """
    if not isinstance(output, ToolOutput):
        raise _bad_output(f"a {type(output).__name__} instead of a ToolOutput")
    content: Any = output.content
    size = len(content) if isinstance(content, str) else 0
    if not isinstance(content, str):
        if not isinstance(content, list | tuple):
            raise _bad_output(f"content of type {type(content).__name__}")
        for block in cast("list[object]", content):
            size += _block_size(block)
    if size > MAX_RESULT_CHARS:
        raise _bad_output(f"{size} characters, a result may have {MAX_RESULT_CHARS}")
    if output.meta is not None and (size := len(encode(freeze(output.meta)))) > MAX_META_BYTES:
        raise _bad_output(f"meta of {size} bytes, it may have {MAX_META_BYTES}")
    if not isinstance(output.error_code, str | None) or not isinstance(output.exit_code, int | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _bad_output("an error code or exit code of another type")
    if output.error_code is not None and storable(output.error_code) != output.error_code:
        raise _bad_output("an error code with half a character")
    if output.exit_code is not None and not -(1 << 63) <= output.exit_code < 1 << 63:
        raise _bad_output("an exit code beyond 64 bits")


def _block_size(block: object) -> int:
    if not isinstance(block, dict):
        raise _bad_output(f"a content block of type {type(block).__name__}")
    body = cast("dict[str, Any]", block)
    if body.get("type") == "image":
        return len(encode(freeze(body)))
    if body.get("type") != "text":
        raise _bad_output(f"a content block of the kind {body.get('type')!r}")
    if not isinstance(body.get("text"), str):
        raise _bad_output("a text block without a text")
    return len(body["text"])


def _bad_output(what: str) -> ToolError:
    return ToolError(what, code="tool.bad_result", hint="return a short text: write what is large into a file")


def value_output(value: Any, *, tool: str) -> ToolOutput:
    """What a function returned, as a result: text and ``ToolOutput`` as they are, anything else as JSON.

    Models and dataclasses become objects, tuples arrays, dates, paths and ids text.

    Raises:
        ToolError: ``tool.bad_result``, naming the place and the type that JSON cannot hold.
    """
    if isinstance(value, ToolOutput):
        return _checked(value, tool)
    if isinstance(value, str):
        return ToolOutput(_plain(value, "the result", 0, tool))
    plain = _plain(value, "the result", 0, tool)
    try:
        return ToolOutput(json.dumps(plain, ensure_ascii=False))
    except ValueError as error:  # an int too long to be written
        raise _refused(tool, str(error), "the result") from error


def _checked(output: ToolOutput, tool: str) -> ToolOutput:
    content: Any = output.content
    if not isinstance(content, str | list):
        raise _refused(tool, f"a value of type {type(content).__name__}", "content")
    content = _plain(content, "content", 0, tool)
    if isinstance(content, list) and not all(isinstance(block, dict) for block in cast("list[Any]", content)):
        raise _refused(tool, "a content block that is no object", "content")
    return dataclasses.replace(output, content=content, meta=_plain(output.meta, "meta", 0, tool))


def _plain(value: Any, place: str, depth: int, tool: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value, place, depth, tool)
    if isinstance(value, str):
        text = str.__str__(value)
        if not text.isascii() and storable(text) != text:
            raise _refused(tool, "text with a lone surrogate", place)
        return text
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refused(tool, f"the number {value}", place)
        return float(value)
    if depth >= _MAX_DEPTH:
        raise _refused(tool, f"nesting above {_MAX_DEPTH}, or a cycle", place)
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, item in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                raise _refused(tool, f"a key of type {type(key).__name__}", place)
            found[_plain(key, place, depth, tool)] = _plain(item, f"{place}[{key!r}]", depth + 1, tool)
        return found
    if isinstance(value, list | tuple):
        items = enumerate(cast("list[Any]", value))
        return [_plain(item, f"{place}[{index}]", depth + 1, tool) for index, item in items]
    if isinstance(value, BaseModel):
        try:
            dumped = value.model_dump(mode="json", by_alias=True)
        except (PydanticSerializationError, ValueError) as error:
            raise _refused(tool, f"a {type(value).__name__} ({error})", place) from error
        return _plain(dumped, place, depth, tool)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name), f"{place}.{field.name}", depth + 1, tool)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, _AS_TEXT):
        return to_jsonable_python(value)
    raise _refused(tool, f"a value of type {type(value).__module__}.{type(value).__qualname__}", place)


def _refused(tool: str, what: str, place: str) -> ToolError:
    return ToolError(
        f"{tool} returned {what} at {place}, which cannot be told to a model",
        code="tool.bad_result",
        hint="return text, or what JSON can hold: str, int, finite float, bool, None, list, dict with str keys",
        details={"tool": tool, "at": place, "found": what},
    )
