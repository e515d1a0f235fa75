"""What the model may ask of ``AgentSwarm``, and the tasks that come of it: resumed subagents first, then the items."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from kimi_ray.errors import ToolError
from kimi_ray.features.swarm.scheduler import SwarmTask
from kimi_ray.tools.schema import Arguments

# K 8.5
MAX_SUBAGENTS = 128
MAX_PROMPT_CHARS = 1_000_000
"""Of one subagent; a template full of placeholders multiplies its item."""
PLACEHOLDER = "{{item}}"
RESUMED = "resume"
"""What stands for the profile in the description of a resumed subagent's task."""

_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class AgentSwarmArguments(Arguments):
    """What AgentSwarm takes."""

    description: _Text = Field(description="What the swarm is for, in 3 to 5 words")
    subagent_type: str | None = Field(
        default=None,
        description="Kind of the subagents made for items, by default coder; resumed ones stay what they are",
    )
    prompt_template: str | None = Field(
        default=None, description=f"Prompt of each new subagent; every {PLACEHOLDER} in it becomes the item"
    )
    items: tuple[_Text, ...] | None = Field(
        default=None,
        description=f"A new subagent for each; at least 2, unless some are resumed; at most {MAX_SUBAGENTS}",
        json_schema_extra={"maxItems": MAX_SUBAGENTS},
    )
    fork: bool | None = Field(default=None, description="Let each new subagent begin with all of this conversation")
    resume_agent_ids: dict[str, _Text] | None = Field(
        default=None,
        description="Subagents to go on with: by agent_id the prompt for each, often just `continue`",
    )
    model: str | None = Field(default=None, description="Model of the new subagents, by default this agent's")

    @property
    def profile_name(self) -> str | None:
        """The profile asked for; an empty text is none."""
        return (self.subagent_type or "").strip() or None

    @property
    def model_name(self) -> str | None:
        """The model asked for; an empty text is none."""
        return (self.model or "").strip() or None

    @property
    def things(self) -> tuple[str, ...]:
        """The items."""
        return self.items or ()

    @property
    def resumed(self) -> tuple[str, ...]:
        """The agents to go on with, in the order given."""
        return tuple(agent_id.strip() for agent_id in self.resume_agent_ids or ())


def check_shape(arguments: AgentSwarmArguments, *, own_profile: str, own_models: Container[str]) -> None:
    """Refuse what cannot become a swarm, before anything is started.

    Args:
        arguments: What the model asked for.
        own_profile: What the caller is: a fork may be called that.
        own_models: The names of the caller's model.

    Raises:
        ToolError: ``validation.failed``.
    """
    items, resumed = len(arguments.things), arguments.resumed
    if arguments.fork and resumed:
        raise _refused("fork cannot be combined with resume_agent_ids: a resumed subagent has a history of its own.")
    if arguments.fork and arguments.profile_name not in (None, own_profile):
        raise _refused("fork cannot be combined with another subagent_type: a fork is what this agent is.")
    if arguments.fork and arguments.model_name is not None and arguments.model_name not in own_models:
        raise _refused("fork cannot be combined with another model: a fork speaks to this agent's.")
    if not resumed and items < 2:
        raise _refused("AgentSwarm requires at least 2 items unless resume_agent_ids is provided.")
    total = items + len(resumed)
    if total > MAX_SUBAGENTS:
        raise _refused(f"AgentSwarm supports at most {MAX_SUBAGENTS} subagents.", total=total, max=MAX_SUBAGENTS)
    if len(set(resumed)) < len(resumed) or "" in resumed:
        raise _refused("resume_agent_ids must name each subagent once.")
    template = (arguments.prompt_template or "").strip()
    if items and not template:
        raise _refused("prompt_template is required when items are provided.")
    if template and PLACEHOLDER not in template:
        raise _refused(f"prompt_template must include the {PLACEHOLDER} placeholder.", placeholder=PLACEHOLDER)
    places = template.count(PLACEHOLDER)
    longest = len(template) + places * (max(map(len, arguments.things), default=0) - len(PLACEHOLDER))
    if longest > MAX_PROMPT_CHARS:
        raise _refused(
            f"The prompt of a subagent would have {longest} characters, more than {MAX_PROMPT_CHARS}: name each item "
            "once, and let the subagents read what is long.",
            chars=longest,
            max=MAX_PROMPT_CHARS,
        )
    seen: dict[str, int] = {}
    for number, item in enumerate(arguments.things, start=1):
        first = seen.setdefault(template.replace(PLACEHOLDER, item), number)
        if first != number:
            raise _refused(
                f"Duplicate subagent prompts from items {first} and {number}. AgentSwarm requires distinct subagents.",
                previous_index=first,
                index=number,
            )


def swarm_tasks(
    arguments: AgentSwarmArguments, *, profile: str, resumed_items: Mapping[str, str | None]
) -> list[SwarmTask]:
    """The tasks of checked arguments.

    Args:
        arguments: They passed ``check_shape``.
        profile: What the new subagents are.
        resumed_items: By agent id, the item that a resumed subagent was made for.
    """
    template = (arguments.prompt_template or "").strip()
    tasks = [
        SwarmTask(
            index,
            prompt,
            f"{arguments.description} #{index} ({RESUMED})",
            item=resumed_items.get(agent_id),
            resume=agent_id,
        )
        for index, (agent_id, prompt) in enumerate(
            zip(arguments.resumed, (arguments.resume_agent_ids or {}).values(), strict=True), start=1
        )
    ]
    for index, item in enumerate(arguments.things, start=len(tasks) + 1):
        prompt = template.replace(PLACEHOLDER, item)
        tasks.append(SwarmTask(index, prompt, f"{arguments.description} #{index} ({profile})", item=item))
    return tasks


def _refused(message: str, **details: Any) -> ToolError:
    return ToolError(message, code="validation.failed", details=details)
