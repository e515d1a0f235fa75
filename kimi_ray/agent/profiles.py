"""The built-in profiles: kinds of agents by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from kimi_ray.errors import ConfigError
from kimi_ray.llm.reachable import NO_MODELS, ReachableModels
from kimi_ray.settings import Profile

_WORK = (
    "You work in a directory on behalf of a user. Use your tools to look before you claim, and prefer small, checked "
    "steps. Paths are relative to the working directory. When you are done, answer in plain text: what you found or "
    "changed, and how you know."
)

_FILES = ("Read", "Write", "Edit", "Glob", "Grep", "Bash")
_FOLLOWING = ("TodoList", "TaskList", "TaskOutput", "TaskStop", "WaitFor")

AGENT = Profile(
    name="agent",
    description="The main agent: reads, writes, runs commands, and hands tasks to subagents.",
    system_prompt=f"You are an agent. {_WORK}",
    tools=(*_FILES, *_FOLLOWING, "Agent", "AgentSwarm", "mcp__*"),
    subagents=("coder", "explore", "plan"),
)
CODER = Profile(
    name="coder",
    description="A subagent that changes code and checks it.",
    system_prompt=f"You are a software engineer. {_WORK} Run the tests that your change concerns before you answer.",
    tools=(*_FILES, *_FOLLOWING, "mcp__*"),
)
EXPLORE = Profile(
    name="explore",
    description="A subagent that only looks: files and commands that read.",
    system_prompt=f"You explore a directory and report. {_WORK} You change nothing.",
    tools=("Read", "Glob", "Grep", "Bash"),
)
PLAN = Profile(
    name="plan",
    description="A subagent that reads, thinks and answers with a plan; it runs no commands.",
    system_prompt=f"You are a software architect. {_WORK} You change nothing: you answer with a plan of small steps,"
    " each with the files that it concerns and how to see that it is done.",
    tools=("Read", "Glob", "Grep"),
)
BARE = Profile(name="bare", description="No tools, no system prompt: the prompt and nothing else.")

BUILTIN: dict[str, Profile] = {profile.name: profile for profile in (AGENT, CODER, EXPLORE, PLAN, BARE)}


def models_for(profile: Profile, models: ReachableModels) -> ReachableModels:
    """What an agent of this profile is told of the models of others: nothing, unless it starts any itself."""
    # A tool of a Feature may start agents too, if the profile names whom.
    others = {tool for tool in profile.tools if not tool.startswith("mcp__")}.difference(_FILES, _FOLLOWING)
    starts = bool(others) and (bool(profile.subagents) or not others.isdisjoint(("Agent", "AgentSwarm")))
    return models if starts else NO_MODELS


def resolve_profile(profile: str | Profile, more: Mapping[str, Profile] | None = None) -> Profile:
    """A profile by name, or the object as it is.

    Args:
        profile: Which.
        more: Profiles besides the built-in ones: those of Features.

    Raises:
        ConfigError: ``profile.unknown``.
    """
    if isinstance(profile, Profile):
        return profile
    named = {**BUILTIN, **(more or {})}
    found = named.get(profile)
    if found is None:
        near = difflib.get_close_matches(profile, named, n=1)
        known = ", ".join(named)
        raise ConfigError(
            f"there is no profile {profile!r}",
            code="profile.unknown",
            hint=f"did you mean {near[0]}? Known are {known}" if near else f"known are {known}",
        )
    return found
