"""Exit codes: 0 done, 1 the work failed, 2 bad usage, 130 interrupted."""

from __future__ import annotations

from kimi_ray.errors import ConfigError, KimiRayError, RunError

DONE = 0
FAILED = 1
USAGE = 2
INTERRUPTED = 130

_WORK_FAILED = frozenset({"swarm.failed", "swarm.incomplete", "swarm.taken_over", "run.write_failed", "run.in_use"})
_USAGE = frozenset(
    {
        "agent.not_found",
        "request.ambiguous_id",
        "request.unknown_id",
        "runtime.auth",
        "runtime.mismatch",
        "runtime.other_cluster",
        "runtime.version_mismatch",
        "session.bad_id",
        "session.bad_metadata",
        "session.exists",
        "session.fork_point_not_found",
        "session.not_found",
        "store.backend_unavailable",
        "store.home_not_writable",
        "store.no_storage_node",
        "store.not_found",
        "store.settings_mismatch",
        "store.unsupported_filesystem",
        "store.wrong_home",
        "tool.bad_signature",
        "tool.duplicate",
        "tool.not_importable",
        "tool.unknown",
        "workdir.bad_ref",
        "workdir.invalid",
        "workdir.no_git",
        "workdir.not_a_directory",
        "workdir.not_a_repository",
        "workdir.not_found",
        "workspace.not_found",
        "workspace.not_on_node",
    }
)


def exit_code(error: KimiRayError) -> int:
    """2 when what was asked for is wrong (the same again would fail the same way), 1 when the work failed."""
    if error.code in _WORK_FAILED:
        return FAILED
    if isinstance(error, ConfigError | RunError) or error.code in _USAGE:
        return USAGE
    return FAILED
