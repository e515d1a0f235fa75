"""What a server answered, as the result of a tool call: text and images as they are, the rest told in words."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kimi_ray.errors import LogError
from kimi_ray.events import freeze
from kimi_ray.tools.contract import ToolOutput
from kimi_ray.tools.results import storable

if TYPE_CHECKING:
    import mcp_types

MAX_TEXT_CHARS = 1_000_000
"""Of a result; more is cut. What is long, and shorter than this, is shown to the model by its preview."""
MAX_IMAGE_BYTES = 10 << 20
"""Of one image, as it is sent (base64)."""
MAX_META_CHARS = 64 << 10


def output_of(result: mcp_types.CallToolResult) -> ToolOutput:
    """The result as the model gets it; what a server gave as data besides is in ``meta``."""
    blocks: list[dict[str, Any]] = [_block(part) for part in result.content]
    structured: Any = result.structured_content
    meta: dict[str, Any] | None = None
    if structured is not None:
        told = json.dumps(structured, ensure_ascii=False)
        if not blocks:
            blocks = [_text(told)]
        elif len(told) <= MAX_META_CHARS and _storable(structured):
            meta = {"structured": structured}
    code = "tool.failed" if result.is_error else None
    if all(block["type"] == "text" for block in blocks):
        text = _cut("\n".join(block["text"] for block in blocks))
        return ToolOutput(text, is_error=result.is_error, error_code=code, meta=meta)
    return ToolOutput(blocks, is_error=result.is_error, error_code=code, meta=meta)


def _storable(value: Any) -> bool:
    try:
        freeze(value)
    except LogError:
        return False
    return True


def _block(part: Any) -> dict[str, Any]:
    kind = part.type
    if kind == "text":
        return _text(part.text)
    if kind == "image":
        return _image(part.data, part.mime_type)
    if kind == "audio":
        return _text(f"(audio, {part.mime_type}, {len(part.data)} characters of base64: it cannot be shown)")
    if kind == "resource_link":
        return _text(f"(resource {part.uri}: {part.description or part.name})")
    if kind == "resource":
        resource = part.resource
        text = getattr(resource, "text", None)
        if text is not None:
            return _text(text)
        media_type = resource.mime_type or "application/octet-stream"
        if media_type.startswith("image/"):
            return _image(resource.blob, media_type)
        size = len(resource.blob)
        return _text(f"(resource {resource.uri}, {media_type}, {size} characters of base64: it cannot be shown)")
    return _text(f"(a part of the kind {kind}: it cannot be shown)")


def _image(data: str, media_type: str) -> dict[str, Any]:
    if len(data) > MAX_IMAGE_BYTES:
        return _text(f"(an image, {media_type}, of {len(data)} bytes: above {MAX_IMAGE_BYTES} it is not shown)")
    return {"type": "image", "data": data, "media_type": storable(media_type)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": _cut(storable(text))}


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut here ...]\n{text[-half:]}"
