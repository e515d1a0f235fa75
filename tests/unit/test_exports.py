"""The public names, pinned: taking one away or adding one is a decision."""

from __future__ import annotations

import subprocess
import sys

import kimi_ray

PUBLIC = """
Agent AgentAwake AgentError AgentEvent AgentLeaving AgentProjections AgentSlots Approval ArchiveResult ChildEnded
ChildStarting Compacted Compacting CompactionResult ConfigError Feature HookSlot IndexStatus Item KimiRayError
LifecycleScope Limits LogError Pending Profile Projection PromptGate PromptHandle PromptQueued PromptResult
ProviderError ReadStore RequestFailed ResolvedModel ResultRow RolloutContext RunError Runtime RuntimeConfig
RuntimeFault Sampling Session SessionError SessionEvent SessionList SessionPage SessionSummary StepStarting
StoreError Stream SubagentHandle SubagentResult Summarizer Summary SummaryPolicy SummaryTask SwarmHandle
SwarmProgress SwarmReport TaskChanged ToolContext ToolDone ToolError ToolGate ToolOutput TurnEnded TurnStarted
TurnStopping UndoResult Usage Workdir Workspace WorkspaceEntry WorkspaceList __version__ open_store run_sync tool
""".split()


def test_the_public_names_are_these_and_all_of_them_are_there() -> None:
    assert sorted(kimi_ray.__all__) == sorted(PUBLIC)
    assert dir(kimi_ray) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(kimi_ray, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(kimi_ray, "nothing_of_the_kind")


def test_importing_the_package_and_the_runtime_loads_no_heavy_library() -> None:
    code = (
        "import sys, kimi_ray\n"
        "assert not [m for m in sys.modules if m.startswith('kimi_ray.')], 'the package loads nothing'\n"
        "kimi_ray.Runtime\n"
        "heavy = [m for m in ('ray', 'openai', 'pyarrow', 'rich', 'typer') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_swarm_and_start_swarm_take_the_same_options() -> None:
    import inspect

    from kimi_ray.session_handle import AgentSwarmOptions, Session, SwarmOptions

    parameters = list(inspect.signature(Session.start_swarm).parameters)
    assert parameters[3:] == list(SwarmOptions.__annotations__)
    assert [*AgentSwarmOptions.__annotations__, "parent"] == parameters[3:]
