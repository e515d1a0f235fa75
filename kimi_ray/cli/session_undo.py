"""``sessions undo``: an agent's last prompts taken back. Without Ray unless asked."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_ray.cli.options import Address, Home, Json, Namespace
from kimi_ray.cli.printing import counted, one_line, print_json, say
from kimi_ray.cli.session_resume import OwnTools, resume_session
from kimi_ray.cli.sessions import AgentOption, SessionArgument

if TYPE_CHECKING:
    from kimi_ray.features.compaction.undo import UndoResult
    from kimi_ray.store.open import ReadStore
    from kimi_ray.store.seam import Stream

_COLUMNS = 80


def undo(
    session: SessionArgument,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", min=1, help="How many prompts.")] = 1,
    agent: AgentOption = None,
    tools: OwnTools = None,
    json: Json = False,
    home: Home = None,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """Take back the last prompts of an agent (main, unless said) and all that came of them; files stay as they are.

    Its log keeps all of it. With --json: {"session_id", "agent_id", "prompts": [ids],
    "last_prompt": null | the content of the newest prompt that is left}.
    """
    from kimi_ray.cli.lookup import open_home
    from kimi_ray.log import message_text

    store, place = open_home(home, session)
    stream, result = asyncio.run(_undo(store, place, session, agent, count, tools, address, namespace))
    left = None if result.last_prompt is None else list(result.last_prompt)
    if json:
        found = {"prompts": list(result.prompts), "last_prompt": left}
        print_json({"session_id": stream.session_id, "agent_id": stream.agent_id, **found})
        return
    say(f"{stream}: {counted(len(result.prompts), 'prompt')} taken back")
    if left is None:
        say("no prompt is left")
    else:
        say(f"the last is now: {one_line(message_text({'content': left}), _COLUMNS)}")


async def _undo(
    store: ReadStore,
    home: str,
    text: str,
    agent: str | None,
    count: int,
    tools: list[str] | None,
    address: str | None,
    namespace: str | None,
) -> tuple[Stream, UndoResult]:
    from kimi_ray.cli.lookup import find_stream
    from kimi_ray.cli.settings_of import operation_config
    from kimi_ray.cli.swarm_arguments import split_names
    from kimi_ray.cli.swarm_plan import make_importable
    from kimi_ray.runtime import Runtime

    stream = await find_stream(store, text, agent)
    cwd, names = os.getcwd(), split_names(tools)
    make_importable(tuple(names or ()), cwd)
    async with Runtime.connect(config=operation_config(home, address, namespace)) as runtime:
        session = await resume_session(runtime.workspace(cwd), stream.session_id, None, names)
        return stream, await session.agent(stream.agent_id).undo(count)
