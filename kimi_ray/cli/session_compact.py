"""``sessions compact``: an agent's conversation made short, by its own model. Without Ray unless asked."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from kimi_ray.cli.options import Address, Home, Json, Namespace
from kimi_ray.cli.printing import counted, print_json, say
from kimi_ray.cli.session_context import ContextCommand, StoredContext
from kimi_ray.cli.session_resume import OwnTools
from kimi_ray.cli.sessions import AgentOption, SessionArgument


def compact(
    session: SessionArgument,
    agent: AgentOption = None,
    instruction: Annotated[
        str | None, typer.Option("--instruction", "-i", metavar="TEXT", help="What you want of the summary.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The session's model from now on. [the one it has]")
    ] = None,
    base_url: Annotated[str | None, typer.Option("--base-url", metavar="URL", help="Where that model is.")] = None,
    tools: OwnTools = None,
    json: Json = False,
    home: Home = None,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """Replace an agent's conversation (main's, unless said) by the user's own words and a summary of its model.

    Its log keeps all of it. Where there is nothing to compact the session is not opened. With --json:
    {"session_id", "agent_id", "compaction": null | {"compaction_id", "trigger", "start_seq", "summary_seq",
    "message_seq", "end_seq", "shadowed_range", "shadowed_seqs", "shadowed_tokens", "message_tokens", "summary"}};
    null: there was nothing to compact.
    """
    stream, result = ContextCommand(
        session,
        agent,
        home,
        address,
        namespace,
        tools,
        act=lambda found: found.compact(instruction),
        is_needless=_is_needless,
        model=model,
        base_url=base_url,
    ).run()
    if json:
        found = None if result is None else asdict(result)
        print_json({"session_id": stream.session_id, "agent_id": stream.agent_id, "compaction": found})
    elif result is None:
        say(f"{stream}: nothing to compact")
    else:
        items = counted(len(result.shadowed_seqs), "message")
        say(f"{stream}: compacted {items}, about {result.shadowed_tokens} tokens, to {result.message_tokens}")


def _is_needless(context: StoredContext) -> bool:
    from kimi_ray.features.compaction import span_of_all

    return not context.asked or span_of_all(context.surface) is None
