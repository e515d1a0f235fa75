"""Tables for analysis: the rows of runs, and the steps, model calls, tool calls and messages of logs, as Arrow tables.

Everything here only reads, without Ray and beside whoever writes: run directories, homes of every backend, archives of
sessions. ``schemas`` is the contract (columns, types, units), ``sources`` finds what a name means, ``reading`` walks
logs in bounded memory, the folds (``steps``, ``calls``, ``conversation``, ``rollouts``) make rows of events, ``tables``
and ``parquet`` put them together. What may enter: what turns stored facts into columns. What may not: anything that
runs agents, and anything that writes into a home.
"""

from kimi_ray.frames.parquet import FramesReport, write_parquet
from kimi_ray.frames.schemas import FRAMES, Column, columns
from kimi_ray.frames.tables import OnDamage, messages, model_calls, problems, rows, steps, tables, tool_calls

__all__ = [
    "FRAMES",
    "Column",
    "FramesReport",
    "OnDamage",
    "columns",
    "messages",
    "model_calls",
    "problems",
    "rows",
    "steps",
    "tables",
    "tool_calls",
    "write_parquet",
]
