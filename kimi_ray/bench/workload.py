"""What the benches run: a scripted model without latency, and a tool that does nothing.

Importable by name, so that hosts find it wherever they are: ``scripted:kimi_ray.bench.workload:one_tool``.
"""

from __future__ import annotations

from kimi_ray.llm.chat import ChatRequest
from kimi_ray.llm.script import Step, tool_call
from kimi_ray.settings import Usage

ONE_TOOL_MODEL = "scripted:kimi_ray.bench.workload:one_tool"
PLAIN_MODEL = "scripted:kimi_ray.bench.workload:plain"

_ASK = Step(tool_calls=(tool_call("look", {"what": "the state of things"}),), usage=Usage(input=400, output=20))
_DONE = Step(text="Everything is in order; nothing needs to be done.", usage=Usage(input=430, output=12))


def one_tool(request: ChatRequest) -> Step:
    """A turn is: a model call that asks for one tool, the tool, a final model call."""
    last = request.messages[-1]["content"][0]
    return _DONE if last["type"] == "tool-result" else _ASK


def plain(_request: ChatRequest) -> Step:
    """A turn is one model call."""
    return _DONE


async def look(what: str) -> str:
    """Look at something.

    Args:
        what: What to look at.
    """
    return f"{what}: fine"
