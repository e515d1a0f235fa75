"""TodoList: the list by which an agent keeps track of longer work, as a Feature.

The list is in the log (``todo/write``, the whole list each time) and nowhere else, so it is there again after a resume
and goes along with a fork.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kimi_ray.agent.journal import Journal
from kimi_ray.scopes import Feature
from kimi_ray.tools.builtin.base import BuiltinTool
from kimi_ray.tools.contract import Access, Accesses, ToolContext, ToolOutput
from kimi_ray.tools.schema import Arguments

MAX_TODOS = 200
MAX_TITLE_CHARS = 500
_MARKS = {"pending": "[ ]", "in_progress": "[~]", "done": "[x]"}


class Todo(Arguments):
    """One thing to do."""

    title: str = Field(min_length=1, max_length=MAX_TITLE_CHARS)
    status: Literal["pending", "in_progress", "done"]


class TodoListArguments(Arguments):
    """What TodoList takes."""

    todos: list[Todo] | None = Field(
        default=None, max_length=MAX_TODOS, description="The whole new list ([] clears it); leave it out to read"
    )


class TodoList(BuiltinTool[TodoListArguments]):
    """Reads the list, or writes the whole of it."""

    name = "TodoList"
    description = (
        "Your list of things to do, for work of several steps. With todos it becomes that list (give all of it, each "
        "with its status); without, it is shown. Keep one thing in_progress, and mark what is done at once."
    )

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def touches(self, arguments: TodoListArguments) -> Accesses:
        """See ``BuiltinTool.touches``."""
        # no file, but calls of one answer must find the list as the ones before have left it
        return Accesses((Access("read" if arguments.todos is None else "write", "/\0todos"),))

    async def call(self, arguments: TodoListArguments, context: ToolContext) -> ToolOutput:
        """See ``BuiltinTool.call``."""
        if arguments.todos is not None:
            self._journal.append("todo/write", {"todos": [todo.model_dump() for todo in arguments.todos]})
        todos = self._journal.fold.todos or []
        if not todos:
            return ToolOutput("The todo list is empty." if arguments.todos is None else "The todo list was cleared.")
        lines = [f"{_MARKS[todo['status']]} {todo['title']}" for todo in todos]
        head = "The todo list:" if arguments.todos is None else "The todo list is now:"
        return ToolOutput("\n".join([head, *lines]), meta={"todos": len(todos)})


class TodoFeature(Feature):
    """Brings the tool TodoList."""

    name = "todo"

    def tools(self) -> dict[str, type]:
        """See ``Feature``."""
        return {"TodoList": TodoList}


__all__ = ["Todo", "TodoFeature", "TodoList"]
