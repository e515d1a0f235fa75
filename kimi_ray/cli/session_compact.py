"""``sessions compact``: an agent's conversation made short, by its own model. Without Ray unless asked."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_ray.cli.options import Address, Home, Json, Namespace
from kimi_ray.cli.printing import counted, print_json, say, tell
from kimi_ray.cli.session_context import ContextCommand, StoredContext
from kimi_ray.cli.session_resume import OwnTools
from kimi_ray.cli.sessions import AgentOption, SessionArgument

if TYPE_CHECKING:
    from kimi_ray.store import Stream


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
    if result is not None and asyncio.run(_is_by_another(session, home, stream, result.compaction_id)):
        tell(
            "note: the summary before this one was not asked of the agent's model (a Feature's summarizer wrote it, or"
            " it was imported), this one was: a Feature must be configured here too"
        )


async def _is_by_another(session: str, home: str | None, stream: Stream, compaction_id: str) -> bool:
    """Whether a model wrote this summary, and none the one before."""
    from kimi_ray.cli.logs_read import lines_from
    from kimi_ray.cli.lookup import open_home
    from kimi_ray.events import parse_event

    store, _ = open_home(home, session)
    asked, before = set[str](), None
    async for line in lines_from(store, stream, 0):
        kind = line.split(b",", 3)[2]
        if b"compaction/request" not in kind and b"compaction/summary" not in kind:
            continue
        event = parse_event(line)
        named: str = event.data["compaction_id"]
        if event.type == "compaction/request":
            asked.add(named)
        elif named != compaction_id:
            before = named
        else:
            break
    return compaction_id in asked and before is not None and before not in asked


def _is_needless(context: StoredContext) -> bool:
    from kimi_ray.features.compaction import span_of_all

    return not context.asked or span_of_all(context.surface) is None
