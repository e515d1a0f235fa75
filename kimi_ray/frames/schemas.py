"""The columns of the frames: names, types, units. A public contract; docs/frames.md shows the same, a test compares.

A column may be added at the end of a frame; none changes its name, type or meaning within version 1.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

FRAMES_VERSION: Final = 1

FRAMES: Final = ("rows", "steps", "model_calls", "tool_calls", "messages")
"""The frames, in the order in which they are written."""

_ARROW_TYPES: Final = {
    "string": "string",
    "json": "string",
    "int64": "int64",
    "float64": "float64",
    "bool": "bool_",
}


_SIGNED: Final = frozenset({"seed", "exit_code", "last_seq"})
"""Numbers that can be below zero; all others are counts, durations or places."""

_FIRST_MS: Final = -62_135_596_800_000
_LAST_MS: Final = 253_402_300_799_999
"""The years 1 to 9999: what Python's dates and most readers have."""


class Column(NamedTuple):
    """A column of a frame."""

    name: str
    type: str
    """``string``, ``json`` (a string that holds JSON), ``int64``, ``float64``, ``bool``, ``timestamp`` (milliseconds,
    UTC), ``list<int64>``."""
    doc: str


def _table(text: str) -> tuple[Column, ...]:
    rows = (line.split("|", 2) for line in text.splitlines() if line.strip())
    return tuple(Column(name.strip(), type_.strip(), doc.strip()) for name, type_, doc in rows)


_USAGE = """
input_tokens       | int64     | input tokens that were not read from a cache
cached_tokens      | int64     | input tokens read from a cache
cache_write_tokens | int64     | input tokens written to a cache
output_tokens      | int64     | output tokens, reasoning among them
reasoning_tokens   | int64     | of the output
usage_estimated    | bool      | the server told none: the numbers are our estimate
"""

_PLACE = """
session_id         | string    | the session of the log
agent_id           | string    | the agent whose log it is
parent_agent_id    | string    | the agent that started it; null for main
run_id             | string    | the run of the rollout, as rows has it
item_id            | string    | the rollout's item, as rows has it
repeat             | int64     | the rollout's repeat, as rows has it
attempt            | int64     | the rollout's attempt, from 1
copied             | bool      | from the log that this one was forked from, where it happened
"""

_COLUMNS: Final[dict[str, tuple[Column, ...]]] = {
    "rows": _table(
        """
run_id             | string    | the run; null for an agent of no run
item_id            | string    | the item; with run_id and repeat the key of a rollout
index              | int64     | the item's place in the run, from 0
repeat             | int64     | from 0
attempt            | int64     | the number of the last attempt, from 1; 0 when none was started
attempts           | int64     | how many attempts are known
seed               | int64     | of the last attempt
session_id         | string    | the session of the last attempt's log
agent_id           | string    | the agent of the last attempt's log
last_seq           | int64     | the log's last durable event
status             | string    | completed, limit, failed, cancelled, not_started; open where only the log tells of it
stop               | string    | why it ended, as in the row
error_code         | string    | null when there was none
error_class        | string    | what errors are grouped by
error_message      | string    | one sentence
error              | json      | the whole error
item               | json      | all columns of the item, or its text; null where only the log tells of it
text               | string    | the last answer
output             | json      | the checked answer, or what a rollout function returned
scores             | json      | an object: scores by name
"""
        + _USAGE.strip()
        + """
cost_usd           | float64   | US dollars, by the configured price; of the last attempt
total_tokens       | int64     | input, cached, cache-written and output tokens of all attempts
total_cost_usd     | float64   | US dollars, of all attempts
price_date         | string    | the date of the price
turns              | int64     | of the last attempt, as all counts here
steps              | int64     | model requests with the tools they asked for
tool_calls         | int64     | tool calls whose turn came, those that were refused among them
interruptions      | int64     | how often its process was lost under it
queued_ms          | int64     | milliseconds from the start of the run to the first turn
limiter_ms         | int64     | milliseconds of waiting for a place at the model
model_ms           | int64     | milliseconds in model requests
tools_ms           | int64     | milliseconds in tools
store_ms           | int64     | milliseconds of waiting for durability
retry_wait_ms      | int64     | milliseconds between attempts of model requests
wall_ms            | int64     | milliseconds from first to last; the parts need not add up to it
model              | string    | the model by its configured name
served_model       | string    | what the server says it is
fingerprint        | string    | of the server's settings
node_id            | string    | where it ran
profile            | string    | the agent's profile; null where only results.jsonl tells of it
tags               | json      | an object; null where only the log tells of it
metadata           | json      | an object; null where only the log tells of it
source             | string    | results: from results.jsonl; log: from its log
labels             | json      | an object: the agent's, as its log has them; null where only results.jsonl tells of it
"""
    ),
    "steps": _table(
        _PLACE
        + """
turn               | int64     | from 0
step               | int64     | within the turn, from 0
seq                | int64     | of its first event
end_seq            | int64     | of its last event; null when it has no end
started            | timestamp | when it began
ended              | timestamp | when it was over; null when it has no end
state              | string    | ended, interrupted (by the user), recovered (its process was lost), open
model              | string    | the model by its configured name
finish_reason      | string    | of its answer
requests           | int64     | attempts at the model, those that failed among them
retries            | int64     | of these, those that were made again
message_seq        | int64     | of its answer
tool_calls         | int64     | tool calls that the answer asks for
tool_errors        | int64     | of these, those that failed
model_ms           | int64     | milliseconds in model requests; null where the log does not say
tools_ms           | int64     | milliseconds in tools
store_ms           | int64     | milliseconds of waiting for durability
"""
        + _USAGE.strip()
        + """
cost_usd           | float64   | US dollars, by the price of its model; null where tokens or price are not known
"""
    ),
    "model_calls": _table(
        _PLACE
        + """
turn               | int64     | from 0; null for a compaction between turns
step               | int64     | from 0; null for a compaction
request_attempt    | int64     | of the same request, from 1
purpose            | string    | step, or compaction
seq                | int64     | of the response event; where there is none of the answer, or the summary
message_seq        | int64     | of the answer
started            | timestamp | when the request began; null where the log does not say
ended              | timestamp | when its last byte came, or it failed
outcome            | string    | answered, failed, cut (the turn ended meanwhile)
model              | string    | the model by its configured name
request_model      | string    | its name in the request
provider           | string    | the provider in the request
served_model       | string    | what the server says it is
fingerprint        | string    | of the server's settings
response_id        | string    | the server's
request_id         | string    | the server's, from the headers
http_status        | int64     |
finish_reason      | string    | stop, tool_calls, length, ...
raw_finish_reason  | string    | as the server spelt it
total_ms           | int64     | milliseconds from the request to the end of the answer
limiter_ms         | int64     | milliseconds of waiting for a place, before it
connect_ms         | int64     | milliseconds to the first byte of the response
ttft_ms            | int64     | milliseconds to the first token
retry_delay_ms     | int64     | milliseconds of waiting before the next attempt
"""
        + _USAGE.strip()
        + """
error_code         | string    | null when it did not fail
error_class        | string    | what errors are grouped by
error_message      | string    | one sentence
cost_usd           | float64   | US dollars, by the price of its model; null where tokens or price are not known
"""
    ),
    "tool_calls": _table(
        _PLACE
        + """
turn               | int64     | from 0
step               | int64     | from 0
index              | int64     | place among the calls of its answer, from 0
call_id            | string    | unique in its log
name               | string    | of the tool
arguments          | string    | the model's raw text: JSON as a rule
asked_seq          | int64     | of the answer that asks for it
call_seq           | int64     | of its tool/call: its turn came; null when it never did
result_seq         | int64     | of its result
started            | timestamp | when its turn came: its body began, or it was refused
ended              | timestamp | when its result was written
queued_ms          | int64     | milliseconds of waiting for calls before it
run_ms             | int64     | milliseconds of its body
status             | string    | ok, error (also when it was refused), not_started, open (no result yet)
error_code         | string    | of an error result
exit_code          | int64     | of a command
result             | string    | the text that the model was shown
result_bytes       | int64     | bytes of the whole result, UTF-8; more than result has when that is a preview
recovered          | bool      | the result was written for it after its process was lost
"""
    ),
    "messages": _table(
        _PLACE
        + """
turn               | int64     | the turn that was open; null between turns
step               | int64     | the step that was open; null between steps
seq                | int64     | of its event
time               | timestamp | when it was written
message_id         | string    | unique in its log
role               | string    | user, assistant, tool; cut for an undo: it takes away what it replaces
source             | string    | the kind of whoever said it: user, model, tool, task, ...
text               | string    | its text blocks, joined by line feeds
reasoning          | string    | of an assistant message
tool_calls         | json      | of an assistant message: a list of {id, name, arguments}
call_id            | string    | of a tool message
is_error           | bool      | of a tool message
images             | int64     | how many images it has
interrupted        | bool      | cut by a cancel: the text so far
replaces           | list<int64> | seqs of the messages that the model saw until then and sees no more
"""
    ),
}


def columns(frame: str) -> tuple[Column, ...]:
    """The columns of a frame, in order.

    Raises:
        ConfigError: ``frames.unknown``.
    """
    found = _COLUMNS.get(frame)
    if found is None:
        from kimi_ray.errors import ConfigError

        raise ConfigError(
            f"there is no frame {frame!r}",
            code="frames.unknown",
            hint=f"the frames are {', '.join(FRAMES)}",
            details={"frame": frame[:200]},
        )
    return found


def bounds_of(column: Column) -> tuple[int, int] | None:
    """The least and the largest value that a column means anything with; None where its type alone says it."""
    if column.type == "timestamp":
        return _FIRST_MS, _LAST_MS
    if column.type == "int64" and column.name not in _SIGNED:
        return 0, (1 << 63) - 1
    return None


def arrow_type(pa: Any, type_: str) -> Any:
    """The Arrow type of a column's type."""
    if type_ == "timestamp":
        return pa.timestamp("ms", tz="UTC")
    if type_ == "list<int64>":
        return pa.list_(pa.int64())
    return getattr(pa, _ARROW_TYPES[type_])()


def arrow_schema(pa: Any, frame: str) -> Any:
    """The Arrow schema of a frame, with its version as metadata."""
    fields = [pa.field(column.name, arrow_type(pa, column.type)) for column in columns(frame)]
    return pa.schema(fields, metadata={"kimi_ray.frame": frame, "kimi_ray.frames_version": str(FRAMES_VERSION)})
