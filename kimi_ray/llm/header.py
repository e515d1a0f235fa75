"""What a model was asked with: the data of ``request/header``."""

from __future__ import annotations

from typing import Any

from kimi_ray.llm.chat import ChatRequest


def describe_request(request: ChatRequest, *, provider: str) -> dict[str, Any]:
    """The settings of a request in canonical form: equal settings give equal data, and nothing empty is in it.

    Args:
        request: The request; its messages are not part of the description.
        provider: The provider's name.

    Returns:
        ``{"provider", "model", "sampling"?, "system"?, "tools"?}``.
    """
    described: dict[str, Any] = {"provider": provider, "model": request.model}
    sampling = request.sampling.said()
    if sampling:
        described["sampling"] = sampling
    if request.system:
        described["system"] = request.system
    if request.tools:
        described["tools"] = [tool.to_data() for tool in request.tools]
    return described
