"""What becomes of a call's outcome: an exception as an error result, a Python value as text."""

from __future__ import annotations

from kimi_ray.errors import KimiRayError
from kimi_ray.tools.contract import ToolOutput

_MAX_MESSAGE = 4000


def error_output(error: BaseException) -> ToolOutput:
    """An error as the model sees it: what happened and the way out; its code and facts go into the log.

    An exception that is not ours is ``tool.user_code``, told by type and message.
    """
    if isinstance(error, KimiRayError):
        text = error.message if error.hint is None else f"{error.message}\nHint: {error.hint}."
        return ToolOutput(_storable(text), is_error=True, error_code=error.code, meta={"error": error.to_data()})
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception as second:  # noqa: BLE001  a user's __str__ may fail too; its failure is what can be told
        message = f"(its message could not be made: {type(second).__name__})"
    text = _storable(f"{kind}: {message}" if message else kind)
    if len(text) > _MAX_MESSAGE:
        text = f"{text[:_MAX_MESSAGE]} [... {len(text) - _MAX_MESSAGE} characters cut]"
    return ToolOutput(text, is_error=True, error_code="tool.user_code", meta={"exception": kind})


def _storable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")
