"""The first document of a fork: what it takes from its source's, and what the caller says (K 4.7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from kimi_ray.session.document_value import MAX_TITLE_CHARS, merged_metadata, new_document, turn_reason, with_agents
from kimi_ray.session.fork_plan import ForkPlan

NOT_INHERITED = "goal"
"""The key of the caller's metadata that ends with the session it was set for."""


def fork_document(
    plan: ForkPlan,
    source: Mapping[str, Any],
    session_id: str,
    *,
    workspace_id: str,
    cwd: str | None,
    group: str,
    index: int,
    title: str | None = None,
    child: bool = False,
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The document of one fork.

    Args:
        plan: What is copied.
        source: The source's document.
        session_id: The fork.
        workspace_id: Of the fork.
        cwd: Of the fork.
        group: Names the forks that were made together.
        index: The fork's number among them, from 0.
        title: The caller's; None makes one of the source's, which a generated title replaces, and no prompt.
        child: Whether it is a child of its source, and listed under it.
        metadata: Over the source's.
        tags: Over the source's.

    Raises:
        SessionError: ``session.bad_metadata``.
    """
    custom = _over(source.get("custom"), {**(metadata or {}), NOT_INHERITED: None})
    if child:
        custom |= {"parent_session_id": plan.source.session_id, "child_session_kind": "child"}
    value = new_document(
        session_id,
        workspace_id=workspace_id,
        cwd=cwd,
        now=plan.created_at,
        title=title,
        forked_from=plan.forked_from,
    )
    # What the source has is no reason to refuse its forks, however large: only what is put on top of it is checked.
    value["custom"], value["tags"] = custom, _over(source.get("tags"), tags or {})
    if title is None:
        named = f"{'Child' if child else 'Fork'}: {source.get('title') or plan.source.session_id}"
        value["title"], value["title_kind"] = named[:MAX_TITLE_CHARS], "replaceable"
    value["updated_at"] = int(source.get("updated_at") or plan.created_at)
    value["fork_group"], value["fork_index"] = group, index
    if plan.main.prompt is not None:
        value["last_prompt"] = plan.main.prompt
    if plan.main.reason is not None:
        value["last_turn_reason"] = turn_reason(plan.main.reason)
    left_out = plan.left_out_data()
    if left_out is not None:
        value["fork_left_out"] = left_out
    with_agents(value, list(plan.agents))
    return value


def _over(inherited: object, given: Mapping[str, Any]) -> dict[str, Any]:
    before: dict[str, Any] = dict(cast("Mapping[str, Any]", inherited)) if isinstance(inherited, Mapping) else {}
    return merged_metadata(before, given)
