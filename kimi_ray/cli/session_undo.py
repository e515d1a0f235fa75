"""``sessions undo``: an agent's last prompts taken back. Without Ray unless asked."""

from __future__ import annotations

from typing import Annotated

import typer

from kimi_ray.cli.options import Address, Home, Json, Namespace
from kimi_ray.cli.printing import counted, one_line, print_json, say
from kimi_ray.cli.session_context import ContextCommand, StoredContext
from kimi_ray.cli.session_resume import OwnTools
from kimi_ray.cli.sessions import AgentOption, SessionArgument

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

    Its log keeps all of it. Where there are fewer prompts the session is not opened. With --json:
    {"session_id", "agent_id", "prompts": [ids], "last_prompt": null | the content of the newest prompt that is left}.
    """
    from kimi_ray.log import message_text

    def is_needless(context: StoredContext) -> bool:
        from kimi_ray.features.compaction import undo_span_of

        undo_span_of(context.surface, count)  # raises what the undo would
        return False

    stream, result = ContextCommand(
        session, agent, home, address, namespace, tools, act=lambda found: found.undo(count), is_needless=is_needless
    ).run()
    assert result is not None
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
