"""Runs: the research unit. Many rollouts, each one agent on one item once, with an identity and a history.

Here is what can be said about a run without running it: its items and their ids, prompts, seeds, the order of starts
and retries, the rows, the directory, what a resume does again. What may enter: pure rules and plain files. What may
not: Ray, hosts, sessions, the model; whoever runs rollouts uses these modules and is not used by them.
"""

from kimi_ray.runs.filters import Filter
from kimi_ray.runs.items import RolloutKey, RunItem, items_hash, keys_of, prepare_items
from kimi_ray.runs.items_file import read_items
from kimi_ray.runs.manifest import build_manifest, seed_of, versions, without_secrets
from kimi_ray.runs.outcomes import RowError, RowStatus, error_of, status_of, stop_of
from kimi_ray.runs.plan import Rollout, RunPlan, plan_run
from kimi_ray.runs.prompts import Prompt, check_prompt, prompt_hash, render_prompt, render_workdir
from kimi_ray.runs.report import ScoreMean, SwarmReport, count_statuses
from kimi_ray.runs.resume import ResumePlan, check_unchanged, plan_resume
from kimi_ray.runs.rollouts import SwarmSettings
from kimi_ray.runs.rows import AttemptRow, AttemptSummary, ResultRow, RowModel, Timing
from kimi_ray.runs.run_directory import (
    RunDirectory,
    default_run_directory,
    read_attempts,
    read_manifest,
    read_rows,
)
from kimi_ray.runs.schedule import DEFAULT_RETRY_ON, FailOn, LimitHit, Progress, Schedule, Spent, Start
from kimi_ray.runs.seeds import RunSeed, fork_seed

__all__ = [
    "DEFAULT_RETRY_ON",
    "AttemptRow",
    "AttemptSummary",
    "FailOn",
    "Filter",
    "LimitHit",
    "Progress",
    "Prompt",
    "ResultRow",
    "ResumePlan",
    "Rollout",
    "RolloutKey",
    "RowError",
    "RowModel",
    "RowStatus",
    "RunDirectory",
    "RunItem",
    "RunPlan",
    "RunSeed",
    "Schedule",
    "ScoreMean",
    "Spent",
    "Start",
    "SwarmReport",
    "SwarmSettings",
    "Timing",
    "build_manifest",
    "check_prompt",
    "check_unchanged",
    "count_statuses",
    "default_run_directory",
    "error_of",
    "fork_seed",
    "items_hash",
    "keys_of",
    "plan_resume",
    "plan_run",
    "prepare_items",
    "prompt_hash",
    "read_attempts",
    "read_items",
    "read_manifest",
    "read_rows",
    "render_prompt",
    "render_workdir",
    "seed_of",
    "status_of",
    "stop_of",
    "versions",
    "without_secrets",
]
