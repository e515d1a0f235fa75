"""``run``: one prompt, one agent, in this process (or on Ray with --address)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_ray.cli import exits
from kimi_ray.cli.options import Address, BaseUrl, Home, Json, Model, Namespace
from kimi_ray.cli.printing import counted, one_line, print_json, safe, tell
from kimi_ray.cli.session_resume import resume_session
from kimi_ray.cli.settings_of import IN_PROCESS
from kimi_ray.errors import ConfigError
from kimi_ray.ids import MAIN

if TYPE_CHECKING:
    from kimi_ray.agent.specs import PromptResult
    from kimi_ray.events import SessionEvent
    from kimi_ray.session_handle import Session

PROFILE = "agent"
_LAST_EVENTS_S = 5.0
_TOOL_COLUMNS = 120
_NOTE_COLUMNS = 400


def run(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT|@FILE", help="What the agent is to do.")],
    model: Model = None,
    base_url: BaseUrl = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="NAME", help="agent, coder, explore, plan, bare, or of a feature. [agent]"),
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", metavar="TEXT|@FILE", help="In place of the profile's.")
    ] = None,
    tools: Annotated[
        list[str] | None,
        typer.Option(
            "--tools",
            metavar="NAMES",
            help="Read,Grep,package.module:function ...; none. With --session: those of your own that it was made "
            "with, as its log cannot hold them. [the profile's]",
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", metavar="X", help="For this prompt.")] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option("--max-output-tokens", metavar="N", help="Of each model request.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Sent to the model, for this prompt.")] = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", metavar="N", help="Model requests.")] = None,
    max_tool_calls: Annotated[int | None, typer.Option("--max-tool-calls", metavar="N")] = None,
    max_total_tokens: Annotated[int | None, typer.Option("--max-total-tokens", metavar="N")] = None,
    max_cost_usd: Annotated[float | None, typer.Option("--max-cost-usd", metavar="X")] = None,
    time_s: Annotated[float | None, typer.Option("--time-s", metavar="S", help="Wall seconds.")] = None,
    workdir: Annotated[
        str | None,
        typer.Option(
            "--workdir",
            metavar="SPEC",
            help="none, shared[:DIR], copy[:DIR], git:REPO@REF, factory:MODULE:FUNCTION. [the current directory]",
        ),
    ] = None,
    permission_mode: Annotated[
        str | None,
        typer.Option(
            "--permission-mode",
            metavar="MODE",
            help="Which tool calls run unasked: manual, auto or yolo. What needs a yes is denied, at once or after "
            "permission_wait_s: only a Python program that holds the session can answer. [the setting]",
        ),
    ] = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Go on with this session (@last, an id or its end).")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="The session's title.")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="KEY=VALUE", help="On the session.")] = None,
    json: Json = False,
    home: Home = None,
    address: Address = None,
    namespace: Namespace = None,
) -> None:
    """Give one agent one prompt. Its answer goes to stdout, what it does to stderr.

    Runs in this process unless --address names a cluster (or `local` starts a local Ray). With --json: {"session_id",
    "state", "stop", "text", "turn", "steps", "tool_calls", "usage", "error", "home", "log"}.
    """
    from kimi_ray.cli.swarm_arguments import split_names
    from kimi_ray.cli.swarm_plan import text_or_file

    if session is not None:
        made_with = {
            "--profile": profile,
            "--system-prompt": system_prompt,
            "--workdir": workdir,
            "--title": title,
            "--tag": tag,
        }
        _refuse_for_a_session([flag for flag, value in made_with.items() if value is not None])
    names, text = split_names(tools), text_or_file(prompt)
    if not (text or "").strip():
        raise ConfigError("the prompt is empty", code="prompt.empty", hint="give it some text")
    said: dict[str, Any] = {
        "prompt": text,
        "model": model,
        "base_url": base_url,
        "profile": profile or PROFILE,
        "system_prompt": text_or_file(system_prompt),
        "tools": names,
        "sampling": {"temperature": temperature, "max_output_tokens": max_output_tokens, "seed": seed},
        "limits": {
            "max_steps": max_steps,
            "max_tool_calls": max_tool_calls,
            "max_total_tokens": max_total_tokens,
            "max_cost_usd": max_cost_usd,
            "time_s": time_s,
        },
        "workdir": workdir,
        "permission_mode": permission_mode,
        "session": session,
        "title": title,
        "tag": tag,
    }
    shown = Shown(quiet=json)
    result, session_id, where = asyncio.run(_run(said, home, address, namespace, shown))
    if json:
        print_json(
            {
                "session_id": session_id,
                "state": result.state,
                "stop": result.stop,
                "text": result.text,
                "turn": result.turn,
                "steps": result.steps,
                "tool_calls": result.tool_calls,
                "usage": result.usage.model_dump(mode="json"),
                "error": result.error,
                **where,
            }
        )
    else:
        _print_end(result, session_id, shown)
    if result.state == "cancelled":
        raise typer.Exit(exits.INTERRUPTED)
    if result.state != "completed":
        raise typer.Exit(exits.FAILED)


def _refuse_for_a_session(flags: list[str]) -> None:
    if flags:
        raise ConfigError(
            f"{', '.join(flags)} cannot be said of a session that exists",
            code="request.conflict",
            hint="it keeps the profile, system prompt, directory, title and tags that it was made with",
        )


async def _run(
    said: dict[str, Any], home: str | None, address: str | None, namespace: str | None, shown: Shown
) -> tuple[PromptResult, str, dict[str, Any]]:
    from kimi_ray.cli.settings_of import runtime_config
    from kimi_ray.cli.swarm_arguments import limits_of, parse_tags, sampling_of
    from kimi_ray.cli.swarm_course import check_home, check_model
    from kimi_ray.cli.swarm_plan import check_price, find_model, find_workdir, make_importable
    from kimi_ray.hosts.features import load_features
    from kimi_ray.runtime import Runtime
    from kimi_ray.session_handle import bind_profile
    from kimi_ray.store.open import open_store
    from kimi_ray.store.seam import Stream

    config = runtime_config(home, None if address == "local" else address or IN_PROCESS, namespace)
    if address == "local":
        config = config.model_copy(update={"address": None})
    cwd = os.getcwd()
    make_importable((*(said["tools"] or ()), said["model"] or ""), cwd)
    model = None
    if said["session"] is None or said["model"] is not None:
        model = find_model(config, said["model"], said["base_url"])
    limits, sampling = limits_of(said["limits"]), sampling_of(said["sampling"])
    if model is not None:
        check_price(model, limits)
    workdir, tags = find_workdir(said["workdir"], cwd), parse_tags(said["tag"] or [])
    bind_profile(said["profile"], said["system_prompt"], said["tools"], load_features(config))
    session_id, from_seq = None, 0
    if said["session"] is not None:
        from kimi_ray.cli.logs_read import next_seq
        from kimi_ray.cli.lookup import find_session

        store = open_store(config.home)
        session_id = await find_session(store, said["session"])
        from_seq = await next_seq(store, Stream(session_id, MAIN))
    await check_home(config)
    if model is not None:
        await check_model(model)
    async with Runtime.connect(config=config) as runtime:
        workspace = runtime.workspace(cwd)
        if session_id is not None:
            session = await resume_session(workspace, session_id, model, said["tools"])
            if said["permission_mode"] is not None:
                await session.main.set_permission_mode(said["permission_mode"])
        else:
            session = await workspace.create_session(
                title=said["title"],
                profile=said["profile"],
                model=model,
                system_prompt=said["system_prompt"],
                tools=said["tools"],
                workdir=workdir,
                tags=tags,
                permission_mode=said["permission_mode"],
            )
        handle = await session.main.submit(said["prompt"], sampling=sampling, limits=limits)
        shower = asyncio.create_task(_show(session, from_seq, handle.id, shown))
        try:
            result = await handle.result()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_EVENTS_S):
                    await asyncio.shield(shower)
        except asyncio.CancelledError:
            tell(f"session {session.id}")
            raise
        finally:
            shower.cancel()
            await asyncio.gather(shower, return_exceptions=True)
        found = session.id
    log = await open_store(config.home).locate(Stream(found, MAIN))
    return result, found, {"home": config.home, "log": log}


async def _show(session: Session, from_seq: int, prompt_id: str, shown: Shown) -> None:
    async for event in session.main.events(from_seq, follow=True):
        shown.event(event)
        if event.type == "prompt/completed" and event.data["prompt_id"] == prompt_id:
            return


class Shown:
    """What an agent does, as it does it: its text on stdout, its tools on stderr."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._printed = ""
        self._at_line_start = True
        self._calls: dict[str, str] = {}
        """The tools of the calls without a result, by the id of the call."""
        self._called = ""
        """The call whose line is the last that was printed."""
        self._summary: Any = None
        """Of the compaction that is under way, once it is written."""
        self.summaries = [0, 0]
        """The tokens that summaries took so far: read, written."""

    def event(self, event: SessionEvent) -> None:
        """One more event."""
        if self._quiet:
            return
        data: Any = event.data
        if event.type.startswith("compaction/"):
            self._compaction(event.type, data)
            return
        if event.type == "assistant/chunk" and data["chunk"].get("type") == "text-delta":
            if sys.stdout.isatty():
                self._write(str(data["chunk"]["text"]))
                self._printed += str(data["chunk"]["text"])
        elif event.type == "assistant/message":
            from kimi_ray.log import message_text

            text = message_text(data["message"])
            self._write(text.removeprefix(self._printed) if text.startswith(self._printed) else text)
            self._printed = ""
            self._end_line()
        elif event.type == "tool/call":
            called = f"{data['name']} {data['arguments']}"
            self._calls[data["call_id"]] = data["name"]
            self._tell(one_line(called, _TOOL_COLUMNS), call_id=data["call_id"])
        elif event.type == "tool/result":
            self._result(data)
        elif event.type == "permission/asked":
            about = f"{data['name']} {data['about']}"
            self._tell(f"waiting {data['wait_s']:g} s for an answer: {one_line(about, _TOOL_COLUMNS)}")
        elif event.type == "note/added":
            self._tell(f"note: {one_line(data['text'], _NOTE_COLUMNS)}")
        elif event.type == "llm/retry":
            self._printed = ""
            self._tell(f"attempt {data['attempt']} failed ({data['error'].get('code')}), next in {data['delay_ms']} ms")

    def _compaction(self, type_: str, data: Any) -> None:
        """The conversation is made short, which may take as long as the longest answer."""
        if type_ == "compaction/start":
            self._summary = None
            self._tell(f"compacting the conversation, about {data.get('tokens', '?')} tokens ({data['trigger']})")
        elif type_ == "compaction/response":
            usage: Any = data.get("usage") or {}
            self.summaries[0] += sum(usage.get(key, 0) for key in ("input", "cached", "cache_write"))
            self.summaries[1] += usage.get("output", 0)
        elif type_ == "compaction/summary":
            self._summary = data
        elif type_ == "compaction/end":
            error = data.get("error")
            if error:
                self._tell(f"  not compacted: {one_line(str(error.get('message')), _NOTE_COLUMNS)}")
                if error.get("hint"):
                    self._tell(f"  hint: {one_line(str(error['hint']), _NOTE_COLUMNS)}")
            elif self._summary is not None:
                items = counted(len(self._summary["shadowed_seqs"]), "message")
                self._tell(f"  compacted {items}, about {self._summary['shadowed_tokens']} tokens by estimate")

    def _result(self, data: Any) -> None:
        """A call that went wrong: under its line, or with its tool's name when other lines came between."""
        call_id = data["message"]["source"]["call_id"]
        name = self._calls.pop(call_id, "")
        if not data.get("error"):
            return
        from kimi_ray.cli.event_lines import blocks_text

        said = blocks_text(data["message"]["content"]).strip().partition("\n")[0]
        how = "denied" if data["error"].get("code") == "tool.denied" else "failed"
        whose = "" if call_id == self._called else f"{name} "
        self._tell(f"  {whose}{how}: {one_line(said, _TOOL_COLUMNS)}", call_id=call_id if not whose else "")

    def _tell(self, line: str, *, call_id: str = "") -> None:
        self._called = call_id
        tell(f"  {line}")

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(safe(text))
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._at_line_start = True


def _print_end(result: PromptResult, session_id: str, shown: Shown) -> None:
    usage = result.usage
    if result.error is not None:
        tell(f"error: {safe(str(result.error.get('message')))}")
        tell(f"code: {result.error.get('code')}")
        if result.error.get("hint"):
            tell(f"hint: {safe(str(result.error['hint']))}")
    if result.stop == "repeated":
        tell("the turn was ended: the same tool call was made again and again")
    read, written = shown.summaries
    summaries = f" (of these {read} in, {written} out for summaries)" if read or written else ""
    tell(
        f"{result.stop or result.state}: {counted(result.steps, 'step')}, {counted(result.tool_calls, 'tool call')}, "
        f"{usage.input + usage.cached + usage.cache_write} tokens in, {usage.output} out{summaries}"
    )
    tell(f"session {session_id}  (kimi-ray sessions tail {session_id[-10:]})")
