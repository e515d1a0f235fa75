"""The command ``kimi-ray``: what a person or a script types, and what it sees.

What may enter: reading flags and files, calling the public API and the pure rules of runs, showing results, exit
codes. What may not: decisions about agents, sessions or runs; whoever needs one makes it in the room it belongs to,
so that the API has it too. Commands that only read never import Ray, and ``--help`` imports nothing heavy: each
command imports what it needs when it runs.
"""

from kimi_ray.cli.app import main

__all__ = ["main"]
