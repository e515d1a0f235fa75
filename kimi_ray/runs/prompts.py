"""From a prompt and an item to the text that an agent gets: one pass, in which items are data and never template.

``{{column}}`` is replaced by that column, ``{{item}}`` by the whole item (a bare string as it is, columns as JSON; a
column named ``item`` comes first). What is put in is not looked at again, so an item may hold braces of any kind.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import cast

from kimi_ray.cancelling import ends_this_task
from kimi_ray.errors import RunError
from kimi_ray.runs.filters import as_text
from kimi_ray.runs.items import BARE_COLUMN, RunItem, unknown_column
from kimi_ray.settings import Item, Workdir

Prompt = str | Callable[[Item], str]
"""A template, or a function of the item."""

_PLACEHOLDER = re.compile(r"\{\{([^{}]+)\}\}")


def placeholders(template: str) -> tuple[str, ...]:
    """The columns that a template names, in order, repeats included."""
    return tuple(name for found in _PLACEHOLDER.findall(template) if (name := found.strip()))


def fill(template: str, item: RunItem, *, where: str = "the prompt") -> str:
    """The template with its placeholders replaced, in one pass.

    Raises:
        RunError: ``items.unknown_column`` naming the column, the item's place and its columns.
    """
    columns = item.columns

    def value(found: re.Match[str]) -> str:
        name = found[1].strip()
        if not name:
            return found[0]
        if name in columns:
            return as_text(columns[name])
        if name == BARE_COLUMN:
            return as_text(item.item.data)
        raise unknown_column(name, columns, item.source or f"item {item.id}", where=f", which {where} names")

    return _PLACEHOLDER.sub(value, template)


def render_prompt(prompt: Prompt, item: RunItem) -> str:
    """The text that the agent of an item gets. An ``Item.prompt`` wins and is taken as it is.

    Raises:
        RunError: ``items.unknown_column``; ``swarm.prompt_failed`` when a prompt function raises or returns something
            that is not text.
    """
    if item.item.prompt is not None:
        return item.item.prompt
    if isinstance(prompt, str):
        return fill(prompt, item)
    try:
        text = cast("object", prompt(item.item))
    except BaseException as error:
        if ends_this_task(error) or isinstance(error, KeyboardInterrupt):
            raise
        raise RunError(
            f"the prompt function failed on item {item.id}: {type(error).__name__}: {error}",
            code="swarm.prompt_failed",
            hint="it is called with each Item and returns its prompt",
            details={"item_id": item.id, "exception": type(error).__name__},
        ) from error
    if not isinstance(text, str):
        raise RunError(
            f"the prompt function returned {type(text).__name__} for item {item.id}",
            code="swarm.prompt_failed",
            hint="it must return a str",
            details={"item_id": item.id},
        )
    return text


def render_workdir(workdir: Workdir | None, item: RunItem) -> Workdir | None:
    """The working directory of an item: its own as it is, else the run's with its placeholders replaced.

    Raises:
        RunError: ``items.unknown_column``.
    """
    if item.item.workdir is not None:
        return item.item.workdir
    if workdir is None:
        return None
    return workdir.model_copy(
        update={
            "path": None if workdir.path is None else fill(workdir.path, item, where="the workdir"),
            "ref": None if workdir.ref is None else fill(workdir.ref, item, where="the workdir"),
        }
    )


def checked_prompt(prompt: Prompt | None, *, needed: bool = True) -> Prompt:
    """The prompt of a swarm; where it is not ``needed`` (a rollout function decides), None is the item itself.

    Raises:
        RunError: ``swarm.no_prompt``.
    """
    if prompt is None and needed:
        raise RunError(
            "the swarm has no prompt",
            code="swarm.no_prompt",
            hint="give a template with {{item}}, or a function of the item; only beside a rollout function it may be"
            " left out",
        )
    return "{{item}}" if prompt is None else prompt


def check_prompt(
    prompt: Prompt, items: Iterable[RunItem], workdir: Workdir | None = None, *, needs_item: bool = True
) -> None:
    """Find before the start what would make every rollout the same (with ``needs_item``), or a later one fail.

    Raises:
        RunError: ``swarm.no_placeholder`` when neither the prompt nor the workdir nor any item's own prompt or workdir
            depends on the item; ``items.unknown_column`` for the first item that lacks a named column.
    """
    named = set(placeholders(prompt)) if isinstance(prompt, str) else set[str]()
    in_workdir = {
        name for text in (workdir and workdir.path, workdir and workdir.ref) for name in placeholders(text or "")
    }
    depends = not needs_item or not isinstance(prompt, str) or bool(named) or bool(in_workdir)
    for item in items:
        own = item.item
        depends = depends or own.prompt is not None or own.workdir is not None
        wanted = (set[str]() if own.prompt is not None else named) | (
            set[str]() if own.workdir is not None else in_workdir
        )
        for name in sorted(wanted - {BARE_COLUMN} - item.columns.keys()):
            where = "the prompt" if name in named else "the workdir"
            raise unknown_column(name, item.columns, item.source or f"item {item.id}", where=f", which {where} names")
    if not depends:
        raise RunError(
            "the prompt does not use the item, so every agent would get the same text",
            code="swarm.no_placeholder",
            hint="put {{item}} or a {{column}} into the prompt or the workdir, or give items their own prompt",
        )


def prompt_hash(prompt: Prompt) -> str:
    """The SHA-256 of the template, or of a prompt function's source (its name where there is no source)."""
    if isinstance(prompt, str):
        text = prompt
    else:
        try:
            text = inspect.getsource(prompt)
        except (OSError, TypeError):
            text = f"{getattr(prompt, '__module__', '')}.{getattr(prompt, '__qualname__', type(prompt).__qualname__)}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
