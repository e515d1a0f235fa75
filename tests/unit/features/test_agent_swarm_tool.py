"""The ``AgentSwarm`` tool against the port to subagents: shapes, order, result text, the only call (K test 59)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic_core import to_json

from kimi_ray.agent.profiles import BUILTIN
from kimi_ray.agent.slots import AgentSlots, ToolGate
from kimi_ray.agent.subagents import SubagentInfo, SubagentPlan, SubagentResult
from kimi_ray.config import RuntimeConfig
from kimi_ray.errors import AgentError, ConfigError, KimiRayError, ProviderError, StoreError, ToolError
from kimi_ray.events import EventType
from kimi_ray.events.catalog import CORE
from kimi_ray.features.swarm import AgentSwarm, OneSwarmAtATime
from kimi_ray.features.swarm.arguments import MAX_SUBAGENTS
from kimi_ray.features.swarm.result_text import RESUME_HINT
from kimi_ray.features.swarm.scheduler import INTERRUPTED, INTERRUPTED_WAITING
from kimi_ray.features.swarm.tool import NOT_ALONE, TWO_SWARMS
from kimi_ray.settings import Profile
from kimi_ray.tools.contract import Accesses, ToolContext, ToolOutput

Answer = SubagentResult | KimiRayError
MINE = {"parent_agent_id": "main"}


@dataclass
class FakeSubagents:
    """Subagents ``agent-1``, ``agent-2``...; ``outcomes`` by item or agent id say how runs end."""

    outcomes: dict[str, list[Answer]] = field(default_factory=dict[str, list[Answer]])
    known: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """Stored agents and their labels."""
    refusal: KimiRayError | None = None
    spawned: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    runs: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])
    plans: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    gate: asyncio.Event | None = None
    ungated: frozenset[str] = frozenset()
    timeouts: set[float | None] = field(default_factory=set[float | None])

    def offered(self) -> list[Profile]:
        return [BUILTIN["explore"]]

    def plan(self, profile: str | None = None, model: str | None = None, *, fork: bool = False) -> SubagentPlan:
        self.plans.append((profile, model, fork))
        if self.refusal is not None:
            raise self.refusal
        found = BUILTIN["agent"] if fork else BUILTIN[profile or "coder"]
        return SubagentPlan(found, SimpleNamespace(name=model or "m"), fork)  # type: ignore[arg-type]

    async def spawn(
        self,
        plan: SubagentPlan,
        *,
        description: str | None = None,
        labels: Mapping[str, str] | None = None,
        call_id: str | None = None,
        background: bool = False,
    ) -> str:
        item = dict(labels or {}).get("swarmItem", "")
        failures = self.outcomes.get(f"spawn {item}")
        if failures:
            assert isinstance(failures[0], KimiRayError)
            raise failures.pop(0)
        agent_id = f"agent-{len(self.spawned) + 1}"
        self.spawned.append(
            {"profile": plan.profile.name, "description": description, "labels": labels, "call_id": call_id}
        )
        self.known[agent_id] = {**(labels or {}), "parent_agent_id": "main"}
        return agent_id

    async def run(
        self,
        agent_id: str,
        prompt: str | None,
        *,
        on_started: Callable[[], None] | None = None,
        will_retry: bool = False,
        timeout_s: float | None = None,
        **_: Any,
    ) -> SubagentResult:
        assert will_retry
        self.timeouts.add(timeout_s)
        self.runs.append((agent_id, prompt))
        if on_started is not None:
            on_started()
        if self.gate is not None and agent_id not in self.ungated:
            await self.gate.wait()
        waiting = self.outcomes.get(self.known[agent_id].get("swarmItem", "")) or self.outcomes.get(agent_id)
        answer = waiting.pop(0) if waiting else SubagentResult(agent_id, "coder", "completed", f"did {prompt}")
        if isinstance(answer, KimiRayError):
            return SubagentResult(agent_id, "coder", "failed", error=answer.to_data())
        return answer

    async def check_resume(self, agent_id: str) -> SubagentInfo:
        labels = self.known.get(agent_id)
        if labels is None:
            raise AgentError(f"there is no agent {agent_id}", code="agent.not_found")
        if labels.get("parent_agent_id") != "main":
            raise AgentError(f"{agent_id} is not yours", code="agent.not_owned")
        return SubagentInfo(agent_id, "coder", labels)

    async def cancel(self, agent_id: str) -> None:
        raise AssertionError(agent_id)

    async def labels_of(self, agent_id: str) -> dict[str, str]:
        if agent_id not in self.known:
            raise AgentError(f"there is no agent {agent_id}", code="agent.not_found")
        return self.known[agent_id]


@dataclass
class FakeJournal:
    """Takes events; its surface is the messages given."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    log: Any = None

    def append(self, type: str, data: dict[str, Any], **_: Any) -> None:
        kind: EventType | None = CORE.get(type)
        assert kind is not None
        kind.payload.model_validate(data)
        self.events.append((type, data))


def made(
    subagents: FakeSubagents,
    journal: FakeJournal | None = None,
    tools: tuple[str, ...] = ("AgentSwarm",),
    **settings: Any,
) -> AgentSwarm:
    spec = SimpleNamespace(profile=Profile(name="lead", tools=tools), model=SimpleNamespace(name="own"))
    return AgentSwarm(spec, subagents, journal or FakeJournal(), RuntimeConfig(**settings))  # type: ignore[arg-type]


async def call(tool: AgentSwarm, cancelled: asyncio.Event | None = None, **arguments: Any) -> ToolOutput:
    context = ToolContext(
        environment=None,  # type: ignore[arg-type]
        session_id="session_1",
        agent_id="main",
        call_id="call-1",
        cancelled=cancelled or asyncio.Event(),
    )
    async with asyncio.timeout(5):
        return await tool.run(tool.check(arguments), context)


REVIEW = {"description": "Review files", "prompt_template": "Review {{item}}"}


# -- results --------------------------------------------------------------------------------------------------------


async def test_one_subagent_for_each_item() -> None:
    subagents = FakeSubagents()
    output = await call(made(subagents), **REVIEW, items=["src/a.ts", " src/b.ts "], subagent_type="explore")
    assert output.content == "\n".join(
        [
            "<agent_swarm_result>",
            "<summary>completed: 2</summary>",
            '<subagent agent_id="agent-1" item="src/a.ts" outcome="completed">did Review src/a.ts</subagent>',
            '<subagent agent_id="agent-2" item="src/b.ts" outcome="completed">did Review src/b.ts</subagent>',
            "</agent_swarm_result>",
        ]
    )
    assert not output.is_error
    assert subagents.plans == [("explore", None, False)]
    assert subagents.spawned == [
        {
            "profile": "explore",
            "description": f"Review files #{number} (explore)",
            "labels": {"swarmItem": item},
            "call_id": "call-1",
        }
        for number, item in ((1, "src/a.ts"), (2, "src/b.ts"))
    ]


async def test_every_placeholder_is_replaced_and_items_are_not_looked_into() -> None:
    subagents = FakeSubagents()
    await call(
        made(subagents), description="d", prompt_template="{{item}}: {{item}} {{ item }}", items=["a", "{{item}}"]
    )
    assert [prompt for _, prompt in subagents.runs] == ["a: a {{ item }}", "{{item}}: {{item}} {{ item }}"]


async def test_resumes_come_first_and_keep_their_items() -> None:
    subagents = FakeSubagents(
        known={
            "agent-old-1": {**MINE, "swarmItem": "src/old-a.ts"},
            "agent-old-2": MINE,
        }
    )
    output = await call(
        made(subagents),
        **REVIEW,
        items=["src/new.ts"],
        resume_agent_ids={"agent-old-2": "Continue B", "agent-old-1": "Continue A"},
    )
    assert output.content == "\n".join(
        [
            "<agent_swarm_result>",
            "<summary>completed: 3</summary>",
            '<subagent mode="resume" agent_id="agent-old-2" outcome="completed">did Continue B</subagent>',
            (
                '<subagent mode="resume" agent_id="agent-old-1" item="src/old-a.ts" outcome="completed">did Continue A'
                "</subagent>"
            ),
            '<subagent agent_id="agent-1" item="src/new.ts" outcome="completed">did Review src/new.ts</subagent>',
            "</agent_swarm_result>",
        ]
    )
    assert [made_["description"] for made_ in subagents.spawned] == ["Review files #3 (coder)"]
    assert [run[0] for run in subagents.runs] == ["agent-old-2", "agent-old-1", "agent-1"]


async def test_one_resume_alone_is_a_swarm_and_plans_nothing() -> None:
    subagents = FakeSubagents(known={"agent-7": {**MINE, "swarmItem": "x"}})
    subagents.refusal = ConfigError("never asked", code="profile.unknown")
    output = await call(made(subagents), description="Go on", resume_agent_ids={" agent-7 ": " continue "})
    assert '<subagent mode="resume" agent_id="agent-7" item="x" outcome="completed">did continue<' in output.content
    assert subagents.runs == [("agent-7", "continue")] and subagents.plans == []


async def test_what_is_no_id_fails_its_own_task_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    subagents = FakeSubagents(known={"agent-7": MINE})
    for name in ("labels_of", "check_resume"):
        plain = getattr(subagents, name)

        async def checked(agent_id: str, plain: Any = plain) -> Any:
            if "/" in agent_id:
                raise StoreError(f"agent id {agent_id!r} cannot be stored", code="store.invalid_id")
            return await plain(agent_id)

        monkeypatch.setattr(subagents, name, checked)
    output = await call(made(subagents), description="Go on", resume_agent_ids={"../x": "go", "agent-7": "go"})
    assert "<summary>completed: 1, failed: 1</summary>" in output.content and "cannot be stored" in output.content


async def test_failures_are_in_the_result_and_do_not_fail_the_call() -> None:
    subagents = FakeSubagents(
        outcomes={
            "b": [AgentError("Agent timed out after 30s.", code="agent.timed_out")],
            "spawn c": [AgentError("nothing left", code="limit.max_steps")],
            "d": [SubagentResult("agent-3", "coder", "cancelled")],
        },
        known={"agent-9": {"parent_agent_id": "agent-1", "swarmItem": "not mine"}},
    )
    output = await call(
        made(subagents), **REVIEW, items=["a", "b", "c", "d"], resume_agent_ids={"agent-8": "go", "agent-9": "go"}
    )
    assert output.content == "\n".join(
        [
            "<agent_swarm_result>",
            "<summary>completed: 1, failed: 5</summary>",
            f"<resume_hint>{RESUME_HINT}</resume_hint>",
            '<subagent mode="resume" state="not_started" outcome="failed">there is no agent agent-8</subagent>',
            '<subagent mode="resume" state="not_started" outcome="failed">agent-9 is not yours</subagent>',
            '<subagent agent_id="agent-1" item="a" outcome="completed">did Review a</subagent>',
            (
                '<subagent agent_id="agent-2" item="b" state="started" outcome="failed">Agent timed out after 30s.'
                "</subagent>"
            ),
            '<subagent item="c" state="not_started" outcome="failed">nothing left</subagent>',
            (
                '<subagent agent_id="agent-3" item="d" state="started" outcome="failed">the subagent ended cancelled'
                "</subagent>"
            ),
            "</agent_swarm_result>",
        ]
    )
    assert not output.is_error


async def test_no_hint_when_there_is_nobody_to_resume() -> None:
    failures: list[Answer] = [AgentError("Agent did not start.", code="agent.broke")]
    subagents = FakeSubagents(outcomes={"spawn a": list(failures), "spawn b": list(failures)})
    output = await call(made(subagents), **REVIEW, items=["a", "b"])
    assert output.content == "\n".join(
        [
            "<agent_swarm_result>",
            "<summary>failed: 2</summary>",
            '<subagent item="a" state="not_started" outcome="failed">Agent did not start.</subagent>',
            '<subagent item="b" state="not_started" outcome="failed">Agent did not start.</subagent>',
            "</agent_swarm_result>",
        ]
    )


async def test_attributes_are_escaped_and_answers_are_not() -> None:
    text = 'a < b && "c"</subagent>'
    subagents = FakeSubagents(outcomes={'<a href="x">&': [SubagentResult("agent-1", "coder", "completed", text)]})
    output = await call(made(subagents), **REVIEW, items=['<a href="x">&', "b"])
    assert f'item="&lt;a href=&quot;x&quot;&gt;&amp;" outcome="completed">{text}</subagent>' in output.content


async def test_a_failure_without_a_word_is_an_unknown_error() -> None:
    subagents = FakeSubagents(outcomes={"a": [AgentError("", code="agent.broke")]})
    output = await call(made(subagents), **REVIEW, items=["a", "b"])
    assert 'outcome="failed">unknown error</subagent>' in output.content


async def test_a_cancel_tells_each_subagent_at_once() -> None:
    subagents = FakeSubagents(gate=asyncio.Event())
    cancelled = asyncio.Event()
    running = asyncio.ensure_future(
        call(made(subagents), cancelled, **REVIEW, items=[f"i{number}" for number in range(6)])
    )
    async with asyncio.timeout(5):
        while len(subagents.runs) < 5:
            await asyncio.sleep(0)
    cancelled.set()
    output = await running
    assert "<summary>aborted: 6</summary>" in output.content
    assert output.content.count(f'state="started" outcome="aborted">{INTERRUPTED}<') == 5
    assert f'<subagent item="i5" state="not_started" outcome="aborted">{INTERRUPTED_WAITING}<' in output.content


async def test_a_refused_subagent_goes_on_without_another_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_ray.features.swarm import launch_plan

    monkeypatch.setattr(launch_plan, "RETRY_BASE_MS", 10)
    limited = ProviderError("too many", code="provider.rate_limit")
    subagents = FakeSubagents(
        outcomes={"b": [limited]}, gate=asyncio.Event(), ungated=frozenset({"agent-2", "agent-3"})
    )
    journal = FakeJournal()
    running = asyncio.ensure_future(call(made(subagents, journal), **REVIEW, items=["a", "b", "c"]))
    async with asyncio.timeout(5):
        while len(subagents.runs) < 4:
            await asyncio.sleep(0)
    assert subagents.gate is not None
    subagents.gate.set()
    output = await running
    assert subagents.runs[3] == ("agent-2", None) and "<summary>completed: 3</summary>" in output.content
    assert journal.events == []  # the port tells of suspensions


async def test_a_refused_subagent_that_is_the_only_one_left_has_failed() -> None:
    limited = ProviderError("too many", code="provider.rate_limit")
    subagents = FakeSubagents(outcomes={"agent-7": [limited]}, known={"agent-7": MINE})
    journal = FakeJournal()
    output = await call(made(subagents, journal), description="d", resume_agent_ids={"agent-7": "go"})
    assert 'mode="resume" agent_id="agent-7" state="started" outcome="failed">too many<' in output.content
    assert [(kind, data["agent_id"], data["error"]["code"]) for kind, data in journal.events] == [
        ("subagent/failed", "agent-7", "provider.rate_limit")
    ]


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"items": [f"{n}" for n in range(MAX_SUBAGENTS + 1)]}, "AgentSwarm supports at most 128 subagents."),
        (
            {"items": [f"{n}" for n in range(MAX_SUBAGENTS)], "resume_agent_ids": {"agent-1": "go"}},
            "AgentSwarm supports at most 128 subagents.",
        ),
        ({"items": ["only"]}, "AgentSwarm requires at least 2 items unless resume_agent_ids is provided."),
        ({}, "AgentSwarm requires at least 2 items unless resume_agent_ids is provided."),
        ({"prompt_template": "  ", "items": ["a", "b"]}, "prompt_template is required when items are provided."),
        (
            {"prompt_template": "Review files", "items": ["a", "b"]},
            "prompt_template must include the {{item}} placeholder.",
        ),
        (
            {"prompt_template": "Review", "resume_agent_ids": {"agent-1": "go"}},
            "prompt_template must include the {{item}} placeholder.",
        ),
        (
            {"items": ["x", "same", "y", "same "]},
            "Duplicate subagent prompts from items 2 and 4. AgentSwarm requires distinct subagents.",
        ),
        (
            {"items": ["x" * 100_000, "y"], "prompt_template": "{{item}}" * 50_000},
            (
                "The prompt of a subagent would have 5000000000 characters, more than 1000000: name each item once, "
                "and let the subagents read what is long."
            ),
        ),
        (
            {"fork": True, "resume_agent_ids": {"agent-1": "go"}},
            "fork cannot be combined with resume_agent_ids: a resumed subagent has a history of its own.",
        ),
        (
            {"fork": True, "items": ["a", "b"], "subagent_type": "coder"},
            "fork cannot be combined with another subagent_type: a fork is what this agent is.",
        ),
        (
            {"fork": True, "items": ["a", "b"], "model": "other"},
            "fork cannot be combined with another model: a fork speaks to this agent's.",
        ),
        (
            {"resume_agent_ids": {"agent-1": "go", " agent-1": "go on"}},
            "resume_agent_ids must name each subagent once.",
        ),
    ],
)
async def test_shapes_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    subagents = FakeSubagents(known={"agent-1": MINE})
    output = await call(made(subagents), **{**REVIEW, **arguments})
    assert (output.content, output.is_error, output.error_code) == (message, True, "validation.failed")
    assert subagents.runs == subagents.spawned == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"description": " ", "items": ["a", "b"]},
        {"items": ["a", " "]},
        {"items": ["a", 1]},
        {"items": "ab"},
        {"resume_agent_ids": {"agent-1": ""}},
        {"resume_agent_ids": ["agent-1"]},
        {"item": ["a", "b"]},
    ],
)
def test_the_schema_is_strict(arguments: dict[str, Any]) -> None:
    with pytest.raises(ToolError) as caught:
        made(FakeSubagents()).check({**REVIEW, **arguments})
    assert caught.value.code == "tool.bad_arguments"


async def test_128_are_taken_by_the_schema_and_the_rules() -> None:
    tool = made(FakeSubagents())
    items = [f"{n}" for n in range(MAX_SUBAGENTS)]
    assert len(tool.check({**REVIEW, "items": items})["items"]) == MAX_SUBAGENTS
    assert tool.parameters["properties"]["items"]["maxItems"] == MAX_SUBAGENTS
    assert "{{item}}" in tool.description
    assert tool.accesses(tool.check({**REVIEW, "items": items})) == Accesses.all()
    to_json(tool.parameters)


async def test_what_the_plan_refuses_fails_the_call() -> None:
    subagents = FakeSubagents(refusal=AgentError("coder is not allowed", code="agent.type_not_allowed"))
    with pytest.raises(AgentError):
        await call(made(subagents), **REVIEW, items=["a", "b"])
    assert subagents.spawned == []


async def test_a_fork_is_what_the_caller_is() -> None:
    subagents = FakeSubagents()
    await call(made(subagents), **REVIEW, items=["a", "b"], fork=True)
    assert subagents.plans == [(None, None, True)]
    assert [spawned["description"] for spawned in subagents.spawned] == [
        "Review files #1 (agent)",
        "Review files #2 (agent)",
    ]


@pytest.mark.parametrize("said", [{"subagent_type": "lead"}, {"model": "own"}, {"model": "primary"}, {"model": " "}])
async def test_a_fork_may_be_called_what_it_is(said: dict[str, str]) -> None:
    subagents = FakeSubagents()
    assert "completed: 2" in (await call(made(subagents), **REVIEW, items=["a", "b"], fork=True, **said)).content
    assert subagents.plans[0][1:] == ("own" if said.get("model") == "own" else None, True)


async def test_null_says_nothing() -> None:
    subagents = FakeSubagents(known={"agent-7": MINE})
    nothing = {"items": None, "fork": None, "model": None, "subagent_type": None, "prompt_template": None}
    output = await call(made(subagents), description="d", resume_agent_ids={"agent-7": "go"}, **nothing)
    assert "completed: 1" in output.content
    output = await call(made(subagents), **REVIEW, items=["a", "b"], resume_agent_ids=None)
    assert output.meta == {"counts": {"completed": 2}}


def test_the_kinds_are_said_where_no_other_tool_says_them() -> None:
    assert f"- explore: {BUILTIN['explore'].description}" in made(FakeSubagents()).description
    assert "explore" not in made(FakeSubagents(), tools=("Agent", "AgentSwarm")).description


async def test_the_time_of_the_settings_is_that_of_each_subagent() -> None:
    subagents = FakeSubagents(outcomes={"a": [SubagentResult("agent-1", "coder", "timed_out")]})
    output = await call(made(subagents, subagent_timeout_s=7), **REVIEW, items=["a", "b"])
    assert subagents.timeouts == {7.0}
    assert 'item="a" state="started" outcome="failed">Subagent timed out.</subagent>' in output.content
    unbounded = FakeSubagents()
    await call(made(unbounded, subagent_timeout_s=0), **REVIEW, items=["a", "b"])
    assert unbounded.timeouts == {None}


async def test_the_cap_of_the_settings_holds() -> None:
    subagents = FakeSubagents(gate=asyncio.Event())
    running = asyncio.ensure_future(
        call(made(subagents, agent_swarm_max_concurrency=2), **REVIEW, items=["a", "b", "c"])
    )
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(subagents.runs) == 2
    assert subagents.gate is not None
    subagents.gate.set()
    assert "<summary>completed: 3</summary>" in (await running).content


# -- the only call --------------------------------------------------------------------------------------------------


def gate(name: str, batch: int) -> ToolGate:
    return ToolGate("c", name, {}, None, Accesses.none(), 0, 0, batch=batch)  # type: ignore[arg-type]


async def asked(*names: str, profile_tools: tuple[str, ...] = ("Bash", "AgentSwarm")) -> list[str | None]:
    """What becomes of the calls of one answer; other handlers come behind and allow all."""
    calls = [{"type": "tool-call", "id": f"c{at}", "name": name, "arguments": "{}"} for at, name in enumerate(names)]
    surface = [
        SimpleNamespace(type="assistant/message", data={"message": {"content": [{"type": "tool-call", "name": "X"}]}}),
        SimpleNamespace(type="assistant/message", data={"message": {"content": [{"type": "text"}, *calls]}}),
        SimpleNamespace(type="tool/result", data={}),
    ]
    slots, later = AgentSlots(), list[str]()

    async def permit(gate: ToolGate) -> None:
        later.append(gate.name)

    slots.tool.register("guard", permit)
    spec = SimpleNamespace(profile=SimpleNamespace(tools=profile_tools))
    OneSwarmAtATime(spec, slots, FakeJournal(log=SimpleNamespace(surface=surface)))  # type: ignore[arg-type]
    slots.tool.register("permissions", permit)
    assert slots.tool.handlers == ("agent_swarm", "guard", "permissions")
    found: list[str | None] = []
    for name in names:
        done = await slots.tool.run(gate(name, len(names)))
        assert (done.veto is None) == (name in later)
        found.append(None if done.veto is None else str(done.veto.content))
        if done.veto is not None:
            assert done.veto.is_error and done.veto.error_code == "validation.failed"
        later.clear()
    return found


async def test_a_swarm_beside_other_calls_stops_them_all_before_anybody_else_is_asked() -> None:
    assert await asked("AgentSwarm", "Bash") == [NOT_ALONE] * 2
    assert await asked("Bash", "AgentSwarm", "Bash") == [NOT_ALONE] * 3
    assert await asked("AgentSwarm", "AgentSwarm") == [TWO_SWARMS] * 2


async def test_a_swarm_alone_and_calls_without_one_are_left_to_others() -> None:
    assert await asked("AgentSwarm") == [None]
    assert await asked("Bash", "Bash") == [None, None]


def test_agents_without_the_tool_have_no_handler() -> None:
    slots = AgentSlots()
    spec = SimpleNamespace(profile=SimpleNamespace(tools=("Bash",)))
    OneSwarmAtATime(spec, slots, FakeJournal())  # type: ignore[arg-type]
    assert not slots.tool
