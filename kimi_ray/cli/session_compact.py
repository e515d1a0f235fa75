"""``sessions compact``: an agent's conversation made short, by its own model. Without Ray unless asked."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.cli.options import Address, Home, Json, Namespace
from kimi_ray.cli.printing import counted, print_json, say
from kimi_ray.cli.session_resume import OwnTools, resume_session
from kimi_ray.cli.sessions import AgentOption, SessionArgument

if TYPE_CHECKING:
    from kimi_ray.features.compaction import CompactionResult
    from kimi_ray.store.open import ReadStore
    from kimi_ray.store.seam import Stream


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

    Its log keeps all of it, and says that the session was opened also when there was nothing to compact. With --json:
    {"session_id", "agent_id", "compaction": null | {"compaction_id", "trigger", "start_seq", "summary_seq",
    "message_seq", "end_seq", "shadowed_range", "shadowed_seqs", "shadowed_tokens", "message_tokens", "summary"}};
    null: there was nothing to compact.
    """
    from kimi_ray.cli.lookup import open_home

    store, place = open_home(home, session)
    stream, result = asyncio.run(
        _compact(store, place, session, agent, instruction, model, base_url, tools, address, namespace)
    )
    if json:
        found = None if result is None else asdict(result)
        print_json({"session_id": stream.session_id, "agent_id": stream.agent_id, "compaction": found})
    elif result is None:
        say(f"{stream}: nothing to compact")
    else:
        items = counted(len(result.shadowed_seqs), "message")
        say(f"{stream}: compacted {items}, about {result.shadowed_tokens} tokens, to {result.message_tokens}")


async def _compact(
    store: ReadStore,
    home: str,
    text: str,
    agent: str | None,
    instruction: str | None,
    model: str | None,
    base_url: str | None,
    tools: list[str] | None,
    address: str | None,
    namespace: str | None,
) -> tuple[Stream, CompactionResult | None]:
    from kimi_ray.cli.lookup import find_stream
    from kimi_ray.cli.settings_of import operation_config
    from kimi_ray.cli.swarm_arguments import split_names
    from kimi_ray.cli.swarm_plan import find_model, make_importable
    from kimi_ray.runtime import Runtime

    stream = await find_stream(store, text, agent)
    config = operation_config(home, address, namespace)
    cwd, names = os.getcwd(), split_names(tools)
    make_importable((*(names or ()), model or ""), cwd)
    other: Any = find_model(config, model, base_url) if model is not None or base_url is not None else None
    async with Runtime.connect(config=config) as runtime:
        session = await resume_session(runtime.workspace(cwd), stream.session_id, other, names)
        return stream, await session.agent(stream.agent_id).compact(instruction)
