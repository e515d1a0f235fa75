"""How a user's tools are sealed for their way through a cluster: with Ray's own pickler, which takes code by value
where no module of it can be imported. Switched on in every process that may send some.
"""

from __future__ import annotations

import copyreg
from typing import Any

from ray import cloudpickle as typed_cloudpickle

from kimi_ray.tools.carried import CarriedTool, arrived

cloudpickle: Any = typed_cloudpickle
"""Ray's own annotations do not export its functions."""


def _seal(tool: CarriedTool) -> tuple[Any, tuple[Any, ...]]:
    return arrived, (tool.name, tool.writes, tool.digest, tool.sealed(cloudpickle.dumps))


def seal_with_ray() -> None:
    """From now on tools that leave this process are sealed so."""
    copyreg.pickle(CarriedTool, _seal)
