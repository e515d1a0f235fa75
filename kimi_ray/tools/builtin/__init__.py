"""The tools that every agent can have, one module each.

A module belongs here when the tool works through the ``Environment`` alone: no ``os``, no ``subprocess``, so that it
works in any place an agent works in. Errors are written for the model that reads them.
"""

from kimi_ray.tools.builtin.bash import Bash
from kimi_ray.tools.builtin.edit import Edit
from kimi_ray.tools.builtin.glob import Glob
from kimi_ray.tools.builtin.grep import Grep
from kimi_ray.tools.builtin.read import Read
from kimi_ray.tools.builtin.write import Write

__all__ = ["Bash", "Edit", "Glob", "Grep", "Read", "Write"]
