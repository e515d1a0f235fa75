"""What kimi-ray is made of, from the code: events, Features, services, state, tools, slots, codes, settings, flags.

Plain JSON in an order that depends on the code alone. Nothing here is a second list of anything.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel

if TYPE_CHECKING:
    from dishka import Provider

    from kimi_ray.hosts.features import Features
    from kimi_ray.llm.chat import ChatRequest
    from kimi_ray.llm.script import Step

Rows = list[dict[str, Any]]

_CODE = re.compile(r"""["']([a-z]+\.[a-z][a-z_]*)["']""")
_FAMILY = re.compile(r"""(?:code["']?\s*[=:]|: Final =)\s*["']([a-z]+)\.[a-z_]+["']""")
_DOCUMENT_KEY = re.compile(r"""\bvalue\[["']([a-z_]+)["']\]|^KEY = ["']([a-z_]+)["']""", re.MULTILINE)
_ROOT = Path(__file__).parents[1]


def event_facts(features: Features) -> Rows:
    """Every event type with its payload's fields."""
    from kimi_ray.events.payloads import Payload

    inherited = set(Payload.model_fields)
    return [
        {
            "name": entry.name,
            "doc": entry.doc or _first(entry.payload.__doc__),
            "surface": entry.surface,
            "ignorable": entry.ignorable,
            "fields": [field for field in _model_fields(entry.payload) if field["name"] not in inherited],
        }
        for entry in features.catalog
    ]


def part_facts() -> Rows:
    """The objects that payloads are made of, with their fields."""
    from kimi_ray.events import payloads

    parts = [
        kind
        for kind in vars(payloads).values()
        if isinstance(kind, type) and issubclass(kind, payloads.Part) and not issubclass(kind, payloads.Payload)
    ]
    return [
        {"name": kind.__name__, "doc": _first(kind.__doc__), "fields": _model_fields(kind)}
        for kind in sorted(parts, key=lambda kind: kind.__name__)
        if kind is not payloads.Part
    ]


def feature_facts(features: Features) -> Rows:
    """Every Feature that is loaded, in the order of its handlers, with what it brings by name."""
    from kimi_ray.scopes import provided_by, service_name

    found: Rows = []
    for feature in features:
        kind = type(feature)
        services = {service_name(one) for provider in feature.services() for one in provided_by(provider)}
        brings = {
            "tools": [*feature.tools(), *(f"{prefix}*" for prefix in feature.tool_prefixes())],
            "profiles": [profile.name for profile in feature.profiles()],
            "events": [entry.name for entry in feature.event_types()],
            "commands": list(feature.commands()),
            "services": sorted({*services, *map(service_name, (*feature.on_session(), *feature.on_agent()))}),
        }
        found.append(
            {
                "name": feature.name,
                "class": f"{kind.__module__}:{kind.__qualname__}",
                **brings,
                "doc": _first(kind.__doc__),
            }
        )
    return found


def service_facts(features: Features) -> Rows:
    """Every service of the containers, outer scopes first."""
    from kimi_ray.hosts.agent_container import host_services
    from kimi_ray.hosts.session_services import LiveSessionServices, SessionHostServices
    from kimi_ray.scopes import LifecycleScope

    own = host_services()
    found = [
        *_provided("agent host", own),
        *_provided("agent host, by a Feature", features.services(own)),
        *_provided("session host", [SessionHostServices(), LiveSessionServices()]),
    ]
    order = [scope.name.lower() for scope in LifecycleScope]
    return sorted(found, key=lambda row: (order.index(row["scope"]), row["where"], row["name"]))


def _provided(where: str, providers: Iterable[Provider]) -> Iterator[dict[str, Any]]:
    from kimi_ray.scopes import provided_by, service_name

    listed = list(providers)
    scopes = {service: scope for provider in listed for service, scope in provided_by(provider).items()}
    for provider in listed:
        for alias in provider.aliases:
            meant: Any = alias.source.type_hint
            scope = scopes.get(meant)
            yield {
                "name": service_name(alias.provides.type_hint),
                "scope": "" if scope is None else scope.name.lower(),
                "where": where,
                "module": getattr(alias.provides.type_hint, "__module__", ""),
                "needs": [service_name(meant)],
                "doc": _doc_of(alias.provides.type_hint),
            }
        for source in (*provider.context_vars, *provider.factories):
            service: Any = source.provides.type_hint
            needs = [
                service_name(key.type_hint)
                for key in (*getattr(source, "dependencies", ()), *getattr(source, "kw_dependencies", {}).values())
            ]
            yield {
                "name": service_name(service),
                "scope": str(source.scope.name).lower() if source.scope is not None else "",
                "where": where,
                "module": getattr(service, "__module__", ""),
                "needs": needs,
                "doc": _doc_of(service) or _first(getattr(source, "source", None).__doc__),
            }


def _doc_of(service: Any) -> str:
    """A class's own text; not that of a generic alias, nor what dataclasses make up."""
    text = _first(service.__doc__) if isinstance(service, type) and get_origin(service) is None else ""
    return "" if text.startswith(f"{getattr(service, '__name__', '')}(") else text


def state_facts() -> Rows:
    """Every state key: what is kept of a home, of a session, of an agent."""
    from kimi_ray.agent.fold import AgentFold
    from kimi_ray.session.document_value import new_document
    from kimi_ray.store.session_index_rows import SessionSummary
    from kimi_ray.store.workspace_registry import WorkspaceEntry

    document = new_document("", workspace_id="", cwd="", now=0, title="x", forked_from="x")
    keys = set(document)
    for module in ("document_value", "fork_document", "in_flight"):
        for first, second in _DOCUMENT_KEY.findall((_ROOT / "session" / f"{module}.py").read_text()):
            keys.add(first or second)
    listed = {field["name"]: field for field in _model_fields(SessionSummary)}
    agent = (field for field in _fields_of(AgentFold) if not field["name"].startswith("_"))
    return [
        *(_state("app", "workspace", field) for field in _fields_of(WorkspaceEntry)),
        *(_state("app", "session list", field) for field in listed.values()),
        *(_state("session", "document", {**listed.get(key, {}), "name": key}) for key in sorted(keys)),
        *(_state("agent", "fold of the log", field) for field in agent),
    ]


def _state(scope: str, of: str, field: Mapping[str, Any]) -> dict[str, Any]:
    said = {key: field.get(key, "") for key in ("name", "type", "doc")}
    return {"scope": scope, "of": of, **said}


async def tool_facts(features: Features, named: Sequence[str]) -> Rows:
    """Every tool as a model is told of it: an agent with all of them is asked, in a runtime of its own.

    Args:
        features: Those whose tools are meant.
        named: Those of them that the setting ``features`` names: nothing else of the settings counts.

    Raises:
        KimiRayError: why a tool cannot be had.
    """
    import tempfile

    from kimi_ray.config import RuntimeConfig
    from kimi_ray.llm.models import ModelSettings, ResolvedModel
    from kimi_ray.runtime import Runtime
    from kimi_ray.settings import Profile
    from kimi_ray.tools.registry import builtin_tools

    own = builtin_tools()
    names = list(dict.fromkeys([*own, *features.tools]))
    script = ModelSettings(provider="scripted", script=f"{__name__}:told_of_tools")
    model = ResolvedModel(name="scripted", provider="scripted", model="scripted", settings=script)
    with tempfile.TemporaryDirectory(prefix="kimi-ray-manifest-") as folder:
        home = str(Path(folder, "home"))
        config = RuntimeConfig(home=home, address="in-process", durability="none", features=tuple(named))
        async with Runtime.connect(config=config) as runtime:
            session = await runtime.workspace(folder).create_session(
                profile=Profile(name="manifest", tools=tuple(names), subagents=("*",)), model=model
            )
            answer = await (await session.main.submit("Which tools have you?")).result()
    told: Rows = json.loads(answer.raise_for_state().text)
    for tool in told:
        kind: Any = features.tools.get(tool["name"], own.get(tool["name"]))
        tool["writes"] = getattr(kind, "writes", None) is True
        tool["from"] = "a Feature" if tool["name"] in features.tools else "kimi-ray"
    return told


def told_of_tools(request: ChatRequest) -> Step:
    """A scripted model that answers with the tools that it was told of."""
    from kimi_ray.llm.script import Step

    return Step(text=json.dumps([tool.to_data() for tool in request.tools]))


def slot_facts() -> Rows:
    """Every slot of an agent with its event's fields."""
    from kimi_ray.agent.slots import AgentSlots

    hints = _annotations_in(AgentSlots.__init__)
    found: Rows = []
    for name, event in hints.items():
        kind: Any = vars(inspect.getmodule(AgentSlots))[event]
        own: dict[str, Any] = {**vars(kind)}
        methods = [
            {"name": f"{method}()", "type": "", "doc": _first(value.__doc__)}
            for method, value in own.items()
            if inspect.isfunction(value) and not method.startswith("_")
        ]
        fields = [*_fields_of(kind), *methods]
        found.append({"name": name, "event": event, "doc": _first(kind.__doc__), "fields": fields})
    return found


def _annotations_in(function: Any) -> dict[str, str]:
    """Of ``self.name = HookSlot[Event](...)`` in a function: the events by name, in the order of the code."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(attr=name)], value=ast.Call(func=ast.Subscript(slice=ast.Name(id=event)))
            ):
                found[name] = event
            case _:
                pass
    return found


_HOOK_EVENTS: dict[str, str] = {
    "UserPromptSubmit": "A prompt is about to join the conversation. May say no.",
    "UserPromptQueued": "A prompt waits behind others.",
    "PreToolUse": "A tool call is about to start. May say no.",
    "PostToolUse": "A tool call has its output.",
    "PostToolUseFailure": "A tool call that had started failed.",
    "PermissionRequest": "A tool call waits for an answer of the user.",
    "PermissionResult": "A tool call that waited has its answer.",
    "TurnStarted": "A turn has begun.",
    "Stop": "A turn is about to complete. May say no, once a turn.",
    "StopFailure": "A turn failed, or reached a limit.",
    "Interrupt": "A user cancelled the turn.",
    "SessionStart": "The main agent came to life, in a new session or an old one.",
    "SessionEnd": "The main agent leaves its host.",
    "SessionHeartbeat": "The main agent lives: every 60 s.",
    "SubagentStart": "A subagent is about to start, and waits.",
    "SubagentStop": "A subagent has answered.",
    "TaskStarted": "A background task runs.",
    "PreCompact": "Before a compaction, which waits for it.",
    "PostCompact": "After a compaction.",
    "Notification": "A background task has ended.",
}


def hook_facts() -> Rows:
    """Every event that a ``[[hooks]]`` table can name."""
    from kimi_ray.settings import HookEvent

    return [{"name": name, "doc": _HOOK_EVENTS[name]} for name in get_args(HookEvent)]


def error_facts() -> Rows:
    """Every error code that the program can give."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(_ROOT.rglob("*.py"))}
    modules = {path.relative_to(_ROOT).with_suffix("").as_posix().replace("/", ".") for path in texts}
    families = {family for text in texts.values() for family in _FAMILY.findall(text)}
    families |= {code.partition(".")[0] for code in _CODE.findall(texts[_ROOT / "errors.py"])}
    literals = {code for text in texts.values() for code in _CODE.findall(text)}
    endings = ("toml", "json", "jsonl", "lock", "new", "py", "md", "sqlite")
    codes = {code for code in literals if code.partition(".")[0] in families and code not in modules}
    return [{"name": code} for code in sorted(codes) if code.partition(".")[2] not in endings]


def config_facts() -> Rows:
    """Every setting with its default, and the keys of the tables among them."""
    from kimi_ray.config import RuntimeConfig
    from kimi_ray.llm.models import ModelSettings, Price
    from kimi_ray.settings import HookSettings, McpServer, PermissionRule

    found = _model_fields(RuntimeConfig)
    tables: list[tuple[str, type[BaseModel]]] = [
        ("[models.X]", ModelSettings),
        ("[models.X] price", Price),
        ("[[hooks]]", HookSettings),
        ("[[permissions]]", PermissionRule),
        ("[mcp_servers.X]", McpServer),
    ]
    for table, model in tables:
        found.extend({**field, "name": f"{table} {field['name']}"} for field in _model_fields(model))
    return found


def command_facts(*, of_features: bool) -> Rows:
    """Every command with its arguments and flags.

    Args:
        of_features: Those that Features bring as well.
    """
    from typer.main import get_command

    from kimi_ray.cli.app import app

    root: Any = get_command(app)
    names = root.list_commands(None) if of_features else list(root.commands)
    found: Rows = [_command("kimi-ray", root)]
    for name in names:
        found.extend(_commands(f"kimi-ray {name}", root.get_command(None, name)))
    return found


def _commands(path: str, command: Any) -> Iterator[dict[str, Any]]:
    inner: dict[str, Any] = getattr(command, "commands", {})
    if not inner:
        yield _command(path, command)
    for name, below in inner.items():
        yield from _commands(f"{path} {name}", below)


def _command(path: str, command: Any) -> dict[str, Any]:
    return {
        "name": path,
        "doc": _first(command.help),
        "flags": [_flag(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)],
    }


def _flag(parameter: Any) -> dict[str, Any]:
    is_option = parameter.param_type_name == "option"
    spelled = [*parameter.opts, *parameter.secondary_opts] if is_option else [str(parameter.name).upper()]
    default: Any = parameter.default
    shown = None if isinstance(default, bool) or default == () or callable(default) else default
    return {
        "name": ", ".join(spelled),
        "type": "" if getattr(parameter, "is_flag", False) else str(parameter.metavar or _value_type(parameter)),
        "default": shown,
        "required": bool(parameter.required),
        "doc": " ".join(str(getattr(parameter, "help", None) or "").split()),
    }


def _value_type(parameter: Any) -> str:
    descriptor: Any = getattr(parameter, "type_descriptor", None)
    if descriptor is not None:
        return type_text(descriptor.annotation)
    return str(getattr(getattr(parameter, "type", None), "name", ""))


# -- classes, fields and types as text ---------------------------------------------------------------------------------


def _fields_of(kind: Any) -> Rows:
    if issubclass(kind, BaseModel):
        return _model_fields(kind)
    docs, hints = _attribute_docs(kind), get_type_hints(kind)
    return [
        {"name": field.name, "type": type_text(hints[field.name]), "doc": docs.get(field.name, "")}
        for field in dataclasses.fields(kind)
    ]


def _model_fields(model: type[BaseModel]) -> Rows:
    docs = _attribute_docs(model)
    found: Rows = []
    for name, field in model.model_fields.items():
        default: Any = None if field.is_required() else field.get_default(call_default_factory=True)
        plain = default.model_dump(mode="json") if isinstance(default, BaseModel) else default
        found.append(
            {
                "name": field.alias or name,
                "type": type_text(field.annotation),
                "required": field.is_required(),
                "default": plain if plain not in ((), {}) else None,
                "doc": " ".join((field.description or docs.get(name, "")).split()),
            }
        )
    return found


def _attribute_docs(kind: type) -> dict[str, str]:
    """The text that stands below each attribute in a class's body, those of its bases among them."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__ != "builtins":
            docs |= _docs_in(base.__module__).get(base.__qualname__, {})
    return docs


@cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    """The same for every class of a module, by its name."""
    try:
        body = ast.parse(inspect.getsource(sys.modules[module])).body
    except (OSError, TypeError):
        return {}  # made without a source: it has no such texts
    found: dict[str, dict[str, str]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            docs = found[node.name] = {}
            for pair in pairwise(node.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        docs[name] = " ".join(text.split())
                    case _:
                        pass
    return found


def type_text(kind: Any) -> str:
    """A type as it is written in the code, the same under every Python."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is None or kind is type(None):
        return "None"
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(part) for part in arguments)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " | ".join(json.dumps(part) for part in arguments)
    if origin is not None:
        return f"{type_text(origin)}[{', '.join(_argument_text(part) for part in arguments)}]"
    if kind is Ellipsis:
        return "..."
    return str(getattr(kind, "__name__", kind))


def _argument_text(part: Any) -> str:
    """One argument of a generic type; that of a callable is a list."""
    if isinstance(part, list):
        return f"[{', '.join(type_text(one) for one in cast('list[Any]', part))}]"
    return type_text(part)


def _first(doc: str | None) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.cleandoc(doc or "").partition("\n\n")[0]).split())


Section = Callable[[], Rows | Awaitable[Rows]]


def sections(features: Features, named: Sequence[str], *, of_features: bool) -> dict[str, Section]:
    """What gives each section of the manifest, by its name, in order.

    Args:
        features: Those that count.
        named: Those of them that the setting ``features`` names.
        of_features: Whether the commands of Features count.
    """
    return {
        "events": lambda: event_facts(features),
        "parts": part_facts,
        "features": lambda: feature_facts(features),
        "services": lambda: service_facts(features),
        "state": state_facts,
        "tools": lambda: tool_facts(features, named),
        "slots": slot_facts,
        "hooks": hook_facts,
        "errors": error_facts,
        "config": config_facts,
        "commands": lambda: command_facts(of_features=of_features),
    }
