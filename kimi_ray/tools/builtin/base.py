"""What the built-in tools share: arguments as a model, errors as results."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar, get_args

from kimi_ray.errors import ToolError
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput
from kimi_ray.tools.results import error_output
from kimi_ray.tools.schema import Arguments, compact_schema, validate

A = TypeVar("A", bound=Arguments)


class BuiltinTool(Generic[A]):
    """A tool written as a class: ``name``, ``description``, an ``Arguments`` model, ``touches`` and ``call``."""

    name: str
    description: str
    writes: bool = False
    parameters: dict[str, Any]
    _model: ClassVar[type[Arguments]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        (cls._model,) = get_args(cls.__orig_bases__[0])  # pyright: ignore[reportAttributeAccessIssue,reportUnknownMemberType]
        cls.parameters = compact_schema(cls._model)

    def touches(self, arguments: A) -> Accesses:
        """What a call touches."""
        raise NotImplementedError

    async def call(self, arguments: A, context: ToolContext) -> ToolOutput:
        """Do it; a raised ``ToolError`` becomes an error result."""
        raise NotImplementedError

    def accesses(self, arguments: dict[str, Any]) -> Accesses:
        """See ``Tool.accesses``."""
        return self.touches(self._parsed(arguments))

    def check(self, arguments: Any) -> dict[str, Any]:
        """See ``Tool.check``."""
        return self._parsed(arguments).model_dump(by_alias=True)

    async def run(self, arguments: dict[str, Any], context: ToolContext) -> ToolOutput:
        """See ``Tool.run``."""
        try:
            return await self.call(self._parsed(arguments), context)
        except ToolError as error:
            return error_output(error)

    def _parsed(self, arguments: Any) -> A:
        return validate(self._model, arguments, tool=self.name)  # pyright: ignore[reportReturnType]
